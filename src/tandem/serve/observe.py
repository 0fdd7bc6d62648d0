"""Watches requests from outside the API: an ASGI layer around the app and a layer around the worker.

In: requests, and the events of their answers. Out: observations for `Metrics`, and one log line for every answer.
"""

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import structlog

from tandem.requests import GenerationRequest, GenerationStats
from tandem.serve.events import Event, Failed, Finished, Generated, Prefilling
from tandem.serve.metrics import Metrics
from tandem.serve.streams import AnswerStream
from tandem.serve.worker import Worker

_log = structlog.get_logger("tandem.requests")


@dataclass
class Request:
    """One HTTP request while it is answered. answers: how many it has asked the worker for."""

    id: str
    endpoint: str
    began_s: float = field(default_factory=time.perf_counter)
    status: int = 0
    answers: int = 0


_current: ContextVar[Request | None] = ContextVar("request", default=None)


class ObservedApp:
    """The app with every HTTP request counted and named. endpoints: the paths that are told apart; others are `other`.

    The name of a request is sent back as `x-request-id`, and is the `id` of its log lines.
    """

    def __init__(self, app: Callable, metrics: Metrics, endpoints: frozenset[str]):
        self.app, self._metrics, self._endpoints = app, metrics, endpoints

    async def __call__(self, scope: Mapping[str, Any], receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(f"req_{secrets.token_hex(8)}", self._endpoint(scope["path"]))
        scope = {**scope, "state": {**scope.get("state", {}), "request_id": request.id}}
        mark = _current.set(request)
        self._metrics.request_began()
        try:
            await self.app(scope, receive, _named(send, request))
        except Exception:
            request.status = request.status or 500
            raise
        finally:
            _current.reset(mark)
            self._metrics.request_ended(request.endpoint, request.status)
            if not request.answers:
                level = _log.info if request.status >= 400 else _log.debug
                took_s = round(time.perf_counter() - request.began_s, 4)
                level(
                    "request",
                    id=request.id,
                    endpoint=request.endpoint,
                    method=scope["method"],
                    status=request.status,
                    took_s=took_s,
                )

    def _endpoint(self, path: str) -> str:
        while path and path not in self._endpoints:
            path = path.rpartition("/")[0]
        return path or "other"


def _named(send: Callable[[dict], Awaitable[None]], request: Request) -> Callable[[dict], Awaitable[None]]:
    async def named(message: dict) -> None:
        if message["type"] == "http.response.start":
            request.status = message["status"]
            headers = list(message.get("headers", ()))
            if all(name.lower() != b"x-request-id" for name, _ in headers):
                message = {**message, "headers": [*headers, (b"x-request-id", request.id.encode())]}
        await send(message)

    return named


class ObservedWorker:
    """A worker whose answers are measured and logged as they are read; everything else is the worker's own.

    texts: whether prompts and answers are logged too.
    """

    def __init__(self, worker: Worker, metrics: Metrics, model: str, texts: bool = False):
        self._worker, self._metrics, self._model, self._texts = worker, metrics, model, texts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def generate(self, request: GenerationRequest, **options: Any) -> "ObservedStream":
        """As Worker.generate."""
        stream = self._worker.generate(request, **options)
        seen = _current.get() or Request("", "")
        seen.answers += 1
        watch = _Watch(seen, self._metrics, self._model, len(request.prompt.ids))
        if self._texts and self._worker.batch is not None:
            watch.prompt, watch.answer = self._worker.batch.tokenizer.decode(request.prompt.ids), []
        return ObservedStream(stream, watch)


@dataclass
class _Watch:
    """What is known of one answer so far."""

    request: Request
    metrics: Metrics
    model: str
    prompt_tokens: int
    began_s: float = field(default_factory=time.perf_counter)
    last_s: float = 0.0
    first_s: float | None = None
    tokens: int = 0
    reused: int = 0
    diverged: str | None = None
    prompt: str | None = None
    answer: list[str] | None = None
    logged: bool = False

    def saw(self, event: Event) -> None:
        if isinstance(event, Generated):
            self._saw_tokens(event)
        elif isinstance(event, Prefilling):
            self.reused, self.diverged = event.step.reused, event.step.diverged or self.diverged
        elif isinstance(event, Finished):
            self.ended(event.reason, event.stats)
        elif isinstance(event, Failed):
            self.ended("failed", None, event.error)

    def _saw_tokens(self, event: Generated) -> None:
        now, tokens = time.perf_counter(), sum(piece.token >= 0 for piece in event.pieces)
        if self.answer is not None:
            self.answer += [piece.text or piece.control or "" for piece in event.pieces]
        if not tokens:
            return
        if self.first_s is None:
            self.first_s = now - self.began_s
            self.metrics.first_token(self.first_s)
        else:
            self.metrics.later_tokens(now - self.last_s, tokens)
        self.last_s, self.tokens = now, self.tokens + tokens

    def ended(self, finish: str, stats: GenerationStats | None, error: Exception | None = None) -> None:
        if self.logged:
            return
        self.logged = True
        decode_s = self.last_s - self.began_s - self.first_s if self.first_s is not None else 0.0
        fields: dict[str, Any] = {
            "id": self.request.id,
            "endpoint": self.request.endpoint,
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "reused": stats.reused_tokens if stats else self.reused,
            "tokens": stats.completion_tokens if stats else self.tokens,
            "first_token_s": None if self.first_s is None else round(self.first_s, 4),
            "tok_s": round(stats.decode_tok_s if stats else (self.tokens - 1) / decode_s if decode_s > 0 else 0.0, 2),
            "finish": finish,
        }
        if stats and stats.drafted:
            fields["acceptance"] = round(stats.accepted / stats.drafted, 3)
        if self.diverged:
            fields["diverged"] = self.diverged  # a position and a kind of change, never text
        if self.answer is not None:
            fields |= {"prompt": self.prompt, "answer": "".join(self.answer)}
        if error is not None:
            fields["error"] = error
        (_log.warning if error is not None else _log.info)("answer", **fields)


class ObservedStream:
    """An AnswerStream whose events are seen by a watch as they are read."""

    def __init__(self, stream: AnswerStream, watch: _Watch):
        self._stream, self._watch = stream, watch

    @property
    def id(self) -> int:
        """Of the request, in the snapshot's list."""
        return self._stream.id

    async def next(self, timeout_s: float | None = None) -> Event | None:
        """As AnswerStream.next."""
        event = await self._stream.next(timeout_s)
        if event is not None:
            self._watch.saw(event)
        return event

    def __aiter__(self) -> "ObservedStream":
        return self

    async def __anext__(self) -> Event:
        return await self.next()

    async def aclose(self) -> None:
        """As AnswerStream.aclose."""
        self.close()

    def close(self) -> None:
        """As AnswerStream.close; an answer that was left before its end is logged as cancelled."""
        self._stream.close()
        self._watch.ended("cancelled", None)

    async def __aenter__(self) -> "ObservedStream":
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()
