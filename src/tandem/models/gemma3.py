"""`gemma3`: text part of Gemma 3. Five sliding-window layers, then one global layer, each kind with its own rope; norms
before and after attention and feed-forward; scaled embedding. Norm weights hold 1 + w. Source: arXiv 2503.19786.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tandem.errors import FormatError
from tandem.models import blocks
from tandem.models.base import Fused, KvState, TensorSpec
from tandem.models.blocks import Block, RopeScaling
from tandem.models.keys import Keys
from tandem.ops.base import Attention, Ops, Rows, Weight

ARCHITECTURE = "gemma3"
LAYERS_OF_27B = 62


@dataclass(frozen=True)
class Config:
    """Sizes and constants of one model. local: whether a layer sees only the window, one entry per layer."""

    hidden_size: int
    ffn_size: int
    vocab_size: int
    max_ctx: int
    rms_norm_eps: float
    attention: Attention  # of global layers
    window: int
    local: tuple[bool, ...]
    rope_theta: float
    rope_scaling: RopeScaling
    local_rope_theta: float
    final_softcap: float | None

    @property
    def num_layers(self) -> int:
        return len(self.local)

    def attention_of(self, layer: int) -> Attention:
        """Local layers differ from global ones by their window."""
        return replace(self.attention, window=self.window) if self.local[layer] else self.attention

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> "Config":
        """From metadata and tensor table of a file; raises FormatError naming the key."""
        keys = Keys(metadata, ARCHITECTURE)
        layers = range(keys.block_count)
        hidden_size = keys.integer("embedding_length")
        attention = blocks.read_attention(keys, layers, 256)
        keys.rotated_dims(attention.head_dim, whole=True)
        # No key carries the query scale; only the 27B model departs from the head's own size.
        if keys.block_count == LAYERS_OF_27B:
            attention = replace(attention, scale=(hidden_size / attention.num_heads) ** -0.5)
        theta = keys.number("rope.freq_base", 1e6)
        window = keys.integer("attention.sliding_window", 0, least=0)
        return cls(
            hidden_size=hidden_size,
            ffn_size=keys.same_in("feed_forward_length", layers),
            vocab_size=keys.vocab_size(tensors),
            max_ctx=keys.integer("context_length"),
            rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
            attention=replace(attention, softcap=keys.number("attn_logit_softcapping", None)),
            window=window,
            local=_local_layers(keys) if window else (False,) * keys.block_count,
            rope_theta=theta,
            rope_scaling=blocks.read_rope_scaling(keys, theta),
            local_rope_theta=keys.number("rope.freq_base_swa", 10000.0),
            final_softcap=keys.number("final_logit_softcapping", None),
        )


def _local_layers(keys: Keys) -> tuple[bool, ...]:
    """`attention.sliding_window_pattern` is the period of global layers (6), or one boolean per layer."""
    pattern = keys.metadata.get(f"{ARCHITECTURE}.attention.sliding_window_pattern", 6)
    if isinstance(pattern, int):
        period = keys.integer("attention.sliding_window_pattern", 6)
        return tuple((layer + 1) % period != 0 for layer in range(keys.block_count))
    flags = keys.array("attention.sliding_window_pattern")
    if len(flags) != keys.block_count:
        raise FormatError(
            f"metadata key {ARCHITECTURE}.attention.sliding_window_pattern has {len(flags)} entries, "
            f"expected {keys.block_count}, one per block"
        )
    return tuple(bool(flag) for flag in flags)


def tensors(config: Config) -> Iterator[TensorSpec]:
    """Every tensor of the file, once."""
    hidden = (config.hidden_size,)
    yield from blocks.global_tensors(config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        block = f"blk.{layer}."
        yield TensorSpec(block + "attn_norm.weight", hidden, "norm")
        yield from blocks.attention_tensors(block, config.hidden_size, config.attention, head_norms=True)
        yield TensorSpec(block + "post_attention_norm.weight", hidden, "norm")
        yield TensorSpec(block + "ffn_norm.weight", hidden, "norm")
        yield from blocks.mlp_tensors(block, config.hidden_size, config.ffn_size)
        yield TensorSpec(block + "post_ffw_norm.weight", hidden, "norm")


def fused(config: Config) -> Iterator[Fused]:
    """Tensors that a file may hold in place of several of the table."""
    return (blocks.fused_qkv(f"blk.{layer}.") for layer in range(config.num_layers))


def state(config: Config) -> tuple[KvState, ...]:
    """One cache per layer, bounded by the window in local ones."""
    return tuple(blocks.kv_state(config.attention_of(layer)) for layer in range(config.num_layers))


def forward(ops: Ops, config: Config, weights: Mapping[str, Weight]) -> Rows:
    """Logits of the step's output rows."""
    eps, head_dim = config.rms_norm_eps, config.attention.head_dim
    # Scaling stretches the global layers only: local ones never see far positions.
    global_rope = blocks.make_rope(config.rope_theta, head_dim, config.rope_scaling)
    local_rope = blocks.make_rope(config.local_rope_theta, head_dim)
    x = ops.embed(weights["token_embd.weight"], config.hidden_size**0.5)
    for layer in range(config.num_layers):
        block = Block(weights, layer)
        rope = local_rope if config.local[layer] else global_rope
        normed = ops.rms_norm(x, block["attn_norm"], eps)
        mixed = blocks.attention(ops, normed, block, layer, config.attention_of(layer), rope, norm_eps=eps)
        projected = ops.matmul(mixed, block["attn_output"])[0]
        x = ops.add(x, ops.rms_norm(projected, block["post_attention_norm"], eps))
        normed = ops.rms_norm(x, block["ffn_norm"], eps)
        gated = ops.gate_up(normed, block["ffn_gate"], block["ffn_up"], "gelu_tanh")
        x = ops.add(x, ops.rms_norm(ops.matmul(gated, block["ffn_down"])[0], block["post_ffw_norm"], eps))
    logits = blocks.head(ops, x, weights, eps)
    return logits if config.final_softcap is None else ops.softcap(logits, config.final_softcap)
