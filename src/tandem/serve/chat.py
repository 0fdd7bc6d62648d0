"""`/v1/chat/completions`: its bodies to an `Ask`, updates to chunks, whole answers to a completion."""

import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.requests import Piece
from tandem.serve.answer import Ended, Progress, Whole, Written, extension, logprob_entry, new_id, timings
from tandem.serve.ask import Ask, choice_of, form_of, sampling_of, thinking_of
from tandem.serve.bodies import CalledFunction, ChatBody, ChatMessage, Part, TemplateBody, encoded
from tandem.serve.errors_api import ApiError, Shape, problem
from tandem.serve.prompt import Prepared
from tandem.text.tools.deltas import Content, Reasoning, ToolCallArguments, ToolCallStart

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file", "input_file")
_string = msgspec.json.Encoder().encode


def chat_ask(body: ChatBody, model_name: str) -> Ask:
    """What the body asks for. Raises ApiError."""
    tools = function_tools(body.tools, body.functions)
    thinking, options = thinking_of(body)
    wanted = None
    if body.logprobs or body.top_logprobs is not None:
        if not body.logprobs:
            raise problem("required", field="logprobs")
        wanted = body.top_logprobs or 0
    return Ask(
        messages=chat_messages(body.messages, model_name),
        tools=tools,
        tool_choice=choice_of(body.tool_choice, tools),
        parallel=body.parallel_tool_calls is not False,
        thinking=thinking,
        template_options=options,
        form=form_of(body.response_format, body.grammar, body.regex),
        sampling=sampling_of(body, body.max_completion_tokens or body.max_tokens),
        logprobs=wanted,
        continues=bool(body.continue_final_message),
    )


def template_ask(body: TemplateBody, model_name: str) -> Ask:
    """What `/apply-template` asks for. Raises ApiError."""
    thinking, options = thinking_of(body)
    tools = function_tools(body.tools, None)
    return Ask(
        messages=chat_messages(body.messages, model_name), tools=tools, thinking=thinking, template_options=options
    )


def chat_messages(messages: Sequence[ChatMessage], model_name: str) -> list[dict[str, Any]]:
    """Messages as templates take them. Raises ApiError naming the message at fault."""
    if not messages:
        raise problem("empty_messages", "messages")
    return [_message(message, f"messages[{at}]", model_name) for at, message in enumerate(messages)]


def _message(message: ChatMessage, place: str, model_name: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise problem("role", field=f"{place}.role", found=message.role, expected=", ".join(ROLES))
    role = "tool" if message.role == "function" else message.role
    made: dict[str, Any] = {"role": role, "content": text_of(message.content, f"{place}.content", model_name)}
    if role == "assistant":
        reasoning = message.reasoning_content or message.reasoning or message.reasoning_text
        if reasoning:
            made["reasoning_content"] = reasoning
        calls = [(call.id, call.function) for call in message.tool_calls or []]
        if message.function_call:
            calls.append((None, message.function_call))
        if calls:
            made["tool_calls"] = [called(id, function, place, at) for at, (id, function) in enumerate(calls)]
    elif role == "tool":
        made["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        made["name"] = message.name
    return made


def text_of(content: str | list[Part] | None, place: str, model_name: str) -> str:
    """The text of a message's content: parts are joined as they stand. Raises ApiError for parts that are no text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for at, part in enumerate(content):
        if part.type in TEXT_PARTS:
            texts.append(part.text or "")
        elif part.type == "refusal":
            texts.append(part.refusal or part.text or "")
        elif part.type in IMAGE_PARTS:
            raise problem("image", field=f"{place}[{at}]", model=model_name)
        else:
            raise problem("part", field=f"{place}[{at}]", found=part.type, expected=", ".join(TEXT_PARTS))
    return "".join(texts)


def called(id: str | None, function: CalledFunction, place: str, at: int) -> dict[str, Any]:
    """A call in the history with its arguments as an object. Raises ApiError if they are none."""
    return {
        "id": id or f"call_{at}",
        "type": "function",
        "function": {
            "name": function.name,
            "arguments": parsed_arguments(function.arguments, f"{place}.tool_calls[{at}]", at),
        },
    }


def parsed_arguments(arguments: str | dict[str, Any] | None, place: str, index: int) -> dict[str, Any]:
    """Arguments of a call as an object. Raises ApiError if they are none."""
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        detail = str(error) if isinstance(error, ValueError) else "nested too deeply"
        raise problem("arguments", field=f"{place}.function.arguments", index=index, detail=detail) from None
    if not isinstance(parsed, dict):
        raise problem(
            "arguments", field=f"{place}.function.arguments", index=index, detail=f"found {type(parsed).__name__}"
        )
    return parsed


def function_tools(tools: list[dict[str, Any]] | None, functions: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Tools as templates show them; those that are no functions are left out, as no model here can call them."""
    given = list(tools or []) + [{"type": "function", "function": function} for function in functions or []]
    return [made for at, tool in enumerate(given) if (made := _tool(tool, at)) is not None]


def _tool(tool: dict[str, Any], at: int) -> dict[str, Any] | None:
    if tool.get("type", "function") != "function":
        return None
    function = tool.get("function")
    if function is None and isinstance(tool.get("name"), str):  # the flat shape of the Responses API
        function = {key: value for key, value in tool.items() if key != "type"}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise problem("call", field=f"tools[{at}]", found="no name")
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


class ChatShaper:
    """Chunks of one request. What is the same in all of them is encoded once."""

    shape: Shape = "openai"

    def __init__(self, prepared: Prepared, choices: int, include_usage: bool, id: str = ""):
        self._prepared, self._choices, self._usage = prepared, choices, include_usage
        self._logprobs = prepared.request.logprobs is not None
        head = {
            "id": id or new_id("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": prepared.model.name,
            "system_fingerprint": FINGERPRINT,
        }
        self._head = b"data: " + encoded(head)[:-1] + b","
        self._deltas = [self._head + b'"choices":[{"index":%d,"delta":' % choice for choice in range(choices)]
        self._ends: list[Ended] = []

    def begin(self, progress: Progress | None) -> bytes:
        """The role, for each choice."""
        return b"".join(self._chunk(choice, b'{"role":"assistant","content":""}') for choice in range(self._choices))

    def written(self, update: Written) -> bytes:
        """A chunk for each delta."""
        choice, chunks = update.choice, []
        extra = self._extra(update)
        for delta in update.deltas:
            kind = type(delta)
            if kind is Content:
                chunks.append(self._chunk(choice, b'{"content":' + _string(delta.text) + b"}", extra))
                extra = b""
            elif kind is Reasoning:
                chunks.append(self._chunk(choice, b'{"reasoning_content":' + _string(delta.text) + b"}"))
            elif kind is ToolCallStart:
                function = {"name": delta.name, "arguments": ""}
                call = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
                chunks.append(self._chunk(choice, b'{"tool_calls":[' + encoded(call) + b"]}"))
            elif kind is ToolCallArguments:
                body = b'{"tool_calls":[{"index":%d,"function":{"arguments":' % delta.index
                chunks.append(self._chunk(choice, body + _string(delta.fragment) + b"}}]}"))
        if extra:
            chunks.append(self._chunk(choice, b'{"content":""}', extra))
        return b"".join(chunks)

    def ended(self, update: Ended) -> bytes:
        """The one chunk with a finish reason."""
        self._ends.append(update)
        last: dict[str, Any] = {"timings": timings(update.stats)}
        if more := extension(update):
            last["tandem"] = more
        chunk = self._deltas[update.choice] + b'{},"finish_reason":' + _string(update.finish) + b"}],"
        return chunk + encoded(last)[1:] + b"\n\n"

    def close(self) -> bytes:
        """Usage, if asked for, and the end."""
        usage = b""
        if self._usage:
            usage = self._head + b'"choices":[],"usage":' + encoded(usage_of(self._ends)) + b"}\n\n"
        return usage + b"data: [DONE]\n\n"

    def idle(self) -> bytes:
        """A chunk with an empty delta."""
        return self._chunk(0, b"{}")

    def fail(self, error: ApiError) -> bytes:
        """The error object; no finish reason, no end mark."""
        return b"data: " + error.encoded("openai") + b"\n\n"

    def _chunk(self, choice: int, delta: bytes, extra: bytes = b"") -> bytes:
        return self._deltas[choice] + delta + extra + b',"finish_reason":null}]}\n\n'

    def _extra(self, update: Written) -> bytes:
        if not self._logprobs or not update.tokens:
            return b""
        return b',"logprobs":' + encoded(logprobs_of(update.tokens, self._prepared))


def completion(prepared: Prepared, wholes: Sequence[Whole]) -> dict[str, Any]:
    """The body of a response that is not streamed."""
    ends = [whole.ended for whole in wholes]
    body = {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": prepared.model.name,
        "system_fingerprint": FINGERPRINT,
        "choices": [_choice(prepared, at, whole) for at, whole in enumerate(wholes)],
        "usage": usage_of(ends),
        "timings": timings(ends[0].stats),
    }
    if more := extension(ends[0]):
        body["tandem"] = more
    return body


def _choice(prepared: Prepared, index: int, whole: Whole) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": whole.content, "refusal": None}
    if whole.reasoning:
        message["reasoning_content"] = whole.reasoning
    if whole.calls:
        message["content"] = whole.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in whole.calls
        ]
    logprobs = None if prepared.request.logprobs is None else logprobs_of(whole.tokens, prepared)
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": whole.ended.finish}


def logprobs_of(pieces: Sequence[Piece], prepared: Prepared) -> dict[str, Any]:
    """Log-probabilities of tokens of the answer's text."""
    tokenizer = prepared.model.tokenizer
    content = [
        logprob_entry(tokenizer, piece.logprob) | {"top_logprobs": [logprob_entry(tokenizer, top) for top in piece.top]}
        for piece in pieces
    ]
    return {"content": content, "refusal": None}


def usage_of(ends: Sequence[Ended]) -> dict[str, Any]:
    """Tokens of all choices of one request; the prompt counts once."""
    first = ends[0].stats
    completion_tokens = sum(end.stats.completion_tokens for end in ends)
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": first.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": min(first.reused_tokens, first.prompt_tokens)},
        "completion_tokens_details": {"reasoning_tokens": sum(end.reasoning_tokens for end in ends)},
    }


FINGERPRINT = "tandem"
