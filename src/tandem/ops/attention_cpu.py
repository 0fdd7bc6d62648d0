"""Records attention over the cache: the argument struct of attention_cache.h."""

import ctypes
from dataclasses import dataclass

import numpy as np

from tandem.errors import ShapeError
from tandem.ops.base import Attention, Rope, Weight
from tandem.ops.program import Buffer, Program
from tandem.ops.weights_cpu import float_address

ROW_BATCH = 8  # rows that the few-rows form works on at a time; this and the next as in attention_few.h
MAX_CHUNKS = 33
TOTALS = 16


class AttentionArgs(ctypes.Structure):
    """Mirror of AttentionArgs in attention_cache.h."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("turns", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("layer", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("value_dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("pairs", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class HeadSteps:
    """What attention does to each head of q and k before it uses them: RMS norm, then rotation by `turns` of `rope`."""

    rope: Rope | None = None
    turns: Buffer | None = None  # of record_rope_table
    q_norm: Weight | None = None
    k_norm: Weight | None = None
    eps: float = 0.0


def record_attention(
    program: Program, q: Buffer, k: Buffer, v: Buffer, layer: int, spec: Attention, steps: HeadSteps = HeadSteps()
) -> Buffer:
    """`Ops.attention`. Raises ShapeError if q, k, v are not as wide as the spec says."""
    widths = (q.width, k.width, v.width)
    needed = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.value_dim)
    if widths != needed or spec.num_heads % spec.num_kv_heads:
        raise ShapeError(f"attention of layer {layer}: q, k, v have {widths} values, {spec} needs {needed}")
    out = program.buffer(spec.num_heads * spec.value_dim)
    partial = program.buffer(0, fixed_bytes=ROW_BATCH * spec.num_heads * MAX_CHUNKS * (spec.value_dim + TOTALS) * 4)
    args = AttentionArgs(
        layer=layer,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        dim=spec.head_dim,
        value_dim=spec.value_dim,
        window=spec.window or 0,
        scale=np.float32(spec.scale),
        softcap=spec.softcap or 0,
        eps=steps.eps,
    )
    buffers = {"q": q, "k": k, "v": v, "out": out, "partial": partial}
    if steps.q_norm is not None:
        args.q_norm = float_address(program, steps.q_norm, spec.head_dim)
        args.k_norm = float_address(program, steps.k_norm, spec.head_dim)
    if steps.rope is not None:
        args.pairs, args.interleaved = len(steps.rope.inv_freq), steps.rope.interleaved
        buffers["turns"] = steps.turns
    program.call("attention", args, **buffers)
    return out
