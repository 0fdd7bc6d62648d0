"""One timeline of tokens and the state that belongs to it. Callers hand over the whole token list; what is still valid
of the state is reused, the rest is computed.

Attention caches can be cut at any position, recurrent state only restored from a checkpoint: those are taken at the
borders the caller names and every CHECKPOINT_EVERY tokens, and capped in number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.errors import RequestError
from tandem.ops.state_cpu import CpuState
from tandem.runtime.step import Runner

CHECKPOINT_EVERY = 4096


@dataclass(frozen=True)
class Checkpoint:
    """Recurrent state after the first `length` tokens of the session's list."""

    length: int
    recurrent: np.ndarray


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    same = np.asarray(a[:n]) == np.asarray(b[:n])
    return n if same.all() else int(np.argmin(same))


class Session:
    """State of one sequence. `tokens` are exactly those that the state has seen."""

    def __init__(self, runner: Runner, specs: Sequence, ctx: int, kv: str, max_checkpoints: int):
        self.runner, self.ctx, self.max_checkpoints = runner, ctx, max_checkpoints
        self.state = CpuState(specs, ctx, kv, runner.max_rows)
        self.recurrent = self.state.recurrent
        self.tokens: list[int] = []
        self.checkpoints: list[Checkpoint] = []
        self._interrupted = False

    @property
    def vocab_size(self) -> int:
        """Width of the logits; a file may have more rows in its head than tokens in its vocabulary."""
        return self.runner.output.width

    def sync(
        self,
        tokens: Sequence[int],
        borders: Sequence[int] = (),
        on_progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> tuple[np.ndarray | None, int]:
        """Brings the state to exactly these tokens; returns (logits float32 [vocab] after the last, tokens reused).

        borders: lengths worth a checkpoint, such as ends of messages. on_progress(done, total) after each chunk.
        Cancelling between chunks returns (None, reused) and leaves a valid, shorter timeline.
        Raises RequestError if the tokens do not fit the context or there are none.
        """
        if not len(tokens):
            raise RequestError("the prompt is empty: at least one token is needed")
        if len(tokens) > self.ctx:
            raise RequestError(f"the prompt has {len(tokens)} tokens, the context holds {self.ctx}: shorten it or load with a larger ctx")
        reused = self._rewind(tokens)
        stops = sorted({b for b in borders if reused < b < len(tokens)} | {len(tokens)})
        while len(self.tokens) < len(tokens):
            if cancelled():
                return None, reused
            at = len(self.tokens)
            border = next(stop for stop in stops if stop > at)
            periodic = (at // CHECKPOINT_EVERY + 1) * CHECKPOINT_EVERY
            self._advance(tokens[at : min(border, periodic, at + self.runner.max_rows)])
            if len(self.tokens) in (border, periodic):
                self._checkpoint()
            if on_progress:
                on_progress(len(self.tokens), len(tokens))
        return self.runner.logits([self._last_row])[0], reused

    def append(self, token: int) -> np.ndarray:
        """Advances by one token; returns its logits float32 [vocab]. Raises RequestError when the context is full."""
        if len(self.tokens) >= self.ctx:
            raise RequestError(f"the context of {self.ctx} tokens is full")
        self._advance([token])
        return self.runner.logits([0])[0]

    def all_logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits after every token of a fresh timeline, float32 [T, vocab_size]. Raises RequestError as `sync`."""
        if not 0 < len(tokens) <= self.ctx:
            raise RequestError(f"{len(tokens)} tokens given, 1 to {self.ctx} fit the context")
        self.clear()
        parts = []
        for at in range(0, len(tokens), self.runner.max_rows):
            part = tokens[at : at + self.runner.max_rows]
            self._advance(part)
            parts.append(self.runner.logits(range(len(part))))
        return np.concatenate(parts)

    def clear(self) -> None:
        """Forgets everything; keeps the memory."""
        self.state.reset()
        self.tokens, self.checkpoints = [], []
        self._interrupted = False

    def _advance(self, tokens: Sequence[int]) -> None:
        self._interrupted = True  # an exception in between leaves state and tokens at odds
        self.runner.run(tokens, len(self.tokens), self.state)
        self.tokens.extend(int(t) for t in tokens)
        self._interrupted = False
        self._last_row = len(tokens) - 1

    def _checkpoint(self) -> None:
        if not self.recurrent or any(c.length == len(self.tokens) for c in self.checkpoints):
            return
        if len(self.checkpoints) >= self.max_checkpoints:
            del self.checkpoints[self._least_useful()]
        self.checkpoints.append(Checkpoint(len(self.tokens), self.state.snapshot()))

    def _least_useful(self) -> int:
        """The checkpoint closest to its successor: dropping it costs the fewest recomputed tokens. The last two stay."""
        lengths = [c.length for c in self.checkpoints]
        gaps = [after - before for before, after in zip(lengths, lengths[1:-1], strict=False)]
        return int(np.argmin(gaps)) if gaps else 0

    def _rewind(self, tokens: Sequence[int]) -> int:
        """Cuts the state to the longest reusable prefix of tokens, at least one short of them all; returns its length."""
        if self._interrupted:
            self.clear()
        shared = min(common_prefix(self.tokens, tokens), len(tokens) - 1)
        if shared == len(self.tokens):
            return shared
        if self.recurrent:
            self.checkpoints = [c for c in self.checkpoints if c.length <= shared]
            shared = self.checkpoints[-1].length if self.checkpoints else 0
        if not self.state.can_cut(len(self.tokens), shared):
            shared = 0
        if shared == 0:
            self.clear()
            return 0
        if self.recurrent:
            self.state.restore(self.checkpoints[-1].recurrent)
        del self.tokens[shared:]
        return shared
