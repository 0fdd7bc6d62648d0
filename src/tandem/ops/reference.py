"""The reference device: a model's forward pass computed at once in numpy float32, slow and plain.

One sequence. `ReferenceState` holds what lasts between steps, `ReferenceStep` the rows of one step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tandem.errors import RequestError, SettingError, nearest
from tandem.ops import attention, delta, experts, norm
from tandem.ops.base import Attention, Delta, Rope, Routing, Weight
from tandem.ops.matmul import Unpacked, multiply, product_scale, unpack_part
from tandem.ops.rope import rotate

CHUNKED_FROM_ROWS = 16  # below, the recurrence is faster than the chunked form


@dataclass(frozen=True)
class ReferenceStep:
    """Rows of one step: token ids and positions int32 [T] (consecutive), and the rows whose logits are wanted."""

    tokens: np.ndarray
    positions: np.ndarray
    out_rows: np.ndarray
    hidden: np.ndarray | None = None  # float32 [T, width], for passes that continue another's hidden states


@dataclass
class KvRows:
    """Keys [S, Hkv * D] and values [S, Hkv * Dv] of one layer, float32 after rounding to the cache's type."""

    keys: np.ndarray
    values: np.ndarray


@dataclass
class DeltaRows:
    """Recurrent state float32 [Hv, Dk, Dv] and the last conv_width - 1 inputs of the convolution, oldest first."""

    state: np.ndarray
    tail: np.ndarray


@dataclass
class ReferenceState:
    """State of one sequence: per layer KvRows or DeltaRows, plus the unpacked weights that steps share.

    specs: `models.<arch>.state(config)`; ctx: most positions; kv: "f32", "f16" or "q8_0".
    """

    specs: Sequence
    ctx: int
    kv: str = "f16"
    unpacked: Unpacked = field(default_factory=Unpacked)

    def __post_init__(self):
        if self.kv not in attention.KV_TYPES:
            raise SettingError(f"kv cache type {self.kv!r} is unknown{nearest(self.kv, attention.KV_TYPES)}")
        self.layers = [_empty(spec) for spec in self.specs]


def _empty(spec) -> KvRows | DeltaRows:
    # By the fields a spec has, not by its class: `models` comes after `ops` in the import order.
    if hasattr(spec, "conv_width"):
        state = np.zeros((spec.num_v_heads, spec.key_dim, spec.value_dim), np.float32)
        return DeltaRows(state, np.zeros((spec.conv_width - 1, spec.conv_channels), np.float32))
    heads = spec.num_kv_heads
    return KvRows(np.zeros((0, heads * spec.key_dim), np.float32), np.zeros((0, heads * spec.value_dim), np.float32))


class ReferenceOps:
    """Computes each op of `ops.base.Ops` when it is called.

    quantize_activations rounds matmul inputs of quantized weights to int8 per 32 values, as the CPU kernels do.
    """

    def __init__(self, step: ReferenceStep, state: ReferenceState, *, quantize_activations: bool = False):
        if len(step.positions) and step.positions[-1] >= state.ctx:
            raise RequestError(
                f"position {step.positions[-1]} does not fit a context of {state.ctx}: load with a larger ctx"
            )
        self.step = step
        self.state = state
        self.quantize_activations = quantize_activations

    def embed(self, table: Weight, scale: float = 1.0) -> np.ndarray:
        rows = unpack_part(table, self.step.tokens)
        return rows * (np.float32(scale) * product_scale(table))

    def hidden_rows(self, width: int) -> np.ndarray:
        assert self.step.hidden is not None and self.step.hidden.shape == (len(self.step.tokens), width)
        return self.step.hidden

    def concat(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.concatenate((x, y), axis=1)

    def rms_norm(self, x: np.ndarray, weight: Weight, eps: float, heads: int = 1) -> np.ndarray:
        return norm.rms_norm(x, self._vector(weight), eps, heads)

    def matmul(self, x: np.ndarray, *weights: Weight) -> list[np.ndarray]:
        return [self._multiply(x, weight) for weight in weights]

    def matmul_add(self, x: np.ndarray, weight: Weight, residual: np.ndarray) -> np.ndarray:
        return residual + self._multiply(x, weight)

    def gate_up(self, x: np.ndarray, gate: Weight, up: Weight, activation: str) -> np.ndarray:
        return norm.ACTIVATIONS[activation](self._multiply(x, gate)) * self._multiply(x, up)

    def add(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return x + y

    def scale(self, x: np.ndarray, factor: float) -> np.ndarray:
        return x * np.float32(factor)

    def softcap(self, x: np.ndarray, cap: float) -> np.ndarray:
        return norm.softcap(x, cap)

    def split_gate(self, x: np.ndarray, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
        heads = x.reshape(len(x), -1, 2, head_dim)
        return heads[:, :, 0].reshape(len(x), -1), heads[:, :, 1].reshape(len(x), -1)

    def sigmoid_gate(self, x: np.ndarray, gate: np.ndarray) -> np.ndarray:
        return x * norm.sigmoid(gate)

    def rope(self, x: np.ndarray, head_dim: int, rope: Rope) -> np.ndarray:
        return rotate(x, self.step.positions, head_dim, rope)

    def attention(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, layer: int, spec: Attention) -> np.ndarray:
        cache = self.state.layers[layer]
        begin = int(self.step.positions[0])
        assert begin <= len(cache.keys), "positions of a step follow those before"
        # Rows at or past the first position belong to a branch that the caller has left.
        cache.keys = np.concatenate([cache.keys[:begin], attention.as_stored(k, self.state.kv)])
        cache.values = np.concatenate([cache.values[:begin], attention.as_stored(v, self.state.kv)])
        return attention.attend(q, cache.keys, cache.values, self.step.positions, spec)

    def short_conv(self, x: np.ndarray, weight: Weight, layer: int) -> np.ndarray:
        rows = self.state.layers[layer]
        y, rows.tail = delta.short_conv(x, self._vector(weight), rows.tail)
        return y

    def delta_rule(
        self,
        qkv: np.ndarray,
        alpha: np.ndarray,
        beta: np.ndarray,
        a: Weight,
        dt_bias: Weight,
        layer: int,
        spec: Delta,
    ) -> np.ndarray:
        keys = spec.num_k_heads * spec.head_dim
        q, k, v = (part.reshape(len(qkv), -1, spec.head_dim) for part in np.split(qkv, [keys, 2 * keys], axis=1))
        q = norm.l2_norm(q, spec.eps) / np.float32(np.sqrt(spec.head_dim))
        k = norm.l2_norm(k, spec.eps)
        log_decay = self._vector(a) * norm.softplus(alpha + self._vector(dt_bias))
        form = delta.delta_chunks if len(qkv) >= CHUNKED_FROM_ROWS else delta.delta_steps
        return form(q, k, v, log_decay, norm.sigmoid(beta), self.state.layers[layer].state).reshape(len(qkv), -1)

    def gated_rms_norm(self, x: np.ndarray, gate: np.ndarray, weight: Weight, eps: float, heads: int) -> np.ndarray:
        return norm.gated_rms_norm(x, gate, self._vector(weight), eps, heads)

    def route(self, x: np.ndarray, router: Weight, k: int) -> Routing:
        ids, weights = experts.choose(self._multiply(x, router), k)
        return Routing(ids, weights, k)

    def experts(
        self, x: np.ndarray, routing: Routing, gate: Weight, up: Weight, down: Weight, activation: str
    ) -> np.ndarray:
        def feed_forward(expert: int, rows: np.ndarray) -> np.ndarray:
            gated = norm.ACTIVATIONS[activation](self._multiply(rows, gate, expert))
            return self._multiply(gated * self._multiply(rows, up, expert), down, expert)

        return experts.mix(x, routing.ids, routing.weights, feed_forward)

    def add_gated(self, base: np.ndarray, x: np.ndarray, gate_input: np.ndarray, gate_weight: Weight) -> np.ndarray:
        gate = gate_input @ self._vector(gate_weight) * product_scale(gate_weight)
        return base + norm.sigmoid(gate)[:, None] * x

    def output_rows(self, x: np.ndarray) -> np.ndarray:
        return x[self.step.out_rows]

    def _vector(self, weight: Weight) -> np.ndarray:
        return self.state.unpacked.get(weight)

    def _multiply(self, x: np.ndarray, weight: Weight, expert: int | None = None) -> np.ndarray:
        return multiply(x, weight, self.state.unpacked, expert, quantize_activations=self.quantize_activations)
