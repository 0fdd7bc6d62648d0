"""Mixture of experts in numpy: the choice of experts for each row, and the sum of their outputs in routing order."""

from collections.abc import Callable

import numpy as np

from tandem.ops.norm import softmax

MIN_WEIGHT_SUM = np.float32(6.1e-5)  # smallest normal half: keeps the renormalisation finite


def choose(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k most probable experts of each row of logits [T, E]: ids int32 [T, k], weights float32 [T, k].

    Softmax over all experts; ties go to the lower id; weights are p / max(sum of the k p, MIN_WEIGHT_SUM).
    """
    probabilities = softmax(logits)
    ids = np.argsort(-probabilities, axis=-1, kind="stable")[:, :k].astype(np.int32)
    chosen = np.take_along_axis(probabilities, ids, axis=-1)
    return ids, chosen / np.maximum(np.sum(chosen, axis=-1, keepdims=True), MIN_WEIGHT_SUM)


def mix(
    x: np.ndarray, ids: np.ndarray, weights: np.ndarray, feed_forward: Callable[[int, np.ndarray], np.ndarray]
) -> np.ndarray:
    """sum over slots a of weights[:, a] * feed_forward(ids[:, a], x), in slot order; each distinct expert runs once.

    x [T, hidden]; ids, weights [T, k]; feed_forward(expert, rows [n, hidden]) -> [n, hidden].
    """
    outputs = np.empty((*ids.shape, x.shape[1]), np.float32)
    for expert in np.unique(ids):
        rows, slots = np.nonzero(ids == expert)
        outputs[rows, slots] = feed_forward(int(expert), x[rows])
    total = np.zeros_like(x)
    for slot in range(ids.shape[1]):
        total += weights[:, slot, None] * outputs[:, slot]
    return total
