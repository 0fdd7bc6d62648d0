"""An answer, token by token, to deltas of reasoning, text and tool calls.

In: the text of each token, or the name of a control token. Out: deltas, the same however the text is cut. Linear time;
no input raises, and none is lost: what cannot be read as a call comes back as content with a flag.
"""

import itertools
from collections.abc import Callable, Sequence

from tandem.errors import RequestError, nearest
from tandem.text.tool_schema import read_tools
from tandem.text.tools.deltas import Delta
from tandem.text.tools.gemma import Gemma
from tandem.text.tools.glm import Glm
from tandem.text.tools.harmony import Harmony
from tandem.text.tools.hermes import Hermes
from tandem.text.tools.llama3 import Llama3
from tandem.text.tools.qwen_xml import QwenXml
from tandem.text.tools.reader import Reader, Sink
from tandem.text.tools.tagged import Tagged

FORMATS = {
    "qwen-xml": QwenXml,
    "hermes": Hermes,
    "gemma": Gemma,
    "llama3": Llama3,
    "glm": Glm,
    "harmony": Harmony,
    "none": Tagged,
}


class AnswerParser:
    """Reads one answer. `push` for each piece, `finish` once at the end.

    Calls are looked for only if tools were offered: without them a call's text is content.
    """

    def __init__(
        self,
        format: str,
        tools: Sequence[object] | None,
        prompt_end: str,
        new_id: Callable[[], str] | None = None,
    ):
        """format: one of FORMATS, see `format_of`; tools: as the request has them (see `read_tools`), None or [] if the
        model may not call any; prompt_end: as `reasoning.prompt_end` says of the prompt; new_id: makes the id of each
        call, None: call_0, call_1, ... Raises RequestError for an unknown format and for tools that cannot be read.
        """
        if format not in FORMATS:
            raise RequestError(f"tool format: unknown {format!r}{nearest(format, FORMATS)}")
        if new_id is None:
            counter = itertools.count()
            new_id = lambda: f"call_{next(counter)}"  # noqa: E731
        self._reader, self._sink = Reader(), Sink(new_id)
        known = {} if format == "none" else read_tools(tools)
        self._reading = FORMATS[format](self._reader, self._sink, known, prompt_end)
        self._markers = self._reading.controls
        self._run = self._reading.run()
        self._finished = False
        next(self._run, None)

    def push(self, text: str, control: str | None = None) -> list[Delta]:
        """The deltas that became certain with one piece. control: the name of a control token, which adds text only if
        the format gives it a meaning."""
        assert not self._finished, "push after finish"
        if control is not None:
            text += self._markers.get(control, "")
        if not text:
            return []
        self._reader.feed(text)
        next(self._run, None)
        return self._sink.taken()

    def finish(self, reason: str) -> list[Delta]:
        """The deltas that were held back. reason: why the answer ended: only after "eos" is a call without its end tags
        taken for complete; after any other a call that is not closed is partial."""
        if self._finished:
            return []
        self._finished = True
        self._reader.end(reason)
        next(self._run, None)
        return self._sink.taken()
