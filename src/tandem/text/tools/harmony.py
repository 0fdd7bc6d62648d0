"""Answers of gpt-oss: messages with a channel and perhaps a recipient in their header.

In: text by a `Reader`, control tokens as one private character each, so that text which spells their names is text.
Out: deltas in a `Sink`: the channel `analysis` is reasoning, a recipient makes a call, all else is content.
"""

import re

from tandem.text.tool_schema import Tool
from tandem.text.tools.coerce import dumped
from tandem.text.tools.deltas import Content, Reasoning
from tandem.text.tools.hermes import arguments_in, fitted
from tandem.text.tools.reader import END, Markers, Reader, Reading, Sink

_NAMES = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
# Lone surrogates, which no decoded text contains.
_CHARS = {name: chr(0xD800 + number) for number, name in enumerate(_NAMES)}
_NAME_OF = {ord(char): name for name, char in _CHARS.items()}
_RECIPIENT = r"(?:to=(?P<{}>[^\s<]+))?\s*"
_HEADER = re.compile(
    r"\s*(?:<\|start\|>)?\s*(?:assistant)?\s*"
    + _RECIPIENT.format("first")
    + r"(?:<\|channel\|>\s*(?P<channel>analysis|commentary|final)\s*"
    + _RECIPIENT.format("second")
    + r")?(?:(?:<\|constrain\|>)?\s*(?:json|code|text))?\s*"
)


def _markers(names: tuple[str, ...]) -> dict[bool, Markers]:
    """Markers for a stream that has control tokens (True), and for one that spells them (False)."""
    return {True: Markers(*(_CHARS[name] for name in names)), False: Markers(*names, *(_CHARS[n] for n in names))}


_HEADER_END = _markers(("<|message|>", "<|end|>", "<|call|>", "<|return|>"))
_BODY_END = _markers(("<|end|>", "<|call|>", "<|return|>", "<|start|>"))


class Harmony:
    """Reads one answer; `run` is the generator that does it."""

    controls = _CHARS

    def __init__(self, reader: Reader, sink: Sink, tools: dict[str, Tool], prompt_end: str):
        """tools: the offered functions by name; prompt_end: not used, messages say themselves what they are."""
        self._reader, self._sink, self._tools = reader, sink, tools

    def run(self) -> Reading:
        """Reads to the end of the text."""
        reader, sink = self._reader, self._sink
        while (yield from reader.skip_space()):
            header, marker, end = yield from reader.before(_HEADER_END[False])
            if header is None or (header is END and not self._begins_message()):
                sink.open(Content, strip=True)  # an answer without any message
                yield from self._text(exact=False)
                continue
            if header is END:
                sink.flagged(_plain(reader.text[reader.pos :]), "partial_tool_call")
                reader.pos = len(reader.text)
                return
            reader.record("")
            reader.pos += end
            if _named(marker) == "<|message|>":
                yield from self._message(_plain(header), exact=marker in _CHARS.values())
            else:
                self._keep(reader.recorded())

    def _begins_message(self) -> bool:
        """Whether what is left begins as a header does."""
        rest = _plain(self._reader.text[self._reader.pos :])
        return rest.startswith(("<|", "to=", "assistant"))

    def _keep(self, text: str) -> None:
        """Text between messages: control tokens alone mean nothing."""
        text = text.translate({code: None for code in _NAME_OF})
        if text.strip():
            self._sink.open(Content, strip=False)
            self._sink.write(text)
            self._sink.close(drop_space=False)

    def _message(self, header: str, exact: bool) -> Reading:
        """Reads the body of a message. exact: its markers were control tokens, so text is never one."""
        said = _HEADER.fullmatch(header)
        if said is None:
            self._reader.recorded()
            self._sink.flagged(header, "malformed_tool_call")
            self._sink.open(Content, strip=False)
            return (yield from self._text(exact))
        recipient, channel = said["first"] or said["second"], said["channel"]
        name = recipient.removeprefix("functions.") if recipient else None
        if name is not None and self._tools and (recipient != name or name in self._tools):
            return (yield from self._call(name, exact))
        self._reader.recorded()
        kind = Reasoning if channel == "analysis" else Content
        self._sink.open(kind, strip=False)
        yield from self._text(exact)

    def _text(self, exact: bool) -> Reading:
        """Reads a body as text of the open kind."""
        marker = yield from self._reader.until(_BODY_END[exact], lambda text: self._sink.write(_plain(text)))
        self._sink.close(drop_space=False)
        if marker is not None and _named(marker) == "<|start|>":
            self._reader.unread(marker)

    def _call(self, name: str, exact: bool) -> Reading:
        """Reads a call whose body is JSON; it is being recorded."""
        reader, sink, parts = self._reader, self._sink, []
        marker = yield from reader.until(_BODY_END[exact], parts.append)
        if marker is not None and _named(marker) == "<|start|>":
            reader.unread(marker)
        source = _plain(reader.recorded())
        if marker is None and reader.reason != "eos":
            return sink.flagged(source, "partial_tool_call")
        arguments = arguments_in(_plain("".join(parts)))
        if arguments is None:
            return sink.flagged(source, "malformed_tool_call")
        tool = self._tools.get(name)
        sink.call(name, tool).end_whole(dumped(fitted(arguments, tool)))


def _plain(text: str) -> str:
    """Text with control tokens by their names."""
    return text if text.isascii() else text.translate(_NAME_OF)


def _named(marker: str) -> str:
    return marker.translate(_NAME_OF)
