"""Norms and activations in numpy float32: what the C++ twins must equal. Rows in, rows out."""

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, heads: int = 1) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight, over each of `heads` equal parts of a row; x [T, heads * D], weight [D]."""
    parts = x.reshape(x.shape[0], heads, -1)
    mean_square = np.mean(np.square(parts), axis=-1, keepdims=True, dtype=np.float32)
    return (parts / np.sqrt(mean_square + np.float32(eps)) * weight).reshape(x.shape)


def gated_rms_norm(x: np.ndarray, gate: np.ndarray, weight: np.ndarray, eps: float, heads: int) -> np.ndarray:
    """rms_norm(x) * silu(gate); x, gate [T, heads * D], weight [D]."""
    return rms_norm(x, weight, eps, heads) * silu(gate)


def l2_norm(x: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(sum(x^2) + eps) over the last axis."""
    return x / np.sqrt(np.sum(np.square(x), axis=-1, keepdims=True, dtype=np.float32) + np.float32(eps))


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + e^x), without overflow."""
    return np.logaddexp(np.float32(0), x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x), accurate in both tails."""
    return np.exp(-softplus(-x))


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """The tanh form of GELU: x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


def softcap(x: np.ndarray, cap: float) -> np.ndarray:
    """cap * tanh(x / cap): bounds x by cap, nearly linear around 0."""
    return np.float32(cap) * np.tanh(x / np.float32(cap))


def softmax(x: np.ndarray) -> np.ndarray:
    """Softmax over the last axis; -inf entries get 0."""
    powers = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return powers / np.sum(powers, axis=-1, keepdims=True)


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}
