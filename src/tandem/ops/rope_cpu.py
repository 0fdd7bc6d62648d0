"""Records rotary position embedding: one table of turns for each kind of rope, then one rotation per use."""

import ctypes

import numpy as np

from tandem.ops.base import Rope
from tandem.ops.program import Buffer, Program


class RopeTableArgs(ctypes.Structure):
    """Mirror of RopeTableArgs in rope.cpp."""

    _fields_ = [
        ("inv_freq", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("pairs", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
        ("magnitude", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    ]


class RopeArgs(ctypes.Structure):
    """Mirror of RopeArgs in rope.cpp."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("width", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("pairs", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
    ]


def rope_key(rope: Rope) -> tuple:
    """Equal for ropes that turn alike: layers share one table."""
    return np.asarray(rope.inv_freq, np.float32).tobytes(), rope.interleaved, rope.magnitude


def record_rope_table(program: Program, rope: Rope) -> Buffer:
    """Cosines and sines of the step's positions, [T, 2 or 4 * pairs] as rope.cpp lays them out."""
    inv_freq = np.ascontiguousarray(rope.inv_freq, np.float32)
    table = program.buffer((4 if rope.interleaved else 2) * len(inv_freq))
    args = RopeTableArgs(
        inv_freq=program.address(inv_freq), pairs=len(inv_freq), interleaved=rope.interleaved, magnitude=rope.magnitude
    )
    program.call("rope_table", args, table=table)
    return table


def record_rope(
    program: Program, x: Buffer, head_dim: int, rope: Rope, table: Buffer, out: Buffer | None = None
) -> Buffer:
    """`Ops.rope`, by the table of `record_rope_table` for the same rope, into `out` if given."""
    out = out or program.buffer(x.width)
    args = RopeArgs(width=x.width, head_dim=head_dim, pairs=len(rope.inv_freq), interleaved=rope.interleaved)
    program.call("rope", args, x=x, table=table, out=out)
    return out
