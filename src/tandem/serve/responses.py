"""`/v1/responses`: its items to an `Ask`, updates to its events, and the store behind `previous_response_id`."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from tandem.serve.answer import Ended, Progress, Written, extension, new_id
from tandem.serve.ask import Ask, choice_of, form_of, sampling_of, thinking_of
from tandem.serve.blocks import Block, BlockWriter
from tandem.serve.bodies import InputItem, Part, ResponsesBody, encoded
from tandem.serve.chat import function_tools, parsed_arguments, text_of
from tandem.serve.errors_api import KINDS, ApiError, Shape, problem
from tandem.serve.model import ServedModel
from tandem.serve.prompt import Prepared, count

ROLES = ("user", "assistant", "system", "developer")
PROBE_TOKENS = 16  # a request without input for so few is a client that looks whether the server is there
_string = msgspec.json.Encoder().encode


class ResponseStore:
    """The last responses and their conversations, in memory, bounded by number and bytes."""

    def __init__(self, most: int = 256, most_bytes: int = 64 << 20):
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0
        self._kept: OrderedDict[str, tuple[dict[str, Any], bytes]] = OrderedDict()

    def put(self, response: dict[str, Any], items: Sequence[InputItem]) -> None:
        """Keeps a response and the whole conversation that led to it, its own output included."""
        data = encoded(list(items))
        self._kept[response["id"]] = (response, data)
        self._bytes += len(data)
        while self._kept and (len(self._kept) > self._most or self._bytes > self._most_bytes):
            _, (_, dropped) = self._kept.popitem(last=False)
            self._bytes -= len(dropped)

    def items(self, id: str) -> list[InputItem]:
        """The conversation up to that response. Raises ApiError (404)."""
        if id not in self._kept:
            raise problem("previous", "previous_response_id", found=id)
        self._kept.move_to_end(id)
        return msgspec.json.decode(self._kept[id][1], type=list[InputItem])

    def response(self, id: str) -> dict[str, Any]:
        """A response as it was sent. Raises ApiError (404)."""
        if id not in self._kept:
            raise problem("no_response", found=id)
        return self._kept[id][0]

    def drop(self, id: str) -> dict[str, Any]:
        """Forgets a response. Raises ApiError (404)."""
        self.response(id)
        self._bytes -= len(self._kept.pop(id)[1])
        return {"id": id, "object": "response", "deleted": True}


@dataclass
class Exchange:
    """One request in terms of this API. items: the whole conversation; warnings: what of it was left out."""

    body: ResponsesBody
    items: list[InputItem]
    warnings: list[str] = field(default_factory=list)
    dropped: int = 0


def exchange_of(body: ResponsesBody, store: ResponseStore) -> Exchange:
    """The conversation so far, with the new input behind it. Raises ApiError."""
    if body.truncation not in (None, "auto", "disabled"):
        raise problem("choices", field="truncation", found=repr(body.truncation), expected="auto or disabled")
    before = store.items(body.previous_response_id) if body.previous_response_id else []
    given = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else list(body.input or [])
    if isinstance(body.input, str) and not body.input:
        given = []
    return Exchange(body, before + given)


def is_probe(exchange: Exchange) -> bool:
    """Whether there is nothing to answer and hardly room for an answer. Raises ApiError if only there is nothing."""
    if exchange.items:
        return False
    if exchange.body.max_output_tokens is None or exchange.body.max_output_tokens > PROBE_TOKENS:
        raise problem("empty_input", field="input")
    return True


def responses_ask(exchange: Exchange, model: ServedModel) -> Ask:
    """What is asked for; with truncation "auto" without the oldest turns that do not fit. Raises ApiError."""
    body = exchange.body
    tools = function_tools([tool for tool in body.tools or [] if _is_function(tool, exchange)], None)
    thinking, options = thinking_of(body)
    messages = _messages(exchange, model.name)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    choice = body.tool_choice if tools or body.tool_choice in ("none", "auto", None) else "none"
    ask = Ask(
        messages=messages,
        tools=tools,
        tool_choice=choice_of(choice, tools),
        parallel=body.parallel_tool_calls is not False,
        thinking=thinking,
        template_options=options,
        form=form_of(body.text.format if body.text else None, None, None, "text.format"),
        sampling=sampling_of(body, body.max_output_tokens),
        prompt_field="input",
    )
    return _truncated(ask, exchange, model) if body.truncation == "auto" else ask


def _is_function(tool: dict[str, Any], exchange: Exchange) -> bool:
    if tool.get("type", "function") == "function":
        return True
    exchange.warnings.append(f"tools of type {str(tool.get('type'))[:40]!r} are not supported and were left out")
    return False


def _truncated(ask: Ask, exchange: Exchange, model: ServedModel) -> Ask:
    """Without the oldest turns: each goes from one message of the user up to the next."""
    while model.ctx is not None and count(model, ask) >= model.ctx:
        messages = list(ask.messages)
        users = [at for at, message in enumerate(messages) if message["role"] == "user"]
        if len(users) < 2:
            break
        kept = [message for message in messages[: users[1]] if message["role"] in ("system", "developer")]
        exchange.dropped += users[1] - len(kept)
        ask = replace(ask, messages=kept + messages[users[1] :])
    return ask


def _messages(exchange: Exchange, model_name: str) -> list[dict[str, Any]]:
    """Items as messages; reasoning, text and calls that follow each other are one turn of the assistant."""
    found: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    for at, item in enumerate(exchange.items):
        place = f"input[{at}]"
        kind = item.type or ("message" if item.role else "")
        if kind in ("reasoning", "function_call") or (kind == "message" and item.role == "assistant"):
            if turn is None or _needs_new_turn(turn, kind):
                turn = {"role": "assistant", "content": ""}
                found.append(turn)
            _add_to_turn(turn, item, kind, place, model_name)
            continue
        turn = None
        if kind == "message":
            if item.role not in ROLES:
                raise problem("role", field=f"{place}.role", found=item.role, expected=", ".join(ROLES))
            found.append({"role": item.role, "content": text_of(item.content, f"{place}.content", model_name)})
        elif kind == "function_call_output":
            output = text_of(item.output, f"{place}.output", model_name)
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        else:
            exchange.warnings.append(f"{place}: an item of type {kind[:40]!r} is not supported and was left out")
    return found


def _needs_new_turn(turn: dict[str, Any], kind: str) -> bool:
    if kind == "reasoning":
        return bool(turn["content"] or turn.get("tool_calls"))
    return kind == "message" and bool(turn["content"] or turn.get("tool_calls"))


def _add_to_turn(turn: dict[str, Any], item: InputItem, kind: str, place: str, model_name: str) -> None:
    if kind == "message":
        turn["content"] = text_of(item.content, f"{place}.content", model_name)
    elif kind == "reasoning":
        parts: Sequence[Part] = item.content if isinstance(item.content, list) else []
        text = item.content if isinstance(item.content, str) else "".join(part.text or "" for part in parts)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + (
            text or "".join(p.text or "" for p in item.summary or [])
        )
    else:
        if not item.name:
            raise problem("call", field=place, found="no name")
        calls = turn.setdefault("tool_calls", [])
        arguments = parsed_arguments(item.arguments, place, len(calls))
        calls.append(
            {
                "id": item.call_id or item.id or "",
                "type": "function",
                "function": {"name": item.name, "arguments": arguments},
            }
        )


class ResponsesShaper(BlockWriter):
    """Events of one response, or, by `final`, the response itself."""

    shape: Shape = "openai"

    def __init__(self, exchange: Exchange, prepared: Prepared | None, model: ServedModel, store: ResponseStore):
        super().__init__()
        self._exchange, self._prepared, self._model, self._store = exchange, prepared, model, store
        self.id, self._created, self._number = new_id("resp_"), int(time.time()), 0
        self._ended: Ended | None = None

    def begin(self, progress: Progress | None) -> bytes:
        """response.created and response.in_progress."""
        response = self.response("in_progress")
        return self._event("response.created", {"response": response}) + self._event(
            "response.in_progress", {"response": response}
        )

    def written(self, update: Written) -> bytes:
        """Events of items."""
        return self.write(update)

    def ended(self, update: Ended) -> bytes:
        """The end of the items."""
        self._ended = update
        return self.finish()

    def close(self) -> bytes:
        """response.completed, or response.incomplete."""
        response = self.final()
        return self._event(f"response.{response['status']}", {"response": response})

    def idle(self) -> bytes:
        """response.in_progress once more."""
        return self._event("response.in_progress", {"response": self.response("in_progress")})

    def fail(self, error: ApiError) -> bytes:
        """response.failed."""
        kind = KINDS[error.kind]
        response = self.response("failed") | {"error": {"code": kind.code or kind.type, "message": error.message}}
        return self._event("response.failed", {"response": response})

    def final(self) -> dict[str, Any]:
        """The complete response; it is stored if the request did not say otherwise."""
        cut = self._ended is not None and self._ended.finish == "length"
        response = self.response("incomplete" if cut else "completed")
        if self._ended is not None:
            stats = self._ended.stats
            response["usage"] = {
                "input_tokens": stats.prompt_tokens,
                "input_tokens_details": {"cached_tokens": min(stats.reused_tokens, stats.prompt_tokens)},
                "output_tokens": stats.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._ended.reasoning_tokens},
                "total_tokens": stats.prompt_tokens + stats.completion_tokens,
            }
        if self._exchange.body.store is not False and self._ended is not None:
            made = msgspec.convert([block_item(block) for block in self.blocks if block.complete], list[InputItem])
            self._store.put(response, [*self._exchange.items, *made])
        return response

    def response(self, status: str) -> dict[str, Any]:
        """The response object as it stands."""
        body, exchange = self._exchange.body, self._exchange
        sampling = self._prepared.request.sampling if self._prepared else None
        more: dict[str, Any] = dict(extension(self._ended) or {}) if self._ended else {}
        if exchange.warnings:
            more["warnings"] = exchange.warnings
        if exchange.dropped:
            more["dropped_messages"] = exchange.dropped
        done = status in ("completed", "incomplete")
        effort = self._prepared.ask.thinking.effort if self._prepared else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model.name,
            "output": [block_item(block) for block in self.blocks] if done else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": effort, "summary": None},
            "store": body.store is not False,
            "temperature": sampling.temperature if sampling else body.temperature,
            "top_p": sampling.top_p if sampling else body.top_p,
            "text": {"format": {"type": body.text.format.type if body.text and body.text.format else "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "truncation": body.truncation or "disabled",
            "usage": _NO_USAGE if done else None,
            "metadata": body.metadata or {},
        } | ({"tandem": more} if more else {})

    def opened(self, block: Block) -> bytes:
        """response.output_item.added, and the part of a text."""
        item = block_item(block) | {"status": "in_progress"}
        if block.kind != "call":
            item["content"] = []
        added = self._event("response.output_item.added", {"output_index": block.index, "item": item})
        if block.kind == "call":
            return added
        return added + self._event("response.content_part.added", {**self._place(block), "part": _part(block)})

    def more(self, block: Block, text: str) -> bytes:
        """One delta."""
        name, extra = _DELTAS[block.kind]
        number = self._next()
        head = b'event: %s\ndata: {"type":"%s","sequence_number":%d,"item_id":"%s","output_index":%d,%s"delta":'
        return head % (name, name, number, block.id.encode(), block.index, extra) + _string(text) + b"}\n\n"

    def closed(self, block: Block) -> bytes:
        """The done events of a block, the last of which holds the whole item."""
        if block.kind == "call":
            data = {"item_id": block.id, "output_index": block.index, "name": block.name, "arguments": block.text}
            done = self._event("response.function_call_arguments.done", data)
        else:
            name = "response.output_text.done" if block.kind == "text" else "response.reasoning_text.done"
            extra = {"logprobs": []} if block.kind == "text" else {}
            done = self._event(name, {**self._place(block), "text": block.text, **extra})
            done += self._event("response.content_part.done", {**self._place(block), "part": _part(block)})
        return done + self._event("response.output_item.done", {"output_index": block.index, "item": block_item(block)})

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": block.id, "output_index": block.index, "content_index": 0}

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def _event(self, name: str, data: dict[str, Any]) -> bytes:
        body = encoded({"type": name, "sequence_number": self._next(), **data})
        return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"


_DELTAS = {
    "reasoning": (b"response.reasoning_text.delta", b'"content_index":0,'),
    "text": (b"response.output_text.delta", b'"content_index":0,"logprobs":[],'),
    "call": (b"response.function_call_arguments.delta", b""),
}
_NO_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 0,
}


def block_item(block: Block) -> dict[str, Any]:
    """A block as an output item."""
    status = "completed" if block.complete else "incomplete"
    if block.kind == "call":
        return {
            "id": block.id,
            "type": "function_call",
            "call_id": block.call_id,
            "name": block.name,
            "arguments": block.text,
            "status": status,
        }
    if block.kind == "reasoning":
        return {"id": block.id, "type": "reasoning", "summary": [], "content": [_part(block)], "status": status}
    return {"id": block.id, "type": "message", "role": "assistant", "content": [_part(block)], "status": status}


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
