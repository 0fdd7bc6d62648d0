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

    bare: markers that begin a call without <tool_call>, each at the start of a line.
    """

    bare: tuple[str, ...] = ()

    def __init__(self, reader: Reader, sink: Sink, tools: dict[str, Tool], prompt_end: str):
        """tools: the offered functions by name; prompt_end: as `reasoning.prompt_end` says."""
        self._reader, self._sink, self._tools, self._prompt_end = reader, sink, tools, prompt_end
        self._open_reasoning = False  # a call came before the tag that ends reasoning
        self._in_reasoning = Markers(THINK_END, CALL) if tools else Markers(THINK_END)
        lines = ["\n" + marker for marker in self.bare]
        self._in_content = Markers(CALL, *lines)
        self._in_content_after_call = Markers(CALL, THINK_END, *lines)

    def run(self) -> Reading:
        """Reads to the end of the text."""
        self._sink.open(Content, strip=self._prompt_end != "none")
        marker, end = yield from self._reader.ahead(THINK, *self.bare)
        if marker == THINK:
            self._reader.pos += end
        if marker == THINK or self._prompt_end == "open":
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
            if marker == THINK_END:
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
        if marker == THINK_END:
            self._open_reasoning = False
        elif marker == CALL:
            yield from self._call()
        else:
            yield from self._bare_call(marker[1:], marker, 0)
        return True

    def _after_call(self) -> Reading:
        """Uses the end tag of a call, and reasoning that begins right behind it."""
        reader = self._reader
        marker, end = yield from reader.ahead(CALL_END, THINK)
        if marker == CALL_END:
            reader.pos += end
            marker, end = yield from reader.ahead(THINK)
        if marker == THINK:
            reader.pos += end
            yield from self._reasoning()

    def _is_call(self) -> Reading:
        """Whether the <tool_call> just used in reasoning begins a call, or only mentions one. Uses nothing."""
        raise NotImplementedError

    def _call(self) -> Reading:
        """Reads what follows <tool_call>."""
        raise NotImplementedError

    def _bare_call(self, marker: str, used: str, end: int) -> Reading:
        """Reads a call that begins with one of `bare`, which ends `end` ahead; used: what was used of it already."""
        raise NotImplementedError
