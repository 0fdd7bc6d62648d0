"""What the Qwen3.5 family shares: layers of gated DeltaNet, every few of gated full attention; an MTP block after them.

`qwen35` and `qwen35moe` add their feed-forward. In files, norm weights hold 1 + w (but `ssm_norm`), `ssm_a` is
-exp(A_log), and value head j uses key head j % num_k_heads.
Sources: Gated Delta Networks, arXiv 2412.06464; Gated Attention, arXiv 2505.06708.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.errors import FormatError
from tandem.models import blocks
from tandem.models.base import DeltaState, Fused, KvState, TensorSpec
from tandem.models.blocks import Block, RopeScaling
from tandem.models.keys import Keys
from tandem.ops.base import Attention, Delta, Ops, Rope, Rows, Weight

FeedForward = Callable[[Rows, Rows, Block], Rows]  # (normed, residual, block) -> residual + feed-forward


@dataclass(frozen=True)
class Trunk:
    """Sizes and constants apart from the feed-forward. Blocks num_layers .. num_blocks-1 are MTP blocks.

    recurrent: whether a block is a DeltaNet layer, one entry per block (False for MTP blocks).
    """

    num_layers: int
    num_blocks: int
    hidden_size: int
    vocab_size: int
    max_ctx: int
    rms_norm_eps: float
    recurrent: tuple[bool, ...]
    attention: Attention
    delta: Delta
    rope_theta: float
    rotated_dims: int
    rope_scaling: RopeScaling


def read_trunk(keys: Keys, tensors: Mapping[str, Any]) -> Trunk:
    """From metadata and tensor table; raises FormatError naming the key, also for a file that holds MTP blocks only."""
    num_mtp = keys.integer("nextn_predict_layers", 0, least=0)
    num_layers = keys.block_count - num_mtp
    if num_layers < 1:
        raise FormatError(
            f"metadata key {keys.architecture}.nextn_predict_layers is {num_mtp}, "
            f"it must be less than block_count = {keys.block_count}"
        )
    _refuse_mtp_only(keys, num_layers, num_mtp, tensors)
    recurrent = _recurrent_blocks(keys, num_layers)
    attention_blocks = [index for index, flag in enumerate(recurrent) if not flag]
    attention = _attention(keys, attention_blocks)
    _check_sections(keys)
    theta = keys.number("rope.freq_base")
    return Trunk(
        num_layers=num_layers,
        num_blocks=keys.block_count,
        hidden_size=keys.integer("embedding_length"),
        vocab_size=keys.vocab_size(tensors),
        max_ctx=keys.integer("context_length"),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        recurrent=recurrent,
        attention=attention,
        delta=_delta(keys),
        rope_theta=theta,
        rotated_dims=keys.rotated_dims(attention.head_dim),
        rope_scaling=blocks.read_rope_scaling(keys, theta),
    )


def _refuse_mtp_only(keys: Keys, num_layers: int, num_mtp: int, tensors: Mapping[str, Any]) -> None:
    only_mtp = num_mtp and f"blk.{num_layers}.attn_norm.weight" in tensors and "blk.0.attn_norm.weight" not in tensors
    if only_mtp:
        raise FormatError(
            f"this {keys.architecture} file holds the multi-token prediction block (blk.{num_layers}) and none of the "
            f"{num_layers} layers before it: load the model's main file"
        )


def _recurrent_blocks(keys: Keys, num_layers: int) -> tuple[bool, ...]:
    flags = keys.array("attention.recurrent_layers", None)
    if flags is None:
        interval = keys.integer("full_attention_interval")
        return tuple(i < num_layers and (i + 1) % interval != 0 for i in range(keys.block_count))
    name = f"metadata key {keys.architecture}.attention.recurrent_layers"
    if len(flags) != keys.block_count:
        raise FormatError(f"{name} has {len(flags)} entries, expected {keys.block_count}, one per block")
    if any(flags[num_layers:]):
        raise FormatError(f"{name} marks a multi-token prediction block as recurrent: they are attention blocks")
    return tuple(bool(flag) for flag in flags)


def _attention(keys: Keys, attention_blocks: list[int]) -> Attention:
    if not attention_blocks:
        raise FormatError(f"a {keys.architecture} model needs at least one full attention layer, this file has none")
    keys.same_in("attention.head_count_kv", attention_blocks)  # in this family it has no default
    attention = blocks.read_attention(keys, attention_blocks)
    keys.allow("attention.value_length", attention.head_dim)  # the gate has the width of q and multiplies the values
    return attention


def _delta(keys: Keys) -> Delta:
    num_k_heads, num_v_heads = keys.integer("ssm.group_count"), keys.integer("ssm.time_step_rank")
    head_dim = keys.integer("ssm.state_size")
    if num_v_heads % num_k_heads:
        raise FormatError(
            f"metadata key {keys.architecture}.ssm.time_step_rank is {num_v_heads}, "
            f"it must be a multiple of ssm.group_count = {num_k_heads}"
        )
    keys.allow("ssm.inner_size", num_v_heads * head_dim)
    conv_width = keys.integer("ssm.conv_kernel", least=2)
    return Delta(num_k_heads, num_v_heads, head_dim, conv_width, keys.number("attention.layer_norm_rms_epsilon"))


def _check_sections(keys: Keys) -> None:
    """Sections give rope pairs to time, height and width; for text the three positions are one, so any will do."""
    sections = keys.array("rope.dimension_sections", [0, 0, 0])
    if len(sections) not in (3, 4):
        raise FormatError(
            f"metadata key {keys.architecture}.rope.dimension_sections has {len(sections)} entries, expected 3 or 4"
        )


def mixer_tensors(trunk: Trunk, index: int) -> Iterator[TensorSpec]:
    """Norms and mixer of block `index`; in an MTP block everything has role "mtp": nothing of it runs in the trunk."""
    block, hidden = f"blk.{index}.", trunk.hidden_size
    mtp = index >= trunk.num_layers
    norm = "mtp" if mtp else "norm"
    yield TensorSpec(block + "attn_norm.weight", (hidden,), norm)
    yield TensorSpec(block + "post_attention_norm.weight", (hidden,), norm)
    if trunk.recurrent[index]:
        yield from _delta_tensors(trunk, block)
        return
    spec, role = trunk.attention, "mtp" if mtp else "attention"
    q, k = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield TensorSpec(block + "attn_q.weight", (2 * q, hidden), role)  # per head: query rows, then gate rows
    yield TensorSpec(block + "attn_k.weight", (k, hidden), role)
    yield TensorSpec(block + "attn_v.weight", (k, hidden), role)
    yield TensorSpec(block + "attn_output.weight", (hidden, q), role)
    yield TensorSpec(block + "attn_q_norm.weight", (spec.head_dim,), norm)
    yield TensorSpec(block + "attn_k_norm.weight", (spec.head_dim,), norm)


def _delta_tensors(trunk: Trunk, block: str) -> Iterator[TensorSpec]:
    spec, hidden = trunk.delta, trunk.hidden_size
    k, v = spec.num_k_heads * spec.head_dim, spec.num_v_heads * spec.head_dim
    yield TensorSpec(block + "attn_qkv.weight", (2 * k + v, hidden), "recurrent")
    yield TensorSpec(block + "attn_gate.weight", (v, hidden), "recurrent")
    yield TensorSpec(block + "ssm_alpha.weight", (spec.num_v_heads, hidden), "recurrent")
    yield TensorSpec(block + "ssm_beta.weight", (spec.num_v_heads, hidden), "recurrent")
    yield TensorSpec(block + "ssm_conv1d.weight", (2 * k + v, spec.conv_width), "recurrent")
    yield TensorSpec(block + "ssm_dt.bias", (spec.num_v_heads,), "recurrent")
    yield TensorSpec(block + "ssm_a", (spec.num_v_heads,), "recurrent")
    yield TensorSpec(block + "ssm_norm.weight", (spec.head_dim,), "norm")
    yield TensorSpec(block + "ssm_out.weight", (hidden, v), "recurrent")


def mtp_tensors(trunk: Trunk, index: int) -> Iterator[TensorSpec]:
    """What an MTP block has besides mixer and feed-forward; the optional ones fall back to the trunk's."""
    block, hidden = f"blk.{index}.nextn.", trunk.hidden_size
    yield TensorSpec(block + "eh_proj.weight", (hidden, 2 * hidden), "mtp")
    yield TensorSpec(block + "enorm.weight", (hidden,), "mtp")
    yield TensorSpec(block + "hnorm.weight", (hidden,), "mtp")
    yield TensorSpec(block + "shared_head_norm.weight", (hidden,), "mtp", required=False)
    yield TensorSpec(block + "embed_tokens.weight", (trunk.vocab_size, hidden), "mtp", required=False)
    yield TensorSpec(block + "shared_head_head.weight", (trunk.vocab_size, hidden), "mtp", required=False)


def fused_qkv(trunk: Trunk) -> Iterator[Fused]:
    """Attention blocks may hold q, k and v as one; in recurrent blocks the same name is a tensor of its own."""
    return (blocks.fused_qkv(f"blk.{i}.") for i in range(trunk.num_blocks) if not trunk.recurrent[i])


def state(trunk: Trunk) -> tuple[KvState | DeltaState, ...]:
    """Cache or recurrent state of each trunk layer."""
    spec = trunk.delta
    channels = (2 * spec.num_k_heads + spec.num_v_heads) * spec.head_dim
    recurrent = DeltaState(spec.num_v_heads, spec.head_dim, spec.head_dim, channels, spec.conv_width)
    cache = blocks.kv_state(trunk.attention)
    return tuple(recurrent if trunk.recurrent[layer] else cache for layer in range(trunk.num_layers))


def forward(ops: Ops, trunk: Trunk, weights: Mapping[str, Weight], feed_forward: FeedForward) -> Rows:
    """Logits of the step's output rows."""
    eps = trunk.rms_norm_eps
    rope = blocks.make_rope(trunk.rope_theta, trunk.rotated_dims, trunk.rope_scaling)
    x = ops.embed(weights["token_embd.weight"])
    for layer in range(trunk.num_layers):
        block = Block(weights, layer)
        normed = ops.rms_norm(x, block["attn_norm"], eps)
        if trunk.recurrent[layer]:
            x = delta_mixer(ops, normed, x, block, layer, trunk)
        else:
            x = gated_attention(ops, normed, x, block, layer, trunk, rope)
        x = feed_forward(ops.rms_norm(x, block["post_attention_norm"], eps), x, block)
    return blocks.head(ops, x, weights, eps)


def draft_state(trunk: Trunk) -> tuple[KvState, ...]:
    """Cache of the MTP block, the one layer of a drafting pass; () in a file without one."""
    return (blocks.kv_state(trunk.attention),) if trunk.num_blocks > trunk.num_layers else ()


def draft_head(trunk: Trunk, weights: Mapping[str, Weight]) -> Weight:
    """The matrix that turns hidden rows of the MTP block into logits: its own, or the trunk's."""
    return weights.get(f"blk.{trunk.num_layers}.nextn.shared_head_head.weight", weights["output.weight"])


def draft(
    ops: Ops, trunk: Trunk, weights: Mapping[str, Weight], feed_forward: FeedForward, head: Weight
) -> Rows:
    """Logits over the rows of `head` for the token after the step's tokens.

    The step brings the hidden state (after the last norm) of the position before each token, from the trunk or from
    this block. models.md 3.6. A file's MTP blocks after the first are not used: files carry one.
    """
    block, eps = Block(weights, trunk.num_layers), trunk.rms_norm_eps
    rope = blocks.make_rope(trunk.rope_theta, trunk.rotated_dims, trunk.rope_scaling)
    own = f"{block.prefix}nextn."
    table = weights.get(own + "embed_tokens.weight", weights["token_embd.weight"])
    embedded = ops.rms_norm(ops.embed(table), block["nextn.enorm"], eps)
    before = ops.rms_norm(ops.hidden_rows(trunk.hidden_size), block["nextn.hnorm"], eps)
    x = ops.matmul(ops.concat(embedded, before), block["nextn.eh_proj"])[0]
    x = gated_attention(ops, ops.rms_norm(x, block["attn_norm"], eps), x, block, 0, trunk, rope)
    x = feed_forward(ops.rms_norm(x, block["post_attention_norm"], eps), x, block)
    norm = weights.get(own + "shared_head_norm.weight", weights["output_norm.weight"])
    return ops.matmul(ops.output_rows(ops.rms_norm(x, norm, eps)), head)[0]


def gated_attention(ops: Ops, normed: Rows, residual: Rows, block: Block, layer: int, trunk: Trunk, rope: Rope) -> Rows:
    """residual + attention whose heads are each multiplied by a sigmoid gate, projected."""
    spec = trunk.attention
    q_and_gate, k, v = ops.matmul(normed, block["attn_q"], block["attn_k"], block["attn_v"])
    q, gate = ops.split_gate(q_and_gate, spec.head_dim)
    q = ops.rms_norm(q, block["attn_q_norm"], trunk.rms_norm_eps, spec.num_heads)
    k = ops.rms_norm(k, block["attn_k_norm"], trunk.rms_norm_eps, spec.num_kv_heads)
    q, k = ops.rope(q, spec.head_dim, rope), ops.rope(k, spec.head_dim, rope)
    mixed = ops.sigmoid_gate(ops.attention(q, k, v, layer, spec), gate)
    return ops.matmul_add(mixed, block["attn_output"], residual)


def delta_mixer(ops: Ops, normed: Rows, residual: Rows, block: Block, layer: int, trunk: Trunk) -> Rows:
    """residual + gated DeltaNet, projected."""
    spec = trunk.delta
    projections = block["attn_qkv"], block["attn_gate"], block["ssm_alpha"], block["ssm_beta"]
    qkv, gate, alpha, beta = ops.matmul(normed, *projections)
    qkv = ops.short_conv(qkv, block["ssm_conv1d"], layer)
    a, dt_bias = (block.weights[block.prefix + name] for name in ("ssm_a", "ssm_dt.bias"))
    mixed = ops.delta_rule(qkv, alpha, beta, a, dt_bias, layer, spec)
    mixed = ops.gated_rms_norm(mixed, gate, block["ssm_norm"], trunk.rms_norm_eps, spec.num_v_heads)
    return ops.matmul_add(mixed, block["ssm_out"], residual)
