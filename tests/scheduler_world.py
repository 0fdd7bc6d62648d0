"""A world around the scheduler: random readers, and an engine that takes time, fails, sleeps and breaks. Everything the
scheduler promises is checked at every step against the world's own books.
"""

import random
from dataclasses import dataclass, field

from tandem.serve import scheduler as act
from tandem.serve.scheduler import Limits, Scheduler, Submission

CLIENTS = ("ann", "ben", "cho", "dee", "eve")
PROMPTS, ANSWERS = (40, 2000), (1, 60)


@dataclass(slots=True)
class Request:
    """One accepted request as the world sees it."""

    id: int
    client: str
    background: bool
    kind: str
    prompt: int
    answer: int
    deadline: float | None
    done: int = 0
    written: int = 0
    open: bool = False
    slow: bool = False
    cost: int = 0
    newcomer: bool = False  # its client had nothing else
    overtaken: dict = field(default_factory=dict)  # cost of each other client's that got a sequence before it

    @property
    def decodable(self) -> bool:
        return self.open and self.done >= self.prompt and not self.slow

    @property
    def runnable(self) -> bool:
        return self.open and not (self.done >= self.prompt and self.slow)


class World:
    """run(n) plays n events; `drain` lets the engine work without trouble until every request has ended."""

    def __init__(self, rng: random.Random, limits: Limits, trouble: float = 1.0):
        self.rng, self.limits, self.trouble = rng, limits, trouble
        self.now = 0.0
        self.scheduler = Scheduler(limits, self.now)
        self.live: dict[int, Request] = {}
        self.waiting: dict[tuple[str, bool], int] = {(k, b): 0 for k in ("answer", "embed") for b in (False, True)}
        self.open: dict[int, Request] = {}
        self.pending: act.Action | None = None
        self.loaded = False
        self.down_level = 2
        self.stopped = False
        self.idle_since: float | None = None
        self.next_id = 0
        self.background_share = 0.3
        self.cancelled: set[int] = set()
        self.since_background = 10**9
        self.prompts_in_a_row = 0
        self.rounds_in_a_row = 0
        self.counts: dict[str, int] = {}
        self.retry_at = 0.0

    # ---- readers

    def run(self, events: int) -> None:
        rng = self.rng
        coming = 0.16
        for at in range(events):
            dice = rng.random()
            if at % 1000 == 0:
                coming, self.background_share = rng.choice((0.01, 0.05, 0.16)), rng.choice((0.0, 0.3, 0.9))
            if dice < 0.78 - coming:
                self.engine()
            elif dice < 0.78:
                self.submit()
            elif dice < 0.84:
                self.cancel()
            elif dice < 0.94:
                self.reader()
            else:
                self.pass_time()

    def submit(self) -> None:
        rng = self.rng
        kind = "embed" if rng.random() < 0.05 else "answer"
        prompt = int(rng.triangular(*PROMPTS, PROMPTS[0]))
        deadline = self.now + rng.uniform(0.0, 60.0) if rng.random() < 0.2 else None
        client, background = rng.choice(CLIENTS), rng.random() < self.background_share
        request = Request(self.next_id, client, background, kind, prompt, rng.randint(*ANSWERS), deadline)
        self.next_id += 1
        most = None if rng.random() < 0.3 else request.answer + rng.choice((0, 0, 40))
        priority = "background" if request.background else "interactive"
        given = Submission(request.id, request.client, prompt, most, priority, deadline, kind)
        retry_after_s = self.scheduler.submit(given, self.now)
        key = (kind, request.background)
        if retry_after_s is not None:
            assert retry_after_s > 0
            refused_for_room = not self.stopped and self.now >= self.retry_at
            full_at = self.limits.max_queue - max(1, self.limits.max_queue // 16)
            assert not refused_for_room or self.waiting[key] >= full_at, "refused with room"
            self.count("refused")
            return
        assert not self.stopped
        request.cost = prompt + act.DECODE_COST * min(act.EXPECTED_TOKENS, most or act.EXPECTED_TOKENS)
        request.newcomer = not request.background and not any(r.client == request.client for r in self.live.values())
        self.live[request.id] = request
        self.waiting[key] += 1
        assert self.waiting[key] <= self.limits.max_queue + self.limits.max_sequences
        self.idle_since = None
        self.count("accepted")

    def some(self) -> Request | None:
        return self.live[self.rng.choice(list(self.live))] if self.live else None

    def cancel(self) -> None:
        request = self.some()
        if request and (self.rng.random() < 0.5 or len(self.live) > 20):
            self.scheduler.cancel(request.id, self.now)
            if not (request.kind == "embed" and request.open):
                self.cancelled.add(request.id)
            self.endings()
        elif self.rng.random() < 0.05:
            self.scheduler.cancel(self.next_id + 7, self.now)  # one that never was

    def reader(self) -> None:
        if self.open:
            request = self.open[self.rng.choice(list(self.open))]
            if request.slow:
                self.scheduler.reader_ready(request.id, self.now)
                request.slow = False
            elif self.rng.random() < 0.3 and request.done >= request.prompt:
                self.scheduler.reader_slow(request.id, self.now)
                request.slow = True

    def pass_time(self) -> None:
        rng = self.rng
        self.now += rng.uniform(0.0, 0.03) if rng.random() < 0.97 else rng.uniform(0.0, 40.0)
        if rng.random() < 0.5:
            self.scheduler.tick(self.now)
            self.endings()
        if rng.random() < 0.002 * self.trouble and not self.stopped:
            self.scheduler.stop(rng.choice((0.0, 1.0, 30.0)), self.now)
            self.stopped = True
            self.endings()

    # ---- the engine

    def engine(self) -> None:
        """Ends the action that runs, or asks for the next one; those without duration are carried out at once."""
        if self.pending is not None:
            action, self.pending = self.pending, None
            self.complete(action)
            self.endings()
            return
        action = self.scheduler.next(self.now)
        self.endings()
        self.check(action)
        self.count(type(action).__name__)
        if isinstance(action, act.Close):
            assert self.live[action.id].open
            self.final(action.id, action.cause)
        elif isinstance(action, act.Evict):
            request = self.open.pop(action.id)
            assert request.background
            request.open = request.slow = False
            request.done = request.written = 0
            self.waiting["answer", True] += 1
        elif isinstance(action, act.Exit):
            assert self.stopped and not self.live
            self.restart()
        elif isinstance(action, act.Wait):
            self.wait(action)
        else:
            if isinstance(action, act.Open):
                request = self.live[action.id]
                assert not request.open
                request.open = True
                self.open[action.id] = request
                self.waiting["answer", request.background] -= 1
                if not request.background:
                    self.check_share(request)
            elif isinstance(action, act.Embed):
                request = self.live[action.id]
                assert request.kind == "embed" and not request.open
                request.open = True
                self.waiting["embed", request.background] -= 1
            self.pending = action

    def wait(self, action: act.Wait) -> None:
        """The engine sleeps until the time named: only right if there is nothing that it could do."""
        if self.loaded:
            assert not any(r.runnable for r in self.open.values()), "runs out of work with work at hand"
            free = self.limits.max_sequences - len(self.open)
            assert not free or not (self.waiting["answer", False] + self.waiting["answer", True])
            assert not self.waiting["embed", False] + self.waiting["embed", True]
        else:
            assert not self.live or self.now < self.retry_at, "the model is down and nobody loads it"
        assert action.until is None or action.until > self.now, "waits for a time that has come"
        timed = any(r.deadline for r in self.live.values())
        assert action.until is not None or not timed, "would sleep over a deadline"
        if action.until is not None and self.rng.random() < 0.3:
            self.now = action.until

    def check(self, action: act.Action) -> None:
        """What holds whenever the engine is told what to do."""
        if isinstance(action, act.Sleep):
            assert not self.live and not self.open, "sleeps with work"
            after = self.limits.sleep.deep_after_s if action.level == 2 else self.limits.sleep.light_after_s
            assert self.idle_since is not None and self.now - self.idle_since >= after - 1e-9, "sleeps too early"
            assert self.down_level < action.level
        elif isinstance(action, act.Wake):
            assert not self.loaded and self.now >= self.retry_at, "wakes too early or twice"
        elif isinstance(action, (act.Open, act.Prefill, act.Decode, act.Embed)):
            assert self.loaded, "a step while asleep"
            assert not self.cancelled, "a step before a cancelled request was ended"
            assert len(self.open) + isinstance(action, act.Open) <= self.limits.max_sequences
            ids = action.ids if isinstance(action, act.Decode) else (action.id,)
            assert len(set(ids)) == len(ids) > 0
            self.check_order(action, [self.live[id] for id in ids])

    def check_order(self, action: act.Action, served: list[Request]) -> None:
        front = [r for r in self.open.values() if not r.background and r.runnable]
        waits = bool(front) or self.waiting["embed", False] > 0
        if any(r.background for r in served):
            has_sequence = any(r.background and r.kind == "answer" for r in served)
            assert not (has_sequence and self.waiting["answer", False]), "background work before one without a sequence"
            if waits:
                every = self.limits.background_every
                assert every and self.since_background >= every - 1, "background work delays interactive work"
                self.since_background = 0
        elif waits:
            self.since_background += not isinstance(action, act.Open)
        if isinstance(action, act.Decode):
            for request in served:
                assert request.decodable, "decodes what is not ready"
            left_out = [r for r in front if r.decodable and r not in served]
            assert not left_out, "an answer is left out of a round"
            self.prompts_in_a_row = 0
            prompts = [r for r in self.open.values() if r.done < r.prompt and not r.background]
            self.rounds_in_a_row = self.rounds_in_a_row + 1 if prompts else 0
            assert self.rounds_in_a_row <= act.MOST_ROUNDS + 1, "a prompt starves"
        elif isinstance(action, (act.Prefill, act.Embed)):
            self.rounds_in_a_row = 0
            self.prompts_in_a_row = self.prompts_in_a_row + 1 if any(r.decodable for r in front) else 0
            assert self.prompts_in_a_row <= 2, "prompts stall answers"
            if isinstance(action, act.Prefill):
                assert served[0].done < served[0].prompt and 0 < action.max_tokens <= self.limits.max_chunk

    def check_share(self, opened: Request) -> None:
        """Nobody who came with nothing is overtaken by more of another client than what that one had coming: one
        request, and as much as its running ones turn out cheaper than expected."""
        most = (self.limits.max_sequences + 2) * (PROMPTS[1] + act.DECODE_COST * act.EXPECTED_TOKENS)
        for cost in opened.overtaken.values():
            assert cost <= most, "a client is starved by another"
        for waiting in self.live.values():
            if waiting.newcomer and not waiting.open and waiting.client != opened.client and waiting.kind == "answer":
                waiting.overtaken[opened.client] = waiting.overtaken.get(opened.client, 0) + opened.cost

    def complete(self, action: act.Action) -> None:
        rng, scheduler = self.rng, self.scheduler
        fails = rng.random() < 0.01 * self.trouble
        if isinstance(action, act.Wake):
            self.now += rng.uniform(0.1, 20.0)
            if rng.random() < 0.2 * self.trouble:
                self.broken(lambda: scheduler.load_failed("no memory", self.now))
                return
            scheduler.woke(self.now)
            self.loaded, self.down_level = True, 0
            if not self.live:
                self.idle_since = self.now
        elif isinstance(action, act.Sleep):
            self.now += 0.1
            self.loaded, self.down_level = False, action.level
            scheduler.slept(action.level, self.now)
        elif fails and rng.random() < 0.1:
            running = [*self.open] + ([action.id] if isinstance(action, act.Embed) else [])
            self.broken(lambda: self.told_broken(running))
        elif isinstance(action, act.Open):
            self.now += 0.0001
            self.failed(action.id) if fails else scheduler.opened(action.id, self.now)
        elif isinstance(action, act.Prefill):
            self.prefill(action, fails)
        elif isinstance(action, act.Embed):
            self.now += 0.01
            if fails:
                self.failed(action.id)
            else:
                scheduler.embedded(action.id, 0.01, self.now)
                self.final(action.id, "ended")
        else:
            self.decode(action, fails)

    def prefill(self, action: act.Prefill, fails: bool) -> None:
        request = self.live[action.id]
        reused = request.prompt // 2 if request.done == 0 and self.rng.random() < 0.3 else 0
        chunk = min(action.max_tokens, request.prompt - request.done - reused)
        took_s = self.rng.choice((0.0, 0.002 * chunk, 0.05 + 0.001 * chunk))
        self.now += took_s
        if fails:
            self.failed(action.id)
            return
        request.done += reused + chunk
        self.scheduler.prefilled(action.id, request.done, chunk, took_s, self.now)

    def decode(self, action: act.Decode, fails: bool) -> None:
        if fails:
            self.failed(action.ids[0])
            return
        took_s = self.rng.choice((0.0, 0.02, 0.05))
        self.now += took_s
        steps = []
        for id in action.ids:
            request = self.live[id]
            tokens = min(self.rng.randint(1, 4), request.answer - request.written)
            request.written += tokens
            steps.append((id, tokens, request.written >= request.answer))
        self.scheduler.decoded(steps, took_s, self.now)
        for id, _, ended in steps:
            if ended:
                self.final(id, "ended")

    def failed(self, id: int) -> None:
        self.scheduler.failed(id, self.now)
        self.final(id, "failed")

    def told_broken(self, running: list[int]) -> None:
        assert sorted(self.scheduler.broke("cuda error", self.now)) == sorted(running)
        for id in running:
            self.final(id, "broke")

    def broken(self, tell) -> None:
        tell()
        self.endings()
        self.loaded, self.down_level = False, 2
        self.retry_at = self.scheduler.life.retry_at_s
        assert self.retry_at - self.now <= 60.0
        self.idle_since = None

    # ---- books

    def endings(self) -> None:
        for ending in self.scheduler.take_endings():
            assert not self.live[ending.id].open
            self.final(ending.id, ending.cause)

    def final(self, id: int, why: str) -> None:
        """The one final event of an accepted request; a second one is a KeyError."""
        request = self.live.pop(id)
        if not request.open:
            self.waiting[request.kind, request.background] -= 1
        self.open.pop(id, None)
        self.cancelled.discard(id)
        self.count(why)
        if why == "deadline":
            assert request.deadline is not None and request.deadline <= self.now
        if not self.live and self.scheduler.life.state in ("loaded", "sleeping"):
            self.idle_since = self.now

    def restart(self) -> None:
        books = self.counts
        self.__init__(self.rng, self.limits, self.trouble)  # type: ignore[misc]
        self.counts = books
        self.count("restarts")

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def drain(self) -> None:
        """Readers read, nothing fails, nobody comes: everything must end within the steps that the work takes."""
        self.trouble = 0.0
        for request in self.open.values():
            self.scheduler.reader_ready(request.id, self.now)
            request.slow = False
        work = sum(r.prompt // self.limits.min_chunk + 2 + r.answer + 4 for r in self.live.values())
        steps = 0
        while self.live:
            self.engine()
            if isinstance(self.pending, act.Wake) or self.pending is None:
                self.now += 0.05
            steps += 1
            assert steps < 4 * work + 5000, f"no progress: {len(self.live)} requests left"
