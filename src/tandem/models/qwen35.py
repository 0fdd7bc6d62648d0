"""`qwen35`: dense Qwen3.5/3.6 (0.8B to 27B): the hybrid trunk with a SiLU-gated feed-forward in every block."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.models import blocks, hybrid
from tandem.models.base import DeltaState, Fused, KvState, TensorSpec
from tandem.models.blocks import Block
from tandem.models.keys import Keys
from tandem.ops.base import Ops, Rows, Weight

ARCHITECTURE = "qwen35"


@dataclass(frozen=True)
class Config:
    """Sizes and constants of one model; ffn_sizes: one per block, MTP blocks included."""

    trunk: hybrid.Trunk
    ffn_sizes: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return self.trunk.num_layers

    @property
    def hidden_size(self) -> int:
        return self.trunk.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.trunk.vocab_size

    @property
    def max_ctx(self) -> int:
        return self.trunk.max_ctx

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> "Config":
        """From metadata and tensor table of a file; raises FormatError naming the key."""
        keys = Keys(metadata, ARCHITECTURE)
        return cls(hybrid.read_trunk(keys, tensors), keys.per_layer("feed_forward_length"))


def tensors(config: Config) -> Iterator[TensorSpec]:
    """Every tensor of the file, once; the MTP block is read with the model and not run in the trunk."""
    trunk = config.trunk
    yield from blocks.global_tensors(trunk.vocab_size, trunk.hidden_size)
    for index in range(trunk.num_blocks):
        mtp = index >= trunk.num_layers
        yield from hybrid.mixer_tensors(trunk, index)
        yield from blocks.mlp_tensors(
            f"blk.{index}.", trunk.hidden_size, config.ffn_sizes[index], "mtp" if mtp else "ffn"
        )
        if mtp:
            yield from hybrid.mtp_tensors(trunk, index)


def fused(config: Config) -> Iterator[Fused]:
    """Tensors that a file may hold in place of several of the table."""
    return hybrid.fused_qkv(config.trunk)


def state(config: Config) -> tuple[KvState | DeltaState, ...]:
    """Cache or recurrent state of each trunk layer."""
    return hybrid.state(config.trunk)


def forward(ops: Ops, config: Config, weights: Mapping[str, Weight]) -> Rows:
    """Logits of the step's output rows."""
    return hybrid.forward(ops, config.trunk, weights, _feed_forward(ops, config))


def draft_state(config: Config) -> tuple[KvState, ...]:
    """Cache of the MTP block; () in a file without one."""
    return hybrid.draft_state(config.trunk)


def draft_head(config: Config, weights: Mapping[str, Weight]) -> Weight:
    """The matrix that turns hidden rows of the MTP block into logits."""
    return hybrid.draft_head(config.trunk, weights)


def draft(ops: Ops, config: Config, weights: Mapping[str, Weight], head: Weight) -> Rows:
    """Logits over the rows of `head`, by the MTP block, of the step's output rows."""
    return hybrid.draft(ops, config.trunk, weights, _feed_forward(ops, config), head)


def _feed_forward(ops: Ops, config: Config) -> hybrid.FeedForward:
    def feed_forward(normed: Rows, residual: Rows, block: Block) -> Rows:
        gated = ops.gate_up(normed, block["ffn_gate"], block["ffn_up"], "silu")
        return ops.matmul_add(gated, block["ffn_down"], residual)

    return feed_forward
