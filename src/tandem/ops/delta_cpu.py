"""Records the short convolution and the gated delta rule: the argument structs of delta.cpp."""

import ctypes

import numpy as np

from tandem.errors import ShapeError
from tandem.ops.base import Delta, Weight
from tandem.ops.program import Buffer, Program
from tandem.ops.weights_cpu import float_address, float_values

MAX_CONV_WIDTH = 16  # as in delta.cpp


class ShortConvArgs(ctypes.Structure):
    """Mirror of ShortConvArgs in delta.cpp."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("channels", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("layer", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class DeltaRuleArgs(ctypes.Structure):
    """Mirror of DeltaRuleArgs in delta.cpp."""

    _fields_ = [
        ("qkv", ctypes.c_void_p),
        ("alpha", ctypes.c_void_p),
        ("beta", ctypes.c_void_p),
        ("a", ctypes.c_void_p),
        ("dt_bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("k_heads", ctypes.c_int32),
        ("v_heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("layer", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    ]


def record_short_conv(program: Program, x: Buffer, weight: Weight, layer: int) -> Buffer:
    """`Ops.short_conv`. Raises ShapeError if weight is not [channels, width] with 1 to 16 taps."""
    channels, width = weight.shape
    if channels != x.width or not 1 <= width <= MAX_CONV_WIDTH:
        raise ShapeError(f"{weight.name}: shape {weight.shape}, short_conv needs ({x.width}, 1..{MAX_CONV_WIDTH})")
    out = program.buffer(channels)
    taps = np.ascontiguousarray(float_values(weight).T)  # [width, channels]
    args = ShortConvArgs(weight=program.address(taps), channels=channels, width=width, layer=layer)
    program.call("short_conv", args, x=x, out=out)
    return out


def record_delta_rule(
    program: Program, qkv: Buffer, alpha: Buffer, beta: Buffer, a: Weight, dt_bias: Weight, layer: int, spec: Delta
) -> Buffer:
    """`Ops.delta_rule`. Raises ShapeError if the rows are not as wide as the spec says."""
    widths = (qkv.width, alpha.width, beta.width)
    heads = spec.num_v_heads
    needed = ((2 * spec.num_k_heads + heads) * spec.head_dim, heads, heads)
    if widths != needed or heads % spec.num_k_heads:
        raise ShapeError(f"delta_rule of layer {layer}: qkv, alpha, beta have {widths} values, {spec} needs {needed}")
    out = program.buffer(heads * spec.head_dim)
    args = DeltaRuleArgs(
        a=float_address(program, a, heads),
        dt_bias=float_address(program, dt_bias, heads),
        k_heads=spec.num_k_heads,
        v_heads=heads,
        dim=spec.head_dim,
        layer=layer,
        eps=spec.eps,
    )
    program.call("delta_rule", args, qkv=qkv, alpha=alpha, beta=beta, out=out)
    return out
