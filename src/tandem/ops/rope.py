"""Rotary position embedding: the frequencies a model hands to the ops, and the rotation itself in numpy."""

import math

import numpy as np

from tandem.ops.base import Rope


def inv_frequencies(theta: float, rotated_dims: int) -> np.ndarray:
    """theta^(-2i / rotated_dims) for each pair i -> float32 [rotated_dims / 2]."""
    return (float(theta) ** (-np.arange(0, rotated_dims, 2, dtype=np.float64) / rotated_dims)).astype(np.float32)


def yarn(
    inv_freq: np.ndarray, theta: float, factor: float, trained_ctx: int, beta_fast: float = 32.0, beta_slow: float = 1.0
) -> tuple[np.ndarray, float]:
    """YaRN: frequencies float32 [n/2] for a context `factor` times longer, and the factor on the rotated values.

    Pairs that turn more than beta_fast times within trained_ctx keep their frequency, pairs that turn less than
    beta_slow times are slowed by `factor`, in between a linear ramp over the pair index. Source: arXiv 2309.00071.
    """
    dims = 2 * len(inv_freq)

    def pair_that_turns(turns: float) -> float:
        return dims * math.log(trained_ctx / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(0.0, math.floor(pair_that_turns(beta_fast)))
    high = min(dims - 1.0, math.ceil(pair_that_turns(beta_slow)))
    ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 1e-3), 0, 1)
    frequencies = inv_freq / factor * ramp + inv_freq * (1 - ramp)
    return frequencies.astype(np.float32), 1.0 + 0.1 * math.log(factor)


def rotate(x: np.ndarray, positions: np.ndarray, head_dim: int, rope: Rope) -> np.ndarray:
    """Turn pair i of each head of x [T, heads * head_dim] by positions * inv_freq[i]; other dims pass through."""
    pairs = len(rope.inv_freq)
    heads = x.reshape(x.shape[0], -1, head_dim)
    # Angles in float64: a float32 product of a position near 10^5 is off by 0.01 rad.
    angles = positions[:, None].astype(np.float64) * rope.inv_freq.astype(np.float64)
    cos = (np.cos(angles) * rope.magnitude).astype(np.float32)[:, None]  # [T, 1, pairs]
    sin = (np.sin(angles) * rope.magnitude).astype(np.float32)[:, None]
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        if rope.interleaved
        else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    out = heads.copy()
    out[..., first] = heads[..., first] * cos - heads[..., second] * sin
    out[..., second] = heads[..., first] * sin + heads[..., second] * cos
    return out.reshape(x.shape)
