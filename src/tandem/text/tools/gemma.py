"""Calls of Gemma 4: <|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>, an object with bare keys.

In: text by a `Reader`. Out: deltas in a `Sink`. Only the sentinel <|"|> delimits strings, so these may hold all else.
Repaired: missing tags around a call, strings in plain quotes or backticks.
"""

import re

from tandem.text.tools.coerce import BROKEN, Spelled, dumped, parsed
from tandem.text.tools.hermes import MAX_RESCANS, fitted
from tandem.text.tools.reader import END, Markers, Reading
from tandem.text.tools.tagged import Tagged

QUOTE, NAME = '<|"|>', "call:"
MAX_DEPTH = 64
_OUTSIDE = Markers(QUOTE, "<tool_call|>", "{", "}", "[", "]")
_INSIDE = Markers(QUOTE)
_WORD = re.compile(r"[^,:{}\[\]\"`]*")
_PLAIN = re.compile(r'"(?:[^"\\]|\\.)*"|`[^`]*`', re.DOTALL)
_CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


class Gemma(Tagged):
    """Reads one answer; `run` is the generator that does it."""

    think, think_end, call, call_end = "<|channel>thought", "<channel|>", "<|tool_call>", "<tool_call|>"
    bare = (NAME,)
    controls = {name: name for name in ("<|channel>", think_end, call, call_end, QUOTE)}

    def _is_call(self) -> Reading:
        marker, _ = yield from self._reader.ahead(NAME)
        return marker == NAME

    def _call(self) -> Reading:
        reader, sink = self._reader, self._sink
        marker, end = yield from reader.ahead(NAME)
        name, name_end = (yield from reader.name("{", end)) if marker == NAME else (marker, 0)
        if name is None or name is END:
            return sink.flagged(self.call, "partial_tool_call" if name is END else "malformed_tool_call")
        yield from self._object(name, name_end, self.call)

    def _bare_call(self, marker: str, used: str, end: int) -> Reading:
        name, name_end = yield from self._reader.name("{", end)
        if name in self._tools:
            return (yield from self._object(name, name_end, used))
        self._sink.write(used)

    def _object(self, name: str, name_end: int, opening: str) -> Reading:
        """Reads the arguments of a call, which begin with the brace that ends `name_end` ahead."""
        reader, sink = self._reader, self._sink
        reader.record(opening)
        reader.pos += name_end
        parts, depth, in_string = ["{"], 1, False
        while depth > 0:
            marker = yield from reader.until(_INSIDE if in_string else _OUTSIDE, parts.append)
            if marker is None or marker == self.call_end:
                break
            parts.append(marker)
            in_string ^= marker == QUOTE
            depth += (marker in "{[") - (marker in "}]") if len(marker) == 1 else 0
        if depth > 0 and in_string and reader.rescans < MAX_RESCANS:
            self._cut_back(parts)
        arguments = parsed_object("".join(parts)) if depth == 0 else None
        if arguments is None:
            cut = depth > 0 and reader.ended and reader.pos == len(reader.text)
            return sink.flagged(reader.recorded(), "partial_tool_call" if cut else "malformed_tool_call")
        reader.recorded()
        tool = self._tools.get(name)
        sink.call(name, tool).end_whole(dumped(fitted(arguments, tool)))
        yield from self._after_call()

    def _cut_back(self, parts: list[str]) -> None:
        """An open string took everything: what stands behind the end tag in it is read again."""
        head, tag, tail = "".join(parts).partition(self.call_end)
        if tag:
            self._reader.rescans += 1
            self._reader.unread(tail)


def parsed_object(text: str) -> dict | None:
    """The object that the text spells, numbers as `Spelled`; None if it spells none."""
    try:
        value, end = _value(text, 0, 0)
    except (ValueError, IndexError):
        return None
    return value if isinstance(value, dict) and not text[end:].strip() else None


def _value(text: str, place: int, depth: int) -> tuple[object, int]:
    """One value and where it ends. Raises ValueError and IndexError."""
    place = _space(text, place)
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if text.startswith(QUOTE, place):
        end = text.index(QUOTE, place + len(QUOTE))
        return text[place + len(QUOTE) : end], end + len(QUOTE)
    if text[place] in '"`':
        match = _PLAIN.match(text, place)
        if match is None:
            raise ValueError("open string")
        value = parsed(match[0]) if text[place] == '"' else match[0][1:-1]
        return (match[0][1:-1] if value is BROKEN else value), match.end()
    if text[place] in "{[":
        return _members(text, place, depth)
    match = _WORD.match(text, place)
    word = match[0].strip()
    if word in _CONSTANTS:
        return _CONSTANTS[word], match.end()
    number = parsed(word)
    if isinstance(number, Spelled):
        return number, match.end()
    if not word or "<" in word:
        raise ValueError("no value")
    return word, match.end()


def _members(text: str, place: int, depth: int) -> tuple[object, int]:
    """An object or a list and where it ends."""
    is_object = text[place] == "{"
    closing = "}" if is_object else "]"
    found: dict | list = {} if is_object else []
    place = _space(text, place + 1)
    while text[place] != closing:
        if is_object:
            key, place = _value(text, place, depth + 1)
            place = _space(text, place)
            if text[place] != ":" or not isinstance(key, str):
                raise ValueError("no key")
            found[str(key)], place = _value(text, place + 1, depth + 1)
        else:
            value, place = _value(text, place, depth + 1)
            found.append(value)
        place = _space(text, place)
        if text[place] == ",":
            place = _space(text, place + 1)
        elif text[place] != closing:
            raise ValueError("no comma")
    return found, place + 1


def _space(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n":
        place += 1
    return place
