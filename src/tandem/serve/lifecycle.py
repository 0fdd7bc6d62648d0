"""Whether the model is in memory: a pure state machine. Times and outcomes go in; when to sleep, at which level, and
whether a wake may be tried come out. It names no device: what a level frees is told by roles of bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tandem.errors import SettingError

ModelState = Literal["loading", "loaded", "sleeping", "failed", "stopping"]
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
# what must be gone after a sleep of each level; level 2 must leave nothing at all
LIGHT_ROLES = ("kv", "recurrent", "checkpoints")


@dataclass(frozen=True)
class SleepPolicy:
    """Idle seconds until caches and states (light, level 1) or weights too (deep, level 2) are freed; None: never.

    Raises SettingError for times that are not positive, or a deep sleep before the light one.
    """

    light_after_s: float | None = None
    deep_after_s: float | None = None

    def __post_init__(self):
        for name in ("light_after_s", "deep_after_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SettingError(f"{name}={value!r}: seconds above 0 are needed, or none for never")
        if None not in (self.light_after_s, self.deep_after_s) and self.deep_after_s <= self.light_after_s:
            raise SettingError(
                f"deep sleep after {self.deep_after_s} s, light sleep after {self.light_after_s} s: deep comes later"
            )

    @classmethod
    def at_level(cls, level: int, after_s: float | None) -> "SleepPolicy":
        """One level, after that many idle seconds; None or 0: never. Raises SettingError for levels but 1 and 2."""
        if level not in (1, 2):
            raise SettingError(f"sleep level {level!r}: 1 frees caches and states, 2 the weights too")
        return cls(**{("light_after_s", "deep_after_s")[level - 1]: after_s or None})

    def times(self, level: int) -> list[tuple[float, int]]:
        """(idle seconds, level) of the sleeps that a model at `level` (0: awake) still has before it."""
        both = ((self.light_after_s, 1), (self.deep_after_s, 2))
        return [(after_s, deeper) for after_s, deeper in both if after_s is not None and deeper > level]


@dataclass(frozen=True)
class MemoryReport:
    """Bytes before and after a sleep: by role as the batch states them, and of the whole process (0: not known)."""

    level: int
    before: Mapping[str, int]
    after: Mapping[str, int]
    rss_before_bytes: int
    rss_after_bytes: int

    def unfreed(self) -> dict[str, int]:
        """Roles whose bytes should be gone at this level and are not; empty is right."""
        return {role: size for role, size in self.after.items() if size and (self.level == 2 or role in LIGHT_ROLES)}


class Lifecycle:
    """State, level of sleep and reason of the last failure; it starts as loading. Every method takes the time now_s.

    A failure may be retried when `retry_at_s` is reached: at once after the first break of a running model, else after
    a pause that doubles from FIRST_RETRY_S to LONGEST_RETRY_S.
    """

    def __init__(self, policy: SleepPolicy, now_s: float):
        self.policy = policy
        self.state: ModelState = "loading"
        self.level = 2
        self.reason = ""
        self.waking = False  # a wake is running: there is never a second one
        self.failures = 0
        self.retry_at_s = now_s
        self.down_since_s: float | None = now_s
        self.idle_since_s: float | None = None

    @property
    def loaded(self) -> bool:
        """Whether steps may run."""
        return self.down_since_s is None

    def busy(self) -> None:
        """There is work: no sleep is due."""
        self.idle_since_s = None

    def idle(self, now_s: float) -> None:
        """There is no work; the timer of a loaded or lightly sleeping model runs from the first of these calls."""
        if self.idle_since_s is None and (self.loaded or self.state == "sleeping"):
            self.idle_since_s = now_s

    def sleep_due(self, now_s: float) -> int | None:
        """The level to go to now, None: stay."""
        if self.idle_since_s is None or self.state not in ("loaded", "sleeping"):
            return None
        levels = [level for after_s, level in self.policy.times(self.level) if now_s >= self.idle_since_s + after_s]
        return max(levels, default=None)

    def next_time_s(self) -> float | None:
        """When a sleep is due next if nothing happens."""
        if self.idle_since_s is None or self.state not in ("loaded", "sleeping"):
            return None
        return min((self.idle_since_s + after_s for after_s, _ in self.policy.times(self.level)), default=None)

    def may_wake(self, now_s: float) -> bool:
        """Whether a wake may begin: the model is down, none is running, and the pause after a failure is over."""
        return not self.loaded and not self.waking and now_s >= self.retry_at_s

    def wake_begun(self) -> None:
        """A wake runs now."""
        assert not self.waking and not self.loaded
        self.waking = True
        self._show("loading")

    def woke(self, now_s: float) -> None:
        """The model is in memory; only now does idle time begin to count."""
        self.waking, self.level, self.down_since_s, self.reason = False, 0, None, ""
        self.idle_since_s = now_s
        self._show("loaded")

    def slept(self, level: int, now_s: float) -> None:
        """A sleep of that level is done; the idle time goes on, so that a deeper one can follow."""
        self.level = level
        if self.down_since_s is None:
            self.down_since_s = now_s
        self._show("sleeping")

    def failed(self, reason: str, now_s: float) -> None:
        """A wake failed, or the running model broke; either way nothing of it can be used."""
        broke = self.loaded
        self.waking, self.level, self.reason, self.idle_since_s = False, 2, reason, None
        self.down_since_s = now_s
        pause_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** min(self.failures, 16))
        self.retry_at_s = now_s if broke and not self.failures else now_s + pause_s
        self.failures += 1
        self._show("failed")

    def proved(self) -> None:
        """An answer ended well: failures before it count no more."""
        self.failures = 0

    def stop(self) -> None:
        """No way back."""
        self.state = "stopping"

    def _show(self, state: ModelState) -> None:
        if self.state != "stopping":
            self.state = state
