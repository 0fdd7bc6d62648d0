"""`llama`: Llama 2/3, SmolLM2 and kin. Pre-norm layers of grouped-query attention and SiLU-gated feed-forward.

Converters permute the rows of q and k, so rope pairs neighbouring dims. Source: Llama 2, arXiv 2307.09288.
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
from tandem.quant import unpack_tensor

ARCHITECTURE = "llama"


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
        """From metadata and tensor table of a file; raises FormatError naming the key or tensor."""
        keys = Keys(metadata, ARCHITECTURE)
        keys.allow("expert_count", 0)
        keys.allow("attention.causal", True)
        refuse_biases(tensors)
        layers = range(keys.block_count)
        hidden_size = keys.integer("embedding_length")
        attention = blocks.read_attention(keys, layers, hidden_size // keys.same_in("attention.head_count", layers))
        scale = keys.number("attention.scale", attention.scale)
        theta = keys.number("rope.freq_base", 10000.0)
        return cls(
            num_layers=keys.block_count,
            hidden_size=hidden_size,
            ffn_size=keys.same_in("feed_forward_length", layers),
            vocab_size=keys.vocab_size(tensors),
            max_ctx=keys.integer("context_length"),
            rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
            attention=replace(attention, scale=scale),
            rope_theta=theta,
            rotated_dims=keys.rotated_dims(attention.head_dim),
            rope_scaling=blocks.read_rope_scaling(keys, theta),
        )


def refuse_biases(tensors: Mapping[str, Any]) -> None:
    """Some models of the family add biases after their projections; a file with them would answer wrongly."""
    for name in tensors:
        if name.startswith("blk.") and name.endswith(".bias"):
            raise FormatError(f"{name}: models with biases in their projections are not supported")


def tensors(config: Config) -> Iterator[TensorSpec]:
    """Every tensor of the file, once."""
    yield from blocks.global_tensors(config.vocab_size, config.hidden_size)
    yield TensorSpec("rope_freqs.weight", (config.rotated_dims // 2,), "norm", required=False)
    for layer in range(config.num_layers):
        block = f"blk.{layer}."
        yield TensorSpec(block + "attn_norm.weight", (config.hidden_size,), "norm")
        yield from blocks.attention_tensors(block, config.hidden_size, config.attention, head_norms=False)
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
    rope = _rope(config, weights)
    x = ops.embed(weights["token_embd.weight"])
    for layer in range(config.num_layers):
        block = Block(weights, layer)
        normed = ops.rms_norm(x, block["attn_norm"], config.rms_norm_eps)
        mixed = blocks.attention(ops, normed, block, layer, config.attention, rope)
        x = ops.matmul_add(mixed, block["attn_output"], x)
        normed = ops.rms_norm(x, block["ffn_norm"], config.rms_norm_eps)
        x = ops.matmul_add(ops.gate_up(normed, block["ffn_gate"], block["ffn_up"], "silu"), block["ffn_down"], x)
    return blocks.head(ops, x, weights, config.rms_norm_eps)


def _rope(config: Config, weights: Mapping[str, Weight]):
    factors = weights.get("rope_freqs.weight")
    if factors is not None:
        factors = unpack_tensor(factors.blocks, factors.ggml_type, factors.shape)
    return blocks.make_rope(config.rope_theta, config.rotated_dims, config.rope_scaling, factors, interleaved=True)
