"""JSON schemas, regular expressions and grammars as steps for `masks.GrammarConstraint`, checked against limits.

In: what a client sent. Out: a `Step`. Whether llguidance can express it shows when the step is compiled.
"""

import json
from collections.abc import Mapping

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from tandem.errors import RequestError
from tandem.text.masks import Limits, Step, first_line

# Formats that describe a value for people and programs, and that no validator checks.
ANNOTATING_FORMATS = frozenset(
    "int32 int64 uint32 uint64 float double decimal number binary byte base64 base64url password path file-path "
    "directory-path textarea color markdown html json json-string phone currency".split()
)
ANY_TEXT = "/(.|\\n)*/"
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
# Behind reasoning an answer begins on a new line; elsewhere at once.
LEADS = {True: "/\\n{0,2}/ ", False: ""}


def schema_step(schema: object, limits: Limits, lead: bool, what: str = "json_schema") -> Step:
    """One JSON value that a schema allows; lead: line breaks may come first. Raises RequestError over the limits."""
    return Step((f"start: {LEADS[lead]}body\nbody: {json_rule(schema, limits, what)}",), _nothing, what)


def json_rule(schema: object, limits: Limits, what: str) -> str:
    """A schema as part of a rule in llguidance's notation. Raises RequestError for schemas over the limits."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise RequestError(f"{what}: this text is no JSON, expected a JSON schema") from None
    if not isinstance(schema, (Mapping, bool)):
        raise RequestError(f"{what}: found {type(schema).__name__}, expected a JSON schema object")
    schema = _checked(schema, limits, what, 0)
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    text = json.dumps(schema)
    if len(text) > limits.schema_chars:
        raise RequestError(f"{what}: {len(text):,} characters, at most {limits.schema_chars:,} are allowed")
    options = {"whitespace_pattern": _WHITESPACE, "whitespace_flexible": True}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def regex_step(pattern: object, limits: Limits, lead: bool) -> Step:
    """Text that matches a regular expression as a whole; lead: line breaks may come first."""
    if not isinstance(pattern, str) or not pattern:
        raise RequestError(f"regex: found {type(pattern).__name__}, expected a string of at least one character")
    terminal = regex_terminal(pattern, limits, "regex")
    return Step((f"start: {LEADS[lead]}BODY\nBODY: {terminal}",), _nothing, "regex")


def regex_terminal(pattern: str, limits: Limits, what: str) -> str:
    """A regex that matches as a whole, as a terminal in llguidance's notation."""
    if len(pattern) > limits.regex_chars:
        raise RequestError(f"{what}: {len(pattern):,} characters, at most {limits.regex_chars:,} are allowed")
    return "/" + llguidance.regex_to_lark(pattern, use_ascii="dw") + "/"


def searched_terminal(pattern: str, limits: Limits, what: str) -> str:
    """A pattern of JSON Schema, which may match anywhere in a text, as a terminal for the whole text.

    Raises RequestError for anchors that do not stand at its ends: no terminal can express them.
    """
    body = pattern.removeprefix("^")
    at_end = body.endswith("$") and not body.endswith("\\$")
    body = body[:-1] if at_end else body
    if body != pattern and _has_top_level_bar(body):
        raise RequestError(f"{what}: anchors beside | cannot be enforced; put brackets around the alternatives")
    before = "" if pattern.startswith("^") else f"{ANY_TEXT} "
    after = "" if at_end else f" {ANY_TEXT}"
    return f"({before}{regex_terminal(f'(?:{body})', limits, what)}{after})"


def grammar_step(text: object, limits: Limits) -> Step:
    """Text that a grammar in Lark's or in GBNF notation allows; GBNF is told by its `::=`."""
    if not isinstance(text, str) or not text.strip():
        raise RequestError(f"grammar: found {type(text).__name__}, expected the text of a grammar")
    if len(text) > limits.grammar_chars:
        raise RequestError(f"grammar: {len(text):,} characters, at most {limits.grammar_chars:,} are allowed")
    if "::=" in text:
        try:
            text = gbnf_to_lark(text)
        except Exception as error:  # the converter raises whatever its steps raise
            raise RequestError(f"grammar cannot be read as GBNF: {first_line(str(error))}") from None
    return Step((text,), _nothing, "grammar")


def _checked(schema: object, limits: Limits, what: str, depth: int) -> object:
    """`schema` without formats that nothing checks. Raises RequestError for what is over the limits."""
    if depth > limits.depth:
        raise RequestError(f"{what}: nested more than {limits.depth} levels deep")
    if isinstance(schema, Mapping):
        # Values of const, enum and default are data in which `format` means nothing, but no data calls itself an int32.
        return {
            key: _checked(value, limits, what, depth + 1)
            for key, value in schema.items()
            if not _is_annotation(key, value, limits, what)
        }
    if isinstance(schema, (list, tuple)):
        return [_checked(value, limits, what, depth + 1) for value in schema]
    return schema


def _is_annotation(key: str, value: object, limits: Limits, what: str) -> bool:
    """Whether one keyword of a schema may be left out. Raises RequestError if its value is over the limits."""
    if key == "enum" and isinstance(value, (list, tuple)) and len(value) > limits.enum_values:
        raise RequestError(f"{what}: an enum of {len(value):,} values, at most {limits.enum_values:,} are allowed")
    if key == "pattern" and isinstance(value, str) and len(value) > limits.regex_chars:
        raise RequestError(
            f"{what}: a pattern of {len(value):,} characters, at most {limits.regex_chars:,} are allowed"
        )
    return key == "format" and isinstance(value, str) and value in ANNOTATING_FORMATS


def _has_top_level_bar(pattern: str) -> bool:
    """Whether an unescaped | stands outside of brackets."""
    depth, in_class = 0, False
    chars = iter(pattern)
    for char in chars:
        if char == "\\":
            next(chars, None)
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char == "|" and depth == 0:
            return True
        else:
            depth += (char == "(") - (char == ")")
    return False


def _nothing(written: bytes) -> None:
    return None
