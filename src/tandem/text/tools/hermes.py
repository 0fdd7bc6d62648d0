"""Calls as JSON: <tool_call> around {"name": NAME, "arguments": {...}}, as Hermes, Qwen2.5 and Qwen3 write them.

In: text by a `Reader`. Out: deltas in a `Sink`. Calls are held back until their JSON is complete, because only then is
it known to be valid. Repaired: brackets missing at the end or too many, line breaks in strings, Python literals,
arguments as JSON text in a string, `parameters` for `arguments`, several calls in one pair of tags, a missing tag.
"""

from tandem.text.tool_schema import Tool
from tandem.text.tools.coerce import BROKEN, dumped, literal, parsed, to_json
from tandem.text.tools.reader import Reader, Reading, Sink
from tandem.text.tools.tagged import CALL, CALL_END, Tagged

MAX_RESCANS = 16  # calls with an open string whose rest is read again: keeps the whole linear
_NAMES, _ARGUMENTS = ("name", "function", "tool_name", "tool"), ("arguments", "parameters", "args", "input")


class Hermes(Tagged):
    """Reads one answer; `run` is the generator that does it."""

    bare = ("{",)

    def _is_call(self) -> Reading:
        marker, _ = yield from self._reader.ahead("{", "[")
        return marker in ("{", "[")

    def _call(self) -> Reading:
        marker, _ = yield from self._reader.ahead("{", "[")
        if marker not in ("{", "["):
            return self._sink.flagged(CALL, "malformed_tool_call" if marker is None else "partial_tool_call")
        if (yield from read_json_calls(self._reader, self._sink, self._tools, CALL)):
            yield from self._after_call()

    def _bare_call(self, marker: str, used: str, end: int) -> Reading:
        """A bare object is a call if its first key says so and an offered function is named."""
        if used:
            self._reader.unread("{")
        if (yield from begins_call(self._reader)):
            if used:
                self._sink.write(used[:-1])
            return (yield from read_json_calls(self._reader, self._sink, self._tools, ""))
        if used:
            self._reader.pos += 1
            self._sink.write(used)


def begins_call(reader: Reader) -> Reading:
    """Whether the object that follows begins with a key of a call. Uses nothing."""
    marker, end = yield from reader.ahead("{")
    if marker != "{":
        return False
    keys = tuple(f'"{key}"' for key in (*_NAMES, *_ARGUMENTS, "type"))
    key, _ = yield from reader.ahead(*keys, offset=end)
    return key in keys


def read_json_calls(reader: Reader, sink: Sink, tools: dict[str, Tool], opening: str) -> Reading:
    """Reads JSON objects that follow as calls; False if the first was none and its text was given back with a flag.

    opening: what was used in front of them; without it only objects that name an offered function are calls.
    """
    first = True
    while True:
        reader.record(opening if first else "")
        lead = yield from reader.skip_space()
        assert lead and lead in "{["
        parts: list[str] = []
        missing = yield from reader.json(parts.append)
        text = "".join(parts)
        calls = _calls_in(text, missing, reader)
        bare = not opening
        if calls is None or (bare and any(name not in tools for name, _ in calls)):
            return _give_back(reader, sink, text, missing, bare)
        reader.recorded()
        for name, arguments in calls:
            tool = tools.get(name)
            sink.call(name, tool).end_whole(dumped(fitted(arguments, tool)))
        first = False
        marker, end = yield from reader.ahead("{", "}", ";", ",", CALL_END)
        while marker in ("}", ";", ","):
            reader.pos += end
            marker, end = yield from reader.ahead("{", "}", CALL_END)
        if marker != "{" or (bare and not (yield from begins_call(reader))):
            return True


def _calls_in(text: str, missing: str, reader: Reader) -> list[tuple[str, dict]] | None:
    """Names and arguments of the calls that JSON text makes; None if it makes none, or was cut off."""
    at_end = reader.ended and reader.pos == len(reader.text)
    if missing.startswith('"') or (missing and at_end and reader.reason != "eos"):
        return None
    value = lenient(text + missing)
    values = value if isinstance(value, list) else [value]
    calls = [call_in(value) for value in values]
    return calls if calls and all(calls) else None


def _give_back(reader: Reader, sink: Sink, text: str, missing: str, bare: bool) -> bool:
    """What was read as text with a flag; where an open string took more than the call, the rest is read again."""
    head, tag, tail = text.partition(CALL_END)
    if missing.startswith('"') and tag and reader.rescans < MAX_RESCANS:
        reader.rescans += 1
        reader.unread(tail)
    elif not missing and not bare and reader.text.startswith(CALL_END, reader.pos):
        reader.pos += len(CALL_END)
    source = reader.recorded()
    cut = missing and reader.ended and not tag and reader.pos == len(reader.text)
    if bare and not cut:
        sink.write(source)  # JSON that is the answer itself
    else:
        sink.flagged(source, "partial_tool_call" if cut else "malformed_tool_call")
    return False


def lenient(text: str) -> object:
    """The value of JSON text, also with line breaks in strings, or of a Python literal; BROKEN if it is neither, or is
    nested too deeply to be written again. Numbers keep their spelling."""
    value = parsed(text)
    if value is BROKEN:
        repaired = literal(text)
        value = BROKEN if repaired is None else parsed(repaired)
    try:
        dumped(value)
    except RecursionError:
        return BROKEN
    return value


def call_in(value: object) -> tuple[str, dict] | None:
    """Name and arguments of the call that a JSON value describes; None if it is no call."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = next((value[key] for key in _NAMES if type(value.get(key)) is str), None)
    if not name:
        return None
    arguments = next((value[key] for key in _ARGUMENTS if key in value), {})
    arguments = arguments_in(arguments) if type(arguments) is str else {} if arguments is None else arguments
    return (name, arguments) if isinstance(arguments, dict) else None


def arguments_in(text: str) -> dict | None:
    """The arguments that a text holds, {} for a blank one, None if it holds none."""
    if not text.strip():
        return {}
    value = lenient(text)
    if type(value) is str:  # JSON text in a JSON string
        value = lenient(value)
    return value if isinstance(value, dict) else None


def fitted(arguments: dict, tool: Tool | None) -> dict:
    """Arguments with strings read as the type that the schema wants where it allows no string."""
    if tool is None:
        return arguments
    found = {}
    for key, value in arguments.items():
        types = tool.types_of(key)
        if type(value) is str and "string" not in types:
            value = parsed(to_json(value, types, tool.choices_of(key)))
        found[key] = value
    return found
