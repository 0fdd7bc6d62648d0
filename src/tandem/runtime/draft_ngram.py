"""Drafts from the text itself: where the last few tokens stood before, what followed them then may follow again.

Works with any model and costs no pass. In: the tokens of a sequence. Out: a continuation copied from earlier in it.
"""

from collections.abc import Sequence

LENGTHS = (5, 3)  # tokens that must agree, the longest match first
REACH = 1 << 16  # tokens of a prompt that are looked at, from its end


class NgramDraft:
    """The places where each run of LENGTHS tokens last ended."""

    def __init__(self, tokens: Sequence[int]):
        self._tokens: list[int] = []
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in LENGTHS]
        self.extend(tokens[-REACH:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Tells tokens that follow. The last one is indexed when its successor is known."""
        known = self._tokens
        for token in tokens:
            for length, ends in zip(LENGTHS, self._ends, strict=True):
                if len(known) >= length:
                    ends[tuple(known[-length:])] = len(known)
            known.append(int(token))

    def draft(self, count: int) -> list[int]:
        """At most `count` tokens that followed the last ones before; [] if they are new."""
        known = self._tokens
        for length, ends in zip(LENGTHS, self._ends, strict=True):
            at = ends.get(tuple(known[-length:]))
            if at is not None and len(known) >= length:
                return self._continue(at, count)
        return []

    def _continue(self, at: int, count: int) -> list[int]:
        """Tokens from place `at` on; past the end they repeat, as a period that has begun would."""
        known, period = self._tokens, len(self._tokens) - at
        return [known[at + i % period] for i in range(count)]
