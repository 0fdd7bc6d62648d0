"""Constraints on what may be written: JSON Schema, regex, grammar or tool calls to the tokens that may come next.

In: what a request asks for, and the tokenizer. Out: a factory of constraints (the protocol `Constraint` of requests).
Everything is compiled under limits when the factory is made, so what cannot be enforced is an error there.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tandem.errors import RequestError, nearest
from tandem.text.call_grammar import JsonCalls, RawCalls, calls_of
from tandem.text.masks import Compiler, GrammarConstraint, Limits, Plan, Step, vocabulary_of
from tandem.text.reasoning import CLOSE, OPEN
from tandem.text.schema_grammar import grammar_step, regex_step, schema_step
from tandem.text.tokenizer import Tokenizer
from tandem.text.tool_schema import Tool, read_tools

__all__ = ["Limits", "forced_tool", "make_constraint"]
# Text that is no call where calls begin with a brace.
_NO_OBJECT = "start: /[^{ \\t\\r\\n](.|\\n)*/"
MAX_KEPT = 16  # requests whose compiled grammars are kept: clients send the same tools again and again
_LOCK = threading.Lock()
_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True)
class ToolRequest:
    """What a request says about calls. choice: "auto", "none", "required" or the name of the one function to call;
    format: as `tools.format_of` says; parallel: whether one answer may hold several calls."""

    tools: Sequence[object] | None = None
    choice: str = "auto"
    format: str = "none"
    parallel: bool = True


def make_constraint(
    tokenizer: Tokenizer,
    *,
    json_schema: object = None,
    regex: str | None = None,
    grammar: str | None = None,
    tool_request: ToolRequest = ToolRequest(),  # noqa: B008 (frozen)
    prompt_end: str = "none",
    limits: Limits = Limits(),  # noqa: B008 (frozen)
) -> Callable[[], GrammarConstraint] | None:
    """A factory of constraints for one request, None if nothing restricts the answer.

    json_schema (a mapping or JSON text), regex (of the whole text) and grammar (Lark's or GBNF notation): what the text
    of the answer must be, at most one of them. Calls are restricted with tool_choice "required" or a name (the answer
    is calls and nothing else), and for tools with `strict` (a call that begins must follow the syntax and the schema).
    A text and calls may both be allowed: then the answer is one or the other. prompt_end: as `reasoning.prompt_end`
    says; reasoning itself is free, and what follows it is restricted. After a complete answer only end tokens remain.
    Raises RequestError for what cannot be enforced, is over the limits or is not understood.
    """
    asked = (json_schema, regex, grammar, tool_request, prompt_end, limits)
    tools = read_tools(tool_request.tools)
    free = tool_request.choice == "none" or not any(tool.strict for tool in tools.values())
    if asked[:3] == (None, None, None) and tool_request.choice in ("auto", "none") and free:
        return None
    key = _key(asked)
    kept = None if key is None else vocabulary_of(tokenizer).kept
    if kept is not None and (made := kept.get(key)) is not None:
        return made
    made = _made(tokenizer, *asked)
    if kept is not None:
        with _LOCK:
            while len(kept) >= MAX_KEPT:
                del kept[next(iter(kept))]
            kept[key] = made
    return made


def _key(asked: tuple) -> bytes | None:
    """Equal for equal requests; None for what is no plain data, which is compiled each time."""
    json_schema, regex, grammar, tools, prompt_end, limits = asked
    plain = [
        json_schema,
        regex,
        grammar,
        tools.tools,
        tools.choice,
        tools.format,
        tools.parallel,
        prompt_end,
        str(limits),
    ]
    try:
        return hashlib.sha256(json.dumps(plain).encode()).digest()
    except (TypeError, ValueError, RecursionError):
        return None


def _made(
    tokenizer: Tokenizer,
    json_schema: object,
    regex: str | None,
    grammar: str | None,
    tool_request: ToolRequest,
    prompt_end: str,
    limits: Limits,
) -> Callable[[], GrammarConstraint]:
    """`make_constraint`, compiled anew."""
    body = _text_step(json_schema, regex, grammar, limits, lead=prompt_end == "open")
    tools, choice = read_tools(tool_request.tools), tool_request.choice
    forced = choice not in ("auto", "none")
    if choice not in _CHOICES:
        tools = {choice: forced_tool(tools, choice)}
    if forced and not tools:
        raise RequestError(f"tool_choice: {choice!r} needs tools, found none")
    compiler = Compiler(vocabulary_of(tokenizer), limits)
    calls = None
    if tools and choice != "none":
        # Behind a call of a free answer everything is free again; behind a forced one only more calls may follow.
        more = tool_request.parallel and (choice == "required" or body is not None) and choice in _CHOICES
        calls = _calls(compiler, tools, tool_request.format, more, limits)
    plan = _plan(body, calls, forced, prompt_end, tokenizer)
    for step in filter(None, [body, plan.first, *plan.watched.values()]):
        compiler.matcher(step.grammars, step.what)
    return lambda: GrammarConstraint(compiler, plan)


def forced_tool(tools: Mapping[str, Tool], name: str) -> Tool:
    """The tool that `tool_choice` names. Raises RequestError for an unknown one."""
    if name not in tools:
        raise RequestError(f"tool_choice: no tool is named {name!r}{nearest(name, tools) if tools else ''}")
    return tools[name]


def _text_step(json_schema: object, regex: object, grammar: object, limits: Limits, lead: bool) -> Step | None:
    asked = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
    given = [key for key, value in asked.items() if value is not None]
    if len(given) > 1:
        raise RequestError(f"{given[0]} and {given[1]} were both given, at most one can be enforced")
    if json_schema is not None:
        return schema_step(json_schema, limits, lead)
    if regex is not None:
        return regex_step(regex, limits, lead)
    return None if grammar is None else grammar_step(grammar, limits)


def _calls(
    compiler: Compiler, tools: Mapping[str, Tool], format: str, parallel: bool, limits: Limits
) -> RawCalls | JsonCalls:
    """The call syntax of all tools; a tool that is not strict and cannot be enforced may be called in any way."""
    enforceable = {}
    for name, tool in tools.items():
        try:
            for step in calls_of(format, {name: tool}, False, limits).steps():
                compiler.matcher(step.grammars, step.what)
            enforceable[name] = tool
        except RequestError:
            if tool.strict:
                raise
            enforceable[name] = Tool(name, {"type": "object"}, tool.description)
    calls = calls_of(format, enforceable, parallel, limits)
    for step in calls.steps():
        compiler.matcher(step.grammars, step.what)
    return calls


def _plan(
    body: Step | None, calls: RawCalls | JsonCalls | None, forced: bool, prompt_end: str, tokenizer: Tokenizer
) -> Plan:
    """Where in the answer which steps begin."""
    lead = prompt_end == "open"
    watched = {calls.marker.encode(): calls.inside} if calls is not None and calls.marker else {}
    if body is None and not forced:
        if watched:
            return Plan(None, watched, again=True)
        body = Step((_NO_OBJECT,), lambda written: None, "tools")
    if body is None or forced:
        first = calls.leading(lead)
    else:
        first = body if calls is None else _either(body, calls, lead)
    watched = {CLOSE.encode(): first, **watched}
    if prompt_end == "open":
        return Plan(None, watched, again=False)
    think = tokenizer.token_id(OPEN) if prompt_end == "none" else None
    return Plan(first, {} if think is None else watched, again=False, think=think)


def _either(body: Step, calls: RawCalls | JsonCalls, lead: bool) -> Step:
    """A step of text or of calls, told apart by the marker at the start."""
    call, marker = calls.leading(lead), calls.marker.encode()

    def then(written: bytes) -> Step | None:
        return call.then(written) if marker and written.lstrip().startswith(marker) else None

    return Step((*body.grammars, *call.grammars), then, f"{body.what} or {call.what}")
