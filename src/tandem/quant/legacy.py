"""The 32-value types with one scale per block: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

In and out: see `Format`. In the nibble bytes, low nibbles are values 0-15 and high nibbles 16-31.
"""

import numpy as np

from tandem.quant.format import define, read_half, repeat_scales, settle_halves, split_bits


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


FORMATS = (
    define("Q4_0", unpack_q4_0, settle_halves((0, 13))),
    define("Q4_1", unpack_q4_1, settle_halves((0, 13), (2, -7.5 * 13))),
    define("Q5_0", unpack_q5_0, settle_halves((0, 7))),
    define("Q5_1", unpack_q5_1, settle_halves((0, 7), (2, -15.5 * 7))),
    define("Q8_0", unpack_q8_0, settle_halves((0, 1))),
)
