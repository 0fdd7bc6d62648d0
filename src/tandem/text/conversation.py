"""A conversation -> token ids. Control tokens come from the template alone: the same words inside a message stay text.

Messages are rendered with a mark inside every control token that their text spells, the result is cut at the real
control tokens, and the mark is taken out of the pieces between them before they are encoded.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.text.template import ChatTemplate
from tandem.text.tokenizer import Tokenizer

MARK = "\ue0f1\ue0f2"  # private use; taken out of a message's own text first, where it means nothing


def encode_conversation(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **extra: Any,
) -> list[int]:
    """Token ids of the rendered conversation. Raises TemplateError and RequestError."""
    names = sorted(map(tokenizer.token_text, tokenizer.control_ids), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, names))) if names else None
    marked = [_marked(message, pattern) for message in messages]
    tools = None if tools is None else [_marked(tool, pattern) for tool in tools]
    text = template.render(marked, tools=tools, add_generation_prompt=add_generation_prompt, **extra)
    ids: list[int] = []
    for piece in tokenizer.split_special(text):
        if isinstance(piece, int):
            ids.append(piece)
        else:
            ids.extend(tokenizer.encode(piece.replace(MARK, ""), parse_special=False))
    return ids


def _marked(value: Any, pattern: re.Pattern | None) -> Any:
    """The value with a mark after the first character of each control token in its strings, at any depth."""
    if isinstance(value, str):
        value = value.replace(MARK, "")
        return pattern.sub(lambda m: m[0][0] + MARK + m[0][1:], value) if pattern else value
    if isinstance(value, Mapping):
        return {key: _marked(item, pattern) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marked(item, pattern) for item in value]
    return value
