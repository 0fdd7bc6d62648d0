"""The I types: vectors of 4 or 8 values from codebooks (`iquant_grids`), or a non-linear 4-bit table. IQ1_S .. IQ4_XS.

In and out: see `Format`. Multi-byte fields are little-endian and not aligned.
"""

import numpy as np

from tandem.quant import iquant_pack
from tandem.quant.fit import as_half, fit_scale, importance, inverse, nearest_in, share_scale, table_codes
from tandem.quant.format import define, half_bytes, join_bits, read_half, repeat_scales, settle_halves, split_bits
from tandem.quant.iquant_grids import GRIDS, IQ4NL, KSIGNS

_SHIFT = np.float32(0.125)


def _words(field: np.ndarray, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(field).view(dtype)


def _signed(magnitudes: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Rows of magnitudes as float32 [n, v], negated where the bits of signs uint8 [n, v // 8] are set."""
    negative = split_bits(signs, 1, 1)
    values = magnitudes.reshape(negative.shape).astype(np.float32)
    return np.where(negative, -values, values)


def _seven_bit_signs(words: np.ndarray) -> np.ndarray:
    """uint32 [n, k] holding four 7-bit sign indices each -> sign bytes uint8 [n, 4 k]."""
    indices = words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    return KSIGNS[indices].reshape(len(words), -1)


def unpack_iq2_xxs(blocks: np.ndarray) -> np.ndarray:
    """d; per 32 values two u32: 4 grid bytes, then 4 x 7-bit signs and a 4-bit scale: d * (0.5 + scale) / 4."""
    words = _words(blocks[:, 2:], "<u4").reshape(len(blocks), 8, 2)
    indices = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    scales = read_half(blocks, 0) * (np.float32(0.5) + (words[:, :, 1] >> 28).astype(np.float32)) * np.float32(0.25)
    return repeat_scales(scales, _signed(GRIDS["IQ2XXS"][indices], _seven_bit_signs(words[:, :, 1])))


def _quarter_scales(blocks: np.ndarray, packed: np.ndarray) -> np.ndarray:
    scales = np.float32(0.5) + split_bits(packed, 4, 1).astype(np.float32)
    return read_half(blocks, 0) * scales * np.float32(0.25)


def unpack_iq2_xs(blocks: np.ndarray) -> np.ndarray:
    """d; 32 u16 (9-bit grid, 7-bit signs) per 8 values; 8 bytes of 4-bit scales per 16: d * (0.5 + scale) / 4."""
    words = _words(blocks[:, 2:66], "<u2")
    values = _signed(GRIDS["IQ2XS"][words & 511], KSIGNS[words >> 9])
    return repeat_scales(_quarter_scales(blocks, blocks[:, 66:]), values)


def unpack_iq2_s(blocks: np.ndarray) -> np.ndarray:
    """d; 32 low grid bytes, 32 sign bytes, 8 bytes of 2 high grid bits, 8 bytes of 4-bit scales per 16."""
    indices = blocks[:, 2:34] | split_bits(blocks[:, 66:74], 2, 1).astype(np.uint16) << 8
    values = _signed(GRIDS["IQ2S"][indices], blocks[:, 34:66])
    return repeat_scales(_quarter_scales(blocks, blocks[:, 74:]), values)


def unpack_iq3_xxs(blocks: np.ndarray) -> np.ndarray:
    """d; 64 grid bytes per 4 values; 8 u32 of 4 x 7-bit signs and a 4-bit scale: d * (0.5 + scale) / 2."""
    words = _words(blocks[:, 66:], "<u4")
    scales = read_half(blocks, 0) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    return repeat_scales(scales, _signed(GRIDS["IQ3XXS"][blocks[:, 2:66]], _seven_bit_signs(words)))


def unpack_iq3_s(blocks: np.ndarray) -> np.ndarray:
    """d; 64 low grid bytes per 4 values, 8 bytes of ninth bits, 32 sign bytes, 4 bytes of 4-bit scales per 32.

    Scale: d * (1 + 2 * scale).
    """
    indices = blocks[:, 2:66] | split_bits(blocks[:, 66:74], 1, 1).astype(np.uint16) << 8
    scales = read_half(blocks, 0) * (1 + 2 * split_bits(blocks[:, 106:], 4, 1))
    return repeat_scales(scales, _signed(GRIDS["IQ3S"][indices], blocks[:, 74:106]))


def _shifted(indices: np.ndarray, negative_shift: np.ndarray) -> np.ndarray:
    """Ternary rows [n, 32] of the IQ1S grid, each moved by 1/8 up or, where negative_shift [n, 32], down."""
    shift = np.where(negative_shift, -_SHIFT, _SHIFT)[:, :, None]
    return (GRIDS["IQ1S"][indices] + shift).reshape(len(indices), -1)


def unpack_iq1_s(blocks: np.ndarray) -> np.ndarray:
    """d; 32 low grid bytes; 8 u16 per 32 values: 4 x 3 high grid bits, 3-bit scale, sign of the shift.

    Scale: d * (2 * scale + 1).
    """
    words = _words(blocks[:, 34:], "<u2")
    high = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(blocks), 32)
    scales = read_half(blocks, 0) * (2 * (words >> 12 & 7) + 1)
    return repeat_scales(scales, _shifted(blocks[:, 2:34] | high << 8, np.repeat(words >> 15, 4, axis=1)))


def unpack_iq1_m(blocks: np.ndarray) -> np.ndarray:
    """32 low grid bytes; 16 bytes of nibbles (3 high grid bits, sign of the shift); 4 u16 of 4 x 3-bit scales.

    The top nibbles of the four u16, first lowest, are the bits of d. Scale per 16 values: d * (2 * scale + 1).
    """
    words = _words(blocks[:, 48:], "<u2")
    d_bits = np.bitwise_or.reduce(words >> 12 << np.array([0, 4, 8, 12], np.uint16), axis=1, keepdims=True)
    scales = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(blocks), 16)
    nibbles = split_bits(blocks[:, 32:48], 4, 1).astype(np.uint16)
    values = _shifted(blocks[:, :32] | (nibbles & 7) << 8, nibbles >> 3)
    return repeat_scales(d_bits.view("<f2").astype(np.float32) * (2 * scales + 1), values)


def unpack_iq4_nl(blocks: np.ndarray) -> np.ndarray:
    """d, 16 bytes of nibbles (low = first half): d * table[q]."""
    return repeat_scales(read_half(blocks, 0), IQ4NL[split_bits(blocks[:, 2:], 4, 16)])


def unpack_iq4_xs(blocks: np.ndarray) -> np.ndarray:
    """d, u16 of 2 high bits and 4 bytes of 4 low bits of 8 scales, 128 bytes of nibbles per 32: d * (scale - 32)."""
    scales = split_bits(blocks[:, 4:8], 4, 1) | split_bits(blocks[:, 2:4], 2, 1) << 4
    return repeat_scales(read_half(blocks, 0) * (scales.astype(np.int8) - 32), IQ4NL[split_bits(blocks[:, 8:], 4, 16)])


_NEAREST_NL = nearest_in(IQ4NL)
_TARGETS_NL = (-140, -127, -120, -113, -106, -98, 98, 106, 113, 120)


def pack_iq4_nl(values: np.ndarray) -> np.ndarray:
    """The scale of least squared error out of a search."""
    d = as_half(fit_scale(values, np.ones_like(values), _NEAREST_NL, _TARGETS_NL))
    return np.hstack([half_bytes(d), join_bits(table_codes(IQ4NL, values * inverse(d)), 4, 16)])


def pack_iq4_xs(values: np.ndarray) -> np.ndarray:
    """Least weighted squared error over scales, group by group and then shared."""
    groups = values.reshape(len(values), 8, 32)
    weights = importance(groups)
    scales = fit_scale(groups, weights, _NEAREST_NL, _TARGETS_NL)
    d, small = share_scale(groups, weights, scales, _NEAREST_NL, -32, 31)
    codes = table_codes(IQ4NL, groups * inverse(d * small)).reshape(len(values), -1)
    small = (small[..., 0] + 32).astype(np.uint8)
    head = [half_bytes(d[..., 0]), join_bits(small >> 4, 2, 1), join_bits(small & 15, 4, 1)]
    return np.hstack([*head, join_bits(codes, 4, 16)])


def _settle_iq1_m(blocks: np.ndarray, rng: np.random.Generator) -> None:
    d = rng.uniform(0.5, 1.5, (len(blocks), 1)) * rng.choice([-1, 1], (len(blocks), 1)) / 8
    bits = half_bytes(d.astype(np.float32)).view("<u2")
    words = _words(blocks[:, 48:], "<u2") & 0xFFF | (bits >> np.array([0, 4, 8, 12], np.uint16) & 15) << 12
    blocks[:, 48:] = words.view(np.uint8)


FORMATS = (
    define("IQ2_XXS", unpack_iq2_xxs, settle_halves((0, 1)), iquant_pack.pack_iq2_xxs),
    define("IQ2_XS", unpack_iq2_xs, settle_halves((0, 1)), iquant_pack.pack_iq2_xs),
    define("IQ3_XXS", unpack_iq3_xxs, settle_halves((0, 0.5)), iquant_pack.pack_iq3_xxs),
    define("IQ1_S", unpack_iq1_s, settle_halves((0, 8)), iquant_pack.pack_iq1_s),
    define("IQ4_NL", unpack_iq4_nl, settle_halves((0, 1)), pack_iq4_nl),
    define("IQ3_S", unpack_iq3_s, settle_halves((0, 0.5)), iquant_pack.pack_iq3_s),
    define("IQ2_S", unpack_iq2_s, settle_halves((0, 1)), iquant_pack.pack_iq2_s),
    define("IQ4_XS", unpack_iq4_xs, settle_halves((0, 1 / 16)), pack_iq4_xs),
    define("IQ1_M", unpack_iq1_m, _settle_iq1_m, iquant_pack.pack_iq1_m),
)
