"""Runs single CPU ops as a program would: buffers filled with NaN around the rows, any instruction set and threads."""

import ctypes
from dataclasses import dataclass

import numpy as np

from tandem import native
from tandem.ops.base import Weight
from tandem.ops.program import Buffer, Pool, Program, SegmentArgs, StepArgs
from tandem.ops.state_cpu import CpuState
from tandem.quant import pack_tensor

ISAS = native.ISAS[: native.ISAS.index(native.best_isa()) + 1]
EXACT = 2e-6  # relative RMS error of float32 arithmetic against float64
MAX_ROWS = 600


@dataclass(frozen=True)
class KvSpec:
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None


@dataclass(frozen=True)
class DeltaSpec:
    num_v_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_width: int


def weight(values: np.ndarray, ggml_type: int = 0, name: str = "w") -> Weight:
    values = np.ascontiguousarray(values, np.float32)
    blocks = pack_tensor(values, ggml_type).reshape(*values.shape[:-1], -1)
    return Weight(name, values.shape, ggml_type, blocks)


class Recorded:
    """One op between input buffers that the test fills and output buffers that it reads; memory around is NaN."""

    def __init__(self, library, threads: int, widths: tuple[int, ...], record, max_rows: int = MAX_ROWS):
        self.program = Program(library, max_rows, max_rows)
        self.pool = Pool(library, threads)
        self.inputs = [self.program.buffer(w) for w in widths]
        made = record(self.program, *self.inputs)
        self.outputs = [made] if isinstance(made, Buffer) else list(made)
        # Inputs are written before the first call and outputs read after the last.
        for b in self.inputs:
            b.first_call = 0
        self.program.place(tuple(self.outputs))
        self.program.finish()

    def __call__(self, *arrays, positions=None, tokens=None, segments=None, out_rows=None) -> list[np.ndarray]:
        given = arrays[0] if arrays else tokens if tokens is not None else positions
        rows = len(given)
        self.program.arena[:] = 0xFF  # NaN in float32 and half
        # With more than one call, outputs may lie where earlier results did.
        guards = [self.program.rows(b, MAX_ROWS).view(np.uint8) for b in self.outputs if len(self.program.calls) == 1]
        for guard in guards:
            guard[:] = 0x5A
        for buffer, array in zip(self.inputs, arrays, strict=True):
            self.program.rows(buffer, rows)[:] = array
        positions = np.arange(rows, dtype=np.int32) if positions is None else np.asarray(positions, np.int32)
        tokens = np.zeros(rows, np.int32) if tokens is None else np.asarray(tokens, np.int32)
        out = np.asarray([0] if out_rows is None else out_rows, np.int32)
        segments = (SegmentArgs * len(segments))(*segments) if segments else None
        step = StepArgs(
            rows=rows,
            n_segments=len(segments) if segments else 0,
            n_out=len(out),
            tokens=tokens.ctypes.data,
            positions=positions.ctypes.data,
            out_rows=out.ctypes.data,
            segments=ctypes.addressof(segments) if segments else None,
        )
        if self.program.head_start != 0:
            self.program.run_trunk(self.pool, step)
        if self.program.head_start is not None:
            step.rows = rows = len(out)
            self.program.run_head(self.pool, step)
        for guard in guards:
            assert np.all(guard[rows:] == 0x5A), "wrote beyond the step's rows"
        return [self.program.rows(b, rows).copy() for b in self.outputs]


def rows_of(rng, rows: int, width: int, size: float = 1.0) -> np.ndarray:
    return (rng.standard_normal((rows, width)) * size).astype(np.float32)


def assert_rows_alone_equal(library, widths, record, arrays, **step) -> np.ndarray:
    """Runs all rows at once on 3 threads, and each row alone on 1 and 2 threads; all must be equal to the bit."""
    together = Recorded(library, 3, widths, record)(*arrays, **step)
    for threads in (1, 2):
        alone = Recorded(library, threads, widths, record)
        for row in range(min(8, len(arrays[0]))):
            here = {key: value[row : row + 1] for key, value in step.items()}
            for one, many in zip(alone(*[a[row : row + 1] for a in arrays], **here), together, strict=True):
                assert np.array_equal(one[0], many[row], equal_nan=True), (threads, row)
    return together


class Sequence:
    """A sequence that a stateful op advances, with the reference's view of it."""

    def __init__(self, library, spec, record, widths, threads=2, kv="f16", ctx=2000):
        self.state = CpuState([spec], ctx, kv, MAX_ROWS)
        self.op = Recorded(library, threads, widths, record)
        self.position = 0

    def step(self, *arrays) -> np.ndarray:
        rows = len(arrays[0])
        segment = self.state.segment(0, rows, self.position)
        positions = np.arange(self.position, self.position + rows)
        self.position += rows
        return self.op(*arrays, positions=positions, segments=[segment])[0]
