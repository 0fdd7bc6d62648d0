"""Chat templates: messages in, the prompt text out, by the Jinja2 template that the model file carries.

Templates are programs of strangers. They run in Jinja2's immutable sandbox, in a child process with limits on time,
memory and output, so that the worst one ends in a TemplateError. What messages say never becomes a control token.
"""

import json
import re
from collections.abc import Mapping, Sequence

from tandem.errors import FormatError, TemplateError
from tandem.text.renderer import LimitExceeded, TemplateRenderer
from tandem.text.tokenizer import Tokenizer

KEY = "tokenizer.chat_template"
# Stand-ins for control tokens that a message spells out; U+FDD0 and U+FDD1 are noncharacters, never in real text.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_STAND_IN = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% set ns.system = message['content'] | trim + '\n\n' %}{% else %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{{ ns.system + message['content'] | trim + '<end_of_turn>\n' }}{% set ns.system = '' %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Family -> the tokens that tell it, and its plainest template, for files that carry none.
FAMILIES: dict[str, tuple[tuple[str, ...], str]] = {
    "chatml": (("<|im_start|>", "<|im_end|>"), CHATML),
    "gemma": (("<start_of_turn>", "<end_of_turn>"), GEMMA),
    "llama3": (("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), LLAMA3),
}


class ChatTemplate:
    """A chat template and the special tokens it may name. `name` says where it is from: "file" or a family.

    The child process that renders starts with the first use (or `start`) and ends with `close` or with this object.
    """

    def __init__(
        self,
        source: str | None,
        tokenizer: Tokenizer,
        name: str = "file",
        tool_source: str | None = None,
        renderer: TemplateRenderer | None = None,
    ):
        """source: Jinja2 text, None if there is no template; tool_source: another one, used when tools are given;
        renderer: the child process, None makes one of its own."""
        self.source, self.tool_source, self.name = source, tool_source, name
        self._tokenizer = tokenizer
        self._special = _special_tokens(tokenizer)
        self.renderer = renderer or TemplateRenderer()

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, object], tokenizer: Tokenizer, renderer: TemplateRenderer | None = None
    ) -> "ChatTemplate":
        """The template of a GGUF file, else the plainest one of its family (ChatML, Gemma or Llama 3 turns).

        A file with neither gives a template whose `render` raises TemplateError. Raises FormatError for a template
        that is no string.
        """
        source, tool_source = (metadata.get(key) for key in (KEY, f"{KEY}.tool_use"))
        for key, value in ((KEY, source), (f"{KEY}.tool_use", tool_source)):
            if value is not None and not isinstance(value, str):
                raise FormatError(f"{key}: found {type(value).__name__}, expected a string")
        if source is not None:
            return cls(source, tokenizer, "file", tool_source, renderer)
        for family, (names, default) in FAMILIES.items():
            if all(tokenizer.token_id(name) is not None for name in names):
                return cls(default, tokenizer, family, None, renderer)
        return cls(None, tokenizer, "none", None, renderer)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **extra: object,
    ) -> str:
        """The prompt text for `messages`, to be encoded with parse_special=True and add_special=False.

        messages, tools and extra (for example enable_thinking=False) reach the template as they are, except that keys
        of messages whose value is None are left out. If the template fails on them, it is tried once more with a
        missing `content` as "", a list of text parts as one text, and JSON text in `arguments` as an object.
        Raises TemplateError: no template, broken template, values that are not JSON, limits exceeded.
        """
        if self.source is None:
            raise TemplateError(
                "this file has no chat template and its vocabulary has no turn tokens that we know "
                f"({', '.join(FAMILIES)}); it may be a base model: give it a prompt instead of messages"
            )
        source = self.tool_source if tools and self.tool_source is not None else self.source
        given = [_without_none(message) for message in _checked_messages(messages)]
        values = {**self._special, **extra, "tools": tools, "add_generation_prompt": add_generation_prompt}
        values.setdefault("documents", None)
        try:
            return self.renderer.render(source, {**values, "messages": given})
        except LimitExceeded:
            raise
        except TemplateError:
            completed = [_completed(message) for message in given]
            if completed == given:
                raise
        return self.renderer.render(source, {**values, "messages": completed})

    def encode(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **extra: object,
    ) -> list[int]:
        """The ids of the rendered prompt. Control tokens come from the template only: where a message or a tool spells
        one out, it is encoded as ordinary text. The first id is bos where the file asks for it.
        Raises what `render` and `Tokenizer.encode` raise.
        """
        hide = _Hiding(self._tokenizer)
        rendered = self.render(
            hide.inside([dict(message) for message in _checked_messages(messages)]),
            None if tools is None else hide.inside(list(tools)),
            add_generation_prompt,
            **{key: hide.inside(value) for key, value in extra.items()},
        )
        ids: list[int] = []
        for piece in self._tokenizer.split_special(rendered):
            ids.extend(self._tokenizer.encode(hide.restore(piece)) if isinstance(piece, str) else [piece])
        if self._tokenizer.add_bos and ids[:1] != [self._tokenizer.bos_id]:
            ids.insert(0, self._tokenizer.bos_id)
        return ids

    def start(self) -> None:
        """Start the child process now, without waiting for it, so that the first rendering need not."""
        self.renderer.start()

    def close(self) -> None:
        """End the child process. A later rendering starts a new one."""
        self.renderer.close()


class _Hiding:
    """Replaces the names of control tokens inside messages by stand-ins, and stand-ins by the names again."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._hidden: list[str] = []

    def inside(self, value: object) -> object:
        """`value` with every string in it made harmless; lists and mappings are copied."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {key: self.inside(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.inside(item) for item in value]
        return value

    def restore(self, text: str) -> str:
        return _STAND_IN.sub(lambda match: self._hidden[int(match[1])], text)

    def _text(self, text: str) -> str:
        parts = []
        for piece in self._tokenizer.split_special(text):
            if isinstance(piece, int):
                parts.append(self._stand_in(self._tokenizer.token_text(piece)))
            elif _OPEN in piece:
                parts.append(piece.replace(_OPEN, self._stand_in(_OPEN)))
            else:
                parts.append(piece)
        return "".join(parts)

    def _stand_in(self, hidden: str) -> str:
        self._hidden.append(hidden)
        return f"{_OPEN}{len(self._hidden) - 1}{_CLOSE}"


def _special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    ids["unk_token"] = tokenizer.unknown_id
    return {key: tokenizer.token_text(index) for key, index in ids.items() if index is not None}


def _checked_messages(messages: Sequence[Mapping[str, object]]) -> Sequence[Mapping[str, object]]:
    if isinstance(messages, (str, bytes, Mapping)) or not all(isinstance(message, Mapping) for message in messages):
        raise TemplateError("chat template: messages must be a list of mappings with at least role and content")
    return messages


def _without_none(message: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in message.items() if value is not None}


def _completed(message: Mapping[str, object]) -> dict[str, object]:
    """`message` with the content and the argument objects that many templates take for granted."""
    completed = {"content": "", **message}
    completed["content"] = _joined_text(completed["content"])
    calls = message.get("tool_calls")
    if isinstance(calls, (list, tuple)):
        completed["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return completed


def _joined_text(content: object) -> object:
    """A list of text parts as one string; anything else as it is."""
    if not isinstance(content, (list, tuple)):
        return content
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content


def _with_parsed_arguments(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": parsed}} if isinstance(parsed, dict) else call
