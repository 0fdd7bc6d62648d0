"""`/v1/messages`: bodies of the Messages API to an `Ask`, updates to its events, whole answers to a message."""

from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.requests import GenerationStats
from tandem.serve.answer import Ended, Progress, Whole, Written, extension, new_id
from tandem.serve.ask import Ask, anthropic_thinking, choice_of, sampling_of
from tandem.serve.blocks import Block, BlockWriter
from tandem.serve.bodies import MessagesBody, Part, encoded
from tandem.serve.errors_api import ApiError, Shape, problem
from tandem.serve.prompt import Prepared, strip_killers

ROLES = ("user", "assistant", "system")
NO_IMAGE = "[An image was here. This model reads text only.]"
ERROR_PREFIX = "Error: "
_SKIPPED = ("redacted_thinking",)
_string = msgspec.json.Encoder().encode


def messages_ask(body: MessagesBody, model_name: str) -> Ask:
    """What the body asks for. A last message of the assistant is the beginning of the answer. Raises ApiError."""
    tools = [made for at, tool in enumerate(body.tools or []) if (made := _tool(tool, at)) is not None]
    thinking, options = anthropic_thinking(body.thinking, body.chat_template_kwargs)
    sampling = sampling_of(body, body.max_tokens)
    if stops := tuple(stop for stop in body.stop_sequences or [] if stop):
        sampling["stop"] = stops
    choice = body.tool_choice or {}
    return Ask(
        messages=messages_of(body, model_name),
        tools=tools,
        tool_choice=choice_of(body.tool_choice, tools),
        parallel=choice.get("disable_parallel_tool_use") is not True,
        thinking=thinking,
        template_options=options,
        sampling=sampling,
        continues=bool(body.messages) and body.messages[-1].role == "assistant",
        shape="anthropic",
    )


def messages_of(body: MessagesBody, model_name: str) -> list[dict[str, Any]]:
    """Messages as templates take them. Raises ApiError naming the message at fault."""
    if not body.messages:
        raise problem("empty_messages", "messages")
    found: list[dict[str, Any]] = []
    if system := _system(body.system):
        found.append({"role": "system", "content": system})
    for at, message in enumerate(body.messages):
        place = f"messages[{at}]"
        if message.role not in ROLES:
            raise problem("role", field=f"{place}.role", found=message.role, expected=", ".join(ROLES[:2]))
        parts = [Part(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        if message.role == "assistant":
            found.append(_assistant(parts, place))
        elif message.role == "system":
            found.append({"role": "system", "content": "".join(part.text or "" for part in parts)})
        else:
            found += _user(parts, place, model_name)
    return found


def _system(system: str | list[Part] | None) -> str:
    """Blocks of a system prompt as one text, without those that change with every request."""
    if isinstance(system, str) or system is None:
        return strip_killers(system or "")
    return "\n\n".join(text for part in system if (text := strip_killers(part.text or "")))


def _assistant(parts: Sequence[Part], place: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for at, part in enumerate(parts):
        if part.type == "text":
            texts.append(part.text or "")
        elif part.type == "thinking":
            thoughts.append(part.thinking or "")
        elif part.type == "tool_use":
            if not part.name:
                raise problem("call", field=f"{place}.content[{at}]", found="no name")
            function = {"name": part.name, "arguments": part.input or {}}
            calls.append({"id": part.id or f"toolu_{at}", "type": "function", "function": function})
        elif part.type not in _SKIPPED:
            raise problem("part", field=f"{place}.content[{at}]", found=part.type, expected="text, thinking, tool_use")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(parts: Sequence[Part], place: str, model_name: str) -> list[dict[str, Any]]:
    """Messages of the user and of tools, in the order of the blocks."""
    found: list[dict[str, Any]] = []
    for at, part in enumerate(parts):
        where = f"{place}.content[{at}]"
        if part.type == "tool_result":
            text = _result_text(part, where)
            found.append({"role": "tool", "tool_call_id": part.tool_use_id, "content": text})
        elif part.type in ("text", "document", "search_result"):
            text = _document(part, where) if part.type != "text" else part.text or ""
            if found and found[-1]["role"] == "user":
                found[-1]["content"] += text
            else:
                found.append({"role": "user", "content": text})
        elif part.type == "image":
            raise problem("image", field=where, model=model_name)
        else:
            raise problem("part", field=where, found=part.type, expected="text, tool_result, document")
    return found or [{"role": "user", "content": ""}]


def _document(part: Part, where: str) -> str:
    source = part.source if isinstance(part.source, dict) else {}
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return source["data"]
    raise problem("part", field=where, found=f"{part.type} of {source.get('type', 'nothing')}", expected="text")


def _result_text(part: Part, where: str) -> str:
    """What a tool said. An image in it is told, not refused: it would stay in the conversation for good."""
    content = part.content or ""
    if not isinstance(content, str):
        content = "".join(NO_IMAGE if inner.type == "image" else inner.text or "" for inner in content)
    return ERROR_PREFIX + content if part.is_error and not content.startswith(ERROR_PREFIX) else content


def _tool(tool: dict[str, Any], at: int) -> dict[str, Any] | None:
    """A tool as templates show it; None for those that only the vendor's own servers run."""
    if tool.get("type", "custom") not in ("custom", None):
        return None
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise problem("call", field=f"tools[{at}]", found="no name")
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("input_schema") or {},
    }
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def stop_reason(ended: Ended, stops: Sequence[str]) -> tuple[str, str | None]:
    """stop_reason and stop_sequence. Which of several sequences it was is not known."""
    if ended.finish == "tool_calls":
        return "tool_use", None
    if ended.finish == "length":
        return "max_tokens", None
    if ended.stop == "stop":
        return "stop_sequence", stops[0] if len(stops) == 1 else None
    return "end_turn", None


def usage_of(stats: GenerationStats, output_tokens: int) -> dict[str, int]:
    """Tokens as this API counts them: what came from the cache is not input."""
    return {
        "input_tokens": max(1, stats.prompt_tokens - stats.reused_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": min(stats.reused_tokens, stats.prompt_tokens - 1),
        "output_tokens": output_tokens,
    }


class MessagesShaper(BlockWriter):
    """Events of one message."""

    shape: Shape = "anthropic"

    def __init__(self, prepared: Prepared):
        super().__init__()
        self._prepared, self.id = prepared, new_id("msg_")
        self._ended: Ended | None = None

    def begin(self, progress: Progress | None) -> bytes:
        """message_start, with what is known of the prompt."""
        total = len(self._prepared.ids)
        reused = min(progress.step.reused, total - 1) if progress and progress.step else 0
        usage = {
            "input_tokens": total - reused,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": reused,
            "output_tokens": 0,
        }
        message = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._prepared.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return event("message_start", {"message": message})

    def written(self, update: Written) -> bytes:
        """Events of blocks."""
        return self.write(update)

    def ended(self, update: Ended) -> bytes:
        """The end of the blocks, and message_delta."""
        reason, sequence = stop_reason(update, self._prepared.request.sampling.stop)
        more = {"tandem": found} if (found := extension(update)) else {}
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = usage_of(update.stats, update.stats.completion_tokens)
        return self.finish() + event("message_delta", {"delta": delta, "usage": usage, **more})

    def close(self) -> bytes:
        """message_stop."""
        return event("message_stop", {})

    def idle(self) -> bytes:
        """A ping, which is an event here."""
        return event("ping", {})

    def fail(self, error: ApiError) -> bytes:
        """The error event."""
        return b"event: error\ndata: " + error.encoded("anthropic") + b"\n\n"

    def opened(self, block: Block) -> bytes:
        """content_block_start."""
        return event("content_block_start", {"index": block.index, "content_block": shown(block)})

    def more(self, block: Block, text: str) -> bytes:
        """content_block_delta."""
        kind, key = _DELTAS[block.kind]
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%s","%s":'
        return head % (block.index, kind, key) + _string(text) + b"}}\n\n"

    def closed(self, block: Block) -> bytes:
        """A signature for thoughts, which clients want to send back, then content_block_stop."""
        signature = b""
        if block.kind == "reasoning":
            signature = event(
                "content_block_delta", {"index": block.index, "delta": {"type": "signature_delta", "signature": ""}}
            )
        return signature + event("content_block_stop", {"index": block.index})


_DELTAS = {
    "reasoning": (b"thinking_delta", b"thinking"),
    "text": (b"text_delta", b"text"),
    "call": (b"input_json_delta", b"partial_json"),
}


def shown(block: Block) -> dict[str, Any]:
    """A content block at its start."""
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    return {"type": "text", "text": ""}


def event(name: str, data: dict[str, Any]) -> bytes:
    """One named event."""
    return b"event: " + name.encode() + b"\ndata: " + encoded({"type": name, **data}) + b"\n\n"


def message(prepared: Prepared, whole: Whole) -> dict[str, Any]:
    """The body of a response that is not streamed."""
    content: list[dict[str, Any]] = []
    if whole.reasoning:
        content.append({"type": "thinking", "thinking": whole.reasoning, "signature": ""})
    if whole.content or not (whole.calls or whole.reasoning):
        content.append({"type": "text", "text": whole.content})
    for call in whole.calls:
        content.append(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": msgspec.json.decode(call.arguments)}
        )
    reason, sequence = stop_reason(whole.ended, prepared.request.sampling.stop)
    more = {"tandem": found} if (found := extension(whole.ended)) else {}
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": prepared.model.name,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage_of(whole.ended.stats, whole.ended.stats.completion_tokens),
        **more,
    }
