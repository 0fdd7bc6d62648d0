#!/usr/bin/env python3
"""Write a full-size GGUF of the arch qwen35moe whose weights are random but valid.

The file has the real shapes, tensor names, metadata and quantized block layouts
of a Qwen3.5/3.6 MoE model (with its MTP layer), so that engines load it and move
the bytes they would move for the real one.  The text it produces is noise: use it
for speed and memory, never for quality.

Needs: numpy and gguf (PyPI, 0.19 or later).

  make_synthetic_gguf.py qwen3.6-35b-a3b out.gguf --quant q4_k
  make_synthetic_gguf.py qwen3.6-35b-a3b cut.gguf --quant iq4_xs --layers 4
  make_synthetic_gguf.py tiny tiny.gguf
  make_synthetic_gguf.py qwen3.5-122b-a10b --dry-run      (sizes only)

How the weights are made.  For each tensor type a pool of random blocks is drawn
once (the embeddings and the output have their own); the scale fields of the blocks
are then overwritten, so that the weights have mean 0 and a standard deviation of
about gain/sqrt(row length), which keeps activations finite.
Tensors are slices of the pool, each starting where the one before ended; the pool
holds a prime number of blocks, so that neither rows nor experts line up with it.
Two experts may share bytes, but never an address: memory traffic, caching and
paging behave as for the real file.

Speculative decoding.  By default the MTP layer guesses noise and no draft is ever
accepted.  With --mtp-noise X the layers write quietly into a loud residual stream,
so that the next token hangs (almost) on the last token alone, and the MTP layer
passes the last token's embedding on with noise of relative size X: with 0 nearly
every draft is accepted, and the more noise, the fewer.  All of the layers' work
stays; read the acceptance off the engine's own report.
"""
import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFWriter
from gguf import GGMLQuantizationType as Q

ARCH = "qwen35moe"


@dataclass(frozen=True)
class Dims:
    name: str
    layers: int            # trunk layers, without the MTP layer
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    experts_used: int
    expert_ff: int
    shared_ff: int
    gdn_v_heads: int
    gdn_k_heads: int
    gdn_head_dim: int
    vocab: int
    mtp: int = 1           # MTP (nextn) layers, 0 or 1
    conv: int = 4
    attn_every: int = 4    # each n-th layer has full attention, the others GDN
    context: int = 262144
    rope_dims: int = 64
    rope_sections: tuple = (11, 11, 10, 0)
    rope_base: float = 1e7
    eps: float = 1e-6


PRESETS = {
    "qwen3.6-35b-a3b": Dims("Qwen3.6-35B-A3B-synthetic", 40, 2048, 16, 2, 256,
                            256, 8, 512, 512, 32, 16, 128, 248320),
    "qwen3.5-122b-a10b": Dims("Qwen3.5-122B-A10B-synthetic", 48, 3072, 32, 2, 256,
                              256, 8, 1024, 1024, 64, 16, 128, 248320),
    "tiny": Dims("Qwen3.5-MoE-tiny-synthetic", 4, 512, 8, 2, 256,
                 32, 4, 256, 256, 8, 4, 128, 16384, context=32768),
}

# What each recipe gives to each group of tensors.  'gate' and 'up' are the routed
# experts' inputs, 'down' their outputs; 'dense' is every other matrix of a layer
# (attention, GDN, shared expert, MTP projection).
RECIPES = {
    "q4_k":   dict(gate=Q.Q4_K,   up=Q.Q4_K,   down=Q.Q5_K,   dense=Q.Q8_0, embd=Q.Q6_K, out=Q.Q6_K, ftype=15),
    "iq4_xs": dict(gate=Q.IQ4_XS, up=Q.IQ4_XS, down=Q.IQ4_XS, dense=Q.Q6_K, embd=Q.Q6_K, out=Q.Q6_K, ftype=30),
    "iq3_s":  dict(gate=Q.IQ3_S,  up=Q.IQ3_S,  down=Q.IQ4_XS, dense=Q.Q6_K, embd=Q.Q6_K, out=Q.Q6_K, ftype=26),
    "q8_0":   dict(gate=Q.Q8_0,   up=Q.Q8_0,   down=Q.Q8_0,   dense=Q.Q8_0, embd=Q.Q8_0, out=Q.Q8_0, ftype=7),
}


def row_bytes(qtype, n):
    block, size = GGML_QUANT_SIZES[qtype]
    if n % block:
        raise SystemExit(f"rows of {n} do not divide into {qtype.name} blocks of {block}")
    return n // block * size


# --- random blocks ----------------------------------------------------------

def half(x, n):
    """n copies of x as float16, as bytes: shape (n, 2)."""
    v = np.float16(x)
    if not np.isfinite(v) or v == 0:
        raise SystemExit(f"scale {x} does not fit a float16")
    return np.tile(np.frombuffer(v.tobytes(), np.uint8), (n, 1))


def mirror_k_scales(s):
    """Make the eight 6-bit minima of Q4_K/Q5_K equal to the eight scales."""
    s[:, 4:8] = s[:, 0:4]
    low = s[:, 8:12] & 0x0F
    s[:, 8:12] = low | (low << 4)


def set_scales(qtype, b, std):
    """Overwrite the scale fields of random blocks b (n, bytes) for that deviation."""
    n = len(b)
    if qtype == Q.Q8_0:                      # d, 32 int8: uniform int8 deviates by 73.9
        b[:, 0:2] = half(std / 73.9, n)
    elif qtype in (Q.Q4_K, Q.Q5_K):          # d, dmin, 12 bytes of scales and minima, quants
        top = 15 if qtype == Q.Q4_K else 31  # w = scale * (d * q - dmin), with dmin = d * top / 2
        d = std / (36.5 * ((top + 1) ** 2 - 1) ** 0.5 / 12 ** 0.5)
        b[:, 0:2] = half(d, n)
        b[:, 2:4] = half(d * top / 2, n)
        mirror_k_scales(b[:, 4:16])
    elif qtype == Q.Q6_K:                    # 192 bytes of quants, 16 int8 scales, d
        b[:, 208:210] = half(std / (73.9 * 18.5), n)
    elif qtype == Q.IQ4_XS:                  # d, 6-bit scales less 32, table of 16 values
        b[:, 0:2] = half(std / (18.5 * 67.0), n)
    elif qtype == Q.IQ3_S:                   # d, grid indices, signs, scales 1, 3 ... 31
        b[:, 0:2] = half(std / (18.5 * 8.0), n)
    else:
        raise SystemExit(f"no random blocks for {qtype.name}")


def prime_at_most(n):
    while n > 3 and any(n % i == 0 for i in range(2, int(n ** 0.5) + 1)):
        n -= 1
    return n


class Pools:
    def __init__(self, mib, seed):
        self.bytes, self.rng = mib << 20, np.random.default_rng(seed)
        self.raw, self.ready, self.at = {}, {}, {}

    def pool(self, qtype, std, group):
        key, source = (qtype, round(std, 9), group), (qtype, group)
        if key not in self.ready:
            size = GGML_QUANT_SIZES[qtype][1]
            if source not in self.raw:
                n = prime_at_most(max(self.bytes // size, 5))
                self.raw[source] = np.frombuffer(self.rng.bytes(n * size), np.uint8).reshape(n, size)
            blocks = self.raw[source].copy()
            set_scales(qtype, blocks, std)
            self.ready[key] = memoryview(blocks.reshape(-1))
            self.at[key] = 0
        return key, self.ready[key]

    def pieces(self, qtype, std, nbytes, group):
        """Slices of the pool that make up the next nbytes of that type and group."""
        key, view = self.pool(qtype, std, group)
        at = self.at[key]
        while nbytes:
            n = min(nbytes, len(view) - at)
            yield view[at:at + n]
            nbytes -= n
            at = (at + n) % len(view)
        self.at[key] = at


# --- tensors ----------------------------------------------------------------

@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple           # slowest dimension first; the row length is the last
    qtype: Q
    kind: str = "weight"   # weight | one | small | decay | dt | router | pass
    gain: float = 1.0

    @property
    def nbytes(self):
        rows = int(np.prod(self.shape[:-1], dtype=np.int64)) if len(self.shape) > 1 else 1
        return rows * row_bytes(self.qtype, self.shape[-1])


LOUD, QUIET = 8.0, 0.05    # --mtp-noise: deviation of the embeddings, gain of what layers write


def tensors(d, r, fuse, predictable=False):
    dense, f32 = r["dense"], Q.F32
    k_dim, v_dim = d.gdn_k_heads * d.gdn_head_dim, d.gdn_v_heads * d.gdn_head_dim
    loud, quiet = (LOUD * d.hidden ** 0.5, QUIET) if predictable else (1.0, 1.0)
    yield Tensor("token_embd.weight", (d.vocab, d.hidden), r["embd"], gain=loud)

    def norm(name, n=None):
        return Tensor(name, (n or d.hidden,), f32, "one")

    def attention(p):
        q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
        yield Tensor(p + "attn_q.weight", (2 * q, d.hidden), dense)   # query and its output gate
        yield Tensor(p + "attn_k.weight", (kv, d.hidden), dense)
        yield Tensor(p + "attn_v.weight", (kv, d.hidden), dense)
        yield Tensor(p + "attn_output.weight", (d.hidden, q), dense, gain=quiet)
        yield norm(p + "attn_q_norm.weight", d.head_dim)
        yield norm(p + "attn_k_norm.weight", d.head_dim)

    def delta_net(p):
        yield Tensor(p + "attn_qkv.weight", (2 * k_dim + v_dim, d.hidden), dense)
        yield Tensor(p + "attn_gate.weight", (v_dim, d.hidden), dense)
        yield Tensor(p + "ssm_conv1d.weight", (2 * k_dim + v_dim, d.conv), f32, "small")
        yield Tensor(p + "ssm_dt.bias", (d.gdn_v_heads,), f32, "dt")
        yield Tensor(p + "ssm_a", (d.gdn_v_heads,), f32, "decay")
        yield Tensor(p + "ssm_beta.weight", (d.gdn_v_heads, d.hidden), dense)
        yield Tensor(p + "ssm_alpha.weight", (d.gdn_v_heads, d.hidden), dense)
        yield norm(p + "ssm_norm.weight", d.gdn_head_dim)
        yield Tensor(p + "ssm_out.weight", (d.hidden, v_dim), dense, gain=quiet)

    def experts(p):
        yield Tensor(p + "ffn_gate_inp.weight", (d.experts, d.hidden), f32, "router")
        if fuse:
            yield Tensor(p + "ffn_gate_up_exps.weight", (d.experts, 2 * d.expert_ff, d.hidden), r["gate"])
        else:
            yield Tensor(p + "ffn_gate_exps.weight", (d.experts, d.expert_ff, d.hidden), r["gate"])
            yield Tensor(p + "ffn_up_exps.weight", (d.experts, d.expert_ff, d.hidden), r["up"])
        yield Tensor(p + "ffn_down_exps.weight", (d.experts, d.hidden, d.expert_ff), r["down"], gain=quiet)
        yield Tensor(p + "ffn_gate_inp_shexp.weight", (d.hidden,), f32, "small")
        yield Tensor(p + "ffn_gate_shexp.weight", (d.shared_ff, d.hidden), dense)
        yield Tensor(p + "ffn_up_shexp.weight", (d.shared_ff, d.hidden), dense)
        yield Tensor(p + "ffn_down_shexp.weight", (d.hidden, d.shared_ff), dense, gain=quiet)

    for i in range(d.layers + d.mtp):
        p = f"blk.{i}."
        is_mtp = i >= d.layers
        yield norm(p + "attn_norm.weight")
        yield from attention(p) if is_mtp or (i + 1) % d.attn_every == 0 else delta_net(p)
        yield norm(p + "post_attention_norm.weight")
        yield from experts(p)
        if is_mtp:
            yield Tensor(p + "nextn.eh_proj.weight", (d.hidden, 2 * d.hidden), Q.Q8_0,
                         "pass" if predictable else "weight")
            yield norm(p + "nextn.enorm.weight")
            yield norm(p + "nextn.hnorm.weight")
            yield norm(p + "nextn.shared_head_norm.weight")
    yield norm("output_norm.weight")
    yield Tensor("output.weight", (d.vocab, d.hidden), r["out"], gain=3.0)


def f32_values(t, rng, skew):
    shape, n = t.shape, t.shape[-1]
    if t.kind == "one":
        v = np.ones(shape)
    elif t.kind == "decay":                        # -exp(A_log)
        v = -np.exp(rng.uniform(-4, 1.5, shape))
    elif t.kind == "dt":
        v = rng.uniform(-4, 1, shape)
    elif t.kind == "router":
        v = rng.standard_normal(shape, np.float32) * (1.5 / n ** 0.5)
        if skew:                                   # louder rows win more often
            v *= np.exp(rng.normal(0, skew, (shape[0], 1)))
    else:
        v = rng.standard_normal(shape, np.float32) / n ** 0.5
    return np.ascontiguousarray(v, np.float32)


def pass_embedding(n, noise, rng):
    """Q8_0 rows of 2n: the identity on the first half, random on the second."""
    b = np.zeros((n, 2 * n // 32, 34), np.uint8)
    rows = np.arange(n)
    b[:, :, 0:2] = half(1 / 127, 1)
    b[rows, rows // 32, 2 + rows % 32] = 127
    if noise:
        tail = b[:, n // 32:]
        tail[:] = np.frombuffer(rng.bytes(tail.size), np.uint8).reshape(tail.shape)
        tail[:, :, 0:2] = half(noise / n ** 0.5 / 73.9, 1)
    return memoryview(b.reshape(-1))


# --- tokenizer --------------------------------------------------------------

def byte_letters():
    """The letter that byte-level BPE writes for each byte (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(other)}}


SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ("the of and to in is that it was for on are as with they be at one have this from or had by "
         "word but not what all were we when your can said there use each which she do how their if will "
         "up other about out many then them these so some her would make like him into time has look two "
         "more write go see number no way could people my than first water been call who oil its now find "
         "long down day did get come made may part system user assistant").split()


def small_bpe(letters):
    """Byte tokens, and merges that spell a few words letter by letter."""
    toks, merges = [letters[b] for b in range(256)], []
    seen, pairs = set(toks), set()
    for w in WORDS:
        for text in (w, letters[32] + w):
            for i in range(1, len(text)):
                pair = (text[:i], text[i])
                if pair not in pairs:
                    pairs.add(pair)
                    merges.append(" ".join(pair))
                    if text[:i + 1] not in seen:
                        seen.add(text[:i + 1])
                        toks.append(text[:i + 1])
    return toks, merges


def tiktoken_bpe(path, letters):
    """Tokens and merges of a tiktoken rank file (base64 token, rank)."""
    import base64
    ranks = {}
    with open(path, "rb") as f:
        for line in f:
            if line.strip():
                tok, rank = line.split()
                ranks[base64.b64decode(tok)] = int(rank)

    def spell(token):
        return "".join(letters[byte] for byte in token)

    order = sorted(ranks, key=ranks.get)
    if [ranks[t] for t in order] != list(range(len(order))):
        raise SystemExit(f"{path}: ranks are not 0, 1, 2 ...")
    merges = []
    for tok in order:
        if len(tok) == 1:
            continue
        parts = [tok[i:i + 1] for i in range(len(tok))]
        while len(parts) > 2:                      # merge the lowest pair until two parts are left
            best = min((ranks.get(parts[i] + parts[i + 1], 1 << 60), i) for i in range(len(parts) - 1))
            if best[0] == 1 << 60:                     # no pair is left to merge
                break
            i = best[1]
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append(spell(parts[0]) + " " + spell(parts[1]))
    return [spell(t) for t in order], merges


def is_text(tok, bytes_of):
    try:
        bytes(bytes_of[c] for c in tok).decode()
        return True
    except UnicodeDecodeError:
        return False


def vocabulary(size, tiktoken):
    letters = byte_letters()
    bytes_of = {c: b for b, c in letters.items()}
    toks, merges = tiktoken_bpe(tiktoken, letters) if tiktoken else small_bpe(letters)
    first = size - 276                             # 248044 for 248320, as in the real vocabulary
    if len(toks) > first:
        raise SystemExit(f"{len(toks)} tokens do not fit a vocabulary of {size}")
    # some servers fail on text that is not UTF-8, so random weights must not write any
    mute = [i for i, t in enumerate(toks) if not is_text(t, bytes_of)] + list(range(first, size))
    types = [1] * len(toks)
    fill = 0
    while len(toks) < first:
        toks.append(f"{letters[32]}w{fill:06d}")
        types.append(1)
        fill += 1
    special = {}
    for s in SPECIALS:
        special[s] = len(toks)
        toks.append(s)
        types.append(3)                            # control
    while len(toks) < size:
        toks.append(f"[PAD{len(toks)}]")
        types.append(5)                            # unused
    return toks, types, merges, special, mute


CHAT = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


# --- the file ---------------------------------------------------------------

def metadata(w, d, recipe, tiktoken):
    """Adds the metadata; returns the tokens that must never be produced."""
    u, k = w.add_uint32, ARCH + "."
    w.add_string("general.name", d.name)
    w.add_string("general.description", "random weights, for speed measurements only")
    w.add_file_type(recipe["ftype"])
    w.add_quantization_version(2)
    u(k + "block_count", d.layers + d.mtp)
    u(k + "context_length", d.context)
    u(k + "embedding_length", d.hidden)
    u(k + "feed_forward_length", d.expert_ff)
    u(k + "attention.head_count", d.heads)
    u(k + "attention.head_count_kv", d.kv_heads)
    u(k + "attention.key_length", d.head_dim)
    u(k + "attention.value_length", d.head_dim)
    w.add_float32(k + "attention.layer_norm_rms_epsilon", d.eps)
    u(k + "rope.dimension_count", d.rope_dims)
    w.add_array(k + "rope.dimension_sections", list(d.rope_sections))
    w.add_float32(k + "rope.freq_base", d.rope_base)
    u(k + "expert_count", d.experts)
    u(k + "expert_used_count", d.experts_used)
    u(k + "expert_feed_forward_length", d.expert_ff)
    u(k + "expert_shared_feed_forward_length", d.shared_ff)
    u(k + "ssm.conv_kernel", d.conv)
    u(k + "ssm.state_size", d.gdn_head_dim)
    u(k + "ssm.group_count", d.gdn_k_heads)
    u(k + "ssm.time_step_rank", d.gdn_v_heads)
    u(k + "ssm.inner_size", d.gdn_v_heads * d.gdn_head_dim)
    u(k + "full_attention_interval", d.attn_every)
    if d.mtp:
        u(k + "nextn_predict_layers", d.mtp)

    toks, types, merges, special, mute = vocabulary(d.vocab, tiktoken)
    w.add_string("tokenizer.ggml.model", "gpt2")
    w.add_string("tokenizer.ggml.pre", "qwen35")
    w.add_array("tokenizer.ggml.tokens", toks)
    w.add_array("tokenizer.ggml.token_type", types)
    w.add_array("tokenizer.ggml.merges", merges)
    u("tokenizer.ggml.eos_token_id", special["<|im_end|>"])
    u("tokenizer.ggml.padding_token_id", special["<|endoftext|>"])
    u("tokenizer.ggml.bos_token_id", special["<|endoftext|>"])
    w.add_bool("tokenizer.ggml.add_bos_token", False)
    w.add_string("tokenizer.chat_template", CHAT)
    return mute


def write_at(fd, at, view):
    while len(view):
        n = os.pwrite(fd, view, at)
        view, at = view[n:], at + n


def write(path, d, recipe, args):
    predictable = args.mtp_noise is not None
    todo = list(tensors(d, recipe, args.fuse_gate_up, predictable))
    w = GGUFWriter(path, ARCH)
    mute = metadata(w, d, recipe, args.tiktoken)
    for t in todo:
        w.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.nbytes, raw_dtype=t.qtype)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    out = w.fout[0]
    w.write_padding(out, out.tell())
    out.flush()
    fd, at = out.fileno(), out.tell()
    pools, rng = Pools(args.pool_mib, args.seed), np.random.default_rng(args.seed + 1)
    with ThreadPoolExecutor(args.threads) as pool:       # pwrite runs outside Python's lock
        jobs = []
        for t in todo:
            here = at
            if t.qtype == Q.F32:
                parts = [memoryview(f32_values(t, rng, args.router_skew)).cast("B")]
            elif t.kind == "pass":
                parts = [pass_embedding(d.hidden, args.mtp_noise, rng)]
            else:
                # embeddings and output share no bytes, or each token would predict itself
                group = "" if t.name.startswith("blk.") else t.name
                parts = pools.pieces(t.qtype, t.gain * args.gain / t.shape[-1] ** 0.5, t.nbytes, group)
            for part in parts:
                jobs.append(pool.submit(write_at, fd, here, part))
                here += len(part)
            at += t.nbytes + -t.nbytes % w.data_alignment
            if t.name == "output.weight":
                out_at, out_row = here - t.nbytes, row_bytes(t.qtype, t.shape[-1])
        for job in jobs:
            job.result()
    for i in mute:                                       # zero rows: logit 0, far below the best
        os.pwrite(fd, bytes(out_row), out_at + i * out_row)
    os.ftruncate(fd, at)                                 # the last tensor's padding
    w.close()


def summary(d, recipe, fuse):
    total, routed, params, active = 0, 0, 0, 0
    for t in tensors(d, recipe, fuse):
        n = int(np.prod(t.shape, dtype=np.int64))
        total, params = total + t.nbytes, params + n
        if "_exps." in t.name:
            routed += t.nbytes
            share = d.experts_used / d.experts
        else:
            share = 0 if t.name == "token_embd.weight" else 1
        if not t.name.startswith(f"blk.{d.layers}."):
            active += t.nbytes * share
    return (f"{params / 1e9:.3f} G parameters, {total / 1e9:.3f} GB "
            f"({8 * total / params:.3f} bits each), routed experts {routed / 1e9:.3f} GB, "
            f"read for one token (no MTP) {active / 1e9:.4f} GB")


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("preset", choices=PRESETS)
    ap.add_argument("output", nargs="?")
    ap.add_argument("--quant", choices=RECIPES, default="q4_k")
    ap.add_argument("--layers", type=int, help="trunk layers instead of the preset's (the MTP layer comes on top)")
    ap.add_argument("--vocab", type=int)
    ap.add_argument("--experts", type=int, help="experts of each layer instead of the preset's")
    ap.add_argument("--no-mtp", action="store_true", help="leave the MTP layer out")
    ap.add_argument("--fuse-gate-up", action="store_true", help="one ffn_gate_up_exps tensor instead of two")
    ap.add_argument("--router-skew", type=float, default=0.0,
                    help="0: experts are chosen about evenly; 0.3 or so: some are much hotter than others")
    ap.add_argument("--mtp-noise", type=float, metavar="X",
                    help="make the next token predictable for the MTP layer, but for this noise (see the top)")
    ap.add_argument("--tiktoken", help="a tiktoken rank file to take the vocabulary and merges from")
    ap.add_argument("--gain", type=float, default=0.7)
    ap.add_argument("--pool-mib", type=int, default=48)
    ap.add_argument("--threads", type=int, default=min(os.cpu_count() or 1, 16))
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--dry-run", action="store_true")
    args = ap.parse_args()

    d = PRESETS[args.preset]
    d = replace(d, layers=args.layers or d.layers, vocab=args.vocab or d.vocab,
                experts=args.experts or d.experts, mtp=0 if args.no_mtp else d.mtp)
    recipe = RECIPES[args.quant]
    print(f"{d.name} {args.quant}, {d.layers} layers + {d.mtp} MTP: {summary(d, recipe, args.fuse_gate_up)}")
    if args.dry_run:
        return
    if not args.output:
        ap.error("an output file is needed")
    t0 = time.time()
    write(args.output, d, recipe, args)
    dt, size = time.time() - t0, os.path.getsize(args.output)
    print(f"wrote {args.output}: {size / 1e9:.3f} GB in {dt:.1f} s ({size / 1e9 / dt:.2f} GB/s)")


if __name__ == "__main__":
    main()
