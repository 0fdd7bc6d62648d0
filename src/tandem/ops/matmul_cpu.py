"""Records matrix products into a program of the CPU library: argument structs and one function per op of `matmul.cpp`.

In: recorded row buffers and weights still in their blocks. Out: float32 row buffers.
"""

import ctypes
import functools

import numpy as np

from tandem.errors import FormatError, SettingError, ShapeError, nearest
from tandem.native import Native
from tandem.ops.base import Weight
from tandem.ops.program import Buffer, Program
from tandem.quant import FORMATS
from tandem.quant.iquant_grids import GRIDS

MAX_WEIGHTS = 8
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class WeightArgs(ctypes.Structure):
    """Mirror of `Weight` in matmul.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("row_stride_bytes", ctypes.c_int64),
        ("expert_stride_bytes", ctypes.c_int64),
        ("scale", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("scale_per_expert", ctypes.c_int32),
    ]


class MatmulArgs(ctypes.Structure):
    """Mirror of `MatmulArgs` in matmul.cpp; out0.. are its `out` array."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("acts", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        *((f"out{i}", ctypes.c_void_p) for i in range(MAX_WEIGHTS)),
        ("weights", WeightArgs * MAX_WEIGHTS),
        ("n_weights", ctypes.c_int32),
        ("activation", ctypes.c_int32),
    ]


@functools.cache
def hand_over_grids(native: Native) -> None:
    """Gives the library its codebooks; without them the IQ and FP4 types read as zeros."""
    native.lib.tandem_set_grid.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64]
    for name in GRIDS:
        table = GRIDS[name]
        refused = native.lib.tandem_set_grid(name.encode(), table.ctypes.data, table.nbytes)
        assert not refused, f"grid {name} of {table.nbytes} bytes"


def act_bytes(native: Native, cols: int) -> int:
    """Bytes of the int8 record of one activation row of cols values."""
    native.lib.tandem_act_bytes.argtypes = [ctypes.c_int64]
    native.lib.tandem_act_bytes.restype = ctypes.c_int64
    return native.lib.tandem_act_bytes(cols)


def weight_args(program: Program, weight: Weight) -> WeightArgs:
    """The weight as the library reads it; the program keeps its memory. Raises FormatError, ShapeError.

    blocks [out, row_bytes] or [experts, out, row_bytes]; rows may be strided, the bytes of a row must be contiguous.
    """
    if weight.ggml_type not in FORMATS or not program.native.lib.tandem_knows_type(weight.ggml_type):
        raise FormatError(f"{weight.name}: tensor type id {weight.ggml_type} has no CPU kernel")
    form = FORMATS[weight.ggml_type]
    rows, cols = weight.shape[-2:]
    row_bytes = cols // form.block_values * form.block_bytes
    blocks = weight.blocks
    expected = (*weight.shape[:-1], row_bytes)
    if cols % form.block_values or blocks.shape != expected or blocks.dtype != np.uint8 or blocks.strides[-1] != 1:
        found = f"{blocks.dtype} {blocks.shape}"
        raise ShapeError(f"{weight.name}: {form.name} {weight.shape} needs uint8 {expected}, has {found}")
    hand_over_grids(program.native)
    args = WeightArgs(data=program.address(blocks), rows=rows, cols=cols, type=weight.ggml_type)
    args.row_stride_bytes = blocks.strides[-2]
    args.expert_stride_bytes = blocks.strides[0] if len(weight.shape) == 3 else 0
    if weight.scale is not None:
        scale = np.ascontiguousarray(weight.scale, np.float32)
        if scale.size not in (1, weight.shape[0] if len(weight.shape) == 3 else 1):
            raise ShapeError(f"{weight.name}: {scale.size} scales for shape {weight.shape}")
        args.scale, args.scale_per_expert = program.address(scale), int(scale.size > 1)
    return args


def record_matmul(program: Program, x: Buffer, weights: list[Weight]) -> list[Buffer]:
    """x [T, K] times each weight [N, K] transposed -> one [T, N] per weight, at most 8 of them."""
    if not 1 <= len(weights) <= MAX_WEIGHTS:
        raise ShapeError(f"{len(weights)} weights for one input, between 1 and {MAX_WEIGHTS} are possible")
    args = _args(program, x, weights)
    outs = [program.buffer(weight.shape[0]) for weight in weights]
    program.call("matmul", args, x=x, acts=_acts(program, x), **{f"out{i}": out for i, out in enumerate(outs)})
    return outs


def record_matmul_add(program: Program, x: Buffer, weight: Weight, residual: Buffer) -> Buffer:
    """residual [T, N] + x [T, K] @ weight.T -> [T, N]."""
    if residual.width != weight.shape[0]:
        raise ShapeError(f"{weight.name}: residual has width {residual.width}, the product {weight.shape[0]}")
    out = program.buffer(weight.shape[0])
    program.call("matmul", _args(program, x, [weight]), x=x, acts=_acts(program, x), residual=residual, out0=out)
    return out


def record_gate_up(program: Program, x: Buffer, gate: Weight, up: Weight, activation: str) -> Buffer:
    """activation(x @ gate.T) * (x @ up.T) -> [T, N]."""
    if gate.shape != up.shape:
        raise ShapeError(f"{gate.name} {gate.shape} and {up.name} {up.shape} must have the same shape")
    args = _args(program, x, [gate, up])
    args.activation = activation_id(activation)
    out = program.buffer(gate.shape[0])
    program.call("gate_up", args, x=x, acts=_acts(program, x), out0=out)
    return out


def activation_id(activation: str) -> int:
    """The library's number of an activation. Raises SettingError for an unknown one."""
    if activation not in ACTIVATIONS:
        raise SettingError(f"activation {activation!r}{nearest(activation, ACTIVATIONS)}")
    return ACTIVATIONS[activation]


def _args(program: Program, x: Buffer, weights: list[Weight]) -> MatmulArgs:
    args = MatmulArgs(n_weights=len(weights))
    for i, weight in enumerate(weights):
        if len(weight.shape) != 2 or weight.shape[1] != x.width:
            raise ShapeError(f"{weight.name}: shape {weight.shape} cannot multiply rows of {x.width} values")
        args.weights[i] = weight_args(program, weight)
    return args


def _acts(program: Program, x: Buffer) -> Buffer:
    return program.buffer(act_bytes(program.native, x.width), np.uint8)
