"""Blocks that several architectures share: rope from metadata, tensor tables and forward passes of plain layers."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tandem.errors import FormatError
from tandem.models.base import Fused, KvState, TensorSpec
from tandem.models.keys import Keys
from tandem.ops.base import Attention, Ops, Rope, Rows, Weight
from tandem.ops.rope import inv_frequencies, yarn


@dataclass(frozen=True)
class RopeScaling:
    """How trained frequencies are stretched to longer contexts: type "none", "linear" or "yarn"."""

    type: str = "none"
    factor: float = 1.0
    trained_ctx: int = 0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def read_attention(keys: Keys, layers: Iterable[int], default_head_dim: int | None = None) -> Attention:
    """Heads of `layers`, causal over all positions; without a default, the file must state its head dimension.

    Raises FormatError naming the key whose value cannot be.
    """
    layers = list(layers)
    num_heads = keys.same_in("attention.head_count", layers)
    num_kv_heads = keys.same_in("attention.head_count_kv", layers, num_heads)
    if num_heads % num_kv_heads:
        raise FormatError(
            f"metadata key {keys.architecture}.attention.head_count_kv is {num_kv_heads}, "
            f"it must divide attention.head_count = {num_heads}"
        )
    stated = () if default_head_dim is None else (default_head_dim,)
    head_dim = keys.integer("attention.key_length", *stated)
    if head_dim < 2 or head_dim % 2:
        raise FormatError(
            f"metadata key {keys.architecture}.attention.key_length (or embedding_length / attention.head_count) is "
            f"{head_dim}, it must be even: rope turns pairs"
        )
    return Attention(
        num_heads, num_kv_heads, head_dim, keys.integer("attention.value_length", head_dim), head_dim**-0.5
    )


def read_rope_scaling(keys: Keys, theta: float) -> RopeScaling:
    """From `rope.scaling.*` (or the old `rope.scale_linear`); raises FormatError for other types."""
    old_factor = keys.number("rope.scale_linear", 1.0)
    factor = keys.number("rope.scaling.factor", old_factor)
    kind = keys.text("rope.scaling.type", "none" if factor == 1.0 else "linear")
    if kind not in ("none", "linear", "yarn"):
        raise FormatError(
            f"metadata key {keys.architecture}.rope.scaling.type is {kind!r}, supported: 'none', 'linear', 'yarn'"
        )
    keys.allow("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    if kind == "yarn" and theta <= 1:
        raise FormatError(f"metadata key {keys.architecture}.rope.freq_base is {theta}, YaRN needs more than 1")
    return RopeScaling(
        kind,
        factor,
        keys.integer("rope.scaling.original_context_length") if kind == "yarn" else 0,
        keys.number("rope.scaling.attn_factor", 1.0),
        keys.number("rope.scaling.yarn_beta_fast", 32.0),
        keys.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def make_rope(
    theta: float,
    rotated_dims: int,
    scaling: RopeScaling = RopeScaling(),
    factors: np.ndarray | None = None,
    *,
    interleaved: bool = False,
) -> Rope:
    """The frequencies of a layer; factors [rotated_dims / 2] (`rope_freqs.weight`) divide them before scaling."""
    inv_freq = inv_frequencies(theta, rotated_dims)
    if factors is not None:
        inv_freq = inv_freq / factors
    magnitude = scaling.attn_factor
    if scaling.type == "linear":
        inv_freq = inv_freq / np.float32(scaling.factor)
    elif scaling.type == "yarn":
        args = (theta, scaling.factor, scaling.trained_ctx, scaling.beta_fast, scaling.beta_slow)
        inv_freq, log_factor = yarn(inv_freq, *args)
        magnitude *= log_factor
    return Rope(inv_freq, interleaved, magnitude)


def global_tensors(vocab_size: int, hidden_size: int) -> Iterator[TensorSpec]:
    """Embedding, last norm and head; without a head the embedding serves (tied)."""
    yield TensorSpec("token_embd.weight", (vocab_size, hidden_size), "embed")
    yield TensorSpec("output_norm.weight", (hidden_size,), "norm")
    yield TensorSpec("output.weight", (vocab_size, hidden_size), "head", required=False)


def attention_tensors(block: str, hidden_size: int, spec: Attention, *, head_norms: bool) -> Iterator[TensorSpec]:
    """Projections of a plain attention layer; head_norms: with RMS norms of q and k per head."""
    q, k = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield TensorSpec(block + "attn_q.weight", (q, hidden_size), "attention")
    yield TensorSpec(block + "attn_k.weight", (k, hidden_size), "attention")
    yield TensorSpec(block + "attn_v.weight", (spec.num_kv_heads * spec.value_dim, hidden_size), "attention")
    yield TensorSpec(block + "attn_output.weight", (hidden_size, spec.num_heads * spec.value_dim), "attention")
    if head_norms:
        yield TensorSpec(block + "attn_q_norm.weight", (spec.head_dim,), "norm")
        yield TensorSpec(block + "attn_k_norm.weight", (spec.head_dim,), "norm")


def mlp_tensors(block: str, hidden_size: int, ffn_size: int, role: str = "ffn") -> Iterator[TensorSpec]:
    """The gated feed-forward of a dense layer."""
    yield TensorSpec(block + "ffn_gate.weight", (ffn_size, hidden_size), role)
    yield TensorSpec(block + "ffn_up.weight", (ffn_size, hidden_size), role)
    yield TensorSpec(block + "ffn_down.weight", (hidden_size, ffn_size), role)


def fused_qkv(block: str) -> Fused:
    """q, k and v rows in one tensor."""
    return Fused(block + "attn_qkv.weight", tuple(f"{block}attn_{part}.weight" for part in "qkv"))


def kv_state(spec: Attention) -> KvState:
    """The cache that an attention layer needs."""
    return KvState(spec.num_kv_heads, spec.head_dim, spec.value_dim, spec.window)


class Block:
    """Weights of one layer by their short names: block["attn_q"] is blk.<i>.attn_q.weight."""

    def __init__(self, weights: Mapping[str, Weight], layer: int):
        self.weights = weights
        self.prefix = f"blk.{layer}."

    def __getitem__(self, name: str) -> Weight:
        return self.weights[f"{self.prefix}{name}.weight"]


def attention(
    ops: Ops, x: Rows, block: Block, layer: int, spec: Attention, rope: Rope, *, norm_eps: float | None = None
) -> Rows:
    """Attention over normed rows x, before the output projection; norm_eps: q and k are RMS-normed per head first."""
    q, k, v = ops.matmul(x, block["attn_q"], block["attn_k"], block["attn_v"])
    if norm_eps is not None:
        q = ops.rms_norm(q, block["attn_q_norm"], norm_eps, spec.num_heads)
        k = ops.rms_norm(k, block["attn_k_norm"], norm_eps, spec.num_kv_heads)
    q, k = ops.rope(q, spec.head_dim, rope), ops.rope(k, spec.head_dim, rope)
    return ops.attention(q, k, v, layer, spec)


def head(ops: Ops, x: Rows, weights: Mapping[str, Weight], eps: float) -> Rows:
    """Logits of the rows that the step asks for -> [n_out, vocab_size]."""
    x = ops.rms_norm(x, weights["output_norm.weight"], eps)  # of all rows: drafts continue from them
    return ops.matmul(ops.output_rows(x), weights["output.weight"])[0]
