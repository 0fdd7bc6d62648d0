"""One request between the engine thread, which writes, and a coroutine, which reads at its own pace."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from tandem.errors import EngineError, RequestError
from tandem.requests import Constraint, GenerationRequest, GenerationStats, Piece, PrefillStep, StopReason
from tandem.serve.events import Event, Failed, Finished, Generated


@dataclass(frozen=True)
class Embedded:
    """What an embedding job hears before its end."""

    vector: np.ndarray


class GuardedConstraint:
    """A constraint whose exceptions are kept instead of raised: they end its own answer after the round, and spare the
    other answers of the round. After an error it allows everything."""

    def __init__(self, inner: Constraint):
        self.inner = inner
        self.error: EngineError | None = None

    def allowed(self) -> np.ndarray | None:
        return self._try(self.inner.allowed, None)

    def forced(self) -> Sequence[int]:
        return self._try(self.inner.forced, ())

    def accept(self, token: int) -> None:
        self._try(lambda: self.inner.accept(token), None)

    def _try(self, call: Callable[[], Any], otherwise: Any) -> Any:
        if self.error is None:
            try:
                return call()
            except EngineError as error:
                self.error = error
            except Exception as error:
                self.error = RequestError(f"the constraint of this request failed: {error!r}")
                self.error.__cause__ = error
        return otherwise


class WrittenAgain:
    """Tokens that were sent already, then what the inner constraint says. same_draws: the sampler draws for the tokens
    that are written again too, so that a seeded answer goes on with the numbers it would have had."""

    MOST_TOKENS = 1 << 20  # of a vocabulary

    def __init__(self, tokens: Sequence[int], inner: Constraint | None, same_draws: bool):
        self.tokens, self.inner, self.at = list(tokens), inner, 0
        self._bits = np.zeros(self.MOST_TOKENS // 32, np.uint32) if same_draws else None

    def allowed(self) -> np.ndarray | None:
        if self.at >= len(self.tokens):
            return self.inner.allowed() if self.inner else None
        if self._bits is None:
            return None
        self._bits[:] = 0
        self._bits[self.tokens[self.at] // 32] = 1 << self.tokens[self.at] % 32
        return self._bits

    def forced(self) -> Sequence[int]:
        if self.at >= len(self.tokens):
            return self.inner.forced() if self.inner else ()
        return self.tokens[self.at :] if self._bits is None else ()

    def accept(self, token: int) -> None:
        self.at += 1
        if self.inner:
            self.inner.accept(token)


class Job:
    """A request on its way through the engine. `answer` and what follows it belong to the engine thread."""

    def __init__(self, id: int, request: GenerationRequest | list[int], kind: str, priority: str):
        self.id, self.request, self.kind, self.priority = id, request, kind, priority
        self.stream: AnswerStream = None  # set before anybody sees the job
        self.began_s = time.monotonic()
        self.consumed = 0  # tokens; written by the reader
        self.slow = False
        self.answer: Any = None
        self.guard: GuardedConstraint | None = None
        self.prefilled = 0
        self.prompt: PrefillStep | None = None
        self.produced = 0
        self._sent: list[int] | None = [] if priority == "background" else None
        self._repeated = 0  # of what was sent before an eviction, written again since

    @property
    def backlog(self) -> int:
        """Tokens written and not read."""
        return self.produced - self.consumed

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, or of what is to be embedded."""
        return len(self.request if self.kind == "embed" else self.request.prompt.ids)

    def no_stats(self, reason: StopReason) -> GenerationStats:
        """Of a request that has no answer in the batch."""
        return GenerationStats(self.prompt_tokens, 0, self.produced, 0.0, 0.0, 0.0, reason)

    def guarded_request(self) -> GenerationRequest:
        """The request as the batch gets it."""
        make, sampling, sent = self.request.constraint, self.request.sampling, self._sent
        if make is None and not sent:
            return self.request

        def guarded() -> GuardedConstraint:
            constraint = make() if make else None
            if sent:
                same_draws = sampling.seed is not None and sampling.temperature > 0
                constraint = WrittenAgain(sent, constraint, same_draws)
            self.guard = GuardedConstraint(constraint)
            return self.guard

        return replace(self.request, constraint=guarded)

    def begin(self, answer: Any) -> None:
        """It has a sequence."""
        self.answer, self.prefilled = answer, 0

    def restart(self) -> None:
        """It has lost its sequence and will be written again from the start."""
        self._repeated = 0

    def fresh(self, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """The pieces that the reader has not been sent before an eviction. Raises EngineError if those differ."""
        if self._sent is None:
            self.produced += len(pieces)
            return pieces
        known = pieces[: len(self._sent) - self._repeated]
        expected = self._sent[self._repeated : self._repeated + len(known)]
        if [piece.token for piece in known] != expected:
            raise EngineError("the answer was interrupted and came out differently when it was written again")
        self._repeated += len(known)
        new = pieces[len(known) :]
        self._sent += [piece.token for piece in new]
        self._repeated += len(new)
        self.produced += len(new)
        return new


class Writer(Protocol):
    """What a stream tells its worker."""

    def leave(self, job: Job) -> None:
        """The reader has gone."""

    def caught_up(self, job: Job) -> None:
        """The reader of a paused answer has read half of what was buffered."""


class AnswerStream:
    """Async iterator over the events of a request; the last one is Finished or Failed. One reader at a time.

    `next(timeout_s)` returns None when nothing came in that time (to send a ping), and loses nothing.
    """

    def __init__(self, worker: Writer, job: Job, buffer_tokens: int):
        self._worker, self._job = worker, job
        self._low = buffer_tokens // 2
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future | None = None
        self._ended = self._closed = False

    @property
    def id(self) -> int:
        """Of the request, in the snapshot's list."""
        return self._job.id

    def put(self, event: Event) -> None:
        """In the event loop: one more event."""
        if self._closed or self._ended:
            return
        self._events.append(event)
        if isinstance(event, (Finished, Failed)):
            self._ended = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self, timeout_s: float | None = None) -> Event | None:
        """The next event, or None after timeout_s. Raises StopAsyncIteration after the last."""
        if not self._events:
            if self._ended or self._closed:
                raise StopAsyncIteration
            await self._wait(timeout_s)
            if not self._events:
                if self._closed:
                    raise StopAsyncIteration
                return None
        event = self._events.popleft()
        return self._read(event) if isinstance(event, Generated) else event

    def __aiter__(self) -> "AnswerStream":
        return self

    async def __anext__(self) -> Event:
        return await self.next()

    async def aclose(self) -> None:
        """The reader leaves: the request ends within one step or chunk. Nothing happens if it has ended."""
        self.close()

    def close(self) -> None:
        """As aclose, outside a coroutine; in the event loop's thread."""
        if self._closed:
            return
        self._closed = True
        if not self._ended:
            self._worker.leave(self._job)
        self._events.clear()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __aenter__(self) -> "AnswerStream":
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def _read(self, event: Generated) -> Generated:
        """The event together with the Generated ones right behind it."""
        pieces = event.pieces
        if self._events and isinstance(self._events[0], Generated):
            parts = [pieces]
            while self._events and isinstance(self._events[0], Generated):
                parts.append(self._events.popleft().pieces)
            pieces = tuple(piece for part in parts for piece in part)
            event = Generated(pieces)
        job = self._job
        job.consumed += len(pieces)
        if job.slow and job.backlog <= self._low:
            self._worker.caught_up(job)
        return event

    async def _wait(self, timeout_s: float | None) -> None:
        assert self._waiter is None, "a stream has one reader"
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, _set, self._waiter)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer:
                timer.cancel()


def _set(waiter: asyncio.Future) -> None:
    if not waiter.done():
        waiter.set_result(None)
