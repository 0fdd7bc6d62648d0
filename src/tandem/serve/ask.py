"""One generation as an API asked for it, in terms of no API: messages, tools, thinking, format, sampling.

In: fields of the bodies. Out: a frozen `Ask`, which `prompt.py` turns into a request to the engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.errors import nearest
from tandem.serve.bodies import ResponseFormat, SamplingFields, ThinkingFields, ThinkingOptions
from tandem.serve.errors_api import Shape, problem

# tokens that each effort allows for reasoning, None: as many as it takes; where the model's template knows efforts
# itself, they go there and nothing is counted
EFFORTS: dict[str, int | None] = {
    "none": 0,
    "minimal": 256,
    "low": 2048,
    "medium": 8192,
    "high": None,
    "xhigh": None,
    "max": None,
}
TEMPLATE_OPTIONS = (
    "enable_thinking",
    "thinking",
    "preserve_thinking",
    "clear_thinking",
    "reasoning_effort",
    "thinking_budget",
    "add_vision_id",
    "date_string",
    "custom_instructions",
    "model_identity",
    "builtin_tools",
    "xml_tools",
    "python_tools",
)
MAX_OPTION_CHARS = 4096
FORMATS = ("text", "json_object", "json_schema", "regex", "grammar")
_RENAMED = {"repeat_penalty": "repetition_penalty"}
_SAMPLING = tuple(name for name in SamplingFields.__struct_fields__ if name not in ("stop", "seed", "top_k"))


@dataclass(frozen=True)
class Thinking:
    """enabled: None leaves it to the model; budget: most tokens of reasoning, None: no bound; effort: as asked."""

    enabled: bool | None = None
    budget: int | None = None
    effort: str | None = None


@dataclass(frozen=True)
class TextForm:
    """What the text of the answer must be; at most one is set."""

    json_schema: object = None
    regex: str | None = None
    grammar: str | None = None


@dataclass(frozen=True)
class Ask:
    """One answer to write. messages: as templates take them, arguments of calls as objects; tools: as templates take
    them, [] for none; tool_choice: auto, none, required or a name; ids: a prompt in tokens, in place of messages;
    sampling: settings that the request states; continues: the last message is the beginning of the answer;
    shape: of the API that asked, for its errors; prompt_field: its name for the messages."""

    messages: Sequence[dict[str, Any]] = ()
    tools: Sequence[dict[str, Any]] = ()
    tool_choice: str = "auto"
    parallel: bool = True
    thinking: Thinking = Thinking()  # noqa: RUF009 (frozen)
    template_options: Mapping[str, object] = field(default_factory=dict)
    form: TextForm = TextForm()  # noqa: RUF009 (frozen)
    sampling: Mapping[str, object] = field(default_factory=dict)
    logprobs: int | None = None
    ids: list[int] | None = None
    continues: bool = False
    shape: Shape = "openai"
    prompt_field: str = "messages"


def sampling_of(body: SamplingFields, max_tokens: int | None) -> dict[str, object]:
    """The sampling settings that the body states, by the engine's names; values are checked where they are used."""
    found: dict[str, object] = {}
    for name in _SAMPLING:
        value = getattr(body, name)
        if value is not None:
            found[_RENAMED.get(name, name)] = value
    if body.top_k is not None:
        found["top_k"] = 0 if body.top_k == -1 else body.top_k
    if body.seed is not None and body.seed != -1:
        found["seed"] = body.seed % 2**64
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if any(stop):
        found["stop"] = tuple(text for text in stop if text)
    if max_tokens is not None:
        found["max_tokens"] = max_tokens
    return found


def thinking_of(body: ThinkingFields) -> tuple[Thinking, dict[str, object]]:
    """The one switch behind all its names, and the options for the template. Off wins over on; a budget in tokens wins
    over an effort."""
    options = template_options(body.chat_template_kwargs)
    nested = [part for part in (body.reasoning, body.thinking) if part is not None]
    efforts = [body.reasoning_effort, options.pop("reasoning_effort", None), *(part.effort for part in nested)]
    effort = next((_effort(value) for value in efforts if value is not None), None)
    switches = [body.enable_thinking, options.pop("enable_thinking", None), options.pop("thinking", None)]
    switches += [switch for part in nested for switch in (part.enabled, _switch(part))]
    budgets = [body.reasoning_budget, options.pop("thinking_budget", None)]
    budgets += [budget for part in nested for budget in (part.budget_tokens, part.max_tokens)]
    return _combined(switches, effort, budgets), options


def anthropic_thinking(
    options: ThinkingOptions | None, kwargs: Mapping[str, object] | None
) -> tuple[Thinking, dict[str, object]]:
    """As `thinking_of`, of a Messages body."""
    return thinking_of(ThinkingFields(thinking=options, chat_template_kwargs=dict(kwargs) if kwargs else None))


def template_options(options: Mapping[str, object] | None) -> dict[str, object]:
    """The options that a template may be given. Raises ApiError for others: they could replace messages and tools."""
    for name, value in (options or {}).items():
        if name not in TEMPLATE_OPTIONS:
            raise problem("template_option", "chat_template_kwargs", found=name, hint=nearest(name, TEMPLATE_OPTIONS))
        plain = (
            value is None
            or isinstance(value, (bool, int, float))
            or (isinstance(value, str) and len(value) <= MAX_OPTION_CHARS)
        )
        if not plain:
            raise problem("template_value", "chat_template_kwargs", field=name, found=type(value).__name__)
    return {name: value for name, value in (options or {}).items() if value is not None}


def form_of(
    format: ResponseFormat | None, grammar: str | None, regex: str | None, field: str = "response_format"
) -> TextForm:
    """What the text must be. Raises ApiError for unknown types and for two at once."""
    schema = None
    if format is not None and format.type != "text":
        if format.type not in FORMATS[1:3]:
            raise problem("format", field=f"{field}.type", found=format.type, expected=", ".join(FORMATS[:3]))
        given = format.json_schema if format.json_schema is not None else {"schema": format.schema}
        schema = given.get("schema") if format.json_schema is None or "schema" in given else given
        if format.type == "json_schema" and schema is None:
            raise problem("required", field=f"{field}.json_schema.schema")
        if schema is None:
            schema = {"type": "object"}
    given_names = [
        name for name, value in ((field, schema), ("grammar", grammar), ("regex", regex)) if value is not None
    ]
    if len(given_names) > 1:
        raise problem("two_formats", given_names[1], first=given_names[0], second=given_names[1])
    return TextForm(schema, regex, grammar)


def choice_of(choice: object, tools: Sequence[object]) -> str:
    """tool_choice of any API as auto, none, required or a name (the tools are checked where they are used)."""
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, str):
        name = {"any": "required"}.get(choice, choice)
        if name not in ("auto", "none", "required"):
            raise problem("tool_choice", "tool_choice", found=repr(choice))
    else:
        name = _named_choice(choice)
    if name not in ("auto", "none") and not tools:
        raise problem("no_tools", "tool_choice", found=repr(name))
    return name


def _named_choice(choice: Mapping[str, object]) -> str:
    kind = choice.get("type")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
    if kind in ("function", "tool") and isinstance(name, str) and name:
        return name
    simple = {"any": "required", "required": "required", "auto": "auto", "none": "none"}
    if kind in simple:
        return simple[kind]
    raise problem("tool_choice", "tool_choice", found=repr(dict(choice)))


def _effort(value: object) -> str:
    if value not in EFFORTS:
        raise problem("effort", field="reasoning_effort", found=value, expected=", ".join(EFFORTS))
    return str(value)


def _switch(part: ThinkingOptions) -> bool | None:
    """`type` of a thinking object: enabled, adaptive (on, as much as it takes) or disabled."""
    known = {"enabled": True, "adaptive": None, "auto": None, "disabled": False, None: None}
    if part.type not in known:
        raise problem("choices", field="thinking.type", found=repr(part.type), expected="enabled, adaptive or disabled")
    return known[part.type]


def _combined(switches: Sequence[object], effort: str | None, budgets: Sequence[object]) -> Thinking:
    for value in switches:
        if value is not None and not isinstance(value, bool):
            raise problem("choices", field="enable_thinking", found=repr(value), expected="true or false")
    budget = next((value for value in budgets if value is not None), None)
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < -1):
        raise problem(
            "number", field="reasoning_budget", found=repr(budget), expected="a whole number of tokens, -1 for no bound"
        )
    off = False in switches or effort == "none" or budget == 0
    if off:
        return Thinking(False, 0, None)
    on = True if True in switches or effort or (budget is not None and budget > 0) else None
    if budget is None and effort is not None:
        return Thinking(on, EFFORTS[effort], effort)
    return Thinking(on, None if budget == -1 else budget, effort)
