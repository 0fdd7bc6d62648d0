"""Records the mixture of experts into a program of the CPU library: struct and record function of `experts.cpp`.

In: recorded rows and their routing. Out: float32 rows.
"""

import ctypes

import numpy as np

from tandem.errors import ShapeError
from tandem.ops.base import Weight
from tandem.ops.matmul_cpu import WeightArgs, act_bytes, activation_id, weight_args
from tandem.ops.program import Buffer, Program


class ExpertsArgs(ctypes.Structure):
    """Mirror of `ExpertsArgs` in experts.cpp."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("inner", ctypes.c_void_p),
        ("acts", ctypes.c_void_p),
        ("inner_acts", ctypes.c_void_p),
        ("gate", WeightArgs),
        ("up", WeightArgs),
        ("down", WeightArgs),
        ("num_experts", ctypes.c_int64),
        ("k", ctypes.c_int32),
        ("activation", ctypes.c_int32),
    ]


def record_experts(
    program: Program, x: Buffer, ids: Buffer, weights: Buffer, gate: Weight, up: Weight, down: Weight, activation: str
) -> Buffer:
    """sum over a, in order, of weights[:, a] * down_e(activation(gate_e x) * up_e x) with e = ids[:, a] -> [T, hidden].

    ids int32 [T, k] in 0..experts-1, distinct within a row; weights float32 [T, k]; gate, up [experts, size, K],
    down [experts, hidden, size]. Raises ShapeError.
    """
    experts, size, cols = gate.shape
    if up.shape != gate.shape or down.shape[0] != experts or down.shape[2] != size or cols != x.width:
        raise ShapeError(
            f"{gate.name} {gate.shape}, {up.name} {up.shape} and {down.name} {down.shape} "
            f"are not one set of experts for rows of {x.width} values"
        )
    if ids.width != weights.width or ids.width > experts:
        raise ShapeError(f"{ids.width} ids and {weights.width} weights per row for {experts} experts")
    k = ids.width
    args = ExpertsArgs(num_experts=experts, k=k, activation=activation_id(activation))
    args.gate, args.up, args.down = (weight_args(program, weight) for weight in (gate, up, down))
    out = program.buffer(down.shape[1])
    program.call(
        "experts",
        args,
        x=x,
        ids=ids,
        weights=weights,
        out=out,
        inner=program.buffer(k * size if down.ggml_type in (0, 1, 30) else 0),
        acts=program.buffer(act_bytes(program.native, cols), np.uint8),
        inner_acts=program.buffer(k * act_bytes(program.native, size), np.uint8),
    )
    return out
