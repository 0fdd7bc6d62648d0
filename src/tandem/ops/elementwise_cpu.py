"""Records the ops that move or combine values one by one: the argument structs of elementwise.cpp."""

import ctypes

import numpy as np

from tandem.errors import ShapeError
from tandem.ops.base import Weight
from tandem.ops.matmul_cpu import weight_args
from tandem.ops.program import Buffer, Program
from tandem.ops.weights_cpu import float_address, product_scale


class EmbedArgs(ctypes.Structure):
    """Mirror of EmbedArgs in elementwise.cpp."""

    _fields_ = [
        ("table", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("width", ctypes.c_int32),
        ("ggml_type", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    ]


class AddArgs(ctypes.Structure):
    """Mirror of AddArgs in elementwise.cpp."""

    _fields_ = [("x", ctypes.c_void_p), ("y", ctypes.c_void_p), ("out", ctypes.c_void_p), ("width", ctypes.c_int64)]


class ConcatArgs(ctypes.Structure):
    """Mirror of ConcatArgs in elementwise.cpp."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_width", ctypes.c_int64),
        ("y_width", ctypes.c_int64),
    ]


class ScaleArgs(ctypes.Structure):
    """Mirror of ScaleArgs in elementwise.cpp."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("factor", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    ]


class SoftcapArgs(ctypes.Structure):
    """Mirror of SoftcapArgs in elementwise.cpp."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("cap", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    ]


class SigmoidGateArgs(ctypes.Structure):
    """Mirror of SigmoidGateArgs in elementwise.cpp."""

    _fields_ = [("x", ctypes.c_void_p), ("gate", ctypes.c_void_p), ("out", ctypes.c_void_p), ("width", ctypes.c_int64)]


class SplitGateArgs(ctypes.Structure):
    """Mirror of SplitGateArgs in elementwise.cpp."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("gates", ctypes.c_void_p),
        ("heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
    ]


class AddGatedArgs(ctypes.Structure):
    """Mirror of AddGatedArgs in elementwise.cpp."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("gate_input", ctypes.c_void_p),
        ("gate_weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("width", ctypes.c_int32),
        ("gate_width", ctypes.c_int32),
        ("gate_scale", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    ]


class OutputRowsArgs(ctypes.Structure):
    """Mirror of OutputRowsArgs in elementwise.cpp."""

    _fields_ = [("x", ctypes.c_void_p), ("out", ctypes.c_void_p), ("width", ctypes.c_int64)]


def record_embed(program: Program, table: Weight, scale: float = 1.0) -> Buffer:
    """`Ops.embed`. Raises FormatError, ShapeError if the table is not a matrix the library can read."""
    weight = weight_args(program, table)
    out = program.buffer(table.shape[1])
    args = EmbedArgs(
        table=weight.data,
        row_bytes=weight.row_stride_bytes,
        width=table.shape[1],
        ggml_type=table.ggml_type,
        scale=scale * product_scale(table),
    )
    program.call("embed", args, out=out)
    return out


def record_add(program: Program, x: Buffer, y: Buffer) -> Buffer:
    """`Ops.add`."""
    _same_width("add", x, y)
    out = program.buffer(x.width)
    program.call("add", AddArgs(width=x.width), x=x, y=y, out=out)
    return out


def record_concat(program: Program, x: Buffer, y: Buffer) -> Buffer:
    """`Ops.concat`."""
    out = program.buffer(x.width + y.width)
    program.call("concat", ConcatArgs(x_width=x.width, y_width=y.width), x=x, y=y, out=out)
    return out


def record_scale(program: Program, x: Buffer, factor: float) -> Buffer:
    """`Ops.scale`."""
    out = program.buffer(x.width)
    program.call("scale", ScaleArgs(width=x.width, factor=factor), x=x, out=out)
    return out


def record_softcap(program: Program, x: Buffer, cap: float) -> Buffer:
    """`Ops.softcap`."""
    out = program.buffer(x.width)
    program.call("softcap", SoftcapArgs(width=x.width, cap=cap), x=x, out=out)
    return out


def record_split_gate(program: Program, x: Buffer, head_dim: int) -> tuple[Buffer, Buffer]:
    """`Ops.split_gate`."""
    values, gates = program.buffer(x.width // 2), program.buffer(x.width // 2)
    args = SplitGateArgs(heads=x.width // (2 * head_dim), head_dim=head_dim)
    program.call("split_gate", args, x=x, values=values, gates=gates)
    return values, gates


def record_sigmoid_gate(program: Program, x: Buffer, gate: Buffer) -> Buffer:
    """`Ops.sigmoid_gate`."""
    _same_width("sigmoid_gate", x, gate)
    out = program.buffer(x.width)
    program.call("sigmoid_gate", SigmoidGateArgs(width=x.width), x=x, gate=gate, out=out)
    return out


def record_add_gated(program: Program, base: Buffer, x: Buffer, gate_input: Buffer, gate_weight: Weight) -> Buffer:
    """`Ops.add_gated`."""
    _same_width("add_gated", base, x)
    out = program.buffer(base.width)
    args = AddGatedArgs(
        gate_weight=float_address(program, gate_weight, gate_input.width),
        width=base.width,
        gate_width=gate_input.width,
        gate_scale=product_scale(gate_weight),
    )
    program.call("add_gated", args, base=base, x=x, gate_input=gate_input, out=out)
    return out


def record_output_rows(program: Program, x: Buffer) -> Buffer:
    """`Ops.output_rows`: ends the program's trunk; what is recorded after it runs on the chosen rows."""
    program.split(x)
    out = program.buffer(x.width)
    program.call("output_rows", OutputRowsArgs(width=x.width), x=x, out=out)
    return out


def _same_width(op: str, x: Buffer, y: Buffer) -> None:
    if x.width != y.width or x.dtype != np.float32 or y.dtype != np.float32:
        raise ShapeError(f"{op}: rows of {x.width} {x.dtype} and {y.width} {y.dtype}, both must be float32 and as wide")
