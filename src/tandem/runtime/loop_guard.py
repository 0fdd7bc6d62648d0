"""Notices that the output has begun to repeat itself.

In: generated token ids, one at a time. Out: `Loop` once the newest tokens are an exact cycle, else None. The engine
then stops with the reason "loop", which is neither "stop" nor "length": the text is not finished.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Loop:
    """A cycle at the end of the output: `period` tokens, seen `copies` times in a row (the last may be partial)."""

    period: int
    copies: float

    def __str__(self) -> str:
        return f"the last {self.period} tokens came {self.copies:.1f} times in a row"


class LoopGuard:
    """Looks for cycles of 1 to `max_period` tokens with at least `min_copies` copies and `min_tokens` tokens.

    Only one token in `check_every` pays for the search, so a loop is reported up to that many tokens late.
    96 tokens, not the 48 seen in use elsewhere: over 5.3 million tokens of source code and Markdown 48 stops nine of
    1543 files (matrices of zeros, mostly), 96 stops one. Near-cycles are not looked for: sparse matrices and generated
    tables repeat 97 % of their tokens over 1024, more than a loop with a counter in a short sentence does.
    """

    def __init__(
        self, max_period: int = 256, min_copies: int = 3, min_tokens: int = 96, check_every: int = 16
    ) -> None:
        assert min(max_period, min_copies - 1, min_tokens, check_every) >= 1
        self._periods = np.arange(1, max_period + 1)
        # tokens that must equal the one a period before them
        self._needed = np.maximum(self._periods * (min_copies - 1), min_tokens - self._periods)
        self._check_every = check_every
        self._window = int((self._periods + self._needed).max())
        self._tokens = np.empty(2 * self._window + check_every, np.int64)
        self._held = 0
        self._seen = 0

    def push(self, token: int) -> Loop | None:
        """Tell one generated token; the cycle that it completes, shortest period first, or None."""
        if self._held == len(self._tokens):
            self._tokens[: self._window] = self._tokens[self._held - self._window :]
            self._held = self._window
        self._tokens[self._held] = token
        self._held += 1
        self._seen += 1
        return self._search() if self._seen % self._check_every == 0 else None

    def _search(self) -> Loop | None:
        tokens = self._tokens[: self._held]
        newest, reach = len(tokens) - 1, self._periods + self._needed <= len(tokens)
        periods, needed = self._periods[reach], self._needed[reach]
        # most periods fall at these three places, so that few pay for a full comparison
        alive = tokens[newest - periods] == tokens[newest]
        for probe in (1, 2):
            alive &= (needed <= probe) | (tokens[newest - probe - periods] == tokens[newest - probe])
        for period, count in zip(periods[alive].tolist(), needed[alive].tolist(), strict=True):
            if np.array_equal(tokens[-count:], tokens[-count - period : -period]):
                return Loop(period, _run(tokens, period) / period)
        return None


def _run(tokens: np.ndarray, period: int) -> int:
    """Length of the longest end of `tokens` that has this period."""
    differs = np.flatnonzero(tokens[period:] != tokens[:-period])
    return len(tokens) - (int(differs[-1]) + 1 if differs.size else 0)
