"""What the worker tells about itself: plain numbers read at one moment, without locks."""

import ctypes
import math
import os
import sys
import time
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace

from tandem.requests import GenerationStats
from tandem.serve.lifecycle import MemoryReport, ModelState
from tandem.serve.scheduler import Scheduler
from tandem.serve.streams import Job

RATE_WINDOW_S = 3.0


@dataclass
class Totals:
    """Counters since the start. finished: ended answers by stop reason; breaks: times that the engine failed."""

    accepted: int = 0
    refused: int = 0
    failed: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    evicted: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    draft_accepted: int = 0
    rounds: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    wakes: int = 0
    sleeps: int = 0
    load_failures: int = 0
    breaks: int = 0
    _recent: float = 0.0  # tokens of late, fading with RATE_WINDOW_S
    _recent_at_s: float = 0.0

    def written(self, tokens: int, now_s: float) -> None:
        """Tokens of one round."""
        self.completion_tokens += tokens
        self._recent = self._recent * math.exp((self._recent_at_s - now_s) / RATE_WINDOW_S) + tokens
        self._recent_at_s = now_s

    def tokens_per_s(self, now_s: float) -> float:
        """Tokens written a second of late, all answers together."""
        return self._recent * math.exp(min(0.0, self._recent_at_s - now_s) / RATE_WINDOW_S) / RATE_WINDOW_S

    def ended(self, stats: GenerationStats) -> None:
        """One answer has ended."""
        self.finished[stats.stop_reason] = self.finished.get(stats.stop_reason, 0) + 1
        self.prompt_tokens += stats.prompt_tokens
        self.reused_tokens += stats.reused_tokens
        self.drafted += stats.drafted
        self.draft_accepted += stats.accepted
        self.rounds += stats.rounds


@dataclass(frozen=True)
class AnswerState:
    """One accepted request: phase, prompt tokens done and in all, tokens written, seconds since it came."""

    id: int
    priority: str
    phase: str  # queued, prefill, decode, paused
    prompt_done: int
    prompt_tokens: int
    tokens: int
    age_s: float


@dataclass(frozen=True)
class WorkerSnapshot:
    """State of the model (and why, if it failed), load, counters, and bytes by role as last seen."""

    state: ModelState
    reason: str
    sleep_level: int
    queued: int
    queued_background: int
    running: int
    tokens_per_s: float
    retry_after_s: float
    totals: Totals
    memory: Mapping[str, int]
    last_sleep: MemoryReport | None
    requests: tuple[AnswerState, ...]


def take_snapshot(
    scheduler: Scheduler,
    jobs: Mapping[int, Job],
    totals: Totals,
    memory: Mapping[str, int],
    last_sleep: MemoryReport | None,
    died: Exception | None,
) -> WorkerSnapshot:
    """The numbers as they stand; each is right, and they may be a step apart from each other."""
    life, now = scheduler.life, time.monotonic()
    counters = replace(copy(totals), finished=dict(totals.finished))
    return WorkerSnapshot(
        state="failed" if died else life.state,
        reason=life.reason,
        sleep_level=0 if life.loaded else life.level,
        queued=scheduler.waiting(),
        queued_background=scheduler.waiting("background"),
        running=len(scheduler.open),
        tokens_per_s=counters.tokens_per_s(now),
        retry_after_s=scheduler.retry_after_s(),
        totals=counters,
        memory=memory,
        last_sleep=last_sleep,
        requests=tuple(_state(job, now) for job in list(jobs.values())),
    )


def process_bytes() -> int:
    """Resident bytes of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def trim_memory() -> None:
    """Gives memory that was freed back to the system, where the C library keeps it."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim:
            trim(0)


def _state(job: Job, now_s: float) -> AnswerState:
    prompt = job.prompt
    total = job.prompt_tokens
    done = prompt.done if prompt else 0
    phase = "queued" if job.answer is None else "paused" if job.slow else "decode" if done >= total else "prefill"
    return AnswerState(job.id, job.priority, phase, done, total, job.produced, now_s - job.began_s)
