"""Every error that a client can see: one table of kinds, one table of texts, and its shape in each API.

In: what went wrong. Out: `ApiError`, JSON bodies, the data of in-stream errors. Clients recognise an overflow of the
context by words, so no other text may contain them: `lint` finds such words, `reworded` replaces them.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from tandem.errors import EngineError, RequestError, SettingError, ShapeError, TemplateError
from tandem.serve.events import Overloaded

Shape = Literal["openai", "anthropic"]
MAX_MESSAGE_CHARS = 2000


@dataclass(frozen=True)
class Kind:
    """HTTP status, type and code in OpenAI's shape, type in Anthropic's."""

    status: int
    type: str
    code: str | None
    anthropic: str


KINDS = {
    "invalid": Kind(400, "invalid_request_error", None, "invalid_request_error"),
    "overflow": Kind(400, "exceed_context_size_error", "context_length_exceeded", "invalid_request_error"),
    "auth": Kind(401, "authentication_error", "invalid_api_key", "authentication_error"),
    "forbidden": Kind(403, "permission_error", "forbidden", "permission_error"),
    "not_found": Kind(404, "not_found_error", "not_found", "not_found_error"),
    "model_not_found": Kind(404, "invalid_request_error", "model_not_found", "not_found_error"),
    "method": Kind(405, "invalid_request_error", "method_not_allowed", "invalid_request_error"),
    "slow": Kind(408, "timeout_error", "body_timeout", "timeout_error"),
    "too_large": Kind(413, "invalid_request_error", "body_too_large", "request_too_large"),
    "media": Kind(415, "invalid_request_error", "unsupported_media_type", "invalid_request_error"),
    "headers": Kind(431, "invalid_request_error", "headers_too_large", "invalid_request_error"),
    "internal": Kind(500, "server_error", "internal_error", "api_error"),
    "overloaded": Kind(503, "overloaded_error", "overloaded", "overloaded_error"),
    "unavailable": Kind(503, "unavailable_error", "unavailable", "api_error"),
}

# name -> (kind, text). Texts of other folders (templates, grammars, sampling) come through `as_api_error`.
TEXTS: dict[str, tuple[str, str]] = {
    "json": ("invalid", "the body is no valid JSON: {detail}"),
    "json_object": ("invalid", "the body is not a JSON object"),
    "nested": ("invalid", "the body is nested too deeply"),
    "field": ("invalid", "{field}: {detail}"),
    "required": ("invalid", "{field}: a value is needed"),
    "number": ("invalid", "{field}: found {found}, expected {expected}"),
    "empty_messages": ("invalid", "messages: found an empty list, expected at least one message"),
    "role": ("invalid", "{field}: found the role {found!r}, expected one of {expected}"),
    "content": ("invalid", "{field}: found {found}, expected a string, null or a list of parts"),
    "part": ("invalid", "{field}: a part of type {found!r} is not supported here; supported: {expected}"),
    "image": ("invalid", "{field}: the model {model!r} reads text only, an image was given"),
    "arguments": ("invalid", "{field}: the arguments of call {index} are no JSON object: {detail}"),
    "call": ("invalid", "{field}: found {found}, expected a function with a name and arguments"),
    "template_option": ("invalid", "chat_template_kwargs: the option {found!r} is not allowed{hint}"),
    "template_value": (
        "invalid",
        "chat_template_kwargs.{field}: found {found}, expected true, false, a number or a short string",
    ),
    "effort": ("invalid", "{field}: found {found!r}, expected one of {expected}"),
    "format": ("invalid", "{field}: found the type {found!r}, expected one of {expected}"),
    "two_formats": ("invalid", "{first} and {second} were both given, at most one of them can be enforced"),
    "tool_choice": ("invalid", "tool_choice: found {found}, expected none, auto, required or the name of a function"),
    "no_tools": ("invalid", "tool_choice: {found} needs tools, none were given"),
    "tool_format": ("invalid", "tools: the model {model!r} has no syntax of tool calls that is known here"),
    "not_supported": ("invalid", "{field}: not supported; {detail}"),
    "choices": ("invalid", "{field}: found {found}, expected {expected}"),
    "logit_tokens": ("invalid", "{field}: token {found} is not in the vocabulary of {size}"),
    "no_user": ("invalid", "messages: nothing to answer was found, expected at least one message of a user"),
    "empty_input": ("invalid", "{field}: found nothing to read, expected some text"),
    "embedding_size": ("invalid", "{field}: found {found} tokens, the model {model!r} takes at most {most} at once"),
    "dimensions": ("invalid", "dimensions: found {found}, the vectors of this model have {most} numbers"),
    "batch": ("invalid", "{field}: found {found} entries, at most {most} are allowed"),
    "previous": (
        "not_found",
        "previous_response_id: {found!r} is not stored here: it was never, or it was dropped for newer ones",
    ),
    "no_response": ("not_found", "no response {found!r} is stored here"),
    "overflow": (
        "overflow",
        "request ({tokens} tokens) exceeds the available context size ({ctx} tokens), try increasing it; "
        "maximum context length is {ctx} tokens",
    ),
    "overflow_messages": ("overflow", "prompt is too long: {tokens} tokens > {ctx} maximum"),
    "no_key": ("auth", "an API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"),
    "wrong_key": ("auth", "the API key is not valid"),
    "host": ("forbidden", "the Host header {found!r} is not allowed; add it to the allowed hosts if it is yours"),
    "origin": ("forbidden", "the Origin {found!r} is not allowed; add it to the allowed origins if it is yours"),
    "path": ("not_found", "nothing is served at {found!r}"),
    "model": ("model_not_found", "the model {found!r} is not served here; known: {known}"),
    "method": ("method", "{method} is not possible at {found!r}"),
    "body_time": ("slow", "the body did not arrive within {seconds} s"),
    "body_size": ("too_large", "the body is larger than the allowed {most} bytes"),
    "media": ("media", "found the content type {found!r}, expected application/json"),
    "encoding": ("media", "found the content encoding {found!r}, expected none"),
    "headers": ("headers", "the headers are larger than allowed"),
    "bad_http": ("invalid", "this is no valid HTTP message"),
    "internal": ("internal", "an internal error; the server's log has it under {found}"),
    "engine": ("internal", "the engine failed at this answer; the server's log has the reason under {found}"),
    "busy": ("overloaded", "overloaded: {detail}"),
    "connections": ("overloaded", "overloaded: {found} requests are open already, try again later"),
    "loading": ("unavailable", "the model {model!r} is not ready ({state}), try again later"),
    "stopping": ("unavailable", "the server is shutting down, try again later"),
}


@dataclass
class ApiError(Exception):
    """An error as the client sees it. kind: of KINDS; param: the field at fault; more: further fields of OpenAI's error
    object; retry_after_s: when to come back, None: not stated. The message passes `lint` unless kind is overflow."""

    kind: str
    message: str
    param: str | None = None
    more: dict[str, object] = field(default_factory=dict)
    retry_after_s: float | None = None

    def __post_init__(self) -> None:
        self.message = self.message.encode("utf-8", "replace").decode()[:MAX_MESSAGE_CHARS]
        if self.kind != "overflow":
            self.message = reworded(self.message)

    @property
    def status(self) -> int:
        """HTTP status."""
        return KINDS[self.kind].status

    def headers(self) -> dict[str, str]:
        """Headers that go with it."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after_s)))
            headers["retry-after-ms"] = str(max(1, round(self.retry_after_s * 1000)))
        if self.kind == "auth":
            headers["www-authenticate"] = "Bearer"
        return headers

    def object(self, shape: Shape) -> dict[str, object]:
        """The body, and the data of an in-stream error."""
        kind = KINDS[self.kind]
        if shape == "anthropic":
            return {"type": "error", "error": {"type": kind.anthropic, "message": self.message}}
        error = {"message": self.message, "type": kind.type, "param": self.param, "code": kind.code}
        return {"error": error | self.more}

    def encoded(self, shape: Shape) -> bytes:
        """The body as JSON."""
        return msgspec.json.encode(self.object(shape))


def problem(name: str, /, param: str | None = None, retry_after_s: float | None = None, **values: object) -> ApiError:
    """The error of that name in TEXTS, filled in. param: the field at fault; if not given, `field` of the values."""
    kind, text = TEXTS[name]
    if param is None and "field" in values:
        param = str(values["field"])
    short = {key: _short(value) for key, value in values.items()}
    return ApiError(kind, text.format(**short), param, retry_after_s=retry_after_s)


def overflow(tokens: int, ctx: int, shape: Shape = "openai", param: str = "messages") -> ApiError:
    """The prompt does not fit: all the signals by which clients know it, in one error."""
    name = "overflow_messages" if shape == "anthropic" else "overflow"
    kind, text = TEXTS[name]
    more = {"n_prompt_tokens": tokens, "n_ctx": ctx}
    return ApiError(kind, text.format(tokens=tokens, ctx=ctx), param, more)


def as_api_error(error: BaseException, request_id: str = "") -> ApiError:
    """Any exception as the client may see it; what is nobody's mistake but ours says no more than where to look."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        return problem("busy", retry_after_s=error.retry_after_s, detail=without_paths(str(error)))
    if isinstance(error, (RequestError, SettingError, TemplateError, ShapeError)):
        return ApiError("invalid", without_paths(str(error)), _leading_field(str(error)))
    name = "engine" if isinstance(error, EngineError) else "internal"
    return problem(name, found=request_id or "this time")


def without_paths(text: str) -> str:
    """The text with paths of files cut down to their last part."""
    return re.sub(r"(?<![\w:/])(?:/[^\s/:'\"]+)+/([^\s/:'\"]+)", r"\1", text)


# What clients take for an overflow of the context, restated from the tables of two agents.
_OVERFLOW_WORDS = tuple(
    re.compile(pattern, re.IGNORECASE | re.DOTALL)
    for pattern in (
        r"exceeds? the limit of",
        r"too many tokens",
        r"token limit",
        r"prompt.*(exceed|\bover\b|limit|too long|too large|maximum)",
        r"(exceed|limit|too long).*prompt",
        r"(request|input).*(token|length|context).*(exceed|\bover\b|limit|too long|too large|maximum)",
        r"max_(completion_|output_)?tokens.*exceed.*context",
        r"context.*(exceed|overflow|limit|too long|too large|maximum|too small)",
        r"(exceed|overflow|maximum|greater than|larger than).*context",
        r"(request|input).*too long",
        r"reduce the length",
        r"context[_ ]length",
    )
)
_REPLACED = tuple(
    (re.compile(pattern, re.IGNORECASE), by)
    for pattern, by in (
        (r"exceeds the limit of", "is larger than the allowed"),
        (r"exceeds", "is larger than"),
        (r"exceed(ed|ing)?", "pass"),
        (r"too many tokens", "more tokens than allowed"),
        (r"token limit", "token bound"),
        (r"limits?", "bounds"),
        (r"too long", "too big"),
        (r"too large", "too big"),
        (r"\bover\b", "above"),
        (r"maximum", "most"),
        (r"overflow\w*", "excess"),
    )
)
_LAST_RESORT = tuple(
    (re.compile(word, re.IGNORECASE), by)
    for word, by in (
        ("context", "window"),
        ("prompt", "text"),
        ("input", "data"),
        ("reduce", "cut"),
        ("too many", "many"),
    )
)


def lint(text: str) -> list[str]:
    """The patterns by which clients would take this text for an overflow; [] is right for all others."""
    return [pattern.pattern for pattern in _OVERFLOW_WORDS if pattern.search(text)]


def reworded(text: str) -> str:
    """The text without words that clients take for an overflow, as it is if it has none."""
    for replacements in (_REPLACED, _LAST_RESORT):
        if not lint(text):
            break
        for pattern, by in replacements:
            text = pattern.sub(by, text)
    return text


def _leading_field(message: str) -> str | None:
    """The field that a message names in front of its first colon."""
    match = re.match(r"([a-z_][a-z0-9_.\[\]]*)(?: token id)?(?: of token \d+)?:", message)
    return match[1] if match else None


def _short(value: object) -> object:
    return value[:200] + "..." if isinstance(value, str) and len(value) > 200 else value
