"""The raw text of one argument to JSON text, by the types that the tool's schema allows.

Formats that write strings raw leave open whether `5` is a number: the schema decides. What fits no allowed type stays a
string, so that nothing is lost and whoever runs the tool can complain.
"""

import ast
import json
import re
import warnings

MAX_LITERAL_CHARS = 65_536
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LOOSE_NUMBER = re.compile(r"\+?(-?)0*([0-9]*)(?:\.([0-9]*))?(?:([eE][+-]?[0-9]+))?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_BOOLEANS = {"true": "true", "false": "false", "True": "true", "False": "false", "TRUE": "true", "FALSE": "false"}


def to_json(raw: str, types: frozenset[str], choices: tuple[object, ...] | None = None) -> str:
    """JSON text for the argument `raw`.

    types: JSON types that the schema allows; choices: the values it allows, None: any. A string is taken as it is
    unless the schema also allows another type and `raw` is JSON of that type.
    """
    if choices is not None:
        chosen = _among(raw, choices)
        if chosen is not None:
            return chosen
    text = raw.strip()
    for kind, read in _READERS:
        if kind in types:
            found = read(text, types)
            if found is not None:
                return found
    return quoted(raw)


class Spelled(str):
    """A number as JSON text spells it, so that no digit gets lost."""


class _Broken:
    """The one object that stands for text that is no JSON."""


BROKEN = _Broken()


def quoted(text: str) -> str:
    """`text` as a JSON string, readable characters unescaped."""
    written = json.dumps(text, ensure_ascii=False)
    return written if _SURROGATE.search(written) is None else json.dumps(text)


def parsed(text: str) -> object:
    """The value of JSON text, numbers as `Spelled` and line breaks allowed in strings; BROKEN if it is no JSON."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return BROKEN


def dumped(value: object) -> str:
    """JSON text of what `parsed` returned. Raises RecursionError for values that are nested too deeply."""
    if isinstance(value, Spelled):
        return str(value)
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{quoted(key)}:{dumped(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dumped, value)) + "]"
    return json.dumps(value) if value is not BROKEN else "null"


def literal(text: str) -> str | None:
    """JSON text for a Python literal such as {'a': True}, None if it is none."""
    if len(text) > MAX_LITERAL_CHARS or not text.startswith(("{", "[", "'", '"')):
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            return json.dumps(ast.literal_eval(text), allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_int=Spelled, parse_float=Spelled, strict=False)


def _among(raw: str, choices: tuple[object, ...]) -> str | None:
    """The allowed value that `raw` spells: exactly, as JSON, without its blank space or without quotes."""
    strings = {choice for choice in choices if isinstance(choice, str)}
    for candidate in (raw, raw.strip(), raw.strip().strip("\"'")):
        if candidate in strings:
            return quoted(candidate)
    for choice in choices:
        if not isinstance(choice, str) and json.dumps(choice) == raw.strip():
            return json.dumps(choice)
    return None


def _null(text: str, types: frozenset[str]) -> str | None:
    spellings = ("null",) if "string" in types else ("null", "None", "")
    return "null" if text in spellings else None


def _boolean(text: str, types: frozenset[str]) -> str | None:
    if "string" in types and text not in ("true", "false"):
        return None
    return _BOOLEANS.get(text)


def _integer(text: str, types: frozenset[str]) -> str | None:
    text = text if _NUMBER.fullmatch(text) else None if "string" in types else _tidied(text)
    if text is None:
        return None
    if "." not in text and "e" not in text and "E" not in text:
        return text
    whole, dot, rest = text.partition(".")
    return whole if dot and rest and not rest.strip("0") else None


def _number(text: str, types: frozenset[str]) -> str | None:
    return text if _NUMBER.fullmatch(text) else None if "string" in types else _tidied(text)


def _tidied(text: str) -> str | None:
    """A number as JSON wants it: no plus sign, no leading zeros, a digit on both sides of the point."""
    match = _LOOSE_NUMBER.fullmatch(text)
    if match is None or not (match[2] or match[3] or "0" in text.partition(".")[0]):
        return None
    fraction = f".{match[3]}" if match[3] else ""
    return f"{match[1]}{match[2] or '0'}{fraction}{match[4] or ''}"


def _object(text: str, types: frozenset[str]) -> str | None:
    return _container(text, dict, "{")


def _array(text: str, types: frozenset[str]) -> str | None:
    return _container(text, list, "[")


def _container(text: str, kind: type, opening: str) -> str | None:
    if not text.startswith((opening, '"')):
        return None
    value = parsed(text)
    if isinstance(value, str) and not isinstance(value, Spelled):  # JSON text in a JSON string
        value = parsed(value)
    if isinstance(value, kind):
        return _dumped_or_none(value)
    repaired = literal(text) if value is BROKEN and text.startswith(opening) else None
    return repaired if repaired is not None and repaired.startswith(opening) else None


def _dumped_or_none(value: object) -> str | None:
    try:
        return dumped(value)
    except RecursionError:
        return None


_READERS = (
    ("null", _null),
    ("boolean", _boolean),
    ("integer", _integer),
    ("number", _number),
    ("object", _object),
    ("array", _array),
)
