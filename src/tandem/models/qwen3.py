"""`qwen3`: dense Qwen3. Like llama, with RMS norms of q and k per head and rope that pairs the halves of a head."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.models import blocks
from tandem.models.base import Fused, KvState, TensorSpec
from tandem.models.blocks import Block, RopeScaling
from tandem.models.keys import Keys
from tandem.ops.base import Attention, Ops, Rows, Weight

ARCHITECTURE = "qwen3"


@dataclass(frozen=True)
class Config:
    """Sizes and constants of one model."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    vocab_size: int
    max_ctx: int
    rms_norm_eps: float
    attention: Attention
    rope_theta: float
    rotated_dims: int
    rope_scaling: RopeScaling

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> "Config":
        """From metadata and tensor table of a file; raises FormatError naming the key."""
        keys = Keys(metadata, ARCHITECTURE)
        layers = range(keys.block_count)
        hidden_size = keys.integer("embedding_length")
        attention = blocks.read_attention(keys, layers, hidden_size // keys.same_in("attention.head_count", layers))
        theta = keys.number("rope.freq_base")
        return cls(
            num_layers=keys.block_count,
            hidden_size=hidden_size,
            ffn_size=keys.same_in("feed_forward_length", layers),
            vocab_size=keys.vocab_size(tensors),
            max_ctx=keys.integer("context_length"),
            rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
            attention=attention,
            rope_theta=theta,
            rotated_dims=keys.rotated_dims(attention.head_dim),
            rope_scaling=blocks.read_rope_scaling(keys, theta),
        )


def tensors(config: Config) -> Iterator[TensorSpec]:
    """Every tensor of the file, once."""
    yield from blocks.global_tensors(config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        block = f"blk.{layer}."
        yield TensorSpec(block + "attn_norm.weight", (config.hidden_size,), "norm")
        yield from blocks.attention_tensors(block, config.hidden_size, config.attention, head_norms=True)
        yield TensorSpec(block + "ffn_norm.weight", (config.hidden_size,), "norm")
        yield from blocks.mlp_tensors(block, config.hidden_size, config.ffn_size)


def fused(config: Config) -> Iterator[Fused]:
    """Tensors that a file may hold in place of several of the table."""
    return (blocks.fused_qkv(f"blk.{layer}.") for layer in range(config.num_layers))


def state(config: Config) -> tuple[KvState, ...]:
    """One cache per layer."""
    return (blocks.kv_state(config.attention),) * config.num_layers


def forward(ops: Ops, config: Config, weights: Mapping[str, Weight]) -> Rows:
    """Logits of the step's output rows."""
    eps = config.rms_norm_eps
    rope = blocks.make_rope(config.rope_theta, config.rotated_dims, config.rope_scaling)
    x = ops.embed(weights["token_embd.weight"])
    for layer in range(config.num_layers):
        block = Block(weights, layer)
        normed = ops.rms_norm(x, block["attn_norm"], eps)
        mixed = blocks.attention(ops, normed, block, layer, config.attention, rope, norm_eps=eps)
        x = ops.matmul_add(mixed, block["attn_output"], x)
        normed = ops.rms_norm(x, block["ffn_norm"], eps)
        x = ops.matmul_add(ops.gate_up(normed, block["ffn_gate"], block["ffn_up"], "silu"), block["ffn_down"], x)
    return blocks.head(ops, x, weights, eps)
