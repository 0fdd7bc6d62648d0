"""The hot loop: rows of token ids through the recorded program of a model -> logits. CPU only for now.

In: loaded weights, a model file's forward, one sequence's state. Out: float32 logits of the wanted rows.
"""

import ctypes
from collections.abc import Mapping, Sequence
from types import ModuleType

import numpy as np

from tandem.native import Native
from tandem.ops.base import Weight
from tandem.ops.cpu import CpuOps
from tandem.ops.program import Pool, Program, SegmentArgs, StepArgs
from tandem.ops.state_cpu import CpuState

MAX_ROWS = 512  # tokens of one prefill chunk
MAX_OUT = 8  # rows of one run of the head


class Runner:
    """A model recorded for this machine. `record` first, then `allocate`, then `prefill` and `logits`."""

    def __init__(self, native: Native, model: ModuleType, config, weights: Mapping[str, Weight], max_rows: int = MAX_ROWS):
        self.native, self.max_rows = native, max_rows
        self.program = Program(native, max_rows, MAX_OUT)
        self.output = model.forward(CpuOps(self.program), config, weights)
        self.scratch_bytes = self.program.place(keep=(self.output,))
        self.pool: Pool | None = None
        self._rows = 0

    def allocate(self, threads: int) -> None:
        """Takes the memory that scratch_bytes announced, and starts the threads."""
        self.program.finish()
        self.pool = Pool(self.native, threads)

    def run(self, tokens: Sequence[int], start_pos: int, state: CpuState) -> None:
        """Advances one sequence by these tokens (1..max_rows), at positions start_pos onwards."""
        assert self.pool is not None
        ids = np.ascontiguousarray(tokens, np.int32)
        positions = np.arange(start_pos, start_pos + len(ids), dtype=np.int32)
        segment = SegmentArgs(0, len(ids), start_pos, 0, state.layer_state)
        step = StepArgs(len(ids), 1, 0, 0, ids.ctypes.data, positions.ctypes.data, None, ctypes.addressof(segment))
        self.program.run_trunk(self.pool, step)
        self._rows = len(ids)

    def logits(self, rows: Sequence[int]) -> np.ndarray:
        """Logits of those rows of the last run, float32 [len(rows), vocab_size]."""
        wanted = np.ascontiguousarray(rows, np.int32)
        assert len(wanted) and wanted.min() >= 0 and wanted.max() < self._rows
        out = np.empty((len(wanted), self.output.width), np.float32)
        for at in range(0, len(wanted), MAX_OUT):
            part = wanted[at : at + MAX_OUT]
            step = StepArgs(len(part), 0, len(part), 0, None, None, part.ctypes.data, None)
            self.program.run_head(self.pool, step)
            out[at : at + len(part)] = self.program.rows(self.output, len(part))
        return out

    def close(self) -> None:
        """Joins the threads and frees the arena; safe to call twice."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None
        self.program.arena = None
