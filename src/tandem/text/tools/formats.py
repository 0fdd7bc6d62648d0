"""Which format a model writes calls in and what its chat template can do, by the template's text and by trying it.

In: the template and metadata of a model file. Out: the name of a format in `answer.FORMATS`, and `Capabilities`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tandem.errors import EngineError

# What only the template of one format says, most telling first.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("gemma", ("<|tool_call>",)),
    ("glm", ("<arg_key>",)),
    ("qwen-xml", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ("<|start_header_id|>", '"parameters"')),
)
_NAME = "probe_tool_name"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A test",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
_THOUGHTS = ("<think>", "<|channel>", "<|channel|>analysis", "reasoning_content")


class _Template(Protocol):
    source: str | None
    tool_source: str | None

    def render(self, messages: list, tools: list | None = None, add_generation_prompt: bool = True, **extra) -> str: ...


@dataclass(frozen=True)
class Capabilities:
    """What a chat template does. supports_tools: it shows offered functions to the model; supports_reasoning: it knows
    a marked part for thoughts; thinking_switch: name of the variable that turns this on and off, None: none found;
    supports_system: it takes a system message; system_first: only as the first one; tool_results: it takes the result
    of a call; keeps_reasoning: it shows earlier thoughts to the model during a series of calls."""

    supports_tools: bool
    supports_reasoning: bool
    thinking_switch: str | None
    supports_system: bool
    system_first: bool
    tool_results: bool
    keeps_reasoning: bool


def format_of(template_source: str | None, metadata: Mapping[str, object]) -> str:
    """The format of calls and reasoning: a key of `answer.FORMATS`; "none" for templates that tell of no calls."""
    if template_source:
        for name, signs in _SIGNS:
            if all(sign in template_source for sign in signs):
                return name
    return "harmony" if metadata.get("general.architecture") == "gpt-oss" else "none"


def capabilities(template: _Template) -> Capabilities:
    """What `template` does, by rendering short conversations; what raises counts as not supported."""
    user, late = {"role": "user", "content": "probe question"}, {"role": "system", "content": "probe late system"}
    system = {"role": "system", "content": "probe first system"}
    answer = {"role": "assistant", "content": "probe answer"}
    call = {"id": "call_0", "type": "function", "function": {"name": _NAME, "arguments": {"key": "probe value"}}}
    called = {"role": "assistant", "content": "", "reasoning_content": "probe thoughts", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_0", "name": _NAME, "content": "probe result"}
    text = (template.source or "") + (template.tool_source or "")
    switch = next((name for name in ("enable_thinking", "thinking") if _changes(template, [user], name)), None)
    loop = _rendered(template, [user, called, result], [_TOOL])
    return Capabilities(
        supports_tools=_NAME in _rendered(template, [user], [_TOOL]),
        supports_reasoning=switch is not None or any(sign in text for sign in _THOUGHTS),
        thinking_switch=switch,
        supports_system="probe first system" in _rendered(template, [system, user]),
        system_first="probe late system" not in _rendered(template, [system, user, answer, late, user]),
        tool_results="probe result" in loop and "probe value" in loop,
        keeps_reasoning="probe thoughts" in loop,
    )


def _rendered(template: _Template, messages: list, tools: list | None = None, **extra: object) -> str:
    try:
        return template.render(messages, tools, **extra)
    except EngineError:
        return ""


def _changes(template: _Template, messages: list, name: str) -> bool:
    on, off = (_rendered(template, messages, **{name: value}) for value in (True, False))
    return on != off
