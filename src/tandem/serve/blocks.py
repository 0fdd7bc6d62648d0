"""Answers as a row of blocks, one after the other: thoughts, text, calls. Two APIs write them so.

In: deltas. Out: calls of `opened`, `more` and `closed` of a subclass, which return bytes of events.
"""

from dataclasses import dataclass, field
from typing import Literal

from tandem.serve.answer import Written, new_id
from tandem.text.tools.deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart

BlockKind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """One block. text: of thoughts, answer, or arguments as JSON; call_id, name: of a call."""

    kind: BlockKind
    index: int
    id: str
    call_id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)
    complete: bool = True

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.parts)


class BlockWriter:
    """Keeps the row of blocks, the last of which may be open. prefixes: of the ids of each kind."""

    prefixes: dict[str, str] = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}

    def __init__(self):
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def write(self, update: Written) -> bytes:
        """Events of some deltas."""
        return b"".join(self._delta(delta) for delta in update.deltas)

    def finish(self) -> bytes:
        """Events that close what is open; an answer without any block gets an empty text."""
        opened = b"" if self.blocks else self._begin("text")
        return opened + self._end()

    def opened(self, block: Block) -> bytes:
        """Events at the start of a block."""
        raise NotImplementedError

    def more(self, block: Block, text: str) -> bytes:
        """Events of more of a block."""
        raise NotImplementedError

    def closed(self, block: Block) -> bytes:
        """Events at the end of a block."""
        raise NotImplementedError

    def _delta(self, delta: Delta) -> bytes:
        match delta:
            case Content(text):
                return self._text("text", text)
            case Reasoning(text):
                return self._text("reasoning", text)
            case ToolCallStart(_, id, name):
                return self._begin("call", id, name)
            case ToolCallArguments(_, fragment):
                return self._add(fragment)
            case ToolCallEnd(_, _, complete):
                assert self._open is not None
                self._open.complete = complete
                return self._end()

    def _text(self, kind: BlockKind, text: str) -> bytes:
        begun = b"" if self._open is not None and self._open.kind == kind else self._begin(kind)
        return begun + self._add(text)

    def _begin(self, kind: BlockKind, call_id: str = "", name: str = "") -> bytes:
        ended = self._end()
        self._open = Block(kind, len(self.blocks), new_id(self.prefixes[kind]), call_id, name)
        self.blocks.append(self._open)
        return ended + self.opened(self._open)

    def _add(self, text: str) -> bytes:
        assert self._open is not None
        self._open.parts.append(text)
        return self.more(self._open, text)

    def _end(self) -> bytes:
        block, self._open = self._open, None
        return b"" if block is None else self.closed(block)
