"""Calls of Qwen3.5, 3.6 and 3-Coder: <tool_call> around <function=NAME> around <parameter=KEY> around raw values.

In: text by a `Reader`. Out: deltas in a `Sink`. Values are raw, so text that looks like the end of one can stand in it.
What ends a value is decided by what follows, and of two possible readings the one is taken that the chat template would
have written: `</parameter>` ends a value only before a parameter that the call does not have yet, before `</function>`
with `</tool_call>` behind it, or at the end of a finished answer. `</think>` or a call ends reasoning.
"""

from tandem.text.tools.coerce import parsed
from tandem.text.tools.hermes import read_json_calls
from tandem.text.tools.reader import END, CallSink, Markers, Reading
from tandem.text.tools.tagged import CALL, CALL_END, Tagged

FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
_IN_VALUE = Markers("\n" + PARAMETER_END, PARAMETER_END, "\n" + FUNCTION_END)


class QwenXml(Tagged):
    """Reads one answer; `run` is the generator that does it."""

    bare = (FUNCTION,)

    def _is_call(self) -> Reading:
        marker, end = yield from self._reader.ahead(FUNCTION, "{")
        if marker != FUNCTION:
            return marker == "{"
        name, _ = yield from self._reader.name(">", end)
        return name in self._tools

    def _call(self) -> Reading:
        reader, sink = self._reader, self._sink
        marker, end = yield from reader.ahead(FUNCTION, "{", "[")
        if marker in ("{", "["):
            if (yield from read_json_calls(reader, sink, self._tools, CALL)):
                yield from self._after_call()
            return
        name, name_end = (yield from reader.name(">", end)) if marker == FUNCTION else (marker, 0)
        if name is None or name is END:
            return sink.flagged(CALL, "partial_tool_call" if name is END else "malformed_tool_call")
        yield from self._function(name, name_end, CALL)
        yield from self._after_call()

    def _bare_call(self, marker: str, used: str, end: int) -> Reading:
        """A bare function is a call if it is offered and its body begins behind it."""
        name, name_end = yield from self._reader.name(">", end)
        if name in self._tools:
            body, _ = yield from self._reader.ahead(PARAMETER, FUNCTION_END, offset=name_end)
            if body is not None and body is not END:
                yield from self._function(name, name_end, used)
                return (yield from self._after_call())
        self._sink.write(used)

    def _function(self, name: str, name_end: int, opening: str) -> Reading:
        """Reads the body of a function whose name ends `name_end` ahead, to </function> or what stands for it."""
        reader, sink = self._reader, self._sink
        reader.record(opening)
        marker, end = yield from reader.ahead(PARAMETER, FUNCTION_END, CALL_END, "{", offset=name_end)
        if marker is None or marker is END:
            reader.pos += name_end
            return sink.flagged(reader.recorded(), "partial_tool_call" if marker is END else "malformed_tool_call")
        if marker == "{":
            return (yield from self._json_body(name, name_end))
        key = key_end = None
        if marker == PARAMETER:
            key, key_end = yield from reader.name(">", end)
            if key is None or key is END:
                reader.pos += name_end
                return sink.flagged(reader.recorded(), "partial_tool_call" if key is END else "malformed_tool_call")
        call = sink.call(name, self._tools.get(name))
        while key is not None:
            reader.pos += key_end
            if not (yield from self._value(call, key, bare=opening != CALL)):
                return call.cut(reader.recorded())
            marker, end = yield from reader.ahead(PARAMETER, FUNCTION_END, CALL_END)
            key, key_end = (yield from reader.name(">", end)) if marker == PARAMETER else (None, 0)
        if marker == FUNCTION_END:
            reader.pos += end
        reader.recorded()
        return call.end()

    def _value(self, call: CallSink, key: str, bare: bool) -> Reading:
        """Reads one value and its end tag; False if the text ends inside it."""
        reader = self._reader
        yield from reader.skip_if("\n")
        call.begin_value(key)
        while True:
            marker = yield from reader.until(_IN_VALUE, call.write)
            if marker is None:
                return False
            if marker == _IN_VALUE.names[2]:
                if (yield from self._ends_without_tag(len(marker))):
                    reader.unread(FUNCTION_END)
                    break
            elif (yield from self._ends(call, bare)):
                break
            call.write(marker)
        call.end_value()
        return True

    def _ends(self, call: CallSink, bare: bool) -> Reading:
        """Whether the </parameter> just used ends the value, by what follows."""
        reader = self._reader
        marker, end = yield from reader.ahead(PARAMETER, FUNCTION_END, CALL_END)
        if marker == PARAMETER:
            key, _ = yield from reader.name(">", end)
            return key is not None and key is not END and key not in call.keys
        if marker == FUNCTION_END:
            if bare:
                return True
            after, _ = yield from reader.ahead(CALL_END, CALL, FUNCTION, offset=end)
            return after is not None and (after is not END or reader.reason == "eos")
        if marker == CALL_END:
            after, _ = yield from reader.ahead(CALL, offset=end)
            return after == CALL or (after is END and reader.reason == "eos")
        return marker is END and reader.reason == "eos"

    def _ends_without_tag(self, length: int) -> Reading:
        """Whether the </function> just used ends a value whose own end tag is missing: only the end of the call and
        then the next call or the end of a finished answer tell."""
        reader = self._reader
        marker, end = yield from reader.ahead(CALL_END)
        if marker != CALL_END:
            return False
        after, _ = yield from reader.ahead(CALL, offset=end)
        return after == CALL or (after is END and reader.reason == "eos")

    def _json_body(self, name: str, name_end: int) -> Reading:
        """Reads a function whose parameters are one JSON object; it is being recorded."""
        reader, sink = self._reader, self._sink
        reader.pos += name_end
        yield from reader.skip_space()
        parts: list[str] = []
        missing = yield from reader.json(parts.append)
        text = "".join(parts)
        if missing or not isinstance(parsed(text), dict):
            cut = bool(missing) and reader.ended
            return sink.flagged(reader.recorded(), "partial_tool_call" if cut else "malformed_tool_call")
        reader.recorded()
        sink.call(name, self._tools.get(name)).end_whole(text)
        marker, end = yield from reader.ahead(FUNCTION_END)
        if marker == FUNCTION_END:
            reader.pos += end
