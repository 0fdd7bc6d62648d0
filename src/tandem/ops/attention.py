"""Causal attention with grouped heads in numpy, and the rounding of keys and values by the cache's storage type."""

import numpy as np

from tandem.ops.base import Attention
from tandem.ops.norm import softcap, softmax

KV_TYPES = ("f32", "f16", "q8_0")
QUERY_BLOCK = 256  # bounds the score matrix for long prompts


def as_stored(x: np.ndarray, kv: str) -> np.ndarray:
    """x [..., D] float32 as it reads back from a cache of type kv: "f32", "f16" or "q8_0" (D a multiple of 32)."""
    if kv == "f32":
        return x
    if kv == "f16":
        return x.astype(np.float16).astype(np.float32)
    assert kv == "q8_0", kv
    return round_to_int8(x, np.float16)


def round_to_int8(x: np.ndarray, scale_dtype: type = np.float32) -> np.ndarray:
    """x rounded to int8 with one scale for each 32 values of the last axis; with float16 scales, the q8_0 format."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    scale = np.max(np.abs(groups), axis=-1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    return (np.rint(groups * inverse) * scale.astype(scale_dtype).astype(np.float32)).reshape(x.shape)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, spec: Attention) -> np.ndarray:
    """Attention of queries at `positions` over keys at positions 0..S-1.

    q [T, Hq * D], k [S, Hkv * D], v [S, Hkv * Dv] float32, positions int [T] -> [T, Hq * Dv].
    """
    group = spec.num_heads // spec.num_kv_heads
    queries = q.reshape(-1, spec.num_kv_heads, group, spec.head_dim).transpose(1, 2, 0, 3)  # [Hkv, G, T, D]
    keys = k.reshape(-1, spec.num_kv_heads, spec.head_dim).transpose(1, 2, 0)[:, None]  # [Hkv, 1, D, S]
    values = v.reshape(-1, spec.num_kv_heads, spec.value_dim).transpose(1, 0, 2)[:, None]  # [Hkv, 1, S, Dv]
    out = np.empty((len(q), spec.num_heads * spec.value_dim), np.float32)
    for begin in range(0, len(q), QUERY_BLOCK):
        rows = slice(begin, min(begin + QUERY_BLOCK, len(q)))
        scores = queries[:, :, rows] @ keys * np.float32(spec.scale)  # [Hkv, G, T, S]
        if spec.softcap is not None:
            scores = softcap(scores, spec.softcap)
        scores = np.where(visible(positions[rows], len(k), spec.window), scores, np.float32(-np.inf))
        mixed = softmax(scores) @ values  # [Hkv, G, T, Dv]
        out[rows] = mixed.transpose(2, 0, 1, 3).reshape(rows.stop - rows.start, -1)
    return out


def visible(positions: np.ndarray, num_keys: int, window: int | None) -> np.ndarray:
    """Which keys each query sees: bool [T, S]; key s is seen from p if p - window < s <= p."""
    keys = np.arange(num_keys)
    seen = keys <= positions[:, None]
    return seen if window is None else seen & (keys > positions[:, None] - window)
