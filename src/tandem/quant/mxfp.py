"""FP4 types: E2M1 values under a small float scale. MXFP4 (32 values, power of two), NVFP4 (4 x 16 values, E4M3).

In and out: see `Format`. NVFP4's per-tensor `.scale` companion is applied by the matmul, not here.
Sources: OCP Microscaling Formats 1.0; ggml's block layouts.
"""

import numpy as np

from tandem.quant.fit import inverse, table_codes
from tandem.quant.format import define, join_bits, repeat_scales, split_bits
from tandem.quant.iquant_grids import E2M1


def half_e8m0(codes: np.ndarray) -> np.ndarray:
    """Half of 2**(code - 127), float32; the half undoes the doubling of the E2M1 table. Code 255 is not special."""
    return np.ldexp(np.float32(1), codes.astype(np.int32) - 128)


def half_e4m3(codes: np.ndarray) -> np.ndarray:
    """Half of an unsigned E4M3 number (bias 7, subnormals at exponent 0), float32; the code 0x7F means 0."""
    exponents, mantissas = codes.astype(np.int32) >> 3 & 15, (codes & 7).astype(np.float32)
    values = np.where(exponents == 0, np.ldexp(mantissas, -10), np.ldexp(1 + mantissas / 8, exponents - 8))
    return np.where(codes == 0x7F, 0, values).astype(np.float32)


def unpack_mxfp4(blocks: np.ndarray) -> np.ndarray:
    """E8M0 byte, 16 bytes of nibbles (low = first half)."""
    return repeat_scales(half_e8m0(blocks[:, :1]), E2M1[split_bits(blocks[:, 1:], 4, 16)])


def unpack_nvfp4(blocks: np.ndarray) -> np.ndarray:
    """4 E4M3 bytes, one per 16 values, then 4 x 8 bytes of nibbles (low = first 8 of 16)."""
    return repeat_scales(half_e4m3(blocks[:, :4]), E2M1[split_bits(blocks[:, 4:], 4, 8)])


def _pack_groups(groups: np.ndarray, first: np.ndarray, tries: int, lowest: int, highest: int, decode):
    """(scale codes uint8 [n, k], value codes uint8 [n, k * s]) of least squared error for groups [n, k, s].

    Tries the `tries` scale codes from `first` [n, k] up, within lowest..highest.
    """
    best_error = best_scale = best_codes = None
    for move in range(tries):
        scale_codes = np.clip(first + move, lowest, highest).astype(np.uint8)
        scales = decode(scale_codes)[..., None]
        codes = table_codes(E2M1, groups * inverse(scales))
        error = ((scales * E2M1[codes] - groups) ** 2).sum(axis=-1, dtype=np.float64)
        if best_error is None:
            best_error, best_scale, best_codes = error, scale_codes, codes
            continue
        better = error < best_error
        best_scale = np.where(better, scale_codes, best_scale)
        best_codes = np.where(better[..., None], codes, best_codes)
        best_error = np.minimum(error, best_error)
    return best_scale, best_codes.reshape(len(groups), -1)


def pack_mxfp4(values: np.ndarray) -> np.ndarray:
    """The power of two of least squared error, out of the three that put the largest value in 3..24 half steps."""
    _, exponents = np.frexp(np.abs(values).max(axis=1, keepdims=True))
    scales, codes = _pack_groups(values[:, None, :], exponents + 124, 3, 0, 254, half_e8m0)
    return np.hstack([scales, join_bits(codes, 4, 16)])


def pack_nvfp4(values: np.ndarray) -> np.ndarray:
    """The E4M3 scales of least squared error near largest / 6. For a per-tensor scale of 1."""
    groups = values.reshape(len(values), 4, 16)
    steps = half_e4m3(np.arange(127, dtype=np.uint8))
    first = np.searchsorted(steps, np.abs(groups).max(axis=-1) / 12)
    scales, codes = _pack_groups(groups, first - 3, 8, 0, 126, half_e4m3)
    return np.hstack([scales, join_bits(codes, 4, 8)])


def _settle_mxfp4(blocks: np.ndarray, rng: np.random.Generator) -> None:
    blocks[:, :1] = rng.integers(121, 128, (len(blocks), 1))


def _settle_nvfp4(blocks: np.ndarray, rng: np.random.Generator) -> None:
    # From 3 * 2**-9 (subnormal) to 1.875.
    blocks[:, :4] = rng.integers(3, 64, (len(blocks), 4))


FORMATS = (
    define("MXFP4", unpack_mxfp4, _settle_mxfp4, pack_mxfp4),
    define("NVFP4", unpack_nvfp4, _settle_nvfp4, pack_nvfp4, largest=2688.0),
)
