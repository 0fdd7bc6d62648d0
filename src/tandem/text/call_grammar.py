"""The call syntax of each format as grammar steps: names from the offered tools, arguments by their schemas.

In: tools. Out: `Step`s for `grammar.GrammarConstraint`. Formats with raw values get one step per argument, so that
arguments may come in any order, none twice, and the call ends only when all required ones are there.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tandem.errors import RequestError
from tandem.text.masks import Limits, Step
from tandem.text.schema_grammar import ANNOTATING_FORMATS, ANY_TEXT, LEADS, json_rule, regex_terminal, searched_terminal
from tandem.text.tool_schema import Tool, resolved, types_of

# What a schema of raw arguments may say beside its properties; anything else would not be enforced.
_ROOT_KEYS = frozenset(
    "type properties required additionalProperties $defs definitions title description $schema $id default examples "
    "strict $comment unevaluatedProperties deprecated readOnly writeOnly".split()
)
_ANNOTATIONS = frozenset("title description default examples deprecated readOnly writeOnly $comment".split())
_STRING_KEYS = frozenset("type pattern minLength maxLength enum const format".split()) | _ANNOTATIONS
MAX_BRANCHES = 64
# Shapes of the formats that a raw string can be held to.
_FORMATS = {
    "date": "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    "time": "([01][0-9]|2[0-3])(:[0-5][0-9]){2}([.][0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": "((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])[.]){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])",
    "email": "[A-Za-z0-9_%+-]+([.][A-Za-z0-9_%+-]+)*@([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?[.])+[A-Za-z]{2,24}",
}
_FORMATS["date-time"] = f"{_FORMATS['date']}T{_FORMATS['time']}"
_KEY = "/[A-Za-z0-9_.-]{1,64}/"  # of an argument that no schema names


@dataclass(frozen=True)
class RawSyntax:
    """How a format writes a call whose argument values are raw: the literal text around its parts."""

    marker: str
    before_name: str
    after_name: str
    before_key: str
    after_key: str
    after_value: str
    end: str
    between: str


QWEN_XML = RawSyntax(
    marker="<tool_call>",
    before_name="\n<function=",
    after_name=">\n",
    before_key="<parameter=",
    after_key=">\n",
    after_value="\n</parameter>\n",
    end="</function>\n</tool_call>",
    between="\n",
)


class RawCalls:
    """Steps of calls with raw values. inside: begins right behind the marker; further: one more call, or none."""

    def __init__(self, syntax: RawSyntax, tools: Mapping[str, Tool], parallel: bool, limits: Limits):
        """parallel: further calls may follow. Raises RequestError for strict tools whose schema cannot be enforced."""
        self._syntax, self._tools, self._parallel, self._limits = syntax, tools, parallel, limits
        self._values = {name: self._values_of(tool) for name, tool in tools.items()}
        self.marker = syntax.marker
        names = " | ".join(_text(name + syntax.after_name) for name in tools)
        self._header = f"{_text(syntax.before_name)} ({names})"
        self.inside = Step((f"start: {self._header}",), self._after_header, "tools")
        start = f"start: {_text(syntax.between + syntax.marker)} {self._header} |"
        self.further = Step((start,), self._after_header, "tools")

    def leading(self, lead: bool) -> Step:
        """The step that begins in front of the marker; lead: line breaks may come first."""
        start = f"start: {LEADS[lead]}{_text(self.marker)} {self._header}"
        return Step((start,), self._after_header, "tools")

    def steps(self) -> list[Step]:
        """Steps that together contain everything that may have to be compiled."""
        return [self.inside, *(self._body(name, frozenset()) for name in self._tools)]

    def _after_header(self, written: bytes) -> Step | None:
        text = written.decode("utf-8", "replace")
        if not text:
            return None
        name = text.partition(self._syntax.before_name)[2].removesuffix(self._syntax.after_name)
        return self._body(name, frozenset())

    def _body(self, name: str, done: frozenset[str]) -> Step:
        """One more argument, or the end of the call if all required ones are done."""
        syntax, tool, values = self._syntax, self._tools[name], self._values[name]
        rules, definitions = [], []
        for key, (rule, definition) in values.items():
            if key not in done:
                before = f"{_text(syntax.before_key)} {_KEY if key == '' else _text(key)} {_text(syntax.after_key)}"
                rules.append(f"{before} {rule}")
                definitions.append(definition)
        if tool.required <= done:
            rules.append(_text(syntax.end))
        lark = "\n".join([f"start: {' | '.join(rules)}", *definitions])
        return Step((lark,), lambda written: self._after_argument(written, name, done), f"tool {name!r}")

    def _after_argument(self, written: bytes, name: str, done: frozenset[str]) -> Step | None:
        text = written.decode("utf-8", "replace")
        if text.startswith(self._syntax.before_key):
            key = text[len(self._syntax.before_key) :].partition(self._syntax.after_key)[0]
            return self._body(name, done | {key})
        return self.further if self._parallel else None

    def _values_of(self, tool: Tool) -> dict[str, tuple[str, str]]:
        """For each argument the rule of its value with what ends it, and the rules that this one names. The key ""
        stands for any argument, where the schema names none and forbids none."""
        root = resolved(tool.parameters, tool.parameters)
        if unknown := sorted(set(root) - _ROOT_KEYS):
            raise RequestError(
                f"tool {tool.name!r}: {unknown[0]!r} beside its properties cannot be enforced in the way this model "
                "writes calls; remove it, or `strict`"
            )
        properties = root.get("properties")
        if not isinstance(properties, Mapping):
            free = bool(root) and root.get("additionalProperties") is not False
            return {"": self._free(0)} if free else {}
        if missing := sorted(tool.required - set(properties)):
            raise RequestError(f"tool {tool.name!r}: {missing[0]!r} is required but not among its properties")
        values = {}
        for number, (key, schema) in enumerate(properties.items()):
            if not key or set(key) & set("<>\n\"'") or key != key.strip():
                raise RequestError(f"tool {tool.name!r}: the argument name {key!r} cannot be written by this model")
            values[key] = self._value(tool, schema, f"tool {tool.name!r}, argument {key!r}", number)
        return values

    def _free(self, number: int) -> tuple[str, str]:
        return f"v{number}", f"v{number}[suffix={_text(self._syntax.after_value)}]: {ANY_TEXT}"

    def _value(self, tool: Tool, schema: object, what: str, number: int) -> tuple[str, str]:
        alternatives = list(
            itertools.islice(_branches(schema, tool.parameters, self._limits.depth, what), MAX_BRANCHES + 1)
        )
        if len(alternatives) > MAX_BRANCHES:
            raise RequestError(f"{what}: more than {MAX_BRANCHES} alternatives")
        branches = [self._branch(branch, tool, what) for branch in alternatives]
        if None in branches:
            return self._free(number)
        end, rules, definitions = _text(self._syntax.after_value), [], []
        strings = [body for is_string, body in branches if is_string]
        if strings:
            rules.append(f"S{number}")
            definitions.append(
                f"S{number}: (({' | '.join(strings)}) & {_lines_without(self._syntax.after_value)}) {end}"
            )
        for index, (is_string, body) in enumerate(branches):
            if not is_string:
                rules.append(f"j{number}_{index} {end}")
                definitions.append(f"j{number}_{index}: {body}")
        return f"({' | '.join(rules)})", "\n".join(definitions)

    def _branch(self, schema: Mapping[str, object], tool: Tool, what: str) -> tuple[bool, str] | None:
        """One alternative of a value: (True, terminal of a string), (False, rule of JSON), None for any text."""
        if schema.get("type") == "string" or (
            "type" not in schema and all(isinstance(choice, str) for choice in _choices(schema) or [None])
        ):
            return _string_terminal(schema, self._limits, what)
        if not set(schema) - _ANNOTATIONS:
            return None
        if "string" in types_of(schema, tool.parameters):
            raise RequestError(f"{what}: its schema allows strings in a way that cannot be enforced; give it a `type`")
        return False, json_rule(_with_definitions(schema, tool.parameters), self._limits, what)


def _branches(schema: object, root: object, depth: int, what: str) -> Iterator[Mapping[str, object]]:
    """The alternatives of a schema: of anyOf and oneOf, and of several types. Raises RequestError: over the depth."""
    if depth == 0:
        raise RequestError(f"{what}: its alternatives are nested too deeply")
    schema = resolved(schema, root)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), Sequence) and not set(schema) & {"type", "enum", "const", "properties", "allOf"}:
            for branch in schema[key]:
                yield from _branches(branch, root, depth - 1, what)
            return
    kinds = schema.get("type")
    for branch in [{**schema, "type": kind} for kind in kinds] if isinstance(kinds, (list, tuple)) else [schema]:
        yield from _by_choices(branch)


def _by_choices(schema: Mapping[str, object]) -> list[Mapping[str, object]]:
    """A schema with `enum` as one for its strings and one for its other values, without those of other types."""
    choices = _choices(schema)
    if choices is None:
        return [schema]
    bare, kind = {key: value for key, value in schema.items() if key not in ("enum", "const")}, schema.get("type")
    strings = [choice for choice in choices if isinstance(choice, str)] if kind in (None, "string") else []
    others = [choice for choice in choices if not isinstance(choice, str)] if kind != "string" else []
    return [{**bare, "enum": part} for part in (strings, others) if part]


def _choices(schema: Mapping[str, object]) -> list[object] | None:
    if "const" in schema:
        return [schema["const"]]
    return list(schema["enum"]) if isinstance(schema.get("enum"), (list, tuple)) else None


def _string_terminal(schema: Mapping[str, object], limits: Limits, what: str) -> tuple[bool, str] | None:
    """A raw string as terminals joined by `&`, None if it may be anything."""
    if unknown := sorted(key for key in schema if key not in _STRING_KEYS and not key.startswith(("x-", "$"))):
        raise RequestError(f"{what}: {unknown[0]!r} cannot be enforced for a string")
    parts = []
    choices = _choices(schema)
    if choices is not None:
        strings = [choice for choice in choices if isinstance(choice, str)]
        if len(strings) > limits.enum_values or not strings:
            raise RequestError(f"{what}: an enum of {len(strings):,} strings, 1 to {limits.enum_values:,} are allowed")
        parts.append(f"({' | '.join(map(_text, strings))})")
    if (shape := schema.get("format")) is not None and shape not in ANNOTATING_FORMATS:
        if shape not in _FORMATS:
            raise RequestError(f"{what}: the format {str(shape)[:60]!r} cannot be enforced for a string")
        parts.append(regex_terminal(_FORMATS[shape], limits, what))
    if isinstance(pattern := schema.get("pattern"), str):
        parts.append(searched_terminal(pattern, limits, what))
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if low or high is not None:
        if not all(isinstance(bound, int) and 0 <= bound <= 1_000_000 for bound in (low, 0 if high is None else high)):
            raise RequestError(f"{what}: lengths must be whole numbers from 0 to 1,000,000")
        parts.append(f"/(.|\\n){{{low},{'' if high is None else high}}}/")
    return (True, " & ".join(parts)) if parts else None


def _with_definitions(schema: Mapping[str, object], root: object) -> dict[str, object]:
    """`schema` with the definitions that its references may point at."""
    found = dict(schema)
    for key in ("$defs", "definitions"):
        if isinstance(root, Mapping) and key in root:
            found.setdefault(key, root[key])
    return found


class JsonCalls:
    """Steps of calls written as JSON objects with a name and arguments."""

    def __init__(
        self,
        marker: str,
        around: tuple[str, str],
        arguments_key: str,
        tools: Mapping[str, Tool],
        parallel: bool,
        limits: Limits,
    ):
        """marker: what opens a call, '' if nothing does; around: literal text between marker and object, and behind."""
        self._tools, self._parallel, self._limits, self._key = tools, parallel, limits, arguments_key
        self.marker = marker
        rules = [self._rule(tool, number) for number, tool in enumerate(tools.values())]
        body = f"call: {' | '.join(f'c{number}' for number in range(len(rules)))}\n" + "\n".join(rules)
        lead, tail = (f"{_text(text)} " if text else "" for text in around)
        start = f"{lead}call {tail}"
        opening = f"{_text(marker)} " if marker else ""
        self._body = f"{opening}{start}\n{body}"
        self.inside = Step((f"start: {start}\n{body}",), self._after, "tools")
        between = "\n" if marker else "; "
        self.further = Step((f"start: {_text(between + marker)} {start} |\n{body}",), self._after, "tools")

    def leading(self, lead: bool) -> Step:
        """The step that begins in front of the marker; lead: line breaks may come first."""
        return Step((f"start: {LEADS[lead]}{self._body}",), self._after, "tools")

    def steps(self) -> list[Step]:
        """Steps that together contain everything that may have to be compiled."""
        return [self.inside]

    def _after(self, written: bytes) -> Step | None:
        return self.further if written and self._parallel and self.marker else None

    def _rule(self, tool: Tool, number: int) -> str:
        parameters = tool.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
        rule = json_rule({"type": "object", **parameters}, self._limits, f"tool {tool.name!r}")
        lead = f'{{"name": {json.dumps(tool.name)}, {json.dumps(self._key)}: '
        return f'c{number}: {_text(lead)} a{number} "}}"\na{number}: {rule}'


def calls_of(format: str, tools: Mapping[str, Tool], parallel: bool, limits: Limits) -> RawCalls | JsonCalls:
    """The call syntax of a format. Raises RequestError for formats whose calls cannot be enforced."""
    if format == "qwen-xml":
        return RawCalls(QWEN_XML, tools, parallel, limits)
    if format == "hermes":
        return JsonCalls("<tool_call>", ("\n", "\n</tool_call>"), "arguments", tools, parallel, limits)
    if format == "llama3":
        return JsonCalls("", ("", ""), "parameters", tools, False, limits)
    raise RequestError(
        f"tool_choice: calls in the format {format!r} cannot be enforced; use tool_choice 'auto' and no strict tools"
    )


def _text(text: str) -> str:
    return json.dumps(text)


def _lines_without(end: str) -> str:
    """A terminal of all texts behind which `end` comes at their end only: no line but the first is that of `end`.

    Not said as a complement of the whole text: whether that can still go on is more than the library finds out.
    """
    line = end.strip("\n")
    assert end == f"\n{line}\n" and "\n" not in line
    return f'(/[^\\n]*/ ("\\n" (/[^\\n]*/ & ~{_text(line)}))*)'
