"""Reads a text that is still being written: formats are generators that ask for more by `yield`.

`Reader` looks for markers and looks ahead by a bounded distance, so that every format takes linear time and holds back
no more than it must. `Sink` gathers what was read as deltas.
"""

import itertools
import re
from collections.abc import Callable, Generator

from tandem.text.tool_schema import MAX_NAME_CHARS, Tool
from tandem.text.tools.coerce import quoted, to_json
from tandem.text.tools.deltas import Content, Delta, Flag, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart

MAX_SPACE_CHARS = 64  # blank space that may stand between two markers of one call
MAX_HEADER_CHARS = 2 * MAX_NAME_CHARS  # of a call: its name, and what damage puts beside it
END = "<end of the text>"  # what `ahead` finds behind the last character; no marker is spelled so
_SPACE = " \t\r\n"
Reading = Generator[None, None, object]


class Markers:
    """A set of marker strings to look for together; of those at one place the first given wins."""

    def __init__(self, *names: str):
        self.names = names
        self.pattern = re.compile("|".join(map(re.escape, names)))
        self._firsts = frozenset(name[0] for name in names)
        self._longest = max(map(len, names))

    def begun(self, text: str, start: int) -> int:
        """Where in `text`, not before `start`, a marker begins that more text might complete; len(text) if nowhere."""
        for index in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[index] in self._firsts:
                tail = text[index:]
                if any(name.startswith(tail) for name in self.names):
                    return index
        return len(text)


class Reader:
    """The text read so far but not yet used, and what became of the stream.

    ended: nothing will follow; reason: why it ended ("eos", "length", ...). Methods that may need more text are
    generators: they yield until `feed` or `end` was called.
    """

    def __init__(self):
        self.text, self.pos, self.ended, self.reason = "", 0, False, ""
        self.rescans = 0  # how often text was read again because its end was not where it seemed
        self._recorded: list[str] | None = None

    def feed(self, text: str) -> None:
        """Adds text at the end; what was used is forgotten, so `pos` is 0 again."""
        self.text = self.text[self.pos :] + text
        self.pos = 0
        if self._recorded is not None:
            self._recorded.append(text)

    def end(self, reason: str) -> None:
        """States that no text follows."""
        self.ended, self.reason = True, reason

    def unread(self, text: str) -> None:
        """Puts text back in front of what is not yet used."""
        self.text, self.pos = text + self.text[self.pos :], 0

    def record(self, before: str) -> None:
        """From here on the text is kept until `recorded`; before: what was already used of it."""
        self._recorded = [before, self.text[self.pos :]]

    def recorded(self) -> str:
        """All used text since `record`, which ends with this."""
        text = "".join(self._recorded or ())
        self._recorded = None
        return text[: len(text) - (len(self.text) - self.pos)]

    def until(self, markers: Markers, emit: Callable[[str], None]) -> Generator[None, None, str | None]:
        """Uses the text up to and with the first marker, which is the result; None if the text ends before one.

        emit: gets the text in front of the marker as soon as no marker can begin in it.
        """
        while True:
            match = markers.pattern.search(self.text, self.pos)
            stop = match.start() if match else len(self.text) if self.ended else markers.begun(self.text, self.pos)
            if stop > self.pos:
                emit(self.text[self.pos : stop])
            self.pos = match.end() if match else stop
            if match:
                return match[0]
            if self.ended:
                return None
            yield

    def ahead(self, *choices: str, offset: int = 0) -> Generator[None, None, tuple[str | None, int]]:
        """Which choice follows after blank space, and where it ends, counted from `pos`; nothing is used.

        offset: begin so many characters behind `pos`. (END, ...) if only blank space follows, (None, 0) if none does.
        """
        longest = max(map(len, choices))
        while True:
            start = self.pos + offset
            place, limit = start, min(len(self.text), start + MAX_SPACE_CHARS)
            while place < limit and self.text[place] in _SPACE:
                place += 1
            rest = self.text[place : place + longest]
            for choice in choices:
                if rest.startswith(choice):
                    return choice, place + len(choice) - self.pos
            if self.ended:
                return (None, 0) if rest else (END, place - self.pos)
            if not any(choice.startswith(rest) for choice in choices):
                return None, 0
            yield

    def name(self, closing: str, offset: int = 0) -> Generator[None, None, tuple[str | None, int]]:
        """The name that stands before the character `closing`, and where that ends, counted from `pos`; nothing is
        used. (None, 0) if what stands there is no name; (END, 0) if the text ends inside it."""
        while True:
            start = self.pos + offset
            stop = self.text.find(closing, start, start + MAX_NAME_CHARS + 1)
            name = self.text[start : stop if stop >= 0 else start + MAX_NAME_CHARS + 1]
            if "\n" in name or "<" in name or len(name) > MAX_NAME_CHARS or (stop >= 0 and not name.strip()):
                return None, 0
            if stop >= 0:
                return name.strip().strip("\"'"), stop + 1 - self.pos
            if self.ended:
                return END, 0
            yield

    def before(self, markers: Markers, offset: int = 0) -> Generator[None, None, tuple[str | None, str, int]]:
        """The short text in front of the next marker, that marker, and where it ends, counted from `pos`; nothing is
        used. (None, "", 0) if no marker is near; (END, "", 0) if the text ends before one."""
        while True:
            start = self.pos + offset
            match = markers.pattern.search(self.text, start, start + MAX_HEADER_CHARS)
            if match:
                return self.text[start : match.start()], match[0], match.end() - self.pos
            if len(self.text) - start >= MAX_HEADER_CHARS:
                return None, "", 0
            if self.ended:
                return END, "", 0
            yield

    def skip_if(self, char: str) -> Generator[None, None, bool]:
        """Uses the next character if it is `char`."""
        while self.pos == len(self.text) and not self.ended:
            yield
        if self.text.startswith(char, self.pos):
            self.pos += len(char)
            return True
        return False

    def skip_space(self) -> Generator[None, None, str]:
        """Uses blank space; the result is the next character, '' at the end of the text."""
        while True:
            while self.pos < len(self.text) and self.text[self.pos] in _SPACE:
                self.pos += 1
            if self.pos < len(self.text):
                return self.text[self.pos]
            if self.ended:
                return ""
            yield

    def rest(self, emit: Callable[[str], None]) -> Generator[None, None, None]:
        """Uses all text to the end."""
        while True:
            if self.pos < len(self.text):
                emit(self.text[self.pos :])
                self.pos = len(self.text)
            if self.ended:
                return
            yield

    def json(self, emit: Callable[[str], None]) -> Generator[None, None, str]:
        """Uses one JSON object or array, which begins here. The result is "" when its last bracket was used, else
        the brackets that are missing: the text ended outside a string, or a '<' follows, which JSON has only in
        strings; '"' if the text ended inside a string."""
        scan = JsonScan()
        while True:
            stop = scan.feed(self.text, self.pos)
            if stop > self.pos:
                emit(self.text[self.pos : stop])
            self.pos = stop
            if scan.done:
                return ""
            if scan.broken or self.ended:
                return '"' if scan.in_string else scan.missing
            yield


class JsonScan:
    """Finds where a JSON object or array ends, however it is cut into pieces."""

    _STRUCTURE = re.compile(r'["{}\[\]<]')
    _IN_STRING = re.compile(r'["\\]')
    _CLOSING = {"{": "}", "[": "]"}

    def __init__(self):
        self._stack: list[str] = []
        self.in_string = self._escaped = self.done = self.broken = False

    @property
    def missing(self) -> str:
        """The brackets that would close what is open."""
        return "".join(reversed(self._stack))

    def feed(self, text: str, start: int) -> int:
        """Scans `text` from `start`; the place up to which it belongs to the value."""
        place = start
        if self._escaped and place < len(text):
            place, self._escaped = place + 1, False
        while True:
            match = (self._IN_STRING if self.in_string else self._STRUCTURE).search(text, place)
            if match is None:
                return len(text)
            place, char = match.end(), match[0]
            if char == '"':
                self.in_string = not self.in_string
            elif char == "\\":
                self._escaped = place == len(text)
                place = min(place + 1, len(text))
            elif char == "<":
                self.broken = True
                return match.start()
            elif char in "{[":
                self._stack.append(self._CLOSING[char])
            elif not self._stack or self._stack.pop() != char:
                self.broken = True
                return place
            elif not self._stack:
                self.done = True
                return place


class Sink:
    """Gathers deltas: joins neighbours of one kind, drops blank space beside markers, counts calls."""

    def __init__(self, new_id: Callable[[], str]):
        self._new_id, self._out, self._calls = new_id, [], 0
        self._kind: type[Reasoning] | type[Content] = Content
        self._strip, self._space = False, []

    def taken(self) -> list[Delta]:
        """The deltas since the last time; neighbours of one kind as one."""
        if len(self._out) < 2:
            out, self._out = self._out, []
            return out
        joined: list[Delta] = []
        for kind, group in itertools.groupby(self._out, _joinable):
            deltas = list(group)
            if kind is None or len(deltas) == 1:
                joined.extend(deltas)
            elif kind[0] is ToolCallArguments:
                joined.append(ToolCallArguments(kind[1], "".join(delta.fragment for delta in deltas)))
            else:
                joined.append(kind[0]("".join(delta.text for delta in deltas)))
        self._out = []
        return joined

    def open(self, kind: type[Reasoning] | type[Content], strip: bool) -> None:
        """What `write` gets from now on is of this kind; strip: without the blank space at its start."""
        self._kind, self._strip, self._space = kind, strip, []

    def write(self, text: str) -> None:
        """More text of the open kind; blank space at its end waits for what follows."""
        if self._strip:
            text = text.lstrip()
            if not text:
                return
            self._strip = False
        body = text.rstrip()
        if body:
            if self._space:
                self._space.append(body)
                self._text("".join(self._space))
            else:
                self._text(body)
            self._space = []
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def close(self, drop_space: bool) -> None:
        """Settles the blank space at the end: dropped in front of a marker, kept at the end of the answer."""
        if self._space and not drop_space:
            self._text("".join(self._space))
        self._space = []

    def flagged(self, text: str, flag: Flag) -> None:
        """A piece of content with a flag, whatever is open; neither joined nor stripped."""
        if text:
            self.close(drop_space=False)
            self._strip = False
            self._out.append(Content(text, flag))

    def call(self, name: str, tool: Tool | None) -> "CallSink":
        """A new tool call."""
        self.close(drop_space=True)
        call = CallSink(self, self._calls, tool)
        self._calls += 1
        self._out.append(ToolCallStart(call.index, self._new_id(), name, None if tool else "unknown_function"))
        return call

    def add(self, delta: Delta) -> None:
        """One delta."""
        self._out.append(delta)

    def _text(self, text: str) -> None:
        self._out.append(self._kind(text))


def _joinable(delta: Delta) -> tuple[type, int] | None:
    """Equal for deltas that can be joined, None for those that cannot."""
    if isinstance(delta, ToolCallArguments):
        return ToolCallArguments, delta.index
    if isinstance(delta, (Reasoning, Content)) and getattr(delta, "flag", None) is None:
        return type(delta), 0
    return None


class CallSink:
    """The arguments of one call, as JSON text that is valid when the call has ended."""

    def __init__(self, sink: Sink, index: int, tool: Tool | None):
        self.index, self.tool, self.keys = index, tool, set()
        self._sink, self._fragments = sink, []
        self._raw: list[str] | None = None  # None: the value is a string that is written as it arrives

    def fragment(self, text: str) -> None:
        """A piece of JSON text."""
        if text:
            self._fragments.append(text)
            self._sink.add(ToolCallArguments(self.index, text))

    def begin_value(self, key: str) -> None:
        """An argument follows by `write`, as raw text that the schema gives a type."""
        self._key, types = key, self.tool.types_of(key) if self.tool else frozenset()
        plain = types == {"string"} and self.tool.choices_of(key) is None
        self._raw = None if plain else []
        self.keys.add(key)
        if plain:
            self.fragment(self._lead(key) + '"')

    def write(self, text: str) -> None:
        """More raw text of the argument."""
        if self._raw is None:
            self.fragment(quoted(text)[1:-1])
        else:
            self._raw.append(text)

    def end_value(self) -> None:
        """The argument is complete."""
        if self._raw is None:
            return self.fragment('"')
        tool = self.tool or Tool("")
        value = to_json("".join(self._raw), tool.types_of(self._key), tool.choices_of(self._key))
        self.fragment(self._lead(self._key) + value)

    def end(self) -> None:
        """The call is complete."""
        self.fragment("}" if self._fragments else "{}")
        self._sink.add(ToolCallEnd(self.index, "".join(self._fragments)))
        self._sink.open(Content, strip=True)

    def end_whole(self, arguments: str) -> None:
        """The call is complete and these are all its arguments, a JSON object."""
        self.fragment(arguments)
        self._sink.add(ToolCallEnd(self.index, arguments))
        self._sink.open(Content, strip=True)

    def cut(self, source: str) -> None:
        """The answer ended inside the call."""
        self._sink.add(ToolCallEnd(self.index, "".join(self._fragments), False, source))

    def _lead(self, key: str) -> str:
        return ("," if self._fragments else "{") + quoted(key) + ":"
