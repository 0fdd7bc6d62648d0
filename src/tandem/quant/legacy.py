"""The 32-value types with one scale per block: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

In and out: see `Format`. In the nibble bytes, low nibbles are values 0-15 and high nibbles 16-31.
"""

import numpy as np

from tandem.quant.fit import as_half, clip_to, fit_line, fit_scale, inverse
from tandem.quant.format import define, half_bytes, join_bits, read_half, repeat_scales, settle_halves, split_bits


def unpack_q4_0(blocks: np.ndarray) -> np.ndarray:
    """d f16, 16 bytes of nibbles: d * (q - 8)."""
    return repeat_scales(read_half(blocks, 0), split_bits(blocks[:, 2:], 4, 16).astype(np.int8) - 8)


def unpack_q4_1(blocks: np.ndarray) -> np.ndarray:
    """d, m f16, 16 bytes of nibbles: d * q + m."""
    return repeat_scales(read_half(blocks, 0), split_bits(blocks[:, 4:], 4, 16)) + read_half(blocks, 2)


def _five_bits(high: np.ndarray, nibbles: np.ndarray) -> np.ndarray:
    return split_bits(nibbles, 4, 16) | split_bits(high, 1, 1) << 4


def unpack_q5_0(blocks: np.ndarray) -> np.ndarray:
    """d f16, 4 bytes of fifth bits in value order, 16 bytes of nibbles: d * (q - 16)."""
    return repeat_scales(read_half(blocks, 0), _five_bits(blocks[:, 2:6], blocks[:, 6:]).astype(np.int8) - 16)


def unpack_q5_1(blocks: np.ndarray) -> np.ndarray:
    """d, m f16, 4 bytes of fifth bits in value order, 16 bytes of nibbles: d * q + m."""
    return repeat_scales(read_half(blocks, 0), _five_bits(blocks[:, 4:8], blocks[:, 8:])) + read_half(blocks, 2)


def unpack_q8_0(blocks: np.ndarray) -> np.ndarray:
    """d f16, 32 int8: d * q."""
    return repeat_scales(read_half(blocks, 0), blocks[:, 2:].view(np.int8))


# Where the largest value of a block may land: both signs, since the codes reach one step further below zero; no halves,
# where rounding errors would decide the code.
_TARGETS_4 = (-9, -8.45, -8, -7.45, -7, -6.45, 6.45, 7, 7.45, 8)
_TARGETS_5 = (-17, -16.45, -16, -15.45, -15, 15, 15.45, 16)


def _symmetric_codes(values: np.ndarray, half_range: int, targets) -> tuple[np.ndarray, np.ndarray]:
    """(d [n, 1] exact in f16, codes 0 .. 2 * half_range - 1) of least squared error for d * (code - half_range)."""
    nearest = clip_to(-half_range, half_range - 1)
    d = as_half(fit_scale(values, np.ones_like(values), nearest, targets))
    return d, (nearest(values * inverse(d)) + half_range).astype(np.uint8)


def _line_codes(values: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(d, m) [n, 1] exact in f16 and codes 0..top of least squared error for d * code + m."""
    spans = (top - 2, top - 1.45, top - 1, top - 0.45, top, top + 0.45, top + 1)
    nearest = clip_to(0, top)
    d, m = fit_line(values, np.ones_like(values), top, spans, positive=True)
    d = as_half(d)
    # The offset takes up what rounding the scale to f16 has moved.
    m = as_half((values - d * nearest((values - m) * inverse(d))).mean(axis=1, keepdims=True))
    return d, m, nearest((values - m) * inverse(d)).astype(np.uint8)


def pack_q4_0(values: np.ndarray) -> np.ndarray:
    """The scale of least squared error out of a search."""
    d, codes = _symmetric_codes(values, 8, _TARGETS_4)
    return np.hstack([half_bytes(d), join_bits(codes, 4, 16)])


def pack_q4_1(values: np.ndarray) -> np.ndarray:
    """The scale and offset of least squared error out of a search."""
    d, m, codes = _line_codes(values, 15)
    return np.hstack([half_bytes(d), half_bytes(m), join_bits(codes, 4, 16)])


def pack_q5_0(values: np.ndarray) -> np.ndarray:
    """The scale of least squared error out of a search."""
    d, codes = _symmetric_codes(values, 16, _TARGETS_5)
    return np.hstack([half_bytes(d), join_bits(codes >> 4, 1, 1), join_bits(codes & 15, 4, 16)])


def pack_q5_1(values: np.ndarray) -> np.ndarray:
    """The scale and offset of least squared error out of a search."""
    d, m, codes = _line_codes(values, 31)
    return np.hstack([half_bytes(d), half_bytes(m), join_bits(codes >> 4, 1, 1), join_bits(codes & 15, 4, 16)])


def pack_q8_0(values: np.ndarray) -> np.ndarray:
    """The scale of least squared error out of a short search; -128 is never written, as in ggml."""
    nearest = clip_to(-127, 127)
    d = as_half(fit_scale(values, np.ones_like(values), nearest, (126.5, 127, 127.5)))
    return np.hstack([half_bytes(d), nearest(values * inverse(d)).astype(np.int8).view(np.uint8)])


FORMATS = (
    define("Q4_0", unpack_q4_0, settle_halves((0, 13)), pack_q4_0),
    define("Q4_1", unpack_q4_1, settle_halves((0, 13), (2, -7.5 * 13)), pack_q4_1),
    define("Q5_0", unpack_q5_0, settle_halves((0, 7)), pack_q5_0),
    define("Q5_1", unpack_q5_1, settle_halves((0, 7), (2, -15.5 * 7)), pack_q5_1),
    define("Q8_0", unpack_q8_0, settle_halves((0, 1)), pack_q8_0),
)
