"""The HTTP application: every path, who may use it, what it reads and what it answers.

In: models, settings, further routes. Out: an ASGI app. Starting and stopping the workers is the caller's.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from starlette.routing import BaseRoute, Match

from tandem.serve import messages as messages_api
from tandem.serve import models_api
from tandem.serve.answer import Caller, Update, Written, answer, answers, gathered, new_id
from tandem.serve.ask import Ask
from tandem.serve.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    MessagesBody,
    ResponsesBody,
    TemplateBody,
    TokenizeBody,
    decoded,
    encoded,
)  # fmt: skip
from tandem.serve.chat import ChatShaper, chat_ask, completion, template_ask
from tandem.serve.completions import CompletionShaper, completion_asks, text_completion
from tandem.serve.embeddings import embeddings
from tandem.serve.errors_api import Shape, as_api_error, problem
from tandem.serve.model import Models, ServedModel
from tandem.serve.openapi import description
from tandem.serve.prompt import Prepared, count, prepare, rendered
from tandem.serve.responses import Exchange, ResponsesShaper, ResponseStore, exchange_of, is_probe, responses_ask
from tandem.serve.security import PUBLIC_PATHS, Guard, read_body
from tandem.serve.sse import EventStream, StreamTiming, send_json, until_gone

_log = logging.getLogger("tandem")
Handler = Callable[..., Any]


@dataclass(frozen=True)
class AppSettings:
    """api_keys: any of which is needed, (): none is; host: that the server is bound to; the rest as in `Guard`,
    `StreamTiming` and `ResponseStore`. body_s: within which a body must arrive; public_paths: further ones."""

    api_keys: Sequence[str] = field(default=(), repr=False)
    host: str = "127.0.0.1"
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    max_body_bytes: int = 32 << 20
    body_s: float = 60.0
    ping_s: float = 15.0
    event_s: float = 60.0
    patience_s: float = 0.5
    deadline_s: float | None = None
    stored_responses: int = 256
    stored_bytes: int = 64 << 20
    public_paths: Sequence[str] = ()


def create_app(
    models: Sequence[ServedModel], settings: AppSettings = AppSettings(), routes: Sequence[BaseRoute] = ()
) -> "App":
    """The app over these models; routes: of others, behind the same checks."""
    return App(Models(models), settings, routes)


class App:
    """See the module. `stopping` is set when the server is about to end: from then on it refuses new work."""

    def __init__(self, models: Models, settings: AppSettings, routes: Sequence[BaseRoute]):
        self.models, self.settings, self.stopping = models, settings, False
        self._routes = list(routes)
        self._store = ResponseStore(settings.stored_responses, settings.stored_bytes)
        self._timing = StreamTiming(settings.patience_s, settings.ping_s, settings.event_s)
        public = PUBLIC_PATHS | set(settings.public_paths)
        self._guard = Guard(settings.api_keys, settings.host, settings.allowed_hosts, settings.allowed_origins, public)

    async def __call__(self, scope, receive, send) -> None:
        """One request, or the life of the server."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)

    async def _live(self, receive, send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await asyncio.gather(*(model.threaded(lambda m=model: m.capabilities) for model in self.models.all))
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def _serve(self, scope, receive, send) -> None:
        path, headers = scope["path"], dict(scope["headers"])
        shape: Shape = "anthropic" if path.startswith("/v1/messages") else "openai"
        send, began = _watched(send, self._origin_headers(headers))
        request_id = scope.get("state", {}).get("request_id") or new_id("req_")
        try:
            if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                self._guard.check("/health", headers)  # a preflight carries no key
                await send({"type": "http.response.start", "status": 204, "headers": [(b"content-length", b"0")]})
                await send({"type": "http.response.body", "body": b""})
                return
            self._guard.check(path, headers)
            await self._route(scope, receive, send, headers, request_id)
        except Exception as error:
            known = as_api_error(error, request_id)
            if known is not error and known.kind == "internal":
                _log.error("%s: %s", request_id, type(error).__name__, exc_info=error)
            if not began():
                extra = known.headers() | ({"connection": "close"} if self._is_stopping() else {})
                await send_json(send, known.status, known.encoded(shape), extra)

    async def _route(self, scope, receive, send, headers: dict[bytes, bytes], request_id: str) -> None:
        path, method = scope["path"], scope["method"]
        if path in POSTS:
            if method != "POST":
                raise problem("method", method=method, found=path)
            caller = _caller(scope, headers, request_id, self.settings.deadline_s)
            await self._post(POSTS[path], caller, headers, receive, send)
            return
        found = self._get(path, method, dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"))))
        if found is not None:
            await send_json(send, 200, encoded(found))
            return
        for route in self._routes:
            match, child = route.matches(scope)
            if match is Match.FULL:
                scope.update(child)
                await route.handle(scope, receive, send)
                return
        raise problem("path", found=path)

    def _get(self, path: str, method: str, query: dict[str, str]) -> dict[str, Any] | None:
        """What is there to read at a path, None if nothing is. Raises ApiError."""
        path = path.removeprefix("/v1") if path.startswith("/v1/") else path
        if path.startswith("/responses/") and method in ("GET", "HEAD", "DELETE"):
            id = path.removeprefix("/responses/")
            return self._store.drop(id) if method == "DELETE" else self._store.response(id)
        if path not in _READS and not path.startswith("/models/"):
            return None
        if method not in ("GET", "HEAD"):
            raise problem("method", method=method, found=path)
        if path.startswith("/models/"):
            return models_api.model_entry(self.models.find(path.removeprefix("/models/")))
        return _READS[path](self, query)

    async def _post(self, endpoint: "Post", caller: Caller, headers: dict[bytes, bytes], receive, send) -> None:
        data = await read_body(headers, receive, self.settings.max_body_bytes, self.settings.body_s)
        if data is None:
            return
        body = decoded(data, endpoint.body)
        if endpoint.generates and self._is_stopping():
            raise problem("stopping", retry_after_s=5.0)
        model = self.models.find(body.model)
        work = asyncio.create_task(endpoint.handler(self, body, model, caller))
        await until_gone(work, receive)
        if work.cancelled():
            return
        made = work.result()
        if isinstance(made, EventStream):
            await made({}, receive, send)
        else:
            await send_json(send, 200, encoded(made))

    async def chat(self, body: ChatBody, model: ServedModel, caller: Caller) -> Any:
        """`/v1/chat/completions`."""
        prepared, choices = await _prepared(model, chat_ask(body, model.name)), body.n or 1
        updates = answers(prepared, caller, choices)
        if not body.stream:
            return completion(prepared, await gathered(updates, choices))
        return self._stream(updates, ChatShaper(prepared, choices, _wants_usage(body)))

    async def completions(self, body: CompletionBody, model: ServedModel, caller: Caller) -> Any:
        """`/v1/completions`."""
        asks = await model.threaded(completion_asks, body, model)
        prepared, choices = [await _prepared(model, ask) for ask in asks], body.n or 1
        if not body.stream:
            wholes = [await gathered(answers(one, caller, choices), choices) for one in prepared]
            return text_completion(prepared, wholes, bool(body.echo))
        if len(prepared) > 1:
            raise problem("not_supported", field="prompt", detail="a stream has one prompt")
        shaper = CompletionShaper(prepared[0], choices, _wants_usage(body), bool(body.echo))
        return self._stream(answers(prepared[0], caller, choices), shaper)

    async def responses(self, body: ResponsesBody, model: ServedModel, caller: Caller) -> Any:
        """`/v1/responses`."""
        exchange = exchange_of(body, self._store)
        if is_probe(exchange):
            shaper = ResponsesShaper(exchange, None, model, self._store)
            return self._stream(_nothing(), shaper) if body.stream else shaper.final()
        ask = await model.threaded(responses_ask, exchange, model)
        prepared = await _prepared(model, ask)
        _warn(exchange, caller)
        shaper = ResponsesShaper(exchange, prepared, model, self._store)
        if body.stream:
            return self._stream(answer(prepared, caller), shaper)
        async for update in answer(prepared, caller):
            if isinstance(update, Written):
                shaper.written(update)
            elif hasattr(update, "finish"):
                shaper.ended(update)
        return shaper.final()

    async def messages(self, body: MessagesBody, model: ServedModel, caller: Caller) -> Any:
        """`/v1/messages`."""
        prepared = await _prepared(model, messages_api.messages_ask(body, model.name))
        updates = answer(prepared, caller)
        if body.stream:
            return self._stream(updates, messages_api.MessagesShaper(prepared))
        return messages_api.message(prepared, (await gathered(updates))[0])

    async def count_tokens(self, body: MessagesBody, model: ServedModel, caller: Caller) -> Any:
        """`/v1/messages/count_tokens`: what the same body would cost, without the engine."""
        ask = messages_api.messages_ask(body, model.name)
        return {"input_tokens": await model.threaded(count, model, ask)}

    async def embeddings(self, body: EmbeddingsBody, model: ServedModel, caller: Caller) -> Any:
        """`/v1/embeddings`."""
        return await embeddings(body, model, caller)

    async def tokenize(self, body: TokenizeBody, model: ServedModel, caller: Caller) -> Any:
        """`/tokenize`."""
        return await model.threaded(models_api.tokenized, body, model)

    async def detokenize(self, body: DetokenizeBody, model: ServedModel, caller: Caller) -> Any:
        """`/detokenize`."""
        return await model.threaded(models_api.detokenized, body, model)

    async def apply_template(self, body: TemplateBody, model: ServedModel, caller: Caller) -> Any:
        """`/apply-template`."""
        opened = body.add_generation_prompt is not False
        return {"prompt": await model.threaded(rendered, model, template_ask(body, model.name), opened)}

    def _stream(self, updates: AsyncIterator[Update], shaper: Any) -> EventStream:
        return EventStream(updates, shaper, self._timing)

    def _is_stopping(self) -> bool:
        return self.stopping or all(model.worker.snapshot().state == "stopping" for model in self.models.all)

    def _origin_headers(self, headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """What a browser wants to hear of a page that is on the list of allowed origins."""
        origin = headers.get(b"origin", b"")
        if origin.decode("latin-1") not in self.settings.allowed_origins:
            return []
        allowed = b"authorization, content-type, x-api-key, anthropic-version, anthropic-beta"
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-allow-headers", allowed),
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"vary", b"origin"),
        ]


@dataclass(frozen=True)
class Post:
    """One path that takes a body. generates: it needs the engine; about: for the description."""

    body: type
    handler: Handler
    about: str
    generates: bool = True


_POSTS = {
    "/chat/completions": Post(ChatBody, App.chat, "Answers a conversation"),
    "/completions": Post(CompletionBody, App.completions, "Continues a text"),
    "/responses": Post(ResponsesBody, App.responses, "Answers a conversation of items"),
    "/messages": Post(MessagesBody, App.messages, "Answers a conversation of blocks"),
    "/messages/count_tokens": Post(MessagesBody, App.count_tokens, "Counts the tokens of a conversation", False),
    "/embeddings": Post(EmbeddingsBody, App.embeddings, "Mean-pooled vectors of texts"),
    "/tokenize": Post(TokenizeBody, App.tokenize, "Tokens of a text", False),
    "/detokenize": Post(DetokenizeBody, App.detokenize, "Text of tokens", False),
    "/apply-template": Post(TemplateBody, App.apply_template, "A conversation as the model's own text", False),
}
POSTS = {f"{prefix}{path}": post for path, post in _POSTS.items() for prefix in ("", "/v1")}
_READS: dict[str, Callable[[App, dict[str, str]], dict[str, Any]]] = {
    "/models": lambda app, query: models_api.model_list(app.models, query),
    "/health": lambda app, query: models_api.health(app.models),
    "/ready": lambda app, query: models_api.ready(app.models, query.get("model")),
    "/props": lambda app, query: models_api.props(app.models.find(query.get("model"))),
    "/openapi.json": lambda app, query: description({f"/v1{path}": post for path, post in _POSTS.items()}),
}
ENDPOINTS = frozenset(POSTS) | {f"{prefix}{path}" for path in _READS for prefix in ("", "/v1")}


async def _prepared(model: ServedModel, ask: Ask) -> Prepared:
    return await model.threaded(prepare, model, ask)


async def _nothing() -> AsyncIterator[Update]:
    """No updates at all."""
    for update in ():
        yield update


def _caller(scope, headers: dict[bytes, bytes], request_id: str, deadline_s: float | None) -> Caller:
    """Who asks, by session or address; headers may ask for the background and a shorter deadline. Raises ApiError."""
    session = headers.get(b"x-claude-code-session-id") or headers.get(b"x-session-id") or b""
    client = session[:64].decode("latin-1") or str((scope.get("client") or ("",))[0])
    priority = headers.get(b"x-tandem-priority", b"interactive").decode("latin-1").lower()
    if priority not in ("interactive", "background"):
        raise problem("choices", field="x-tandem-priority", found=repr(priority), expected="interactive or background")
    wish = headers.get(b"x-tandem-deadline-s", b"").decode("latin-1")
    if wish:
        seconds = float(wish) if wish.replace(".", "", 1).isdigit() else 0.0
        if not seconds > 0:
            raise problem("number", field="x-tandem-deadline-s", found=repr(wish), expected="seconds above 0")
        deadline_s = min(seconds, deadline_s or seconds)
    return Caller(request_id, client, priority, deadline_s)


def _wants_usage(body: ChatBody | CompletionBody) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


def _warn(exchange: Exchange, caller: Caller) -> None:
    for warning in exchange.warnings:
        _log.warning("%s: %s", caller.id, warning)


def _watched(send: Callable, extra: list[tuple[bytes, bytes]]) -> tuple[Callable, Callable[[], bool]]:
    """`send` that adds headers, and whether a response has begun."""
    state = {"began": False}

    async def watched(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            state["began"] = True
            if extra:
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await send(message)

    return watched, lambda: state["began"]
