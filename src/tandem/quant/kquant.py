"""The K types: super-blocks of 256 values, f16 scales of small integer scales. Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.

In and out: see `Format`. "m" is subtracted: d * scale * q - dmin * min.
"""

import numpy as np

from tandem.quant.format import define, read_half, repeat_scales, settle_halves, split_bits


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


FORMATS = (
    define("Q2_K", unpack_q2_k, settle_halves((80, 4), (82, 6))),
    define("Q3_K", unpack_q3_k, settle_halves((108, 1.5))),
    define("Q4_K", unpack_q4_k, settle_halves((0, 1 / 4), (2, 7.5 / 4))),
    define("Q5_K", unpack_q5_k, settle_halves((0, 1 / 8), (2, 15.5 / 8))),
    define("Q6_K", unpack_q6_k, settle_halves((208, 1 / 32))),
)
