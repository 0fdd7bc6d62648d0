"""One answer in terms of no API: the worker's events come in, updates go out that each API writes in its own shape.

The parser of the model's format parts the text; tokens are counted and stop reasons named here, once for all APIs.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from tandem.errors import RequestError
from tandem.requests import GenerationStats, Piece, PrefillStep, StopReason, TokenLogprob
from tandem.serve.errors_api import ApiError, as_api_error, overflow, problem
from tandem.serve.events import Failed, Finished, Generated, Prefilling
from tandem.serve.prompt import Prepared
from tandem.text.tokenizer import Tokenizer
from tandem.text.tools import AnswerParser
from tandem.text.tools.deltas import Content, Delta, Reasoning, ToolCallEnd, ToolCallStart

_log = logging.getLogger("tandem")
_QUEUED_UPDATES = 32  # of several answers to one request, before the reader must catch up


@dataclass(frozen=True)
class Caller:
    """Who asks. id: of the request, in logs and errors; client: for the fair queue; deadline_s: from now, or None."""

    id: str
    client: str = ""
    priority: str = "interactive"
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """The prompt is on its way through the model; None: the request waits."""

    step: PrefillStep | None


@dataclass(frozen=True, slots=True)
class Written:
    """More of an answer. tokens: with log-probabilities, of the answer's text only."""

    deltas: list[Delta]
    tokens: Sequence[Piece] = ()
    choice: int = 0


@dataclass(frozen=True)
class Ended:
    """The answer is complete. finish: as chat completions word it; stop: why the engine ended; reasoning_tokens: of the
    completion's; flags: what was odd about calls in it."""

    finish: str
    stop: StopReason
    stats: GenerationStats
    reasoning_tokens: int = 0
    flags: tuple[str, ...] = ()
    calls: int = 0
    choice: int = 0


Update = Progress | Written | Ended


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}{secrets.token_hex(12)}"


@dataclass
class _Raw:
    """A parser that parses nothing."""

    def push(self, text: str, control: str | None = None) -> list[Delta]:
        return [Content(text)] if text else []

    def finish(self, reason: str) -> list[Delta]:
        return []


class AnswerReader:
    """Pieces to updates, of one answer."""

    def __init__(self, prepared: Prepared, choice: int = 0):
        raw = prepared.prompt_end == "raw"
        self._parser = _Raw() if raw else AnswerParser(
            prepared.format, prepared.tools, prepared.prompt_end, lambda: new_id("call_")
        )  # fmt: skip
        self._choice, self._logprobs = choice, prepared.request.logprobs is not None
        self._reasoning = prepared.prompt_end == "open"
        self._in_call = False
        self.reasoning_tokens = self._complete = self._incomplete = 0
        self._flags: dict[str, None] = {}
        self.token_ids: list[int] = []

    def take(self, pieces: Sequence[Piece]) -> Written:
        """The deltas of some pieces; neighbours of one kind are one delta."""
        deltas: list[Delta] = []
        tokens: list[Piece] = []
        push = self._parser.push
        for piece in pieces:
            new = push(piece.text, piece.control)
            if piece.token >= 0:
                self.token_ids.append(piece.token)
            if new:
                self._notice(new)
                deltas += new
            if self._reasoning:
                self.reasoning_tokens += piece.token >= 0
            elif self._logprobs and not self._in_call and piece.logprob is not None and piece.control is None:
                tokens.append(piece)
        return Written(_joined(deltas) if len(deltas) > 1 else deltas, tokens, self._choice)

    def end(self, finished: Finished) -> tuple[Written, Ended]:
        """What was held back, and how it went."""
        deltas = self._parser.finish(finished.reason)
        self._notice(deltas)
        ended = Ended(
            self._finish(finished.reason),
            finished.reason,
            finished.stats,
            min(self.reasoning_tokens, finished.stats.completion_tokens),
            tuple(self._flags),
            self._complete,
            self._choice,
        )
        return Written(deltas, (), self._choice), ended

    def _finish(self, reason: StopReason) -> str:
        """A call that was cut off must not be run: then the answer is not complete, whatever cut it."""
        if reason not in ("eos", "stop") or self._incomplete:
            return "length"
        return "tool_calls" if self._complete else "stop"

    def _notice(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            kind = type(delta)
            if kind is Reasoning:
                self._reasoning = True
            elif kind is Content:
                self._reasoning = self._in_call = False
                if delta.flag:
                    self._flags[delta.flag] = None
            elif kind is ToolCallStart:
                self._reasoning, self._in_call = False, True
                if delta.flag:
                    self._flags[delta.flag] = None
            elif kind is ToolCallEnd:
                self._in_call = False
                if delta.complete:
                    self._complete += 1
                else:
                    self._incomplete += 1
                    self._flags["partial_tool_call"] = None


async def answer(prepared: Prepared, caller: Caller, choice: int = 0) -> AsyncIterator[Update]:
    """One answer from the queue to its end; leaving early cancels it. Raises ApiError."""
    model, reader = prepared.model, AnswerReader(prepared, choice)
    record = model.recent.seen(caller.id, prepared.ids) if choice == 0 else None
    if record and record.diverged:
        _log.info("%s: prompt parts from an earlier one at %s", caller.id, record.diverged)
    try:
        stream = model.worker.generate(
            prepared.request, client=caller.client, priority=caller.priority, deadline_s=caller.deadline_s
        )
    except Exception as error:
        raise _failure(error, prepared, caller) from error
    async with aclosing(stream) as events:
        async for event in events:
            kind = type(event)
            if kind is Generated:
                yield reader.take(event.pieces)
            elif kind is Finished:
                if event.reason == "cancelled":
                    raise problem("stopping", retry_after_s=5.0)
                if record:
                    model.recent.answered(record, prepared.ids, reader.token_ids, event.stats.reused_tokens)
                written, ended = reader.end(event)
                if written.deltas:
                    yield written
                yield ended
            elif kind is Failed:
                raise _failure(event.error, prepared, caller)
            else:
                yield Progress(event.step if kind is Prefilling else None)


async def answers(prepared: Prepared, caller: Caller, count: int) -> AsyncIterator[Update]:
    """Several answers to one request as they are written, told apart by `choice`. The first error ends all."""
    if count == 1:
        async with aclosing(answer(prepared, caller)) as updates:
            async for update in updates:
                yield update
        return
    queue: asyncio.Queue[Update | ApiError | None] = asyncio.Queue(_QUEUED_UPDATES)
    tasks = [asyncio.create_task(_feed(queue, prepared, caller, choice)) for choice in range(count)]
    try:
        left = count
        while left:
            update = await queue.get()
            if isinstance(update, ApiError):
                raise update
            if update is None:
                left -= 1
            else:
                yield update
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(queue: asyncio.Queue, prepared: Prepared, caller: Caller, choice: int) -> None:
    try:
        async with aclosing(answer(prepared, caller, choice)) as updates:
            async for update in updates:
                await queue.put(update)
        await queue.put(None)
    except ApiError as error:
        await queue.put(error)


@dataclass
class Call:
    """One complete call of an answer."""

    id: str
    name: str
    arguments: str = ""
    complete: bool = True


@dataclass
class Whole:
    """An answer gathered: text, reasoning, calls that may be run, and its tokens with log-probabilities."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[Piece] = field(default_factory=list)
    ended: Ended | None = None
    _open: dict[int, Call] = field(default_factory=dict)

    def add(self, update: Written) -> None:
        """More of it."""
        self.tokens += update.tokens
        for delta in update.deltas:
            match delta:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case ToolCallStart(index, id, name):
                    self._open[index] = Call(id, name)
                case ToolCallEnd(index, arguments, complete, source):
                    call = self._open[index]
                    call.arguments = arguments
                    if complete:
                        self.calls.append(call)
                    else:  # what was cut off is shown as the model wrote it, and is no call
                        self.content += source


async def gathered(updates: AsyncIterator[Update], count: int = 1) -> list[Whole]:
    """Whole answers by choice. Raises ApiError."""
    wholes = [Whole() for _ in range(count)]
    async with aclosing(updates):
        async for update in updates:
            if isinstance(update, Written):
                wholes[update.choice].add(update)
            elif isinstance(update, Ended):
                wholes[update.choice].ended = update
    return wholes


def timings(stats: GenerationStats) -> dict[str, float | int]:
    """How fast it went, in the names that clients of llama-server read."""
    computed = stats.prompt_tokens - stats.reused_tokens
    return {
        "cache_n": stats.reused_tokens,
        "prompt_n": computed,
        "prompt_ms": round(stats.prefill_s * 1000, 3),
        "prompt_per_second": round(stats.prefill_tok_s, 2),
        "predicted_n": stats.completion_tokens,
        "predicted_ms": round(stats.decode_s * 1000, 3),
        "predicted_per_second": round(stats.decode_tok_s, 2),
        "draft_n": stats.drafted,
        "draft_n_accepted": stats.accepted,
    }


def logprob_entry(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, object]:
    """One token with its log-probability as chat completions show it."""
    data = tokenizer.token_bytes(entry.token, keep_control=True)
    return {"token": data.decode("utf-8", "replace"), "logprob": max(entry.logprob, -9999.0), "bytes": list(data)}


def extension(ended: Ended) -> dict[str, object] | None:
    """What no API has a field for: an end by a guard, a deadline or the context, and odd calls."""
    found: dict[str, object] = {}
    if ended.stop in ("loop", "deadline", "context"):
        found["stop_reason"] = ended.stop
    if ended.flags:
        found["flags"] = list(ended.flags)
    return found or None


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Neighbours that are plain text of one kind as one."""
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        kind = type(delta)
        if kind is type(last) and kind is Reasoning:
            joined[-1] = Reasoning(last.text + delta.text)
        elif kind is type(last) and kind is Content and not (delta.flag or last.flag):
            joined[-1] = Content(last.text + delta.text)
        else:
            joined.append(delta)
    return joined


def _failure(error: Exception, prepared: Prepared, caller: Caller) -> ApiError:
    """The error for the client; what the client is not told goes to the log."""
    model, ids = prepared.model, prepared.ids
    if isinstance(error, RequestError) and model.ctx is not None and len(ids) >= model.ctx:
        # the context was not known yet when the prompt was made
        return overflow(len(ids), model.ctx, prepared.ask.shape, prepared.ask.prompt_field)
    known = as_api_error(error, caller.id)
    if known.kind != "internal":
        return known
    _log.error("%s: %s: %s", caller.id, type(error).__name__, error)
    snapshot = model.worker.snapshot()
    if snapshot.state in ("failed", "loading"):
        retry_after_s = max(1.0, snapshot.retry_after_s)
        return problem("loading", retry_after_s=retry_after_s, model=model.name, state=snapshot.state)
    return known
