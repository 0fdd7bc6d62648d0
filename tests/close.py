"""The one way that tests compare arrays of floats: relative root-mean-square error with a stated bound."""

import numpy as np


def assert_close(actual: np.ndarray, expected: np.ndarray, bound: float) -> float:
    """Relative RMS error |actual - expected| / |expected|, which must be at most `bound` (0 asks for equality).

    Shapes must be equal. NaN and infinities must be in the same places with the same sign, and do not count. Where
    expected is all zero the error is absolute.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    finite = np.isfinite(expected)
    assert np.array_equal(actual[~finite], expected[~finite], equal_nan=True), "NaN or infinity in other places"
    difference, reference = actual[finite] - expected[finite], expected[finite]
    assert np.isfinite(difference).all(), "NaN or infinity where the reference is finite"
    norm = np.linalg.norm(reference)
    error = float(np.linalg.norm(difference) / (norm if norm else 1.0))
    assert error <= bound, f"relative RMS error {error:.3g} over the bound {bound:.3g}"
    return error
