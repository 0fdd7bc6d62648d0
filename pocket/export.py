"""Trained weights -> GGUF, with Tandem's writer and quantizers.

In: the folder of `weights_io.save` and `tokenizer.json`. Out: one file, mixed K-quants or F32. Undoes the differences
between training and file: gate and up are split, value heads go from grouped to tiled order, `ssm_a` = -exp(A_log).
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

import tokenizer as vocabulary
import weights_io
from model import Config, Tensors, is_matrix, shapes
from optimizer import BLOCK, fake_q3_k
from tandem.gguf import read_gguf as open_gguf
from tandem.gguf import write_gguf
from tandem.quant import format_by_name, pack_tensor, unpack_tensor

HERE = Path(__file__).parent
ARCHITECTURE = "qwen35moe"
FILE_TYPE_MIXED, FILE_TYPE_F32 = 12, 0  # Q3_K_M in llama.cpp's list: experts are Q3_K
# First match wins. Experts were trained on the Q3_K grid; what every token passes through gets more bits.
MIX = (
    (r"_exps\.weight", "Q3_K"),
    (r"token_embd", "Q6_K"),
    (r"(ssm_out|attn_output|attn_v|eh_proj|ffn_down_shexp)\.weight", "Q6_K"),
    (r"", "Q5_K"),
)


def tiled(t: torch.Tensor, config: Config, size: int, dim: int = 0) -> torch.Tensor:
    """Value heads of `size` entries along dim, from grouped by key head to tiled: new head j uses key head j % k_heads."""
    repeat = config.v_heads // config.k_heads
    t = t.movedim(dim, 0)
    t = t.reshape(config.k_heads, repeat, size, *t.shape[1:]).transpose(0, 1).reshape(t.shape)
    return t.movedim(0, dim)


def file_tensors(weights: Tensors, config: Config) -> Iterator[tuple[str, np.ndarray]]:
    """Names and float32 values as the file has them."""
    keys = 2 * config.k_heads * config.state
    for name, t in weights.items():
        if name.endswith(("attn_qkv.weight", "ssm_conv1d.weight")):
            t = torch.cat([t[:keys], tiled(t[keys:], config, config.state)])
        elif name.endswith("attn_gate.weight"):
            t = tiled(t, config, config.state)
        elif name.endswith(("ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias")):
            t = tiled(t, config, 1)
        elif name.endswith("ssm_a_log"):
            name, t = name.removesuffix("_log"), tiled(-t.exp(), config, 1)
        elif name.endswith("ssm_out.weight"):
            t = tiled(t, config, config.state, dim=1)
        if "ffn_gate_up" in name:
            gate, up = t.chunk(2, -2)
            yield name.replace("gate_up", "gate"), gate.contiguous().numpy()
            yield name.replace("gate_up", "up"), up.contiguous().numpy()
        else:
            yield name, t.contiguous().numpy()


def grouped(t: torch.Tensor, config: Config, size: int, dim: int = 0) -> torch.Tensor:
    """Value heads back from tiled to grouped by key head: the inverse of `tiled`."""
    repeat = config.v_heads // config.k_heads
    t = t.movedim(dim, 0)
    t = t.reshape(repeat, config.k_heads, size, *t.shape[1:]).transpose(0, 1).reshape(t.shape)
    return t.movedim(0, dim)


def read_gguf(path: Path, config: Config | None = None) -> Tensors:
    """float32 weights in the shapes of training from a file that `export` wrote: its exact inverse up to rounding."""
    config = config or Config()
    with open_gguf(path) as file:
        tensors = file.tensors.items()
        found = {n: torch.from_numpy(unpack_tensor(file.blocks(n), t.ggml_type, t.shape)) for n, t in tensors}
    keys, out = 2 * config.k_heads * config.state, {}
    for name, shape in shapes(config).items():
        if "ffn_gate_up" in name:
            t = torch.cat([found[name.replace("gate_up", part)] for part in ("gate", "up")], -2)
        elif name.endswith("ssm_a_log"):
            t = grouped((-found[name.removesuffix("_log")]).log(), config, 1)
        else:
            t = found[name]
        if name.endswith(("attn_qkv.weight", "ssm_conv1d.weight")):
            t = torch.cat([t[:keys], grouped(t[keys:], config, config.state)])
        elif name.endswith("attn_gate.weight"):
            t = grouped(t, config, config.state)
        elif name.endswith(("ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias")):
            t = grouped(t, config, 1)
        elif name.endswith("ssm_out.weight"):
            t = grouped(t, config, config.state, dim=1)
        out[name] = t.reshape(shape).contiguous()
    return out


def format_for(name: str, shape: tuple[int, ...], mixed: bool) -> str:
    """Tensor type of a weight: small and one-dimensional ones stay F32."""
    if not mixed or not is_matrix(name, shape) or shape[-1] % BLOCK:
        return "F32"
    return next(form for pattern, form in MIX if re.search(pattern, name))


def metadata(config: Config, tokenizer: Tokenizer, mixed: bool) -> dict[str, object]:
    """Every key of the file."""
    general = {
        "architecture": ARCHITECTURE, "type": "model", "name": "Tandem Pocket", "basename": "tandem-pocket",
        "size_label": "32x2M", "license": "apache-2.0", "languages": ["en"], "tags": ["text-generation", "python"],
        "description": "A small demonstration model trained on permissively licensed Python code and documentation.",
        "file_type": FILE_TYPE_MIXED if mixed else FILE_TYPE_F32, "quantization_version": 2,
        "sampling.temp": 0.6, "sampling.top_k": 20, "sampling.top_p": 0.9,
    }  # fmt: skip
    half = config.rotated // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3, 0]
    arch = {
        "block_count": config.num_layers + 1, "nextn_predict_layers": 1, "context_length": config.max_ctx,
        "embedding_length": config.hidden, "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "attention.layer_norm_rms_epsilon": config.eps,
        "rope.dimension_count": config.rotated, "rope.dimension_sections": sections, "rope.freq_base": config.rope_theta,
        "full_attention_interval": config.interval, "ssm.conv_kernel": config.conv_width,
        "ssm.group_count": config.k_heads, "ssm.time_step_rank": config.v_heads, "ssm.state_size": config.state,
        "ssm.inner_size": config.v_heads * config.state, "expert_count": config.num_experts,
        "expert_used_count": config.num_used, "expert_feed_forward_length": config.ff,
        "expert_shared_feed_forward_length": config.shared_ff,
    }  # fmt: skip
    keys: dict[str, object] = {f"general.{key}": value for key, value in general.items()}
    keys |= {f"{ARCHITECTURE}.{key}": value for key, value in arch.items()}
    keys |= vocabulary.metadata(tokenizer)
    return keys | {"tokenizer.chat_template": (HERE / "chat_template.jinja").read_text()}


def export(weights: Tensors, config: Config, tokenizer: Tokenizer, path: Path, mixed: bool) -> None:
    """Writes the file."""

    def packed() -> Iterator[tuple]:
        for name, values in file_tensors(weights, config):
            form = format_for(name, values.shape, mixed)
            if form == "Q3_K":  # the values that training computed with; the packer finds these blocks again
                values = fake_q3_k(torch.from_numpy(values)).numpy()
            kind = format_by_name(form)
            yield name, values.shape, kind.ggml_type, pack_tensor(values, kind.ggml_type)

    write_gguf(path, metadata(config, tokenizer, mixed), packed())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--f32", action="store_true", help="the unquantized checkpoint, for comparison")
    args = parser.parse_args()
    weights, config = weights_io.load(args.weights)
    export(weights, config, Tokenizer.from_file(str(args.tokenizer)), args.out, not args.f32)
    print(json.dumps({"file": str(args.out), "bytes": args.out.stat().st_size}))


if __name__ == "__main__":
    main()
