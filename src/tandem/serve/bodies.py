"""What clients may send: one msgspec struct per body. Unknown fields are ignored, known ones must have these types.

In: JSON bytes. Out: structs, or an `ApiError` that names the field. The OpenAPI description is generated from them.
"""

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from tandem.serve.errors_api import ApiError, problem

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Choices = Annotated[int, Meta(ge=1, le=8)]
Body = TypeVar("Body")


class Part(Struct, kw_only=True):
    """One part of a message's content, of any API."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    source: Any = None
    # blocks of the Messages API
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Part] | None" = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None


class CalledFunction(Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct, kw_only=True):
    function: CalledFunction
    id: str | None = None
    type: str | None = None


class ChatMessage(Struct, kw_only=True):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_text: str | None = None


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    type: str
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | None = None
    name: str | None = None
    strict: bool | None = None


class ThinkingOptions(Struct, kw_only=True):
    """`thinking` of the Messages API and `reasoning` of the others."""

    type: str | None = None
    budget_tokens: int | None = None
    effort: str | None = None
    enabled: bool | None = None
    max_tokens: int | None = None
    summary: str | None = None


class SamplingFields(Struct, kw_only=True):
    """Settings of one answer that every generating endpoint takes; ranges are those of the engine's settings."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    loop_guard: bool | None = None


class ThinkingFields(SamplingFields, kw_only=True):
    """Those, and the many names of one switch."""

    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning: ThinkingOptions | None = None
    thinking: ThinkingOptions | None = None
    reasoning_budget: int | None = None


class ChatBody(ThinkingFields, kw_only=True):
    messages: list[ChatMessage]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Choices | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    regex: str | None = None
    continue_final_message: bool | None = None


class CompletionBody(SamplingFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Choices | None = None
    best_of: Choices | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | bool | None = None
    grammar: str | None = None
    regex: str | None = None
    json_schema: dict[str, Any] | None = None
    parse_special: bool | None = None


class InputItem(Struct, kw_only=True):
    """One item of a Responses conversation."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    status: str | None = None


class TextOptions(Struct, kw_only=True):
    format: ResponseFormat | None = None
    verbosity: str | None = None


class ResponsesBody(ThinkingFields, kw_only=True):
    input: str | list[InputItem] | None = None
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    max_output_tokens: Count | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    truncation: str | None = None
    metadata: dict[str, Any] | None = None


class AnthropicMessage(Struct, kw_only=True):
    role: str
    content: str | list[Part]


class MessagesBody(SamplingFields, kw_only=True):
    messages: list[AnthropicMessage]
    model: str | None = None
    max_tokens: Count | None = None
    system: str | list[Part] | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingsBody(Struct, kw_only=True):
    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: Count | None = None


class TokenizeBody(Struct, kw_only=True):
    content: str
    model: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class TemplateBody(ThinkingFields, kw_only=True):
    messages: list[ChatMessage]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None


def decoded(data: bytes, kind: type[Body]) -> Body:
    """The body as that struct. Raises ApiError naming the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _validation_problem(str(error)) from None
    except msgspec.DecodeError as error:
        raise problem("json", detail=str(error)) from None
    except UnicodeDecodeError as error:
        raise problem("json", detail=f"no UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise problem("nested") from None


def encoded(value: object) -> bytes:
    """A value as JSON."""
    return msgspec.json.encode(value)


def _validation_problem(message: str) -> ApiError:
    """msgspec's words with the field first: `Expected `int`, got `str` - at `$.seed`` -> seed: expected int, ..."""
    words, _, place = message.partition(" - at `$")
    where = re.sub(r"^\.|`$", "", place)
    missing = re.match(r"Object missing required field `(.*)`", words)
    if missing:
        return problem("required", field=f"{where}.{missing[1]}" if where else missing[1])
    if not where:
        return problem("json_object")
    return problem("field", field=where, detail=words[:1].lower() + words[1:].replace("`", ""))
