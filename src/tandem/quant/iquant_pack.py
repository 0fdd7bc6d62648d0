"""Quantizers of the codebook types IQ1_S .. IQ3_S: nearest codebook rows, found by one matrix product per scale tried.

In: finite float32 [n, 256]. Out: uint8 blocks whose layouts `iquant` documents. The error minimised is unweighted.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tandem.quant.fit import as_half, inverse
from tandem.quant.format import half_bytes, join_bits
from tandem.quant.iquant_grids import GRIDS, KSIGNS

# Multiplications in one product with the codebook: at most so many that OpenBLAS stays on this thread (several busy
# processes that each start threads wait for each other), and that the scores stay in the cache.
_PIECE = 1 << 18

# units float32 [m, group] -> (their nearest values float32 [m, group], arrays of codes)
_Coder = Callable[[np.ndarray], tuple[np.ndarray, list[np.ndarray]]]


@dataclass(frozen=True)
class _Scales:
    """How a type scales: value = d * factor * (2 * s + 1) * unit, one s in 0..top for `group` values."""

    group: int
    top: int
    factor: float
    # root mean square of a group in units of its scale, values to try
    sizes: tuple[float, ...]


def _search(grid: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Index, int64 [m], of the grid row nearest to each of vectors [m, v]."""
    rows = grid.astype(np.float32)
    bias = (rows * rows).sum(axis=1) / 2
    found = np.empty(len(vectors), np.int64)
    step = _PIECE // rows.size
    for start in range(0, len(vectors), step):
        scores = vectors[start : start + step] @ rows.T
        scores -= bias
        found[start : start + step] = scores.argmax(axis=1)
    return found


def _signed_coder(name: str, *, even: bool) -> _Coder:
    """Codes [grid indices, sign bytes]; `even` for 7-bit signs, where each 8 values have an even number of minuses."""
    grid = GRIDS[name]

    def code(units: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        rows = units.reshape(-1, 8)
        negative, sizes = rows < 0, np.abs(rows)
        if even:
            # The wrong sign costs least on the smallest value, which then asks for a value below zero.
            odd = np.flatnonzero(negative.sum(axis=1) & 1)
            smallest = sizes[odd].argmin(axis=1)
            negative[odd, smallest] ^= True
            sizes[odd, smallest] *= -1
        indices = _search(grid, sizes.reshape(-1, grid.shape[1]))
        values = grid[indices].reshape(-1, 8).astype(np.float32)
        signs = np.packbits(negative, axis=1, bitorder="little")
        return np.where(negative, -values, values).reshape(units.shape), [indices, signs]

    return code


def _shifted_coder(run: int) -> _Coder:
    """Codes [grid indices, 1 where the shift is down]; the shift of 1/8 has one direction per `run` values."""
    grid = GRIDS["IQ1S"]

    def code(units: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        tries = []
        for shift in (np.float32(0.125), np.float32(-0.125)):
            indices = _search(grid, units.reshape(-1, 8) - shift)
            values = (grid[indices] + shift).reshape(-1, run)
            tries.append((values, indices.reshape(-1, run // 8), ((values - units.reshape(-1, run)) ** 2).sum(axis=1)))
        (up, up_indices, up_error), (down, down_indices, down_error) = tries
        falls = (down_error < up_error)[:, None]
        values, indices = np.where(falls, down, up), np.where(falls, down_indices, up_indices)
        return values.reshape(units.shape), [indices.reshape(-1), falls.reshape(-1).astype(np.int64)]

    return code


def _fit(groups: np.ndarray, code: _Coder, sizes: tuple[float, ...]) -> np.ndarray:
    """Scale [m, 1] >= 0 of least squared error for each of groups [m, g], over the sizes tried."""
    unit = inverse(np.sqrt(np.mean(groups * groups, axis=1, keepdims=True)))
    best, best_gain = np.zeros_like(unit), np.zeros_like(unit)
    for size in sizes:
        values, _ = code(groups * (unit * np.float32(size)))
        along, norm = (values * groups).sum(axis=1, keepdims=True), (values * values).sum(axis=1, keepdims=True)
        scale = along * inverse(norm)
        better = along * scale > best_gain
        np.copyto(best, scale, where=better & (scale > 0))
        np.copyto(best_gain, along * scale, where=better & (scale > 0))
    return best


def _share(groups: np.ndarray, code: _Coder, own: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """(d [n, 1], s int64 0..top [n, k]) so that d * (2 * s + 1) serves groups [n, k, g]; d is not yet f16."""
    n, count, group = groups.shape
    own = own.reshape(n, count)
    d = own.max(axis=1, keepdims=True) / np.float32(2 * top + 1)
    nearest = np.clip(np.rint((own * inverse(d) - 1) / 2), 0, top).astype(np.int64)
    best, best_error = nearest, np.full(own.shape, np.inf)
    units = np.zeros(groups.shape, np.float32)
    for move in (0, -1, 1):
        tried = np.clip(nearest + move, 0, top)
        scale = d * (2 * tried + 1).astype(np.float32)
        values = code((groups * inverse(scale)[:, :, None]).reshape(-1, group))[0].reshape(groups.shape)
        error = ((scale[:, :, None] * values - groups) ** 2).sum(axis=2)
        better = error < best_error
        best, best_error = np.where(better, tried, best), np.where(better, error, best_error)
        np.copyto(units, values, where=better[:, :, None])
    units *= (2 * best + 1).astype(np.float32)[:, :, None]
    refit = ((units * groups).sum(axis=(1, 2)) * inverse((units * units).sum(axis=(1, 2))))[:, None]
    d = np.where(refit > 0, refit, d)
    return d, best


def _pack(values: np.ndarray, scales: _Scales, code: _Coder):
    """(d float32 [n, 1] exact in f16, s int64 [n, k], arrays of codes, each [n, ...])."""
    n = len(values)
    groups = values.reshape(n, -1, scales.group)
    own = _fit(groups.reshape(-1, scales.group), code, scales.sizes)
    d, small = _share(groups, code, own, scales.top)
    d = as_half(d / np.float32(scales.factor))
    scale = d * np.float32(scales.factor) * (2 * small + 1).astype(np.float32)
    _, codes = code((groups * inverse(scale)[:, :, None]).reshape(-1, scales.group))
    return d, small, [c.reshape(n, -1) for c in codes]


def _bytes(words: np.ndarray, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(words.astype(dtype)).view(np.uint8)


def _sign_words(signs: np.ndarray, small: np.ndarray) -> np.ndarray:
    """Sign bytes [n, 32] of even parity and scales [n, 8] -> u32 of 4 x 7 bits and 4 bits, int64 [n, 8]."""
    indices = (signs & 127).astype(np.int64).reshape(len(signs), 8, 4)
    assert (KSIGNS[indices] == signs.reshape(indices.shape)).all()
    return (indices << np.array([0, 7, 14, 21])).sum(axis=2) | small << 28


_IQ2_SIZES = (13, 15, 17, 19, 21, 23, 26)
_IQ2_32 = _Scales(32, 15, 1 / 8, _IQ2_SIZES)
_IQ2_16 = _Scales(16, 15, 1 / 8, _IQ2_SIZES)
_IQ3_XXS = _Scales(32, 15, 1 / 4, (14, 16, 18, 20, 22, 25, 28))
_IQ3_S = _Scales(32, 15, 1, (3.6, 4.2, 4.8, 5.4, 6, 6.6, 7.4))
_IQ1_S = _Scales(32, 7, 1, (0.5, 0.6, 0.7, 0.8, 0.9))
_IQ1_M = _Scales(16, 7, 1, (0.5, 0.6, 0.7, 0.8, 0.9))


def pack_iq2_xxs(values: np.ndarray) -> np.ndarray:
    """Least squared error over scales and codebook rows, signs with even parity."""
    d, small, (indices, signs) = _pack(values, _IQ2_32, _signed_coder("IQ2XXS", even=True))
    grid_words = (indices.reshape(len(values), 8, 4) << np.array([0, 8, 16, 24])).sum(axis=2)
    words = np.stack([grid_words, _sign_words(signs, small)], axis=2).reshape(len(values), 16)
    return np.hstack([half_bytes(d), _bytes(words, "<u4")])


def pack_iq2_xs(values: np.ndarray) -> np.ndarray:
    """Least squared error over scales and codebook rows, signs with even parity."""
    d, small, (indices, signs) = _pack(values, _IQ2_16, _signed_coder("IQ2XS", even=True))
    words = indices | (signs & 127).astype(np.int64) << 9
    return np.hstack([half_bytes(d), _bytes(words, "<u2"), join_bits(small, 4, 1)])


def pack_iq2_s(values: np.ndarray) -> np.ndarray:
    """Least squared error over scales and codebook rows."""
    d, small, (indices, signs) = _pack(values, _IQ2_16, _signed_coder("IQ2S", even=False))
    low = _bytes(indices & 255, "u1")
    return np.hstack([half_bytes(d), low, signs, join_bits(indices >> 8, 2, 1), join_bits(small, 4, 1)])


def pack_iq3_xxs(values: np.ndarray) -> np.ndarray:
    """Least squared error over scales and codebook rows, signs with even parity."""
    d, small, (indices, signs) = _pack(values, _IQ3_XXS, _signed_coder("IQ3XXS", even=True))
    return np.hstack([half_bytes(d), _bytes(indices, "u1"), _bytes(_sign_words(signs, small), "<u4")])


def pack_iq3_s(values: np.ndarray) -> np.ndarray:
    """Least squared error over scales and codebook rows."""
    d, small, (indices, signs) = _pack(values, _IQ3_S, _signed_coder("IQ3S", even=False))
    low = _bytes(indices & 255, "u1")
    return np.hstack([half_bytes(d), low, join_bits(indices >> 8, 1, 1), signs, join_bits(small, 4, 1)])


def pack_iq1_s(values: np.ndarray) -> np.ndarray:
    """Least squared error over scales, codebook rows and the direction of the shift."""
    d, small, (indices, falls) = _pack(values, _IQ1_S, _shifted_coder(32))
    high = ((indices >> 8).reshape(len(values), 8, 4) << np.array([0, 3, 6, 9])).sum(axis=2)
    return np.hstack([half_bytes(d), _bytes(indices & 255, "u1"), _bytes(high | small << 12 | falls << 15, "<u2")])


def pack_iq1_m(values: np.ndarray) -> np.ndarray:
    """Least squared error over scales, codebook rows and the directions of the shift."""
    d, small, (indices, falls) = _pack(values, _IQ1_M, _shifted_coder(8))
    words = (small.reshape(len(values), 4, 4) << np.array([0, 3, 6, 9])).sum(axis=2)
    d_bits = half_bytes(d).view("<u2").astype(np.int64)
    words |= (d_bits >> np.array([0, 4, 8, 12]) & 15) << 12
    return np.hstack([_bytes(indices & 255, "u1"), join_bits(indices >> 8 | falls << 3, 4, 1), _bytes(words, "<u2")])
