"""Short convolution and gated delta rule in numpy: the recurrence, and the chunked form that prefill uses.

Rows of one sequence in, rows out; the states given are advanced. Head j of v uses head j % Hk of q and k.
"""

import numpy as np

from tandem.ops.norm import silu

CHUNK = 64


def short_conv(x: np.ndarray, weight: np.ndarray, tail: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """SiLU of the depthwise causal convolution over time; returns (y [T, C], next tail).

    x [T, C]; weight [C, width], last tap on the newest input; tail [width - 1, C]: the inputs before x, oldest first.
    """
    inputs = np.concatenate([tail, x])  # [width - 1 + T, C]
    width = weight.shape[1]
    y = sum(inputs[tap : tap + len(x)] * weight[:, tap] for tap in range(width))
    return silu(y), inputs[len(inputs) - (width - 1) :].copy()


def delta_steps(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, log_decay: np.ndarray, beta: np.ndarray, state: np.ndarray
) -> np.ndarray:
    """Advance the gated delta rule token by token; returns y [T, Hv, Dv].

    q, k [T, Hk, Dk], k L2-normalised, q L2-normalised and scaled; v [T, Hv, Dv]; log_decay [T, Hv], <= 0;
    beta [T, Hv] in (0, 1); state [Hv, Dk, Dv], updated in place. Source: Gated Delta Networks, arXiv 2412.06464.
    """
    q, k = per_value_head(q, v), per_value_head(k, v)
    y = np.empty_like(v)
    for t in range(len(v)):
        state *= np.exp(log_decay[t])[:, None, None]
        expected = np.einsum("hkv,hk->hv", state, k[t])
        change = beta[t][:, None] * (v[t] - expected)
        state += k[t][:, :, None] * change[:, None, :]
        y[t] = np.einsum("hkv,hk->hv", state, q[t])
    return y


def delta_chunks(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
    chunk: int = CHUNK,
) -> np.ndarray:
    """The same function as `delta_steps`, by matrix products over chunks of tokens; arguments and result alike.

    Within a chunk the change each token makes depends on the changes of the tokens before it: one unit lower
    triangular system per head gives them all.
    """
    q, k = per_value_head(q, v), per_value_head(k, v)
    y = np.empty_like(v)
    for begin in range(0, len(v), chunk):
        rows = slice(begin, begin + chunk)
        parts = (np.moveaxis(part[rows], 0, 1) for part in (q, k, v, log_decay, beta))  # heads first
        y[rows] = np.moveaxis(_one_chunk(*parts, state), 0, 1)
    return y


def _one_chunk(q, k, v, log_decay, beta, state):
    """q, k [H, C, Dk], v [H, C, Dv], log_decay, beta [H, C], state updated in place -> y [H, C, Dv]."""
    log_total = np.cumsum(log_decay, axis=1)  # decay from the chunk's start to after token i
    later = np.tri(v.shape[1], dtype=bool)
    # Masked before exp: above the diagonal the exponent is positive and may overflow.
    decay = np.exp(np.where(later, log_total[:, :, None] - log_total[:, None, :], -np.inf))
    system = np.where(np.tri(v.shape[1], k=-1, dtype=bool), beta[:, :, None] * (k @ k.swapaxes(1, 2)) * decay, 0)
    system += np.eye(v.shape[1], dtype=v.dtype)
    from_state = (k * np.exp(log_total)[:, :, None]) @ state
    changes = np.linalg.solve(system, beta[:, :, None] * (v - from_state))  # [H, C, Dv]
    y = (q * np.exp(log_total)[:, :, None]) @ state + (q @ k.swapaxes(1, 2) * decay) @ changes
    left = np.exp(log_total[:, -1:] - log_total)  # decay from token i to the chunk's end
    state *= np.exp(log_total[:, -1])[:, None, None]
    state += (k * left[:, :, None]).swapaxes(1, 2) @ changes
    return y


def per_value_head(x: np.ndarray, v: np.ndarray) -> np.ndarray:
    """x [T, Hk, D] repeated so that head j is x's head j % Hk -> [T, Hv, D], with Hv from v [T, Hv, Dv]."""
    return np.tile(x, (1, v.shape[1] // x.shape[1], 1))
