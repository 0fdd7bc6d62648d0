"""`qwen35moe`: Qwen3.5/3.6 mixture of experts (35B-A3B, 122B-A10B, 397B-A17B): the hybrid trunk with softmax top-k
experts and one sigmoid-gated shared expert in every block.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.errors import FormatError
from tandem.models import blocks, hybrid
from tandem.models.base import DeltaState, Fused, KvState, TensorSpec
from tandem.models.blocks import Block
from tandem.models.keys import Keys
from tandem.ops.base import Ops, Rows, Weight

ARCHITECTURE = "qwen35moe"
SOFTMAX_GATING = 1  # value of expert_gating_func


@dataclass(frozen=True)
class Config:
    """Sizes and constants of one model; expert_sizes: one per block, MTP blocks included."""

    trunk: hybrid.Trunk
    num_experts: int
    num_experts_per_tok: int
    expert_sizes: tuple[int, ...]
    shared_size: int

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
        keys.allow("expert_gating_func", SOFTMAX_GATING)
        keys.allow("expert_weights_norm", True)
        keys.allow("expert_weights_scale", 1.0, 0.0)
        num_experts, used = keys.integer("expert_count"), keys.integer("expert_used_count")
        if used > num_experts:
            raise FormatError(
                f"metadata key {ARCHITECTURE}.expert_used_count is {used}, "
                f"it must be at most expert_count = {num_experts}"
            )
        return cls(
            hybrid.read_trunk(keys, tensors),
            num_experts,
            used,
            keys.per_layer("expert_feed_forward_length"),
            keys.same_in("expert_shared_feed_forward_length", range(keys.block_count)),
        )


def tensors(config: Config) -> Iterator[TensorSpec]:
    """Every tensor of the file, once; the MTP block is read with the model and not run in the trunk."""
    trunk = config.trunk
    yield from blocks.global_tensors(trunk.vocab_size, trunk.hidden_size)
    for index in range(trunk.num_blocks):
        yield from hybrid.mixer_tensors(trunk, index)
        yield from _expert_tensors(config, index)
        if index >= trunk.num_layers:
            yield from hybrid.mtp_tensors(trunk, index)


def _expert_tensors(config: Config, index: int) -> Iterator[TensorSpec]:
    block, hidden, experts = f"blk.{index}.ffn_", config.hidden_size, config.num_experts
    size, shared = config.expert_sizes[index], config.shared_size
    router, routed, always = ("router", "expert", "shared") if index < config.num_layers else ("mtp",) * 3
    yield TensorSpec(block + "gate_inp.weight", (experts, hidden), router)
    yield TensorSpec(block + "gate_exps.weight", (experts, size, hidden), routed)
    yield TensorSpec(block + "up_exps.weight", (experts, size, hidden), routed)
    yield TensorSpec(block + "down_exps.weight", (experts, hidden, size), routed)
    yield TensorSpec(block + "gate_inp_shexp.weight", (hidden,), router)
    yield TensorSpec(block + "gate_shexp.weight", (shared, hidden), always)
    yield TensorSpec(block + "up_shexp.weight", (shared, hidden), always)
    yield TensorSpec(block + "down_shexp.weight", (hidden, shared), always)


def fused(config: Config) -> Iterator[Fused]:
    """Tensors that a file may hold in place of several of the table."""
    yield from hybrid.fused_qkv(config.trunk)
    for index in range(config.trunk.num_blocks):
        block = f"blk.{index}.ffn_"
        yield Fused(block + "gate_up_exps.weight", (block + "gate_exps.weight", block + "up_exps.weight"))


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
        routing = ops.route(normed, block["ffn_gate_inp"], config.num_experts_per_tok)
        chosen = block["ffn_gate_exps"], block["ffn_up_exps"], block["ffn_down_exps"]
        routed = ops.experts(normed, routing, *chosen, "silu")
        gated = ops.gate_up(normed, block["ffn_gate_shexp"], block["ffn_up_shexp"], "silu")
        shared = ops.matmul(gated, block["ffn_down_shexp"])[0]
        return ops.add(residual, ops.add_gated(routed, shared, normed, block["ffn_gate_inp_shexp"]))

    return feed_forward
