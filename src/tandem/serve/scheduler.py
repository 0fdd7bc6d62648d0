"""What the engine does next: a pure state machine without threads, clocks or I/O.

In: events, which are its methods (a request came, a chunk is done, a reader left ...), each with the time. Out: `next`,
the one action for the engine now, and `take_endings`, requests that ended without the engine. Whoever drives it carries
out one action, reports its outcome by the matching event, and asks again.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tandem.errors import SettingError
from tandem.serve.fair_queue import ChunkClock, FairQueue
from tandem.serve.lifecycle import Lifecycle, SleepPolicy

Priority = Literal["interactive", "background"]
Kind = Literal["answer", "embed"]
# why a request ends that does not end by itself
Cause = Literal["cancelled", "deadline", "slow_reader", "load_deadline", "load_failed", "stopping"]

DECODE_COST = 8  # a decoded token keeps the engine about as long as that many prompt tokens
EXPECTED_TOKENS = 256  # of an answer without a limit
FIRST_SERVICE_S = 5.0  # guess before an answer has ended
MOST_ROUNDS = 64  # between two chunks, however short the rounds are


@dataclass(frozen=True)
class Limits:
    """Bounds of the scheduler. max_queue: requests waiting, for each of interactive and background. stall_s: how long a
    prompt's chunk may keep running answers waiting, as far as chunks of min_chunk tokens allow. prefill_share: most
    of the time that prompts may take while answers are being written. background_every: one step in so many goes to a
    background request that stands back, 0: none. reader_timeout_s: how long a reader with a full buffer is waited for.
    load_deadline_s: how long a request waits for the model. Raises SettingError for values out of range."""

    max_sequences: int = 4
    max_queue: int = 128
    stall_s: float = 0.2
    prefill_share: float = 0.8
    max_chunk: int = 512
    min_chunk: int = 16
    background_every: int = 64
    reader_timeout_s: float = 60.0
    load_deadline_s: float = 600.0
    sleep: SleepPolicy = field(default_factory=SleepPolicy)

    def __post_init__(self):
        for name in ("max_sequences", "max_queue", "stall_s", "min_chunk", "reader_timeout_s", "load_deadline_s"):
            if not getattr(self, name) > 0:
                raise SettingError(f"{name}={getattr(self, name)!r}: a number above 0 is needed")
        if not 0 < self.prefill_share < 1:
            raise SettingError(f"prefill_share={self.prefill_share!r}: a number between 0 and 1 is needed")
        if self.max_chunk < self.min_chunk:
            raise SettingError(f"max_chunk={self.max_chunk}: at least min_chunk={self.min_chunk} is needed")
        if self.background_every < 0 or self.background_every == 1:
            raise SettingError(f"background_every={self.background_every}: 0 (never) or at least 2 steps are needed")


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as far as the scheduler cares: tokens of its prompt, most tokens of its answer (None: no limit), the
    time at which it is to be ended (None: never)."""

    id: int
    client: str
    prompt_tokens: int
    max_tokens: int | None = None
    priority: Priority = "interactive"
    deadline: float | None = None
    kind: Kind = "answer"


@dataclass(frozen=True, slots=True)
class Open:
    """Give the request a sequence; then `opened` or `failed`."""

    id: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """One chunk of its prompt; then `prefilled`, `failed` or `broke`."""

    id: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Decode:
    """One round of these answers; then `decoded`, `failed` or `broke`."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Embed:
    """Compute the embedding; then `embedded`, `failed` or `broke`."""

    id: int


@dataclass(frozen=True, slots=True)
class Close:
    """The answer is over for that cause: free its sequence and say so. Nothing is reported back."""

    id: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Evict:
    """Free its sequence for an interactive request; it will be opened anew and must not repeat what was said."""

    id: int


@dataclass(frozen=True, slots=True)
class Sleep:
    """Free memory; then `slept` or `broke`."""

    level: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Load; then `woke` or `load_failed`."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before that time, unless an event comes; None: at any time."""

    until: float | None


@dataclass(frozen=True, slots=True)
class Exit:
    """Stopped, and every request has ended."""


Action = Open | Prefill | Decode | Embed | Close | Evict | Sleep | Wake | Wait | Exit


@dataclass(frozen=True, slots=True)
class Ending:
    """A request that ended while no sequence was its own."""

    id: int
    cause: Cause


class _Request:
    __slots__ = (
        "id", "client", "background", "kind", "prompt_tokens", "cost", "deadline", "arrived", "opened_at", "open",
        "done", "decoding", "slow_since", "slow_timer", "cause", "used", "queue",
    )  # fmt: skip

    def __init__(self, s: Submission, now: float, queue: FairQueue):
        self.id, self.client, self.kind, self.prompt_tokens = s.id, s.client, s.kind, s.prompt_tokens
        self.background, self.deadline, self.arrived, self.queue = s.priority == "background", s.deadline, now, queue
        answer_tokens = EXPECTED_TOKENS if s.max_tokens is None else min(s.max_tokens, EXPECTED_TOKENS)
        self.cost = s.prompt_tokens + (DECODE_COST * answer_tokens if s.kind == "answer" else 0)
        self.opened_at: float | None = None
        self.open = self.decoding = False
        self.done = 0  # prompt tokens
        self.used = 0  # tokens, decoded ones counted DECODE_COST times
        self.slow_since: float | None = None
        self.slow_timer = False
        self.cause: Cause | None = None  # set: to be closed


class Scheduler:
    """See the module. now: seconds of one clock that never goes back. The rules:

    All answers that can be written are written together, one round for all of them. A prompt goes in chunks between
    rounds: one chunk, then rounds for as long as `prefill_share` asks; a chunk beside running answers is as long as
    fits `stall_s`. Sequences are given to clients by FairQueue. Background work runs when no interactive work can, but
    for one step in `background_every`, and loses its sequence to an interactive request that has none. Whoever ends
    is closed before anything else is done.
    """

    def __init__(self, limits: Limits, now: float = 0.0):
        self.limits = limits
        self.life = Lifecycle(limits.sleep, now)
        self.requests: dict[int, _Request] = {}
        self.open: dict[int, _Request] = {}
        queues = {(kind, b): FairQueue(limits.max_queue) for kind in ("answer", "embed") for b in (False, True)}
        self._queues: dict[tuple[str, bool], FairQueue[_Request]] = queues
        self._closing: list[_Request] = []
        self._endings: list[Ending] = []
        self._timers: list[tuple[float, int, str]] = []
        self._chunks = ChunkClock(limits.min_chunk, limits.max_chunk)
        self._embedding: _Request | None = None
        self._debt_s = 0.0  # seconds of decoding that are due before the next chunk ...
        self._rounds_due = 0  # ... but no more rounds than these
        self._stood_back = 0  # steps since background work that could run has run
        self._service_s: float | None = None
        self._wanted = True  # the model is to be loaded though nobody asks
        self._stop_at: float | None = None

    # ---- events from readers

    def submit(self, request: Submission, now: float) -> float | None:
        """Accepts the request and returns None, or refuses it and returns after how many seconds to try again."""
        assert request.id not in self.requests
        if self._stop_at is not None:
            return max(1.0, self._stop_at - now)
        if self.life.state == "failed" and now < self.life.retry_at_s:
            return self.life.retry_at_s - now
        queue = self._queues[request.kind, request.priority == "background"]
        if not queue.has_place(request.client):
            return self.retry_after_s()
        accepted = _Request(request, now, queue)
        self.requests[request.id] = accepted
        queue.push(accepted)
        self.life.busy()
        if request.deadline is not None:
            self._time(request.deadline, request.id, "deadline")
        return None

    def cancel(self, id: int, now: float) -> None:
        """The reader has left; requests that have ended are ignored."""
        self._end(id, "cancelled", now)

    def reader_slow(self, id: int, now: float) -> None:
        """The reader's buffer is full: only this answer pauses."""
        request = self.open.get(id)
        if request and request.slow_since is None:
            request.slow_since = now
            if request.slow_timer:
                return
            request.slow_timer = True
            self._time(now + self.limits.reader_timeout_s, id, "slow_reader")

    def reader_ready(self, id: int, now: float) -> None:
        """The reader has caught up."""
        request = self.requests.get(id)
        if request:
            request.slow_since = None

    def tick(self, now: float) -> None:
        """Time has passed: ends what is due, as far as it needs no engine."""
        while self._timers and self._timers[0][0] <= now:
            _, id, kind = heapq.heappop(self._timers)
            request = self.requests.get(id)
            if request is None:
                continue
            if kind == "deadline":
                self._end(id, "deadline", now)
            else:
                self._check_reader(request, now)
        if not self.life.loaded:
            self._end_waits_for_load(now)
        if self._stop_at is not None and now >= self._stop_at:
            for id in list(self.requests):
                self._end(id, "stopping", now)

    def stop(self, grace_s: float, now: float) -> None:
        """No more requests; those accepted have grace_s to end, those that wait for a model that is down have not."""
        self._stop_at = now + grace_s if self._stop_at is None else min(self._stop_at, now + grace_s)
        self._wanted = False
        self.life.stop()
        if not self.life.loaded:
            for id in list(self.requests):
                self._end(id, "stopping", now)
        self.tick(now)

    # ---- events from the engine

    def opened(self, id: int, now: float) -> None:
        """The answer of the last Open has its sequence."""
        request = self.requests[id]
        request.opened_at = now

    def prefilled(self, id: int, done: int, computed: int, took_s: float, now: float) -> None:
        """A chunk is done: prompt tokens in place now, and how many of them the chunk computed."""
        request = self.requests[id]
        request.done = done
        request.used += computed
        request.decoding = done >= request.prompt_tokens
        self._chunks.tell(computed, took_s)
        self._owe(took_s)

    def decoded(self, steps: Sequence[tuple[int, int, bool]], took_s: float, now: float) -> None:
        """A round is done: for each of its answers the id, its new tokens, and whether it has ended."""
        self._debt_s = max(0.0, self._debt_s - took_s)
        self._rounds_due = self._rounds_due - 1 if self._debt_s else 0
        for id, tokens, ended in steps:
            request = self.requests[id]
            request.used += DECODE_COST * tokens
            if ended:
                self.life.proved()
                self._leave(request, now)

    def embedded(self, id: int, took_s: float, now: float) -> None:
        """The embedding of the last Embed is done."""
        request = self.requests[id]
        request.used += request.prompt_tokens
        self.life.proved()
        self._owe(took_s)
        self._leave(request, now)

    def failed(self, id: int, now: float) -> None:
        """This request of the last action failed, and nothing else; its sequence is free."""
        self._leave(self.requests[id], now)

    def broke(self, reason: str, now: float) -> list[int]:
        """The engine cannot be used any more: returns the requests that end with it, those with a sequence."""
        running = [*self.open.values()] + ([self._embedding] if self._embedding else [])
        ended = [request.id for request in running]
        for request in running:
            self._leave(request, now)
        self._closing.clear()
        self.life.failed(reason, now)
        return ended

    def woke(self, now: float) -> None:
        """The model is in memory."""
        self._wanted = False
        self.life.woke(now)
        if self.requests:
            self.life.busy()

    def load_failed(self, reason: str, now: float) -> None:
        """The last Wake failed: whoever waited for it ends, a later request tries again."""
        self._wanted = False
        self.life.failed(reason, now)
        for id in list(self.requests):
            self._end(id, "load_failed", now)

    def slept(self, level: int, now: float) -> None:
        """The last Sleep is done."""
        self.life.slept(level, now)

    # ---- decisions

    def take_endings(self) -> list[Ending]:
        """Requests that ended without a sequence since the last call."""
        endings, self._endings = self._endings, []
        return endings

    def next(self, now: float) -> Action:
        """The one thing for the engine to do now."""
        self.tick(now)
        if self._closing:
            request = self._closing.pop()
            self._leave(request, now)
            return Close(request.id, request.cause)
        if self._stop_at is not None and not self.requests:
            return Exit()
        if not self.life.loaded:
            return self._asleep(now)
        if not self.requests:
            self.life.idle(now)
            level = self.life.sleep_due(now)
            return Sleep(level) if level else Wait(self.life.next_time_s())
        return self._work(now) or Wait(self._next_time())

    def retry_after_s(self) -> float:
        """Seconds until half of what waits will have been served, from the time answers take; at least 1."""
        waiting = sum(len(q) for (kind, _), q in self._queues.items() if kind == "answer")
        service_s = FIRST_SERVICE_S if self._service_s is None else self._service_s
        return max(1.0, service_s * (waiting / 2 + 1) / self.limits.max_sequences)

    def waiting(self, priority: Priority | None = None) -> int:
        """How many requests wait for a sequence."""
        return sum(len(q) for (_, b), q in self._queues.items() if priority is None or b == (priority == "background"))

    def position(self, id: int) -> int | None:
        """How many requests are likely to be served before it; None: it does not wait."""
        request = self.requests.get(id)
        if request is None or request.open:
            return None
        ahead = 0
        if request.background:
            ahead = len(self._queues[request.kind, False])
        return ahead + request.queue.position(request)

    # ---- how it decides

    def _asleep(self, now: float) -> Action:
        if (self._wanted or self.requests) and self.life.may_wake(now):
            self.life.wake_begun()
            return Wake()
        if not self.requests and not self._wanted:
            self.life.idle(now)
            level = self.life.sleep_due(now)
            return Sleep(level) if level else Wait(self.life.next_time_s())
        times = [self.life.retry_at_s] + [t for t in (self._next_time(),) if t is not None]
        if self.requests:
            times.append(min(self._load_late_at(r) for r in self.requests.values()))
        return Wait(min(times))

    def _work(self, now: float) -> Action | None:
        """Opens what may be opened, else the next step; interactive work first, background work with what is left."""
        interactive, background = self._queues["answer", False], self._queues["answer", True]
        free = self.limits.max_sequences - len(self.open)
        if len(interactive) and free:
            return self._take(interactive)
        if len(interactive):
            victims = [r for r in self.open.values() if r.background]
            if victims:
                return self._evict(min(victims, key=lambda r: (r.used, -r.arrived)))
        front, back = [], []
        for request in self.open.values():
            if not (request.decoding and request.slow_since is not None):
                (back if request.background else front).append(request)
        front_embed, back_embed = self._queues["embed", False].peek(), self._queues["embed", True].peek()
        opens = len(background) and free
        if not (front or front_embed):
            self._stood_back = 0
            if opens:
                return self._take(background)
            # small chunks: whoever comes finds the engine free after one of them
            return self._step(back, back_embed, self._chunks.tokens_in(self.limits.stall_s))
        if back or back_embed or opens:
            self._stood_back += 1
            if 0 < self.limits.background_every <= self._stood_back:
                self._stood_back = 0
                return self._trickle(front, [*back, *filter(None, (back_embed, opens and background.peek()))])
        return self._step(front, front_embed, self.limits.max_chunk)

    def _take(self, queue: FairQueue) -> Open:
        request = queue.pop()
        request.open = True
        self.open[request.id] = request
        return Open(request.id)

    def _evict(self, request: _Request) -> Evict:
        del self.open[request.id]
        request.open = request.decoding = False
        request.done = 0
        request.slow_since = None
        request.queue.correct(request.client, -request.cost)
        request.queue.push(request, first=True)
        return Evict(request.id)

    def _step(self, of: Sequence[_Request], embed: _Request | None, most: int) -> Action | None:
        """A round, or a chunk if its turn has come: of one prompt, sized so that the round after it comes soon."""
        decoding = [r for r in of if r.decoding]
        prompts = [r for r in of if not r.decoding]
        if embed:
            prompts.append(embed)
        if decoding and (not prompts or self._rounds_due > 0):
            return Decode(tuple([r.id for r in decoding]))
        if not prompts:
            return None
        rate = self._chunks.tokens_per_s()
        # who came first, but one that is done sooner than the wait of another goes before it
        request = min(prompts, key=lambda r: (r.arrived + (r.prompt_tokens - r.done) / rate, r.id))
        if decoding:
            most = min(most, self._chunks.tokens_in(self.limits.stall_s))
        return self._run_prompt(request, most)

    def _trickle(self, front: Sequence[_Request], back: Sequence[_Request]) -> Action:
        """One step for the oldest background work beside interactive work: rows in its round, or one short chunk."""
        oldest = min(back, key=lambda r: r.arrived)
        if oldest.decoding:
            return Decode(tuple([r.id for r in (*front, *back) if r.decoding]))
        if oldest.kind == "answer" and not oldest.open:
            return self._take(oldest.queue)
        return self._run_prompt(oldest, self._chunks.tokens_in(self.limits.stall_s))

    def _run_prompt(self, request: _Request, most: int) -> Action:
        self._owe(0.0)
        if request.kind == "answer":
            return Prefill(request.id, most)
        request.queue.pop()
        request.open, self._embedding = True, request
        return Embed(request.id)

    def _owe(self, took_s: float) -> None:
        """After a chunk: how much decoding is due before the next one, if there is anything to decode."""
        self._debt_s = took_s * (1 - self.limits.prefill_share) / self.limits.prefill_share
        self._rounds_due = MOST_ROUNDS if took_s > 0 else 1

    def _time(self, when: float, id: int, kind: str) -> None:
        if len(self._timers) > 64 + 4 * len(self.requests):
            self._timers = [timer for timer in self._timers if timer[1] in self.requests]
            heapq.heapify(self._timers)
        heapq.heappush(self._timers, (when, id, kind))

    def _next_time(self) -> float | None:
        """When `tick` has something to do, if nothing happens before."""
        first = self._timers[0][0] if self._timers else None
        return min((t for t in (self._stop_at, first) if t is not None), default=None)

    def _end(self, id: int, cause: Cause, now: float) -> None:
        request = self.requests.get(id)
        if request is None or request.cause is not None:
            return
        if request.open:
            if request.kind == "embed":
                return  # its one step runs, and ends it
            request.cause = cause
            self._closing.append(request)
            return
        request.queue.remove(request)
        del self.requests[id]
        self._endings.append(Ending(id, cause))

    def _check_reader(self, request: _Request, now: float) -> None:
        request.slow_timer = request.slow_since is not None
        if request.slow_timer:
            late_at = request.slow_since + self.limits.reader_timeout_s
            if late_at <= now:
                self._end(request.id, "slow_reader", now)
            else:
                self._time(late_at, request.id, "slow_reader")

    def _leave(self, request: _Request, now: float) -> None:
        """Forgets an accepted request that has ended; its client is charged for what it took."""
        if request.cause is not None and request in self._closing:
            self._closing.remove(request)
        del self.requests[request.id]
        self.open.pop(request.id, None)
        if request is self._embedding:
            self._embedding = None
        request.queue.correct(request.client, request.used - request.cost)
        if request.opened_at is not None and request.kind == "answer":
            took_s = now - request.opened_at
            self._service_s = took_s if self._service_s is None else self._service_s + 0.2 * (took_s - self._service_s)

    def _end_waits_for_load(self, now: float) -> None:
        for id in [r.id for r in self.requests.values() if self._load_late_at(r) <= now]:
            self._end(id, "load_deadline", now)

    def _load_late_at(self, request: _Request) -> float:
        return max(request.arrived, self.life.down_since_s) + self.limits.load_deadline_s
