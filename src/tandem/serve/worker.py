"""The engine thread, and the asyncio face of it.

In: GenerationRequests from coroutines. Out: a stream of events for each. All calls of the Batch happen on one thread,
which asks the scheduler what is next; what a step gave to all its answers goes to the event loop in one call.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import numpy as np

from tandem.batch import Batch
from tandem.errors import EngineError, SettingError
from tandem.requests import DecodeStep, GenerationRequest, GenerationStats, StopReason
from tandem.serve import scheduler as act
from tandem.serve.events import Failed, Finished, Generated, Overloaded, Prefilling, Waiting
from tandem.serve.lifecycle import MemoryReport
from tandem.serve.scheduler import Cause, Limits, Priority, Scheduler, Submission
from tandem.serve.snapshot import Totals, WorkerSnapshot, process_bytes, take_snapshot, trim_memory
from tandem.serve.streams import AnswerStream, Embedded, Job

_log = logging.getLogger("tandem")

TICK_S = 0.5  # how often requests that wait for a busy engine are looked at
EXIT_WAIT_S = 30.0  # beyond the grace, for a load that cannot be interrupted


class Worker:
    """Owns the engine thread and its Batch.

    make_batch: opens the model; called on the engine thread, at the start and after the engine broke. buffer_tokens:
    how far an answer may be ahead of its reader. Use `start`, then `generate`, then `stop`, all in one event loop.
    """

    def __init__(self, make_batch: Callable[[], Batch], limits: Limits | None = None, *, buffer_tokens: int = 256):
        if buffer_tokens < 1:
            raise SettingError(f"buffer_tokens={buffer_tokens}: at least 1 is needed")
        self.limits = limits = limits or Limits()
        self._make_batch, self._buffer_tokens = make_batch, buffer_tokens
        self.totals = Totals()
        self.memory: dict[str, int] = {}
        self.last_sleep: MemoryReport | None = None
        self._scheduler = Scheduler(limits, time.monotonic())
        self._changed = threading.Condition(threading.Lock())  # guards the scheduler; never held during engine work
        self._jobs: dict[int, Job] = {}  # accepted and not ended
        self._running: dict[int, Job] = {}  # with an answer in the batch; of the engine thread alone
        self._next_id = 0
        self._batch: Batch | None = None
        self._load_error: Exception | None = None
        self._close_error: Exception | None = None
        self._died: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ticker: asyncio.TimerHandle | None = None

    # ---- for coroutines

    @property
    def batch(self) -> Batch | None:
        """The Batch once it was loaded (its tokenizer stays usable while it sleeps); None before, or after it broke.
        Only attributes may be read: its methods belong to the engine thread."""
        return self._batch

    async def start(self) -> None:
        """Starts the thread, which begins to load; does not wait for that."""
        assert self._thread is None
        self._loop = asyncio.get_running_loop()
        self._exited, self._settled = asyncio.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="tandem-engine", daemon=True)
        self._thread.start()

    async def wait_loaded(self) -> None:
        """Returns when the first load has ended. Raises what it raised."""
        await self._settled.wait()
        if self._load_error:
            raise self._load_error

    def generate(
        self,
        request: GenerationRequest,
        *,
        client: str = "",
        priority: Priority = "interactive",
        deadline_s: float | None = None,
    ) -> AnswerStream:
        """Accepts the request: an async iterator over its events; close it (`async with`) when the reader leaves.

        Raises Overloaded if it is not accepted, EngineError if the engine thread is gone.
        """
        job = Job(self._take_id(), request, "answer", priority)
        tokens, most = len(request.prompt.ids), request.sampling.max_tokens
        self._submit(job, Submission(job.id, client, tokens, most, priority, self._deadline(deadline_s)))
        return job.stream

    async def embed(
        self, ids: list[int], *, client: str = "", priority: Priority = "interactive", deadline_s: float | None = None
    ) -> np.ndarray:
        """Mean of the final hidden states, float32 [hidden]. Raises Overloaded, RequestError, EngineError."""
        job = Job(self._take_id(), ids, "embed", priority)
        self._submit(job, Submission(job.id, client, len(ids), None, priority, self._deadline(deadline_s), "embed"))
        async with job.stream as stream:
            async for event in stream:
                if isinstance(event, Embedded):
                    return event.vector
                if isinstance(event, Failed):
                    raise event.error
        raise EngineError("the embedding was cancelled")

    def snapshot(self) -> WorkerSnapshot:
        """State and counters of this moment; never waits for the engine and never wakes it."""
        return take_snapshot(self._scheduler, self._jobs, self.totals, self.memory, self.last_sleep, self._died)

    async def stop(self, grace_s: float = 10.0) -> None:
        """Refuses what comes from now on, lets accepted requests go on for grace_s, ends the rest, frees the model."""
        if self._thread is None:
            return
        with self._changed:
            self._scheduler.stop(grace_s, time.monotonic())
            self._send_endings()
            self._changed.notify()
        try:
            await asyncio.wait_for(self._exited.wait(), grace_s + EXIT_WAIT_S)
            self._thread.join()
        except TimeoutError:
            _log.warning("the engine did not come back from its last call within %.0f s after the grace", EXIT_WAIT_S)
        if self._ticker:
            self._ticker.cancel()

    def leave(self, job: Job) -> None:
        """For streams: the reader has gone."""
        with self._changed:
            self._scheduler.cancel(job.id, time.monotonic())
            self._send_endings()
            self._changed.notify()

    def caught_up(self, job: Job) -> None:
        """For streams: the reader of a paused answer has read what was buffered."""
        with self._changed:
            job.slow = False
            self._scheduler.reader_ready(job.id, time.monotonic())
            self._changed.notify()

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _deadline(self, deadline_s: float | None) -> float | None:
        return None if deadline_s is None else time.monotonic() + deadline_s

    def _submit(self, job: Job, submission: Submission) -> None:
        assert self._loop is not None, "start the worker first"
        if self._died:
            raise EngineError("the engine thread has ended by an error; restart the server") from self._died
        job.stream = AnswerStream(self, job, self._buffer_tokens)
        with self._changed:
            scheduler = self._scheduler
            retry_after_s = scheduler.submit(submission, time.monotonic())
            if retry_after_s is not None:
                self.totals.refused += 1
                raise Overloaded(self._refusal(), retry_after_s)
            self.totals.accepted += 1
            self._jobs[job.id] = job
            position = scheduler.position(job.id)
            if not scheduler.life.loaded:
                job.stream.put(Waiting("loading", position))
            elif position or len(scheduler.open) >= self.limits.max_sequences:
                job.stream.put(Waiting("queue", position))
            self._changed.notify()
        if self._ticker is None:
            self._ticker = self._loop.call_later(TICK_S, self._tick)

    def _refusal(self) -> str:
        life = self._scheduler.life
        if life.state == "stopping":
            return "this server is shutting down and overloaded with what it has to end, retry later"
        if life.state == "failed":
            return f"the model could not be loaded ({life.reason}); overloaded, retry later"
        return "queue full: this server is overloaded, retry later"

    def _tick(self) -> None:
        """Ends what is due while the engine is busy with something long."""
        with self._changed:
            self._scheduler.tick(time.monotonic())
            self._send_endings()
        self._ticker = self._loop.call_later(TICK_S, self._tick) if self._jobs else None

    # ---- the engine thread

    def _run(self) -> None:
        try:
            while True:
                action = self._next_action()
                if isinstance(action, act.Exit):
                    break
                self._DO[type(action)](self, action)
                if self._close_error:
                    self._break(self._close_error)
            if self._batch:
                self._batch.close_all()
        except Exception as error:  # a mistake of ours: nobody may be left waiting for an answer
            _log.exception("the engine thread ended")
            self._died = error
            with self._changed:
                self._scheduler.life.failed(f"the engine thread ended: {error!r}", time.monotonic())
            dead = EngineError(f"the engine thread ended: {error!r}")
            self._post([(job, Failed(dead)) for job in list(self._jobs.values())])
        finally:
            self._loop.call_soon_threadsafe(self._settled.set)
            self._loop.call_soon_threadsafe(self._exited.set)

    def _next_action(self) -> act.Action:
        with self._changed:
            while True:
                now = time.monotonic()
                action = self._scheduler.next(now)
                self._send_endings()
                if not isinstance(action, act.Wait):
                    return action
                if self._batch and self._scheduler.life.loaded:
                    self.memory = self._batch.memory()
                self._changed.wait(None if action.until is None else max(0.0, action.until - now))

    def _open(self, action: act.Open) -> None:
        job = self._jobs[action.id]
        try:
            job.begin(self._batch.open(job.guarded_request()))
        except Exception as error:  # nothing has run yet: whatever it is, it is this request's
            self._fail(job, error)
            return
        self._running[job.id] = job
        with self._changed:
            self._scheduler.opened(job.id, time.monotonic())

    def _prefill(self, action: act.Prefill) -> None:
        job = self._jobs[action.id]
        begin = time.monotonic()
        try:
            step = self._batch.prefill(job.answer, action.max_tokens)
        except EngineError as error:
            self._fail(job, error)
            return
        except Exception as error:
            self._break(error)
            return
        now = time.monotonic()
        computed = max(0, step.done - max(job.prefilled, step.reused))
        job.prefilled, job.prompt = step.done, step
        self.totals.prefill_s += now - begin
        self.totals.computed_tokens += computed
        with self._changed:
            self._scheduler.prefilled(job.id, step.done, computed, now - begin, now)
        self._post([(job, Prefilling(step))])

    def _decode(self, action: act.Decode) -> None:
        jobs = [self._jobs[id] for id in action.ids]
        begin = time.monotonic()
        try:
            steps = self._batch.decode([job.answer for job in jobs])
        except Exception as error:
            culprit = _culprit(error, jobs)
            self._fail(culprit, error) if culprit else self._break(error)
            return
        now = time.monotonic()
        told, events = [], []
        for job, step in zip(jobs, steps, strict=True):
            try:
                events += self._after_step(job, step)
            except EngineError as error:
                told.append((job.id, 0, True))
                self._free(job)
                events.append((job, Failed(error)))
                continue
            told.append((job.id, len(step.pieces), step.finished is not None))
        tokens = sum(count for _, count, _ in told)
        self.totals.decode_s += now - begin
        self.totals.written(tokens, now)
        with self._changed:
            self._scheduler.decoded(told, now - begin, now)
            for job in jobs:
                if not job.slow and job.backlog > self._buffer_tokens:
                    job.slow = True
                    if job.backlog > self._buffer_tokens:  # the reader may have read before it could see `slow`
                        self._scheduler.reader_slow(job.id, now)
                    else:
                        job.slow = False
        self._post(events)

    def _after_step(self, job: Job, step: DecodeStep) -> list:
        """Events of one answer's part of a round; closes it if it has ended. Raises what its constraint raised."""
        if job.guard and job.guard.error:
            raise job.guard.error
        pieces = job.fresh(step.pieces)
        events = [(job, Generated(pieces))] if pieces else []
        if step.finished:
            events.append((job, self._finish(job, step.finished)))
        return events

    def _embed(self, action: act.Embed) -> None:
        job = self._jobs[action.id]
        begin = time.monotonic()
        try:
            vector = self._batch.embed(job.request)
        except EngineError as error:
            self._fail(job, error)
            return
        except Exception as error:
            self._break(error)
            return
        now = time.monotonic()
        with self._changed:
            self._scheduler.embedded(job.id, now - begin, now)
        self._post([(job, Embedded(vector)), (job, Finished("eos", job.no_stats("eos")))])

    def _close(self, action: act.Close) -> None:
        job, cause = self._jobs[action.id], action.cause
        if cause in ("cancelled", "slow_reader", "deadline"):
            event = self._finish(job, "deadline" if cause == "deadline" else "cancelled")
        else:
            self._free(job)
            event = Failed(self._reason_of_end(job, cause))
        self._post([(job, event)])

    def _evict(self, action: act.Evict) -> None:
        job = self._running[action.id]  # it may have been cancelled meanwhile, as it waits again
        self._free(job)
        job.restart()
        self.totals.evicted += 1
        self._post([(job, Waiting("paused", 0))])

    def _sleep(self, action: act.Sleep) -> None:
        try:
            before, rss_before = self._batch.memory(), process_bytes()
            self._batch.sleep(action.level)
            trim_memory()
            self.memory = self._batch.memory()
        except Exception as error:
            self._break(error)
            return
        self.last_sleep = MemoryReport(action.level, before, self.memory, rss_before, process_bytes())
        if self.last_sleep.unfreed():
            _log.warning("asleep at level %d, but not freed: %s", action.level, self.last_sleep.unfreed())
        self.totals.sleeps += 1
        with self._changed:
            self._scheduler.slept(action.level, time.monotonic())

    def _wake(self, action: act.Wake) -> None:
        with self._changed:
            waiting = [(job, Waiting("loading", self._scheduler.position(job.id) or 0)) for job in self._jobs.values()]
        self._post(waiting)
        try:
            if self._batch is None:
                self._batch = self._new_batch()
            else:
                self._batch.wake()
            self.memory = self._batch.memory()
        except Exception as error:
            _log.error("loading the model failed: %s", error)
            self._load_error = error
            self.totals.load_failures += 1
            if not isinstance(error, EngineError):
                self._discard()
            with self._changed:
                self._scheduler.load_failed(str(error) or repr(error), time.monotonic())
                self._send_endings()
        else:
            self._load_error = None
            self.totals.wakes += 1
            with self._changed:
                self._scheduler.woke(time.monotonic())
        self._loop.call_soon_threadsafe(self._settled.set)

    _DO = {
        act.Open: _open,
        act.Prefill: _prefill,
        act.Decode: _decode,
        act.Embed: _embed,
        act.Close: _close,
        act.Evict: _evict,
        act.Sleep: _sleep,
        act.Wake: _wake,
    }

    def _new_batch(self) -> Batch:
        batch = self._make_batch()
        if batch.max_sequences < self.limits.max_sequences:
            batch.close_all()
            most = self.limits.max_sequences
            raise SettingError(f"{most} answers at once are set, the batch holds {batch.max_sequences}")
        return batch

    def _fail(self, job: Job, error: Exception) -> None:
        """This request failed, the engine did not."""
        self._free(job)
        with self._changed:
            self._scheduler.failed(job.id, time.monotonic())
        self._post([(job, Failed(error))])

    def _break(self, error: Exception) -> None:
        """The engine is in a state that nobody knows: everything running ends, the next request loads anew."""
        _log.error("the engine broke", exc_info=error)
        failure = EngineError(f"the engine failed while it wrote this answer ({error!r}); it is loaded anew, retry")
        failure.__cause__ = error
        self._load_error, self._close_error = error, None
        self.totals.breaks += 1
        with self._changed:
            ended = self._scheduler.broke(str(error) or repr(error), time.monotonic())
        for job in self._running.values():
            job.answer = None
        self._running.clear()
        self._post([(self._jobs[id], Failed(failure)) for id in ended])
        self._discard()

    def _discard(self) -> None:
        """Gives up the batch, whatever state it is in."""
        batch, self._batch, self.memory = self._batch, None, {}
        try:
            if batch:
                batch.close_all()
        except Exception:
            _log.warning("the broken engine could not be closed", exc_info=True)

    def _free(self, job: Job, reason: StopReason | None = None) -> GenerationStats | None:
        """Closes the job's answer, if it has one; on the engine thread."""
        answer, job.answer = job.answer, None
        self._running.pop(job.id, None)
        if answer is None:
            return None
        try:
            return self._batch.close(answer, reason)
        except Exception as error:  # this request ends as it was to; the engine is given up after the action
            self._close_error = error
            return None

    def _finish(self, job: Job, reason: StopReason) -> Finished:
        stats = self._free(job, reason) or job.no_stats(reason)
        self.totals.ended(stats)
        return Finished(stats.stop_reason, stats)

    def _send_endings(self) -> None:
        """Tells those whose requests ended without a sequence; the lock is held."""
        events = []
        for ending in self._scheduler.take_endings():
            job = self._jobs[ending.id]
            if ending.cause in ("cancelled", "slow_reader") and job.kind == "answer":
                stats = job.no_stats("cancelled")
                self.totals.ended(stats)
                events.append((job, Finished("cancelled", stats)))
            else:
                events.append((job, Failed(self._reason_of_end(job, ending.cause))))
        self._post(events)

    def _reason_of_end(self, job: Job, cause: Cause) -> EngineError:
        """Why a request ends that can be sent again."""
        wait_s = time.monotonic() - job.began_s
        if cause == "load_failed":
            return EngineError(f"the model could not be loaded: {self._load_error}")
        if cause == "stopping":
            return Overloaded("this server is shutting down; overloaded for now, retry later", 5.0)
        if cause == "load_deadline":
            return Overloaded(f"waited {wait_s:.1f} s for the model to be loaded: overloaded, retry later", 10.0)
        if cause == "deadline":
            return Overloaded(f"waited {wait_s:.1f} s for its turn: this server is overloaded, retry later", 5.0)
        return EngineError("the embedding was cancelled")

    def _post(self, events: list) -> None:
        """Events to the streams of their jobs, in one call into the event loop."""
        if not events:
            return
        for job, event in events:
            if isinstance(event, (Finished, Failed)):
                self._jobs.pop(job.id, None)
                self.totals.failed += isinstance(event, Failed)
        self._loop.call_soon_threadsafe(_deliver, events)


def _culprit(error: Exception, jobs: list[Job]) -> Job | None:
    """The one answer of a round that the error belongs to; None: the round itself failed."""
    if len(jobs) == 1 and isinstance(error, EngineError):
        return jobs[0]
    answer = getattr(error, "answer", None)
    return next((job for job in jobs if job.answer is answer), None) if answer is not None else None


def _deliver(events: list) -> None:
    for job, event in events:
        job.stream.put(event)

