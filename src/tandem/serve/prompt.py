"""From what was asked to what the engine gets: messages in the order of the template, tokens, borders, settings.

In: an `Ask` and the model. Out: `Prepared`, with the engine's request. All of it may run on any thread and never
touches the engine.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.errors import RequestError
from tandem.requests import GenerationRequest, Prompt
from tandem.serve.ask import Ask
from tandem.serve.errors_api import overflow, problem
from tandem.serve.model import ServedModel
from tandem.text.budget import Both, reasoning_budget
from tandem.text.grammar import ToolRequest, make_constraint
from tandem.text.reasoning import prompt_end

SYSTEM_ROLES = ("system", "developer")
# Lines that agents put in front of the system prompt and that change with every request.
KILLER_LINES = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n?")
MAX_BORDERS = 3
_TAIL_TOKENS = 16  # of a prompt behind its last message: the opened answer
_END_CHARS = 64


@dataclass(frozen=True)
class Prepared:
    """One answer, ready for the engine. format, tools: for the parser of the answer; prompt_end: as
    `reasoning.prompt_end` says, "raw" if the answer is not to be parsed; ask: where it came from."""

    model: ServedModel
    ask: Ask
    request: GenerationRequest
    format: str
    tools: Sequence[dict[str, Any]]
    prompt_end: str

    @property
    def ids(self) -> list[int]:
        """Tokens of the prompt."""
        return self.request.prompt.ids


def prepare(model: ServedModel, ask: Ask) -> Prepared:
    """Renders, encodes and checks. Raises ApiError, RequestError, SettingError, TemplateError."""
    if ask.ids is not None:
        prompt, end = Prompt(ask.ids, (), continues=True), "raw"
        check_fits(model, ask, ask.ids)
    else:
        prompt, end = _encoded(model, ask)
    thinks = end == "open" or (
        end == "none" and ask.thinking.enabled is not False and model.capabilities.supports_reasoning
    )
    sampling = model.sampling(thinks, ask.sampling)
    for token, _ in sampling.logit_bias:
        if token >= model.tokenizer.vocab_size:
            raise problem("logit_tokens", field="logit_bias", found=token, size=model.tokenizer.vocab_size)
    tools = offered(ask)
    if tools and ask.tool_choice != "auto" and model.format == "none":
        raise problem("tool_format", "tools", model=model.name)
    request = GenerationRequest(prompt, sampling, _constraint(model, ask, tools, end), ask.logprobs)
    return Prepared(model, ask, request, model.format, tools, end)


def count(model: ServedModel, ask: Ask) -> int:
    """Tokens of the prompt, exactly as `prepare` makes it, whether it fits or not."""
    return len(_ids(model, ask)[0])


def rendered(model: ServedModel, ask: Ask, add_generation_prompt: bool = True) -> str:
    """The prompt as text."""
    messages = arranged(model, ask.messages)
    return model.template.render(messages, offered(ask) or None, add_generation_prompt, **_options(model, ask))


def offered(ask: Ask) -> list[dict[str, Any]]:
    """The tools that the model sees."""
    return [] if ask.tool_choice == "none" else list(ask.tools)


def arranged(model: ServedModel, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as the template takes them: `developer` is `system`; where system must come first, all such messages are
    one in front; where there is no system role, it begins the first user message."""
    named = [{**message, "role": "system"} if message["role"] in SYSTEM_ROLES else message for message in messages]
    named = [_without_killers(message) for message in named]
    named = [message for message in named if message["role"] != "system" or message["content"]]
    late = any(message["role"] == "system" for message in named[1:])
    hoist = model.offer.hoist_system
    if late and (hoist or (hoist is None and model.capabilities.system_first)):
        texts = [message["content"] for message in named if message["role"] == "system"]
        others = [message for message in named if message["role"] != "system"]
        named = [{"role": "system", "content": "\n\n".join(texts)}, *others]
    if named and named[0]["role"] == "system" and not model.capabilities.supports_system:
        named = _merged_into_user(named)
    return named


def strip_killers(text: str) -> str:
    """The text of a system message without the lines that change with every request."""
    return KILLER_LINES.sub("", text, count=1)


def check_fits(model: ServedModel, ask: Ask, ids: Sequence[int]) -> None:
    """Raises ApiError if the prompt leaves no room for one token of answer."""
    if not ids:
        raise problem("empty_input", field=ask.prompt_field)
    if model.ctx is not None and len(ids) >= model.ctx:
        raise overflow(len(ids), model.ctx, ask.shape, ask.prompt_field)


def _encoded(model: ServedModel, ask: Ask) -> tuple[Prompt, str]:
    ids, messages = _ids(model, ask)
    check_fits(model, ask, ids)
    end = prompt_end(model.tokenizer.decode(ids[-_END_CHARS:], keep_control=True))
    if ask.continues:
        end = "closed" if end == "none" else end
        return Prompt(ids, (), continues=True), end

    def closed() -> list[int]:
        return model.template.encode(messages, offered(ask) or None, False, **_options(model, ask))

    return Prompt(ids, borders(ids, messages, model, closed), continues=False), end


def _ids(model: ServedModel, ask: Ask) -> tuple[list[int], list[dict[str, Any]]]:
    """Token ids of the prompt, and the messages that the template was given."""
    if ask.ids is not None:
        return ask.ids, []
    messages = arranged(model, ask.messages)
    if not messages:
        raise problem("empty_messages", "messages")
    last = messages[-1]
    begun = last["content"].rstrip() if ask.continues and last["role"] == "assistant" else ""
    if ask.continues and last["role"] == "assistant":
        messages = messages[:-1]
    options = _options(model, ask)
    if begun and model.capabilities.thinking_switch:
        options[model.capabilities.thinking_switch] = False
    ids = model.template.encode(messages, offered(ask) or None, True, **options)
    return (ids + model.tokenizer.encode(begun) if begun else ids), messages


def borders(
    ids: Sequence[int], messages: Sequence[dict[str, Any]], model: ServedModel, closed: Callable[[], list[int]]
) -> tuple[int, ...]:
    """Lengths at which later prompts are likely to part from this one: behind the system message, behind the last real
    question (where earlier thoughts are taken out), and behind the last message. Few, as each costs a step.

    Messages end with a token that ends an answer, and such tokens come from the template alone; closed: the ids without
    the opened answer, asked for where the template marks no ends."""
    ends = [at + 1 for at, token in enumerate(ids) if token in model.tokenizer.eog_ids]
    ends = [_next_turn(ids, end, model) for end in ends]
    found = {ends[-1]} if ends and len(ids) - ends[-1] <= _TAIL_TOKENS else {_shared(ids, closed())}
    if ends and messages[0]["role"] == "system":
        found.add(ends[0])
    last_user = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=len(messages) - 1)
    after = len(messages) - 1 - last_user
    if after and len(ends) > after:
        found.add(ends[-1 - after])
    return tuple(sorted(place for place in found if 0 < place < len(ids)))[-MAX_BORDERS:]


def _next_turn(ids: Sequence[int], end: int, model: ServedModel) -> int:
    """Where the next turn begins: behind at most two tokens of line breaks, at a control token."""
    for place in range(end, min(end + 3, len(ids))):
        if ids[place] in model.tokenizer.control_ids:
            return place
    return end


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


def _options(model: ServedModel, ask: Ask) -> dict[str, object]:
    """Values for the template beside messages and tools."""
    options = dict(ask.template_options)
    enabled = model.offer.thinking if ask.thinking.enabled is None else ask.thinking.enabled
    if enabled is not None:
        options[model.capabilities.thinking_switch or "enable_thinking"] = enabled
    if ask.thinking.effort is not None and _knows_efforts(model):
        options["reasoning_effort"] = ask.thinking.effort
    return options


def _knows_efforts(model: ServedModel) -> bool:
    return "reasoning_effort" in (model.template.source or "")


def _constraint(model: ServedModel, ask: Ask, tools: list[dict[str, Any]], end: str) -> Callable[[], Any] | None:
    """What restricts the answer: a form, calls, a budget for reasoning; None if nothing does."""
    parsed_end = "none" if end == "raw" else end
    wanted = ToolRequest(tools or None, ask.tool_choice if tools else "none", model.format, ask.parallel)
    form = ask.form
    make = make_constraint(
        model.tokenizer,
        json_schema=form.json_schema,
        regex=form.regex,
        grammar=form.grammar,
        tool_request=wanted,
        prompt_end=parsed_end,
    )
    budget = ask.thinking.budget
    by_effort = ask.thinking.effort is not None and _knows_efforts(model)
    if budget is None or end == "raw" or (by_effort and budget) or not _may_think(model, budget, end):
        return make
    limit = reasoning_budget(model.tokenizer, budget, end, model.format)
    return (lambda: Both(limit(), make())) if make else limit


def _may_think(model: ServedModel, budget: int, end: str) -> bool:
    """Whether a budget can matter: reasoning is open, or may be opened by the model."""
    return end == "open" or (end == "none" and model.capabilities.supports_reasoning)


def _without_killers(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "system" or not isinstance(message["content"], str):
        return message
    return {**message, "content": strip_killers(message["content"])}


def _merged_into_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    system, rest = messages[0]["content"], [message for message in messages[1:] if message["role"] != "system"]
    for at, message in enumerate(rest):
        if message["role"] == "user":
            return [*rest[:at], {**message, "content": f"{system}\n\n{message['content']}"}, *rest[at + 1 :]]
    raise RequestError("messages: this model has no system role and no message of a user was found: add one")
