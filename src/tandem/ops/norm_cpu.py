"""Records the norms into a program: the argument structs of norm.cpp."""

import ctypes

from tandem.errors import ShapeError
from tandem.ops.base import Weight
from tandem.ops.program import Buffer, Program
from tandem.ops.weights_cpu import float_address


class RmsNormArgs(ctypes.Structure):
    """Mirror of RmsNormArgs in norm.cpp."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("width", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    ]


class GatedRmsNormArgs(ctypes.Structure):
    """Mirror of GatedRmsNormArgs in norm.cpp."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("gate", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("width", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    ]


def record_rms_norm(
    program: Program, x: Buffer, weight: Weight, eps: float, heads: int = 1, out: Buffer | None = None
) -> Buffer:
    """`Ops.rms_norm`, into `out` if given."""
    out = out or program.buffer(x.width)
    args = RmsNormArgs(weight=float_address(program, weight, x.width // heads), width=x.width, heads=heads, eps=eps)
    program.call("rms_norm", args, x=x, out=out)
    return out


def record_add_rms_norm(program: Program, residual: Buffer, x: Buffer, weight: Weight, eps: float) -> Buffer:
    """residual + rms_norm(x). Raises ShapeError if they are not equally wide."""
    if residual.width != x.width:
        raise ShapeError(f"add: rows of {residual.width} and {x.width} values")
    out = program.buffer(x.width)
    args = RmsNormArgs(weight=float_address(program, weight, x.width), width=x.width, heads=1, eps=eps)
    program.call("rms_norm", args, residual=residual, x=x, out=out)
    return out


def record_gated_rms_norm(program: Program, x: Buffer, gate: Buffer, weight: Weight, eps: float, heads: int) -> Buffer:
    """`Ops.gated_rms_norm`."""
    out = program.buffer(x.width)
    args = GatedRmsNormArgs(
        weight=float_address(program, weight, x.width // heads), width=x.width, heads=heads, eps=eps
    )
    program.call("gated_rms_norm", args, x=x, gate=gate, out=out)
    return out
