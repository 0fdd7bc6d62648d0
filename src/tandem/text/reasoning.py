"""Parts a streamed answer into reasoning and answer: pieces of text come in, pieces with their kind go out.

Reasoning stands between <think> and </think> at the start of an answer. Templates may write the opening tag, or an
empty block that forbids reasoning, at the end of the prompt: `prompt_end` tells which.
"""

from dataclasses import dataclass
from typing import Literal

OPEN, CLOSE = "<think>", "</think>"
Kind = Literal["reasoning", "answer"]


@dataclass(frozen=True)
class Piece:
    """Some text of one kind, never empty."""

    kind: Kind
    text: str


def prompt_end(prompt: str) -> Literal["open", "closed", "none"]:
    """Whether a rendered prompt ends inside reasoning, behind reasoning, or leaves the choice to the model."""
    end = prompt.rstrip()
    return "open" if end.endswith(OPEN) else "closed" if end.endswith(CLOSE) else "none"


class ReasoningSplitter:
    """Takes the tags and the blank space beside them out of the stream, however it is cut into pieces.

    Only a tag at the very start opens reasoning, and the first closing tag ends it: later ones are text.
    """

    def __init__(self, end: Literal["open", "closed", "none"] = "none"):
        """end: how the prompt ended, as `prompt_end` says."""
        self._state = {"open": "reasoning", "closed": "answer", "none": "start"}[end]
        self._held = ""
        self._skip_space = True

    def push(self, text: str) -> list[Piece]:
        """The pieces that became certain with this text."""
        self._held += text
        pieces: list[Piece] = []
        if self._state == "start":
            self._start()
        if self._state == "reasoning":
            before, tag, after = self._held.partition(CLOSE)
            if tag:
                self._emit(pieces, "reasoning", before.rstrip())
                self._state, self._held, self._skip_space = "answer", after, True
            else:
                # the blank space before a closing tag goes with it
                keep = len(before[: len(before) - _overlap(before, CLOSE)].rstrip())
                self._held = before[keep:]
                self._emit(pieces, "reasoning", before[:keep])
        if self._state == "answer":
            self._held, ready = "", self._held
            self._emit(pieces, "answer", ready)
        return pieces

    def flush(self) -> list[Piece]:
        """What was held back when the stream ends."""
        pieces: list[Piece] = []
        kind: Kind = "reasoning" if self._state == "reasoning" else "answer"
        self._held, rest = "", self._held
        self._emit(pieces, kind, rest)
        return pieces

    def _start(self) -> None:
        begin = self._held.lstrip()
        if begin.startswith(OPEN):
            self._state, self._held = "reasoning", begin.removeprefix(OPEN)
        elif not OPEN.startswith(begin):
            self._state, self._skip_space = "answer", False

    def _emit(self, pieces: list[Piece], kind: Kind, text: str) -> None:
        if self._skip_space:
            text = text.lstrip()
        if text:
            self._skip_space = False
            pieces.append(Piece(kind, text))


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of text that begins the tag."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
