"""The hot loop: rows of token ids of one or several sequences through a recorded program -> logits and hidden rows.

In: a recorded forward or drafting pass, the states of the sequences. CPU only for now.
"""

from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from tandem.errors import EngineError
from tandem.native import Native
from tandem.ops.base import Weight
from tandem.ops.cpu import CpuOps
from tandem.ops.program import Buffer, Pool, Program, SegmentArgs, StepArgs
from tandem.ops.state_cpu import CpuState

MAX_ROWS = 512  # tokens of one prefill chunk
MAX_OUT = 8  # rows of one run of the head
EXACT_ROWS = 8  # up to this many rows of a step, each has the same bits as if it were alone


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of one sequence in a step, the first at position start_pos.

    tentative: recurrent state stays as it is until the state's `accept` says how many of the rows count.
    """

    state: CpuState
    tokens: Sequence[int]
    start_pos: int
    tentative: bool = False


class Runner:
    """A pass recorded for this machine: `allocate` first, then `run`, `logits` and `hidden`.

    record: called once with the ops that record, returns the logits rows.
    """

    def __init__(self, native: Native, record: Callable[[CpuOps], Buffer], max_rows: int = MAX_ROWS):
        self.native, self.max_rows = native, max_rows
        self.program = Program(native, max_rows, MAX_OUT)
        self.output = record(CpuOps(self.program))
        self.scratch_bytes = self.program.place(keep=(self.output,))
        self.pool: Pool | None = None
        self._rows = 0
        self._tokens, self._positions = (np.zeros(max_rows, np.int32) for _ in range(2))
        self._counting = np.arange(max_rows, dtype=np.int32)
        self._out_rows = np.zeros(MAX_OUT, np.int32)
        self._addresses = tuple(a.ctypes.data for a in (self._tokens, self._positions, self._out_rows))

    @classmethod
    def trunk(cls, native: Native, model: ModuleType, config, weights: Mapping[str, Weight]) -> "Runner":
        """The forward pass of a model file."""
        return cls(native, lambda ops: model.forward(ops, config, weights))

    def allocate(self, pool: Pool) -> None:
        """Takes the memory that scratch_bytes announced; the pool's threads will run the steps."""
        self.program.finish()
        self.pool = pool

    def run(self, parts: Sequence[Part], hidden: np.ndarray | None = None) -> None:
        """Advances each sequence by its tokens, 1..max_rows in all.

        hidden: float32 [rows, width], for passes that read hidden states.
        """
        self.program.run_trunk(self.pool, self._step(parts, hidden))

    def run_to_logits(self, parts: Sequence[Part], hidden: np.ndarray | None = None) -> np.ndarray:
        """`run` of at most MAX_OUT rows in all, and the logits of every row, a view that the next call overwrites."""
        step = self._step(parts, hidden)
        self._out_rows[: step.rows] = self._counting[: step.rows]
        step.n_out, step.out_rows = step.rows, self._addresses[2]
        self.program.run_all(self.pool, step)
        return self.program.rows(self.output, step.rows)

    def _step(self, parts: Sequence[Part], hidden: np.ndarray | None) -> StepArgs:
        if self.pool is None:
            raise EngineError("the engine is closed: load it again")
        segments = (SegmentArgs * len(parts))()
        rows = 0
        for at, part in enumerate(parts):
            end = rows + len(part.tokens)
            self._tokens[rows:end] = part.tokens
            np.add(self._counting[: end - rows], part.start_pos, out=self._positions[rows:end])
            segments[at] = part.state.segment(rows, end - rows, part.start_pos, part.tentative)
            rows = end
        if hidden is not None:
            self.program.rows(self.program.input, rows)[:] = hidden
        tokens, positions, _ = self._addresses
        self._rows, self._segments = rows, segments
        return StepArgs(rows, len(parts), 0, 0, tokens, positions, None, addressof(segments))

    def run_hidden(self, hidden: np.ndarray) -> None:
        """A pass over hidden rows alone, float32 [rows, width]: no tokens, no sequences."""
        rows = len(hidden)
        self.program.rows(self.program.input, rows)[:] = hidden
        self.program.run_trunk(self.pool, StepArgs(rows, 0, 0, 0, None, None, None, None))
        self._rows = rows

    def logits(self, rows: Sequence[int]) -> np.ndarray:
        """Logits of those rows of the last run, float32 [len(rows), vocab_size]; up to MAX_OUT rows are a view that
        the next call overwrites."""
        assert len(rows) and min(rows) >= 0 and max(rows) < self._rows
        if len(rows) <= MAX_OUT:
            return self._head(rows)
        parts = (rows[at : at + MAX_OUT] for at in range(0, len(rows), MAX_OUT))
        return np.concatenate([self._head(part).copy() for part in parts])

    def hidden(self) -> np.ndarray:
        """Hidden states after the last norm of all rows of the last run, float32 [rows, hidden_size]; a view that the
        next run overwrites."""
        return self.program.rows(self.program.hidden, self._rows)

    def close(self) -> None:
        """Frees the arena; safe to call twice."""
        self.pool = None
        self.program.release()

    def _head(self, rows: Sequence[int]) -> np.ndarray:
        n = len(rows)
        self._out_rows[:n] = rows
        self.program.run_head(self.pool, StepArgs(n, 0, n, 0, None, None, self._addresses[2], None))
        return self.program.rows(self.output, n)
