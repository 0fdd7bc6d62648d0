"""A limit on how much a model may reason, and two constraints as one.

In: every token of an answer. Out: what must come next (the protocol `Constraint` of requests): when the budget is used
up, a closing message and the marker that ends reasoning.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tandem.errors import RequestError
from tandem.text.tokenizer import Tokenizer

MESSAGE = "\n\nThe budget for thinking is used up: I answer now.\n"
MAX_EXTRA_TOKENS = 4  # how long to wait for the end of a character that the budget would cut


class _Constraint(Protocol):
    def allowed(self) -> np.ndarray | None: ...
    def forced(self) -> Sequence[int]: ...
    def accept(self, token: int) -> None: ...


@dataclass(frozen=True)
class ReasoningMarkers:
    """How a format marks reasoning. opens: text that begins it; closes: pattern of what ends it, in the last bytes of
    the answer; closing: text that ends it, control tokens by name."""

    opens: str
    closes: re.Pattern[bytes]
    closing: str


# A call ends reasoning as the closing tag does, see `tools.tagged`; its bare mention does not.
_TAGS = ReasoningMarkers("<think>", re.compile(rb"</think>|<tool_call>\s{0,8}(?:<function=|\{)"), "</think>\n\n")
MARKERS = {
    "gemma": ReasoningMarkers("<|channel>thought", re.compile(rb"<channel\|>|<\|tool_call>"), "<channel|>"),
    "harmony": ReasoningMarkers(
        "<|channel|>analysis<|message|>",
        re.compile(rb"<\|end\|>|<\|return\|>|<\|call\|>"),
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
}
_TAIL_BYTES = 64


class ReasoningBudget:
    """Lets `limit` tokens of reasoning pass, then forces `closing_ids`. One object per answer.

    Several spans of reasoning in one answer share the budget; with 0 each is closed where it opens.
    """

    def __init__(
        self,
        limit: int,
        closing_ids: Sequence[int],
        token_bytes: Callable[[int], bytes],
        inside: bool,
        markers: ReasoningMarkers = _TAGS,
    ):
        """limit: tokens; closing_ids: what ends reasoning, with any message in front of the marker; token_bytes: the
        bytes of a token, of a control token its name; inside: the prompt already opened reasoning.
        Raises RequestError for a negative limit."""
        if limit < 0:
            raise RequestError(f"reasoning budget: found {limit}, expected 0 or more tokens")
        self._left, self._closing, self._bytes = limit, tuple(closing_ids), token_bytes
        self._inside, self._markers, self._opens = inside, markers, markers.opens.encode()
        self._tail, self._forced, self._extra = b"", (), MAX_EXTRA_TOKENS
        self.closed = False  # whether the budget ended reasoning
        self._spend(0)

    def allowed(self) -> np.ndarray | None:
        """None: the budget restricts by `forced` alone."""
        return None

    def forced(self) -> Sequence[int]:
        """What is left of the closing message and marker, () while the budget lasts."""
        return self._forced

    def accept(self, token: int) -> None:
        """Counts one token."""
        if self._forced:
            assert token == self._forced[0], f"token {token} where {self._forced[0]} was forced"
            self._forced = self._forced[1:]
            if not self._forced:
                self._inside, self._tail = False, b""
            return
        self._tail = (self._tail + self._bytes(token))[-_TAIL_BYTES:]
        if not self._inside:
            if self._opens in self._tail:
                self._inside, self._tail = True, b""
                self._spend(0)
        elif self._markers.closes.search(self._tail):
            self._inside, self._tail = False, b""
        else:
            self._spend(1)

    def _spend(self, tokens: int) -> None:
        self._left -= tokens
        if not self._inside or self._left > 0:
            return
        if _open_character(self._tail) and self._extra:
            self._extra -= 1
            return
        self._forced, self.closed = self._closing, True


class Both:
    """Two constraints as one: what both allow, and what the first of them that forces anything forces."""

    def __init__(self, first: _Constraint, second: _Constraint):
        self._parts = (first, second)

    def allowed(self) -> np.ndarray | None:
        """Bits that both have. Raises RequestError if there are none."""
        masks = [mask for part in self._parts if (mask := part.allowed()) is not None]
        if len(masks) < 2:
            return masks[0] if masks else None
        mask = masks[0] & masks[1]
        if not mask.any():
            raise RequestError("constraint: no token satisfies both constraints of this request; drop one of them")
        return mask

    def forced(self) -> Sequence[int]:
        """The tokens that the first forces, else those of the second."""
        return self._parts[0].forced() or self._parts[1].forced()

    def accept(self, token: int) -> None:
        """Tells both."""
        for part in self._parts:
            part.accept(token)


def reasoning_budget(
    tokenizer: Tokenizer, limit: int, prompt_end: str, format: str = "none", message: str = MESSAGE
) -> Callable[[], ReasoningBudget]:
    """A factory of budgets for one request. prompt_end: as `reasoning.prompt_end` says; format: as `tools.format_of`
    says; message: what the model is made to think last. Raises RequestError for a negative limit."""
    markers = MARKERS.get(format, _TAGS)
    closing = tokenizer.encode(message if limit else "") + tokenizer.encode(markers.closing, parse_special=True)
    inside = prompt_end == "open"

    def make() -> ReasoningBudget:
        return ReasoningBudget(limit, closing, lambda token: tokenizer.token_bytes(token, True), inside, markers)

    make()
    return make


def _open_character(data: bytes) -> bool:
    """Whether the bytes end inside a character of UTF-8."""
    for length in range(1, min(4, len(data)) + 1):
        byte = data[-length]
        if byte & 0xC0 != 0x80:
            return byte >= 0xC0 and length < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False
