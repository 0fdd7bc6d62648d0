"""The vocabulary of a forward pass: what a model file may ask for, and the frozen descriptions it hands over.

A model calls the methods of an `Ops`. `ops.reference.ReferenceOps` computes them at once in numpy float32;
`ops.cpu.CpuOps` records them into a program that the C++ library runs. Rows (T) are the tokens of one step.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Rows = Any  # a float32 [T, width] array in the reference, a recorded Buffer on a device


@dataclass(frozen=True)
class Weight:
    """One matrix or vector of the model file, still in its blocks.

    blocks: uint8 [*shape[:-1], row_bytes] view of the mapped file (leading strides may be larger than the rows,
    when a fused tensor was split). shape: logical, numpy order: (width,), (out, in) or (experts, out, in).
    scale: float32 [1] or [experts] multiplied onto the product (NVFP4 companions), else None.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    blocks: np.ndarray
    scale: np.ndarray | None = None


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. Pair i turns by position * inv_freq[i]; dims past 2 * len(inv_freq) pass through.

    interleaved: pairs are (2i, 2i+1) if true, else (i, i + n/2) with n = 2 * len(inv_freq).
    magnitude: factor on the rotated values (YaRN's attention factor), 1.0 normally.
    """

    inv_freq: np.ndarray  # float32 [n/2]
    interleaved: bool = False
    magnitude: float = 1.0


@dataclass(frozen=True)
class Attention:
    """Causal attention with grouped heads: query head h reads kv head h // (num_heads / num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int
    scale: float  # multiplied onto q.k
    window: int | None = None  # a query at p sees keys p-window+1 .. p
    softcap: float | None = None  # cap * tanh(score / cap), before the mask


@dataclass(frozen=True)
class Delta:
    """Gated DeltaNet dimensions. Value head j uses query/key head j % num_k_heads (GGUF order)."""

    num_k_heads: int
    num_v_heads: int
    head_dim: int  # keys and values alike
    conv_width: int
    eps: float  # of the L2 norm of q and k


@dataclass(frozen=True)
class Routing:
    """Chosen experts of each row: ids int32 [T, k] by falling probability, weights float32 [T, k]."""

    ids: Rows
    weights: Rows
    k: int


class Ops(Protocol):
    """One method per op. `layer` is the index of the layer whose state (cache or recurrent) is read and advanced.

    All rows are float32, row-major. Nothing is modified in place except the state.
    """

    def embed(self, table: Weight, scale: float = 1.0) -> Rows:
        """Rows of the step's token ids from table [vocab, hidden], times scale -> [T, hidden]."""

    def hidden_rows(self, width: int) -> Rows:
        """Rows that the step brings along beside its token ids: hidden states of another pass -> [T, width]."""

    def concat(self, x: Rows, y: Rows) -> Rows:
        """Each row of x followed by the same row of y."""

    def rms_norm(self, x: Rows, weight: Weight, eps: float, heads: int = 1) -> Rows:
        """x / sqrt(mean(x^2) + eps) * weight over each of `heads` equal parts of a row; weight [width / heads]."""

    def matmul(self, x: Rows, *weights: Weight) -> list[Rows]:
        """x [T, K] times each weight [N, K] transposed -> one [T, N] per weight. 8-bit activations on quantized types."""

    def matmul_add(self, x: Rows, weight: Weight, residual: Rows) -> Rows:
        """residual + x @ weight.T -> [T, N]."""

    def gate_up(self, x: Rows, gate: Weight, up: Weight, activation: str) -> Rows:
        """activation(x @ gate.T) * (x @ up.T) -> [T, N]; activation is "silu" or "gelu_tanh"."""

    def add(self, x: Rows, y: Rows) -> Rows:
        """x + y."""

    def scale(self, x: Rows, factor: float) -> Rows:
        """x * factor."""

    def softcap(self, x: Rows, cap: float) -> Rows:
        """cap * tanh(x / cap)."""

    def split_gate(self, x: Rows, head_dim: int) -> tuple[Rows, Rows]:
        """x [T, heads * 2 * head_dim], per head head_dim values then head_dim gates -> (values, gates) [T, heads * head_dim]."""

    def sigmoid_gate(self, x: Rows, gate: Rows) -> Rows:
        """x * sigmoid(gate)."""

    def rope(self, x: Rows, head_dim: int, rope: Rope) -> Rows:
        """Rotate each head of x [T, heads * head_dim] by the step's positions."""

    def attention(self, q: Rows, k: Rows, v: Rows, layer: int, spec: Attention) -> Rows:
        """Append k [T, Hkv*D] and v [T, Hkv*Dv] to the layer's cache at the step's positions, attend causally
        over the cache -> [T, Hq*Dv]. Keys and values are read back as the cache stores them (f16 or q8_0)."""

    def short_conv(self, x: Rows, weight: Weight, layer: int) -> Rows:
        """SiLU of the depthwise causal convolution over time; x [T, C], weight [C, width] (last tap newest);
        the layer's conv tail [width-1, C] gives the inputs before this step."""

    def delta_rule(self, qkv: Rows, alpha: Rows, beta: Rows, a: Weight, dt_bias: Weight, layer: int, spec: Delta) -> Rows:
        """Gated delta rule over the step's rows -> [T, Hv*D].

        qkv [T, (2*Hk + Hv) * D]: all q heads, all k heads, all v heads, after the convolution. alpha, beta [T, Hv] raw
        projections; log_decay = a * softplus(alpha + dt_bias) (a < 0), beta = sigmoid(beta). q, k are L2-normalised
        here and q scaled by 1/sqrt(D). State float32 [Hv, Dk, Dv], advanced. models.md 3.3: decay, then delta, then read.
        """

    def gated_rms_norm(self, x: Rows, gate: Rows, weight: Weight, eps: float, heads: int) -> Rows:
        """rms_norm(x, weight, eps, heads) * silu(gate)."""

    def route(self, x: Rows, router: Weight, k: int) -> Routing:
        """Softmax over all experts of x @ router.T (float32), the k most probable (ties: lower id first),
        weights renormalised: p / max(sum p, 6.1e-5)."""

    def experts(self, x: Rows, routing: Routing, gate: Weight, up: Weight, down: Weight, activation: str) -> Rows:
        """sum over the row's experts e, in routing order, of weight_e * down_e(activation(gate_e x) * up_e x) -> [T, hidden]."""

    def add_gated(self, base: Rows, x: Rows, gate_input: Rows, gate_weight: Weight) -> Rows:
        """base + sigmoid(<gate_input, gate_weight>) * x (the shared expert); gate_weight [hidden]."""

    def output_rows(self, x: Rows) -> Rows:
        """Only the rows whose logits the step asks for -> [n_out, width]."""
