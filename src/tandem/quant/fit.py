"""Search for scales: what every `pack` minimises is the weighted squared error of its groups of values.

In: groups of float32 values [..., s] and weights of the same shape. Out: scales [..., 1], and small integer scales.
A candidate scale gives codes, the codes give the least-squares scale, and the candidate with the least error wins.
"""

from collections.abc import Callable, Sequence

import numpy as np

# Rounds values in units of the scale to the nearest values that codes stand for, both float32 [..., s].
Nearest = Callable[[np.ndarray], np.ndarray]


def clip_to(low: int, high: int) -> Nearest:
    """The Nearest of codes that are the integers low..high."""

    def nearest(units: np.ndarray) -> np.ndarray:
        rounded = np.rint(units)
        return np.clip(rounded, low, high, out=rounded)

    return nearest


def table_codes(table: np.ndarray, units: np.ndarray) -> np.ndarray:
    """The index, uint8, of the entry of `table` that is nearest to each value; of equal entries the first."""
    entries, codes = np.unique(table, return_index=True)
    middles = (entries[1:].astype(np.float32) + entries[:-1]) / 2
    return codes.astype(np.uint8)[np.searchsorted(middles, units)]


def nearest_in(table: np.ndarray) -> Nearest:
    """The Nearest of codes that stand for integers of a table; within 1/32 of a middle it may take the other side."""
    reach = int(np.abs(table.astype(int)).max())
    resolution = 16
    rounded = table[table_codes(table, np.arange(-reach * resolution, reach * resolution + 1) / resolution)]
    rounded = rounded.astype(np.float32)

    def nearest(units: np.ndarray) -> np.ndarray:
        at = np.clip(units, -reach, reach) * np.float32(resolution) + np.float32(reach * resolution + 0.5)
        return rounded[at.astype(np.int32)]

    return nearest


def importance(values: np.ndarray) -> np.ndarray:
    """Weights for groups [..., s] of model weights whose inputs are unknown: large ones matter more (ggml's choice)."""
    return np.sqrt(np.mean(values * values, axis=-1, keepdims=True)) + np.abs(values)


def inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale, and 0 where the scale is 0 or too small to invert."""
    usable = np.abs(scale) > 1e-37
    return np.divide(1, scale, out=np.zeros_like(scale), where=usable)


def peak(values: np.ndarray) -> np.ndarray:
    """The value of largest magnitude of each group, with its sign; [..., 1]."""
    return np.take_along_axis(values, np.abs(values).argmax(axis=-1)[..., None], axis=-1)


def as_half(scale: np.ndarray) -> np.ndarray:
    """The scale as f16 will store it, as float32; saturates, since an infinite scale would make NaN of zeros."""
    return np.clip(scale, -65504, 65504).astype(np.float16).astype(np.float32)


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("...s,...s->...", a, b)[..., None]


def fit_scale(values: np.ndarray, weights: np.ndarray, nearest: Nearest, targets: Sequence[float]) -> np.ndarray:
    """Scale [..., 1] of least weighted error for each group.

    A target is where the group's peak is placed, in units of the scale; its sign chooses the sign of the scale.
    """
    unit = inverse(peak(values))
    weighted = values * weights
    best = np.zeros_like(unit)
    best_gain = np.zeros_like(unit)
    for target in targets:
        codes = nearest(values * (unit * np.float32(target)))
        along, norm = _dot(weighted, codes), _dot(weights * codes, codes)
        scale = along * inverse(norm)
        gain = along * scale
        better = gain > best_gain
        np.copyto(best, scale, where=better)
        np.copyto(best_gain, gain, where=better)
    return best


def _line(codes: np.ndarray, values: np.ndarray, weights: np.ndarray, *, positive: bool):
    """Least-squares (scale, offset) of values = scale * codes + offset and its error; offset > 0 only if positive."""
    weighted = weights * codes
    n, sx = weights.sum(axis=-1, keepdims=True), _dot(weights, values)
    sq, sqq, sqx = weighted.sum(axis=-1, keepdims=True), _dot(weighted, codes), _dot(weighted, values)
    determinant = n * sqq - sq * sq
    # Equal codes leave one unknown: their common value. It is all offset if the code is 0 or the offset is free.
    equal = determinant <= 1e-6 * n * sqq
    factor = inverse(np.where(equal, 0, determinant))
    scale, offset = (n * sqx - sq * sx) * factor, (sqq * sx - sq * sqx) * factor
    offset = np.where(equal & (positive | (sqq == 0)), sx * inverse(n), offset)
    if not positive:
        through_zero = (offset > 0) | equal & (sqq > 0)
        scale = np.where(through_zero, sqx * inverse(sqq), scale)
        offset = np.where(through_zero, 0, offset)
    difference = scale * codes + offset - values
    return scale, offset, _dot(weights * difference, difference)


def fit_line(values: np.ndarray, weights: np.ndarray, top: int, spans: Sequence[float], *, positive: bool):
    """(scale, offset), both [..., 1], of least weighted error for codes 0..top: values = scale * code + offset.

    A span is how many steps the group's range is cut into. Unless `positive`, the offset is at most 0.
    """
    low = values.min(axis=-1, keepdims=True)
    if not positive:
        low = np.minimum(low, 0)
    step = inverse(values.max(axis=-1, keepdims=True) - low)
    above = values - low
    nearest = clip_to(0, top)
    best = None
    for span in spans:
        best = _keep_better(best, _line(nearest(above * (step * np.float32(span))), values, weights, positive=positive))
    # The least-squares line rarely starts at the lowest value: code once more along it.
    codes = nearest((values - best[1]) * inverse(best[0]))
    return _keep_better(best, _line(codes, values, weights, positive=positive))[:2]


def _keep_better(best, new):
    """Of two (scale, offset, error), the one with the smaller error for each group."""
    if best is None:
        return new
    better = new[2] < best[2]
    return tuple(np.where(better, b, a) for a, b in zip(best, new, strict=True))


def share_scale(values, weights, scales, nearest: Nearest, low: int, high: int):
    """(d, small): f16-exact d [n, 1, 1] and integer scales [n, k, 1] in low..high, so that d * small serves the groups.

    values, weights: [n, k, s]. scales: [n, k, 1], the best scale of each group on its own.
    """
    limit = low if low < 0 else high
    d = as_half(peak(scales[..., 0])[..., None] / np.float32(limit))
    small = np.clip(np.rint(scales * inverse(d)), low, high)
    for _ in range(2):
        small = _best_neighbour(values, weights, d, small, nearest, low, high)
        units = small * nearest(values * inverse(d * small))
        along = (weights * values * units).sum(axis=(1, 2), keepdims=True)
        norm = (weights * units * units).sum(axis=(1, 2), keepdims=True)
        refit = as_half(along * inverse(norm))
        d = np.where(refit == 0, d, refit)
    return d, small


def _best_neighbour(values, weights, d, small, nearest, low, high):
    best, best_error = small, None
    for move in (0, -1, 1):
        tried = np.clip(small + move, low, high)
        scale = d * tried
        difference = scale * nearest(values * inverse(scale)) - values
        error = _dot(weights * difference, difference)
        if best_error is None:
            best_error = error
            continue
        best = np.where(error < best_error, tried, best)
        best_error = np.minimum(error, best_error)
    return best


def share_line(values, weights, scales, offsets, top: int, limit: int):
    """(d, dmin, small, mins): f16-exact d, dmin [n, 1, 1], integers 0..limit [n, k, 1]: values = d small q - dmin mins.

    values, weights: [n, k, s]; q is 0..top. scales >= 0 and offsets <= 0: [n, k, 1], each group's own best line.
    """
    scales, lows = np.maximum(scales, 0), np.maximum(-offsets, 0)
    d = as_half(scales.max(axis=1, keepdims=True) / np.float32(limit))
    dmin = as_half(lows.max(axis=1, keepdims=True) / np.float32(limit))
    small = np.clip(np.rint(scales * inverse(d)), 0, limit)
    mins = np.clip(np.rint(lows * inverse(dmin)), 0, limit)
    nearest = clip_to(0, top)
    for _ in range(2):
        small, mins = _best_line_neighbour(values, weights, (d, dmin), (small, mins), nearest, limit)
        units = small * nearest((values + dmin * mins) * inverse(d * small))
        d, dmin = _refit_line(values, weights, units, mins, (d, dmin))
    return d, dmin, small, mins


def _refit_line(values, weights, units, mins, old):
    """Least squares for (d, dmin) over a whole super-block; keeps `old` where the system has no good solution."""

    def total(a, b):
        return np.einsum("nks,nks,nks->n", weights, a, b)[:, None, None]

    lows = np.broadcast_to(-mins, units.shape)
    uu, um, mm = total(units, units), total(units, lows), total(lows, lows)
    ux, mx = total(units, values), total(lows, values)
    determinant = uu * mm - um * um
    solvable = determinant > 1e-4 * uu * mm
    factor = inverse(np.where(solvable, determinant, 0))
    d, dmin = (mm * ux - um * mx) * factor, (uu * mx - um * ux) * factor
    good = solvable & (d > 0) & (dmin >= 0)
    return as_half(np.where(good, d, old[0])), as_half(np.where(good, dmin, old[1]))


def _best_line_neighbour(values, weights, halves, smalls, nearest, limit):
    (d, dmin), (small, mins) = halves, smalls
    best, best_error = (small, mins), None
    for move in (0, -1, 1):
        for move_min in (0, -1, 1):
            tried = np.clip(small + move, 0, limit)
            tried_min = np.clip(mins + move_min, 0, limit)
            scale, low = d * tried, dmin * tried_min
            difference = scale * nearest((values + low) * inverse(scale)) - low - values
            error = _dot(weights * difference, difference)
            if best_error is None:
                best_error = error
                continue
            better = error < best_error
            best = np.where(better, tried, best[0]), np.where(better, tried_min, best[1])
            best_error = np.minimum(error, best_error)
    return best
