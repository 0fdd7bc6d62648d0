"""The K types: super-blocks of 256 values, f16 scales of small integer scales. Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.

In and out: see `Format`. "m" is subtracted: d * scale * q - dmin * min.
"""

import numpy as np

from tandem.quant.fit import clip_to, fit_line, fit_scale, importance, inverse, share_line, share_scale
from tandem.quant.format import define, half_bytes, join_bits, read_half, repeat_scales, settle_halves, split_bits


def unpack_q2_k(blocks: np.ndarray) -> np.ndarray:
    """16 bytes (scale low nibble, min high) per 16 values, 64 bytes of 2-bit q, d, dmin."""
    scales, d, dmin = blocks[:, :16], read_half(blocks, 80), read_half(blocks, 82)
    values = repeat_scales(d * (scales & 15), split_bits(blocks[:, 16:80], 2, 32))
    return values - np.repeat(dmin * (scales >> 4), 16, axis=1)


def unpack_q3_k(blocks: np.ndarray) -> np.ndarray:
    """32 bytes of high bits, 64 bytes of 2 low bits, 12 bytes of 16 six-bit scales, d: d * (scale - 32) * (q - 4)."""
    scales = split_bits(blocks[:, 96:104], 4, 8) | split_bits(blocks[:, 104:108], 2, 4) << 4
    codes = split_bits(blocks[:, 32:96], 2, 32) | split_bits(blocks[:, :32], 1, 32) << 2
    return repeat_scales(read_half(blocks, 108) * (scales.astype(np.int8) - 32), codes.astype(np.int8) - 4)


def split_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """12 bytes [n, 12] of Q4_K and Q5_K -> 8 six-bit scales and 8 six-bit mins, uint8 [n, 8] each.

    Scales 0-3 and mins 0-3 are the low 6 bits of bytes 0-3 and 4-7; the later ones have their low 4 bits in the
    nibbles of bytes 8-11 and their high 2 bits on top of bytes 0-3 and 4-7.
    """
    first, second, nibbles = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, nibbles & 15 | first >> 2 & 48], axis=1)
    mins = np.concatenate([second & 63, nibbles >> 4 | second >> 2 & 48], axis=1)
    return scales, mins


def _unpack_with_mins(blocks: np.ndarray, codes: np.ndarray) -> np.ndarray:
    scales, mins = split_scales(blocks[:, 4:16])
    values = repeat_scales(read_half(blocks, 0) * scales, codes)
    return values - np.repeat(read_half(blocks, 2) * mins, 32, axis=1)


def unpack_q4_k(blocks: np.ndarray) -> np.ndarray:
    """d, dmin, 12 bytes of 8 scales and 8 mins, 128 bytes of nibbles (32 low, then 32 high)."""
    return _unpack_with_mins(blocks, split_bits(blocks[:, 16:], 4, 32))


def unpack_q5_k(blocks: np.ndarray) -> np.ndarray:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit j of byte i is value 32 j + i."""
    return _unpack_with_mins(blocks, split_bits(blocks[:, 48:], 4, 32) | split_bits(blocks[:, 16:48], 1, 32) << 4)


def unpack_q6_k(blocks: np.ndarray) -> np.ndarray:
    """128 bytes of low nibbles, 64 of 2 high bits, 16 int8 scales, d: d * scale * (q - 32)."""
    codes = split_bits(blocks[:, :128], 4, 64) | split_bits(blocks[:, 128:192], 2, 32) << 4
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return repeat_scales(read_half(blocks, 208) * scales, codes.astype(np.int8) - 32)


def _fit_lines(values: np.ndarray, group: int, top: int, limit: int):
    """d, dmin [n, 1] f16-exact; scales, mins uint8 [n, 256 // group] up to `limit`; codes uint8 0..top [n, 256]."""
    groups = values.reshape(len(values), -1, group)
    weights = importance(groups)
    spans = np.arange(top - 0.15 * top - 0.5, top + 1.01, max(0.25, top / 30))
    scales, offsets = fit_line(groups, weights, top, spans, positive=False)
    d, dmin, small, mins = share_line(groups, weights, scales, offsets, top, limit)
    codes = clip_to(0, top)((groups + dmin * mins) * inverse(d * small)).reshape(len(values), -1)
    small, mins, codes = (a.astype(np.uint8) for a in (small[..., 0], mins[..., 0], codes))
    return d[..., 0], dmin[..., 0], small, mins, codes


def _fit_scales(values: np.ndarray, half_range: int, low: int, high: int, targets):
    """d [n, 1] f16-exact, scales int8 low..high [n, 16], codes uint8 0 .. 2 * half_range - 1 [n, 256]."""
    groups = values.reshape(len(values), 16, 16)
    weights = importance(groups)
    nearest = clip_to(-half_range, half_range - 1)
    scales = fit_scale(groups, weights, nearest, targets)
    d, small = share_scale(groups, weights, scales, nearest, low, high)
    codes = nearest(groups * inverse(d * small)).reshape(len(values), -1) + half_range
    return d[..., 0], small[..., 0].astype(np.int8), codes.astype(np.uint8)


def join_scales(scales: np.ndarray, mins: np.ndarray) -> np.ndarray:
    """The inverse of `split_scales`: uint8 [n, 12]."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = mins[:, :4] | mins[:, 4:] >> 4 << 6
    return np.hstack([first, second, scales[:, 4:] & 15 | mins[:, 4:] << 4])


def pack_q2_k(values: np.ndarray) -> np.ndarray:
    """Least weighted squared error over scales and mins, group by group and then shared."""
    d, dmin, scales, mins, codes = _fit_lines(values, 16, 3, 15)
    return np.hstack([scales | mins << 4, join_bits(codes, 2, 32), half_bytes(d), half_bytes(dmin)])


def pack_q3_k(values: np.ndarray) -> np.ndarray:
    """Least weighted squared error over scales, group by group and then shared."""
    d, scales, codes = _fit_scales(values, 4, -32, 31, (-5, -4.5, -4, -3.7, -3.4, -3.1, -2.8, 2.8, 3.1, 3.4, 3.7, 4))
    scales = (scales + 32).astype(np.uint8)
    packed = np.hstack([join_bits(scales & 15, 4, 8), join_bits(scales >> 4, 2, 4)])
    return np.hstack([join_bits(codes >> 2, 1, 32), join_bits(codes & 3, 2, 32), packed, half_bytes(d)])


def pack_q4_k(values: np.ndarray) -> np.ndarray:
    """Least weighted squared error over scales and mins, group by group and then shared."""
    d, dmin, scales, mins, codes = _fit_lines(values, 32, 15, 63)
    return np.hstack([half_bytes(d), half_bytes(dmin), join_scales(scales, mins), join_bits(codes, 4, 32)])


def pack_q5_k(values: np.ndarray) -> np.ndarray:
    """Least weighted squared error over scales and mins, group by group and then shared."""
    d, dmin, scales, mins, codes = _fit_lines(values, 32, 31, 63)
    head = [half_bytes(d), half_bytes(dmin), join_scales(scales, mins)]
    return np.hstack([*head, join_bits(codes >> 4, 1, 32), join_bits(codes & 15, 4, 32)])


def pack_q6_k(values: np.ndarray) -> np.ndarray:
    """Least weighted squared error over scales, group by group and then shared."""
    d, scales, codes = _fit_scales(values, 32, -128, 127, (-33, -32.5, -32, -31.5, -31, -30.5, 31, 31.5, 32))
    low, high = join_bits(codes & 15, 4, 64), join_bits(codes >> 4, 2, 32)
    return np.hstack([low, high, scales.view(np.uint8), half_bytes(d)])


FORMATS = (
    define("Q2_K", unpack_q2_k, settle_halves((80, 4), (82, 6)), pack_q2_k),
    define("Q3_K", unpack_q3_k, settle_halves((108, 1.5)), pack_q3_k),
    define("Q4_K", unpack_q4_k, settle_halves((0, 1 / 4), (2, 7.5 / 4)), pack_q4_k),
    define("Q5_K", unpack_q5_k, settle_halves((0, 1 / 8), (2, 15.5 / 8)), pack_q5_k),
    define("Q6_K", unpack_q6_k, settle_halves((208, 1 / 32)), pack_q6_k),
)
