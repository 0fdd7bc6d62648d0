"""Ternary types: 256 values of -1, 0 or 1 and one f16 scale at the end. TQ1_0 (base 3), TQ2_0 (2 bits).

In and out: see `Format`.
"""

import numpy as np

from tandem.quant.fit import as_half, clip_to, fit_scale, inverse
from tandem.quant.format import define, half_bytes, join_bits, read_half, repeat_scales, settle_halves, split_bits

# TQ1_0: (first byte, bytes, digits per byte); digit k of byte j of a part is value k * bytes + j of that part.
_TQ1_PARTS = ((0, 32, 5), (32, 16, 5), (48, 4, 4))


def unpack_tq1_0(blocks: np.ndarray) -> np.ndarray:
    """48 bytes of 5 base-3 digits, 4 bytes of 4, d: d * (digit - 1).

    A byte is ceil(number * 256 / 243), so the top digit of (byte * 3**k mod 256) is digit k, most significant first.
    """
    digits = []
    for first, count, per_byte in _TQ1_PARTS:
        powers = (3 ** np.arange(per_byte)).astype(np.uint8)[:, None]
        shifted = blocks[:, None, first : first + count] * powers  # wraps at 256 by design
        digits.append((shifted.astype(np.uint16) * 3 >> 8).reshape(len(blocks), -1))
    return repeat_scales(read_half(blocks, 52), np.concatenate(digits, axis=1).astype(np.int8) - 1)


def unpack_tq2_0(blocks: np.ndarray) -> np.ndarray:
    """64 bytes of 2-bit q, d: d * (q - 1)."""
    return repeat_scales(read_half(blocks, 64), split_bits(blocks[:, :64], 2, 32).astype(np.int8) - 1)


def _ternary_codes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(d [n, 1] exact in f16, codes 0..2) of least squared error for d * (code - 1)."""
    nearest = clip_to(-1, 1)
    d = as_half(fit_scale(values, np.ones_like(values), nearest, np.arange(0.75, 3.5, 0.125)))
    return d, (nearest(values * inverse(d)) + 1).astype(np.uint8)


def pack_tq1_0(values: np.ndarray) -> np.ndarray:
    """The scale of least squared error out of a search; exact for values that are already -d, 0, d."""
    d, codes = _ternary_codes(values)
    packed, start = [], 0
    for _, count, per_byte in _TQ1_PARTS:
        digits = codes[:, start : start + count * per_byte].reshape(len(codes), per_byte, count)
        numbers = np.einsum("nkj,k->nj", digits.astype(np.uint16), 81 // 3 ** np.arange(per_byte))
        packed.append(((numbers * 256 + 242) // 243).astype(np.uint8))
        start += count * per_byte
    return np.hstack([*packed, half_bytes(d)])


def pack_tq2_0(values: np.ndarray) -> np.ndarray:
    """The scale of least squared error out of a search; exact for values that are already -d, 0, d."""
    d, codes = _ternary_codes(values)
    return np.hstack([join_bits(codes, 2, 32), half_bytes(d)])


FORMATS = (
    define("TQ1_0", unpack_tq1_0, settle_halves((52, 80)), pack_tq1_0),
    define("TQ2_0", unpack_tq2_0, settle_halves((64, 52)), pack_tq2_0),
)
