"""What formats with <think> and <tool_call> share: reasoning, answer text and where calls begin.

In: text by a `Reader`. Out: deltas in a `Sink`. A subclass reads what stands inside <tool_call>.
"""

from tandem.text.reasoning import CLOSE as THINK_END
from tandem.text.reasoning import OPEN as THINK
from tandem.text.tool_schema import Tool
from tandem.text.tools.deltas import Content, Reasoning
from tandem.text.tools.reader import Markers, Reader, Reading, Sink

CALL, CALL_END = "<tool_call>", "</tool_call>"


class Tagged:
    """Reads one answer; `run` is the generator that does it. Alone it knows reasoning and no calls.

    A format with other names for the tags sets think, think_end, call and call_end. bare: markers that begin a call
    without `call`, each at the start of a line; inline: the same anywhere; controls: what a control token stands for.
    """

    think, think_end, call, call_end = THINK, THINK_END, CALL, CALL_END
    bare: tuple[str, ...] = ()
    inline: tuple[str, ...] = ()
    controls = {name: name for name in (THINK, THINK_END, CALL, CALL_END)}

    def __init__(self, reader: Reader, sink: Sink, tools: dict[str, Tool], prompt_end: str):
        """tools: the offered functions by name; prompt_end: as `reasoning.prompt_end` says."""
        self._reader, self._sink, self._tools, self._prompt_end = reader, sink, tools, prompt_end
        self._open_reasoning = False  # a call came before the tag that ends reasoning
        self._in_reasoning = Markers(self.think_end, self.call) if tools else Markers(self.think_end)
        begins = [self.call, *("\n" + marker for marker in self.bare), *self.inline]
        self._in_content = Markers(*begins)
        self._in_content_after_call = Markers(self.think_end, *begins)

    def run(self) -> Reading:
        """Reads to the end of the text."""
        self._sink.open(Content, strip=self._prompt_end != "none")
        marker, end = yield from self._reader.ahead(self.think, *self.bare)
        if marker == self.think:
            self._reader.pos += end
        if marker == self.think or self._prompt_end == "open":
            yield from self._reasoning()
        elif marker in self.bare and self._tools:
            yield from self._bare_call(marker, "", end)
        while (yield from self._content()):
            pass

    def _reasoning(self) -> Reading:
        """Reads to the end of reasoning, and the call that ends it if one does."""
        reader, sink = self._reader, self._sink
        sink.open(Reasoning, strip=True)
        while True:
            marker = yield from reader.until(self._in_reasoning, sink.write)
            if marker == self.think_end:
                sink.close(drop_space=True)
                return sink.open(Content, strip=True)
            if marker is None:
                return sink.close(drop_space=False)
            if (yield from self._is_call()):
                self._open_reasoning = True
                return (yield from self._call())
            sink.write(marker)

    def _content(self) -> Reading:
        """Reads text and the call behind it; False at the end of the text."""
        reader, sink = self._reader, self._sink
        if not self._tools:
            yield from reader.rest(sink.write)
            sink.close(drop_space=False)
            return False
        markers = self._in_content_after_call if self._open_reasoning else self._in_content
        marker = yield from reader.until(markers, sink.write)
        if marker is None:
            sink.close(drop_space=False)
            return False
        if marker == self.think_end:
            self._open_reasoning = False
        elif marker == self.call:
            yield from self._call()
        else:
            yield from self._bare_call(marker.removeprefix("\n"), marker, 0)
        return True

    def _after_call(self) -> Reading:
        """Uses the end tag of a call, and reasoning that begins right behind it."""
        reader = self._reader
        marker, end = yield from reader.ahead(self.call_end, self.think)
        if marker == self.call_end:
            reader.pos += end
            marker, end = yield from reader.ahead(self.think)
        if marker == self.think:
            reader.pos += end
            yield from self._reasoning()

    def _is_call(self) -> Reading:
        """Whether the <tool_call> just used in reasoning begins a call, or only mentions one. Uses nothing."""
        raise NotImplementedError

    def _call(self) -> Reading:
        """Reads what follows <tool_call>."""
        raise NotImplementedError

    def _bare_call(self, marker: str, used: str, end: int) -> Reading:
        """Reads a call that begins with one of `bare` or `inline`, which ends `end` ahead; used: its used text."""
        raise NotImplementedError
