"""Calls of GLM-4.5 to 4.7: <tool_call>NAME, then pairs of <arg_key> and <arg_value> with raw values.

In: text by a `Reader`. Out: deltas in a `Sink`. Repaired: a missing <arg_key>, </arg_key> or <arg_value>, an end tag
behind the name of a call without arguments, a value or call without its end tag, JSON in place of tags.
"""

from tandem.text.tools.hermes import read_json_calls
from tandem.text.tools.reader import END, CallSink, Markers, Reading
from tandem.text.tools.tagged import CALL, CALL_END, Tagged

KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_BEHIND_NAME = Markers(KEY, KEY_END, VALUE_END, CALL_END)
_BEHIND_KEY = Markers(KEY_END, VALUE)
_IN_VALUE = Markers(VALUE_END, CALL_END)


class Glm(Tagged):
    """Reads one answer; `run` is the generator that does it."""

    def _is_call(self) -> Reading:
        marker, _ = yield from self._reader.ahead("{")
        if marker == "{":
            return True
        text, marker, _ = yield from self._reader.before(_BEHIND_NAME)
        if text is None or text is END:
            return False
        return self._named(text, marker)[0] in self._tools

    def _call(self) -> Reading:
        reader, sink = self._reader, self._sink
        marker, _ = yield from reader.ahead("{", "[")
        if marker in ("{", "["):
            if (yield from read_json_calls(reader, sink, self._tools, CALL)):
                yield from self._after_call()
            return
        text, marker, end = yield from reader.before(_BEHIND_NAME)
        name, key = (text, None) if text is None or text is END else self._named(text, marker)
        if name is None or name is END:
            return sink.flagged(CALL, "partial_tool_call" if name is END else "malformed_tool_call")
        reader.record(CALL)
        reader.pos += end - (len(marker) if marker in (KEY, CALL_END) else 0)
        if key is not None:
            reader.unread(KEY + key + KEY_END)
            reader.record(CALL + name)
        yield from self._arguments(sink.call(name, self._tools.get(name)))
        yield from self._after_call()

    def _named(self, text: str, marker: str) -> tuple[str | None, str | None]:
        """The name of the function and, where the tag between them is missing, the first key; (None, None): neither."""
        text = text.strip()
        if marker == KEY_END:
            names = [name for name in self._tools if text.startswith(name) and len(name) < len(text)]
            name = max(names, key=len, default=None)
            return name, None if name is None else text[len(name) :].strip()
        valid = text and not set(text) & set("<>{}\n")
        return (text if valid else None), None

    def _arguments(self, call: CallSink) -> Reading:
        """Reads pairs up to the end of the call, whose own end tag is left."""
        reader = self._reader
        while True:
            marker, end = yield from reader.ahead(KEY, CALL_END, VALUE_END)
            if marker == VALUE_END:
                reader.pos += end
                continue
            if marker == CALL_END or (marker is END and reader.reason == "eos") or marker is None:
                reader.recorded()
                return call.end()
            key, marker, key_end = (END, "", 0) if marker is END else (yield from reader.before(_BEHIND_KEY, end))
            if key is None or key is END:
                return call.cut(self._rest_of(end))
            reader.pos += key_end
            if marker == KEY_END:
                marker, end = yield from reader.ahead(VALUE)
                reader.pos += end if marker == VALUE else 0
            if not (yield from self._value(call, key.strip())):
                return call.cut(reader.recorded())

    def _rest_of(self, end: int) -> str:
        """The text of a call that cannot be read on; a key without an end is used up."""
        self._reader.pos = len(self._reader.text)
        return self._reader.recorded()

    def _value(self, call: CallSink, key: str) -> Reading:
        """Reads one value and its end tag; False if the text ends inside it."""
        reader = self._reader
        call.begin_value(key)
        while True:
            marker = yield from reader.until(_IN_VALUE, call.write)
            if marker is None:
                return False
            if marker == VALUE_END:
                after, end = yield from reader.ahead(KEY, CALL_END)
                if after == KEY:
                    next_key, _, _ = yield from reader.before(_BEHIND_KEY, end)
                    closed = next_key is not None and next_key is not END and next_key.strip() not in call.keys
                else:
                    closed = after == CALL_END or (after is END and reader.reason == "eos")
            else:
                after, _ = yield from reader.ahead(CALL)
                closed = after == CALL or (after is END and reader.reason == "eos")
            if closed:
                if marker == CALL_END:
                    reader.unread(CALL_END)
                call.end_value()
                return True
            call.write(marker)
