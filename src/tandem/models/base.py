"""What every model file states about itself, so that the runtime can check, plan and run it.

A model file `models/<architecture>.py` has five names:
    Config.from_gguf(metadata, tensors) -> frozen config; raises FormatError on a missing or unsupported key
    tensors(config) -> iterator of TensorSpec: every tensor of the file, once
    state(config) -> tuple of KvState | DeltaState, one per layer (index = `layer` of the ops)
    fused(config) -> iterator of Fused: other names under which a file may carry several of those tensors as one
    forward(ops, config, weights) -> logits rows: weights maps tensor name -> ops.base.Weight
and, if the architecture can hold a multi-token prediction block, three more:
    draft_state(config) -> tuple of KvState: the caches of a drafting pass, () if the file has no such block
    draft_head(config, weights) -> the Weight that turns its hidden rows into logits
    draft(ops, config, weights, head) -> logits rows over the rows of `head`
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSpec:
    """One tensor the model reads: shape in numpy order (out, in); role for sizes and placement.

    role: "embed", "head", "norm", "attention", "recurrent", "ffn", "router", "shared", "expert" or "mtp".
    """

    name: str
    shape: tuple[int, ...]
    role: str
    required: bool = True


@dataclass(frozen=True)
class Fused:
    """One file tensor that stands for several canonical ones, concatenated along the row axis (-2), in order."""

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class KvState:
    """Keys and values of one attention layer, one row per position; window: only the last positions are read."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None


@dataclass(frozen=True)
class DeltaState:
    """Recurrent state of one gated DeltaNet layer: float32 [heads, key_dim, value_dim] and a conv tail."""

    num_v_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_width: int
