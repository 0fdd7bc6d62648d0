"""Tiny random models: GGUF files of every architecture in every variant, and the same weights as `transformers` models.

`write_tiny` makes the file from the model's own tensor table; `to_transformers` undoes what a converter does to values.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from tandem.gguf import read_gguf, write_gguf
from tandem.models import ARCHS, model_for
from tandem.models.base import TensorSpec
from tandem.ops.base import Weight
from tandem.quant import format_by_name, unpack_tensor
from tandem.runtime.weights import load_weights

HYBRIDS = ("qwen35", "qwen35moe")
Formats = str | Mapping[str, str]
Tensors = dict[str, tuple[tuple[int, ...], int, np.ndarray]]  # name -> shape, ggml type, packed bytes

_COMMON = {"context_length": 512, "attention.layer_norm_rms_epsilon": 1e-6}
_HYBRID = {
    "block_count": 5,
    "embedding_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0],
    "rope.freq_base": 1e4,
    "full_attention_interval": 4,
    "ssm.conv_kernel": 4,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.state_size": 32,
    "ssm.inner_size": 128,
}
_SIZES: dict[str, dict] = {
    "llama": {
        "block_count": 3,
        "embedding_length": 128,
        "feed_forward_length": 192,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "rope.dimension_count": 32,
        "rope.freq_base": 1e4,
    },
    "qwen3": {
        "block_count": 3,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "rope.freq_base": 1e6,
    },
    "gemma3": {
        "block_count": 7,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 1,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.sliding_window": 8,
        "rope.freq_base": 1e6,
    },
    "qwen35": _HYBRID | {"feed_forward_length": 128},
    "qwen35moe": _HYBRID
    | {
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 64,
        "expert_shared_feed_forward_length": 64,
    },
}
# Every row a multiple of 256, for types with blocks of 256 values.
_WIDE: dict[str, dict] = {
    "llama": {"embedding_length": 256, "feed_forward_length": 512, "attention.head_count": 8},
    "qwen3": {"embedding_length": 256, "feed_forward_length": 256, "attention.head_count": 8},
    "gemma3": {"embedding_length": 256, "feed_forward_length": 256, "attention.head_count": 8},
}
_WIDE["qwen35"] = _WIDE["qwen3"] | {"ssm.group_count": 4, "ssm.time_step_rank": 8, "ssm.inner_size": 256}
_WIDE["qwen35moe"] = _WIDE["qwen35"] | {"expert_feed_forward_length": 256, "expert_shared_feed_forward_length": 256}
del _WIDE["qwen35moe"]["feed_forward_length"]


def write_tiny(arch: str, path: str | Path, formats: Formats = "F32", seed: int = 0, **variations) -> Path:
    """Write a tiny random model and return its path. The same seed gives every tensor the same values in all variants.

    formats: type of all matrices, or a mapping from tensor name, role or "*" to a type; vectors, convolutions and
    (unless named) routers stay F32. variations: see `_vary`; `metadata` changes keys (None removes one).
    """
    metadata = tiny_metadata(arch, formats, mtp=variations.get("mtp", False), **variations.pop("metadata", {}))
    config = ARCHS[arch].Config.from_gguf(_as_read(metadata), {})
    specs = list(ARCHS[arch].tensors(config))
    tensors = {spec.name: _pack(spec, tiny_values(spec, seed), formats) for spec in specs if not _left_out(spec)}
    tensors = _vary(tensors, list(ARCHS[arch].fused(config)), **variations)
    write_gguf(path, metadata, ((name, *tensor) for name, tensor in tensors.items()))
    return Path(path)


def tiny_metadata(arch: str, formats: Formats = "F32", *, mtp: bool = False, **changes) -> dict[str, object]:
    """Metadata of a tiny model, tokenizer included; `changes` are keys without the architecture, or whole keys."""
    names = [formats] if isinstance(formats, str) else formats.values()
    wide = any(format_by_name(name).block_values == 256 for name in names)
    sizes = _COMMON | _SIZES[arch] | (_WIDE[arch] if wide else {})
    if mtp:
        sizes |= {"block_count": sizes["block_count"] + 1, "nextn_predict_layers": 1}
    metadata = {"general.architecture": arch, "general.name": f"tiny {arch}"}
    metadata |= {f"{arch}.{key}": value for key, value in sizes.items()} | tiny_tokenizer()
    for key, value in changes.items():
        key = key if key.startswith(("general.", "tokenizer.", f"{arch}.")) else f"{arch}.{key}"
        metadata[key] = value
    return {key: value for key, value in metadata.items() if value is not None}


def _as_read(metadata: Mapping[str, object]) -> dict[str, object]:
    """Metadata as `read_gguf` returns it: numeric lists are arrays."""
    return {
        key: np.array(value) if isinstance(value, list) and not isinstance(value[0], str) else value
        for key, value in metadata.items()
    }


def tiny_tokenizer(pre: str = "qwen2") -> dict[str, object]:
    """A byte-level BPE tokenizer with a few merges and the chat markers; 320 tokens."""
    # Printable bytes stand for themselves, the others for code points from 256 on: the usual byte alphabet.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    tokens = [letters[byte] for byte in range(256)]
    space = letters[32]
    pairs = ["t h", "th e", f"{space} the", "i n", "a n", "an d", f"{space} and", "e r", "o n", "l l", f"{space} a"]
    tokens += [pair.replace(" ", "") for pair in pairs]
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    first_special = len(tokens)
    padding = 320 - first_special - len(specials)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + specials + [f"[PAD{i}]" for i in range(padding)],
        "tokenizer.ggml.token_type": [1] * first_special + [3] * len(specials) + [5] * padding,
        "tokenizer.ggml.merges": pairs,
        "tokenizer.ggml.eos_token_id": first_special + 2,
        "tokenizer.ggml.bos_token_id": first_special,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    }


def tiny_values(spec: TensorSpec, seed: int) -> np.ndarray:
    """Random float32 values of a tensor, sized so that every part of the model moves the logits."""
    rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    values = rng.standard_normal(spec.shape, np.float32)
    name = spec.name.split(".", 2)[-1] if spec.name.startswith("blk.") else spec.name
    if name == "ssm_a":
        return -np.exp(values)
    if name == "rope_freqs.weight":
        return np.exp(np.abs(values))
    if "norm" in name:
        return 1 + np.float32(0.2) * values
    if name == "ssm_dt.bias":
        return values
    return values * np.float32(1.5 / np.sqrt(spec.shape[-1]))


def _left_out(spec: TensorSpec) -> bool:
    # Tensors that files of the common kind do not carry.
    return not spec.required and spec.name.split(".")[-2] in ("rope_freqs", "embed_tokens", "shared_head_head")


def format_of(spec: TensorSpec, formats: Formats) -> str:
    """Type name of a tensor; the name counts before the role, the role before "*"."""
    if len(spec.shape) == 1 or "conv1d" in spec.name:
        return "F32"
    if isinstance(formats, str):
        return "F32" if spec.role == "router" or "ffn_gate_inp" in spec.name else formats
    return formats.get(spec.name) or formats.get(spec.role) or ("F32" if spec.role == "router" else formats["*"])


def _pack(spec: TensorSpec, values: np.ndarray, formats: Formats) -> tuple[tuple[int, ...], int, np.ndarray]:
    return pack(values, format_of(spec, formats))


def pack(values: np.ndarray, format_name: str) -> tuple[tuple[int, ...], int, np.ndarray]:
    """(shape, ggml type, packed bytes) of values in a type that has a quantizer."""
    form = format_by_name(format_name)
    return values.shape, form.ggml_type, form.pack(values.reshape(-1, form.block_values)).reshape(-1)


def _vary(
    tensors: Tensors,
    fused: list,
    mtp: bool = False,
    tied: bool = False,
    fuse: tuple[str, ...] = (),
    scales: bool = False,
    extra: Mapping[str, np.ndarray] | None = None,
    edit: Callable[[Tensors], None] | None = None,
) -> Tensors:
    """mtp: an MTP block after the trunk. tied: without output.weight. fuse: parts of names of tensors to fuse. scales:
    companions that double what halved weights give. extra: more F32 tensors. edit: any change of the table of tensors.
    """
    tensors = dict(tensors)
    if tied:
        del tensors["output.weight"]
    for fusion in fused:
        if any(part in fusion.name for part in fuse):
            tensors[fusion.name] = _join([tensors.pop(part) for part in fusion.parts])
    if scales:
        tensors |= dict(_halve(tensors))
    for name, values in (extra or {}).items():
        tensors[name] = pack(np.asarray(values, np.float32), "F32")
    if edit:
        edit(tensors)
    return tensors


def _join(parts: list) -> tuple[tuple[int, ...], int, np.ndarray]:
    assert len({ggml_type for _, ggml_type, _ in parts}) == 1, "only tensors of one type can be fused"
    rows = [packed.reshape(*shape[:-1], -1) for shape, _, packed in parts]
    shape = (*parts[0][0][:-2], sum(part[0][-2] for part in parts), parts[0][0][-1])
    return shape, parts[0][1], np.concatenate(rows, axis=-2).reshape(-1)


def _halve(tensors: Tensors) -> Iterator[tuple[str, tuple]]:
    """Halved F32 matrices and the companions that undo it: one factor, or one per expert (a quarter for odd ones)."""
    for name, (shape, ggml_type, packed) in tensors.items():
        if len(shape) < 2 or "conv1d" in name or ggml_type != 0:
            continue
        factors = np.full(shape[0] if len(shape) == 3 else 1, 2, np.float32)
        factors[1::2] = 4
        yield (
            name,
            (
                shape,
                0,
                (packed.view(np.float32).reshape(len(factors), -1) / factors[:, None]).view(np.uint8).reshape(-1),
            ),
        )
        yield name.removesuffix(".weight") + ".scale", pack(factors, "F32")


class TinyFiles:
    """files(arch, **variations) -> path of a tiny model in `folder`; the same request is written once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._written: dict[str, tuple[Path, dict]] = {}

    def __call__(self, arch: str, **variations) -> Path:
        request = arch + repr(variations)
        if request not in self._written:
            # The oracle knows a file by its name.
            path = self.folder / f"{arch}-{zlib.crc32(request.encode()):08x}.gguf"
            # Functions are shown by their address: holding them keeps it from being given to another.
            self._written[request] = write_tiny(arch, path, **variations), variations
        return self._written[request][0]


def retyped(parts: Sequence[str], format_name: str = "F32", shape: tuple[int, ...] | None = None):
    """An `edit` for write_tiny: tensors with one of `parts` in their names get another type or shape, same values."""

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if any(part in name for part in parts)]:
            old_shape, old_type, packed = tensors[name]
            _, new_type, packed = pack(unpack_tensor(packed, old_type, old_shape), format_name)
            tensors[name] = (shape or old_shape, new_type, packed)

    return edit


def loaded(path: str | Path) -> tuple[object, dict[str, Weight]]:
    """(config, weights) of a file."""
    with read_gguf(path) as file:
        model = model_for(file.metadata)
        config = model.Config.from_gguf(file.metadata, file.tensors)
        return config, load_weights(file, model, config)


def unpacked_weights(path: str | Path) -> tuple[str, object, dict[str, np.ndarray]]:
    """(architecture, config, float32 arrays under the names of the model's table) of a file, companions applied."""
    with read_gguf(path) as file:
        model = model_for(file.metadata)
        config = model.Config.from_gguf(file.metadata, file.tensors)
        arrays = {}
        for name, weight in load_weights(file, model, config).items():
            blocks = np.ascontiguousarray(weight.blocks).reshape(-1)
            values = unpack_tensor(blocks, weight.ggml_type, weight.shape)
            if weight.scale is not None:
                values = values * weight.scale.reshape(-1, *[1] * (values.ndim - 1))
            arrays[name] = values
        return model.ARCHITECTURE, config, arrays


def to_transformers(path: str | Path, **config_changes):
    """A float32 `transformers` model in eval mode with the weights of a file. config_changes: what no GGUF key says."""
    arch, config, arrays = unpacked_weights(path)
    builders = {"llama": _llama, "qwen3": _qwen3, "gemma3": _gemma3, "qwen35": _qwen35, "qwen35moe": _qwen35moe}
    return builders[arch](config, arrays, config_changes)


def _build(model_class, hf_config, state: Mapping[str, np.ndarray]):
    import torch

    hf_config._attn_implementation = "eager"
    model = model_class(hf_config).to(torch.float32).eval()
    given = {name: torch.from_numpy(np.array(values, np.float32)) for name, values in state.items()}
    result = model.load_state_dict(given, strict=False)
    assert not result.unexpected_keys, result.unexpected_keys
    missing = [name for name in result.missing_keys if name != "lm_head.weight"]
    assert not missing, missing
    return model


def _plain_config(config) -> dict:
    """Fields that configurations of all plain architectures share."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.attention.num_heads,
        "num_key_value_heads": config.attention.num_kv_heads,
        "head_dim": config.attention.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_ctx,
        "tie_word_embeddings": False,
    }


def _plain_state(config, arrays: Mapping[str, np.ndarray], norms: Mapping[str, str], norm_offset: float = 0) -> dict:
    state = {
        "model.embed_tokens.weight": arrays["token_embd.weight"],
        "model.norm.weight": arrays["output_norm.weight"] - norm_offset,
        "lm_head.weight": arrays["output.weight"],
    }
    matrices = {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"} | {"attn_output": "self_attn.o_proj"}
    matrices |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    for layer in range(config.num_layers):
        for ours, theirs in (matrices | norms).items():
            offset = norm_offset if ours in norms else 0
            state[f"model.layers.{layer}.{theirs}.weight"] = arrays[f"blk.{layer}.{ours}.weight"] - offset
    return state


_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def halves_from_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo the converter's permutation of q and k rows: dims that rope pairs as (2i, 2i+1) become (i, i + half)."""
    out, width = rows.shape
    return rows.reshape(heads, out // heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def _llama(config, arrays, changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    state = _plain_state(config, arrays, _PRE_NORMS)
    for layer in range(config.num_layers):
        for part, heads in (("q", config.attention.num_heads), ("k", config.attention.num_kv_heads)):
            name = f"model.layers.{layer}.self_attn.{part}_proj.weight"
            state[name] = halves_from_pairs(state[name], heads)
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    return _build(LlamaForCausalLM, LlamaConfig(**_plain_config(config) | {"rope_parameters": rope} | changes), state)


def _qwen3(config, arrays, changes):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    hf_config = Qwen3Config(**_plain_config(config) | {"rope_parameters": rope} | changes)
    return _build(Qwen3ForCausalLM, hf_config, _plain_state(config, arrays, _PRE_NORMS | _HEAD_NORMS))


def _gemma3(config, arrays, changes):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": config.rope_theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": config.local_rope_theta},
    }
    own = {
        "rope_parameters": ropes,
        "sliding_window": config.window,
        "layer_types": ["sliding_attention" if local else "full_attention" for local in config.local],
        "query_pre_attn_scalar": config.attention.head_dim,
        "final_logit_softcapping": config.final_softcap,
        "attn_logit_softcapping": config.attention.softcap,
    }
    norms = _HEAD_NORMS | {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    hf_config = Gemma3TextConfig(**_plain_config(config) | own | changes)
    return _build(Gemma3ForCausalLM, hf_config, _plain_state(config, arrays, norms, norm_offset=1))


def _hybrid_config(trunk) -> dict:
    rope = {
        "rope_type": "default",
        "rope_theta": trunk.rope_theta,
        "partial_rotary_factor": trunk.rotated_dims / trunk.attention.head_dim,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
    flags = trunk.recurrent[: trunk.num_layers]
    return {
        "vocab_size": trunk.vocab_size,
        "hidden_size": trunk.hidden_size,
        "num_hidden_layers": trunk.num_layers,
        "num_attention_heads": trunk.attention.num_heads,
        "num_key_value_heads": trunk.attention.num_kv_heads,
        "head_dim": trunk.attention.head_dim,
        "rms_norm_eps": trunk.rms_norm_eps,
        "max_position_embeddings": trunk.max_ctx,
        "tie_word_embeddings": False,
        "rope_parameters": rope,
        "layer_types": ["linear_attention" if flag else "full_attention" for flag in flags],
        "linear_conv_kernel_dim": trunk.delta.conv_width,
        "linear_key_head_dim": trunk.delta.head_dim,
        "linear_value_head_dim": trunk.delta.head_dim,
        "linear_num_key_heads": trunk.delta.num_k_heads,
        "linear_num_value_heads": trunk.delta.num_v_heads,
    }


def grouped_heads(x: np.ndarray, delta, rows_per_head: int) -> np.ndarray:
    """Undo the reorder of value heads along axis 0: from head j with key head j % K to heads grouped by key head."""
    repeats = delta.num_v_heads // delta.num_k_heads
    heads = x.reshape(repeats, delta.num_k_heads, rows_per_head, *x.shape[1:])
    return heads.swapaxes(0, 1).reshape(x.shape)


def _hybrid_state(trunk, arrays) -> dict:
    state = {
        "model.embed_tokens.weight": arrays["token_embd.weight"],
        "model.norm.weight": arrays["output_norm.weight"] - 1,
        "lm_head.weight": arrays["output.weight"],
    }
    for layer in range(trunk.num_layers):
        block, theirs = f"blk.{layer}.", f"model.layers.{layer}."
        state[theirs + "input_layernorm.weight"] = arrays[block + "attn_norm.weight"] - 1
        state[theirs + "post_attention_layernorm.weight"] = arrays[block + "post_attention_norm.weight"] - 1
        if trunk.recurrent[layer]:
            state |= {f"{theirs}linear_attn.{name}": x for name, x in _delta_state(trunk.delta, arrays, block).items()}
            continue
        for ours, name in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("output", "o_proj")):
            state[f"{theirs}self_attn.{name}.weight"] = arrays[f"{block}attn_{ours}.weight"]
        for part in "qk":
            state[f"{theirs}self_attn.{part}_norm.weight"] = arrays[f"{block}attn_{part}_norm.weight"] - 1
    return state


def _delta_state(delta, arrays, block: str) -> dict:
    keys = 2 * delta.num_k_heads * delta.head_dim

    def regroup_values(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x[:keys], grouped_heads(x[keys:], delta, delta.head_dim)])

    return {
        "in_proj_qkv.weight": regroup_values(arrays[block + "attn_qkv.weight"]),
        "in_proj_z.weight": grouped_heads(arrays[block + "attn_gate.weight"], delta, delta.head_dim),
        "in_proj_b.weight": grouped_heads(arrays[block + "ssm_beta.weight"], delta, 1),
        "in_proj_a.weight": grouped_heads(arrays[block + "ssm_alpha.weight"], delta, 1),
        "conv1d.weight": regroup_values(arrays[block + "ssm_conv1d.weight"])[:, None],
        "dt_bias": grouped_heads(arrays[block + "ssm_dt.bias"], delta, 1),
        "A_log": np.log(-grouped_heads(arrays[block + "ssm_a"], delta, 1)),
        "norm.weight": arrays[block + "ssm_norm.weight"],
        "out_proj.weight": grouped_heads(arrays[block + "ssm_out.weight"].T, delta, delta.head_dim).T,
    }


def _qwen35(config, arrays, changes):
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    state = _hybrid_state(config.trunk, arrays)
    for layer in range(config.num_layers):
        for part in ("gate", "up", "down"):
            state[f"model.layers.{layer}.mlp.{part}_proj.weight"] = arrays[f"blk.{layer}.ffn_{part}.weight"]
    own = {"intermediate_size": config.ffn_sizes[0]}
    return _build(Qwen3_5ForCausalLM, Qwen3_5TextConfig(**_hybrid_config(config.trunk) | own | changes), state)


def _qwen35moe(config, arrays, changes):
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    state = _hybrid_state(config.trunk, arrays)
    for layer in range(config.num_layers):
        block, theirs = f"blk.{layer}.ffn_", f"model.layers.{layer}.mlp."
        gate_up = [arrays[f"{block}{part}_exps.weight"] for part in ("gate", "up")]
        state[theirs + "gate.weight"] = arrays[block + "gate_inp.weight"]
        state[theirs + "experts.gate_up_proj"] = np.concatenate(gate_up, axis=1)
        state[theirs + "experts.down_proj"] = arrays[block + "down_exps.weight"]
        state[theirs + "shared_expert_gate.weight"] = arrays[block + "gate_inp_shexp.weight"][None]
        for part in ("gate", "up", "down"):
            state[f"{theirs}shared_expert.{part}_proj.weight"] = arrays[f"{block}{part}_shexp.weight"]
    own = {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.expert_sizes[0],
        "shared_expert_intermediate_size": config.shared_size,
    }
    return _build(Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**_hybrid_config(config.trunk) | own | changes), state)
