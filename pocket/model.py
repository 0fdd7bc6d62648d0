"""The pocket model in PyTorch: `qwen35moe` with every part, as pure functions over a dict of tensors.

In: token ids [B, T+2] and the weights, named as in GGUF files. Out: losses, or logits for checks. Weights keep the
shapes of GGUF tensors, with three differences that `export.py` undoes: gate and up are one tensor, value heads are
grouped by key head, and `ssm_a_log` holds log(-ssm_a). Norm weights are the plain factors.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import kernels

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Config:
    """Sizes. Matrix products have inner dimensions that are multiples of 256, so that K-quants fit."""

    vocab_size: int = 10240
    hidden: int = 256
    num_layers: int = 8
    interval: int = 4
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    rotated: int = 32
    rope_theta: float = 100_000.0
    k_heads: int = 2
    v_heads: int = 4
    state: int = 128
    conv_width: int = 4
    num_experts: int = 32
    num_used: int = 4
    ff: int = 256
    shared_ff: int = 256
    eps: float = 1e-6
    max_ctx: int = 4096

    def recurrent(self, layer: int) -> bool:
        """Whether block `layer` is a DeltaNet layer; the MTP block (layer == num_layers) is not."""
        return layer < self.num_layers and (layer + 1) % self.interval != 0


TINY = Config(vocab_size=512, hidden=64, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=32, rotated=8, k_heads=1,
              v_heads=2, state=32, num_experts=8, num_used=2, ff=64, shared_ff=64, max_ctx=512)  # fmt: skip


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every weight with its shape, in file order."""
    c, h = config, config.hidden
    out: dict[str, tuple[int, ...]] = {"token_embd.weight": (c.vocab_size, h), "output_norm.weight": (h,)}
    for layer in range(c.num_layers + 1):
        b = f"blk.{layer}."
        out |= {b + "attn_norm.weight": (h,), b + "post_attention_norm.weight": (h,)}
        if c.recurrent(layer):
            v, channels = c.v_heads * c.state, (2 * c.k_heads + c.v_heads) * c.state
            out |= {b + "attn_qkv.weight": (channels, h), b + "attn_gate.weight": (v, h)}
            out |= {b + "ssm_alpha.weight": (c.v_heads, h), b + "ssm_beta.weight": (c.v_heads, h)}
            out |= {b + "ssm_conv1d.weight": (channels, c.conv_width), b + "ssm_dt.bias": (c.v_heads,)}
            out |= {b + "ssm_a_log": (c.v_heads,), b + "ssm_norm.weight": (c.state,), b + "ssm_out.weight": (h, v)}
        else:
            q, k = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
            out |= {b + "attn_q.weight": (2 * q, h), b + "attn_k.weight": (k, h), b + "attn_v.weight": (k, h)}
            out |= {b + "attn_output.weight": (h, q)}
            out |= {b + "attn_q_norm.weight": (c.head_dim,), b + "attn_k_norm.weight": (c.head_dim,)}
        out |= {b + "ffn_gate_inp.weight": (c.num_experts, h), b + "ffn_gate_inp_shexp.weight": (h,)}
        out |= {b + "ffn_gate_up_exps.weight": (c.num_experts, 2 * c.ff, h)}
        out |= {b + "ffn_down_exps.weight": (c.num_experts, h, c.ff)}
        out |= {b + "ffn_gate_up_shexp.weight": (2 * c.shared_ff, h), b + "ffn_down_shexp.weight": (h, c.shared_ff)}
    n = f"blk.{c.num_layers}.nextn."
    out |= {n + "eh_proj.weight": (h, 2 * h), n + "enorm.weight": (h,), n + "hnorm.weight": (h,)}
    return out | {n + "shared_head_norm.weight": (h,)}


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight is a large matrix: computed in bf16, trained with Muon (but the embedding), quantized in files."""
    small = ("ffn_gate_inp.weight", "ssm_conv1d.weight", "ssm_alpha.weight", "ssm_beta.weight")
    return len(shape) >= 2 and not name.endswith(small)


def init_weights(config: Config, seed: int) -> Tensors:
    """Fresh float32 weights on the CPU, the same for the same seed."""
    rng = torch.Generator().manual_seed(seed)
    out: Tensors = {}
    residual_outputs = ("attn_output.weight", "ssm_out.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight")
    for name, shape in shapes(config).items():
        if name.endswith("norm.weight"):
            out[name] = torch.ones(shape)
        elif name.endswith("ssm_a_log"):
            out[name] = torch.empty(shape).uniform_(1.0, 16.0, generator=rng).log()
        elif name.endswith("ssm_dt.bias"):
            dt = torch.empty(shape).uniform_(math.log(1e-3), math.log(0.1), generator=rng).exp()
            out[name] = dt + torch.log(-torch.expm1(-dt))
        elif name.endswith("ssm_conv1d.weight"):
            out[name] = torch.empty(shape).uniform_(-0.5, 0.5, generator=rng)
        else:
            std = 0.02 if name == "token_embd.weight" else 0.5 * shape[-1] ** -0.5
            if name.endswith(residual_outputs):
                std /= math.sqrt(2 * config.num_layers)
            out[name] = torch.empty(shape).normal_(0.0, std, generator=rng)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32, in x's dtype."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rope_table(config: Config, length: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [length, rotated / 2]."""
    half = config.rotated // 2
    angles = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * angles
    return angles.cos().float().to(device), angles.sin().float().to(device)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest], -1)


def attention_mixer(x, norm, wq, wk, wv, wo, q_norm, k_norm, cos, sin, config: Config):
    """x + gated attention, [B, T, hidden]."""
    c = config
    batch, length = x.shape[:2]
    y = rms_norm(x, norm, c.eps)
    q, gate = (y @ wq.t()).view(batch, length, c.num_heads, 2, c.head_dim).unbind(3)
    k = (y @ wk.t()).view(batch, length, c.num_kv_heads, c.head_dim)
    v = (y @ wv.t()).view(batch, length, c.num_kv_heads, c.head_dim)
    q = _rotate(rms_norm(q, q_norm, c.eps), cos, sin)
    k = _rotate(rms_norm(k, k_norm, c.eps), cos, sin)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=c.num_heads != c.num_kv_heads)
    o = o.transpose(1, 2) * torch.sigmoid(gate.float()).to(x.dtype)
    return x + o.reshape(batch, length, -1) @ wo.t()


def _unit(x: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def delta_inputs(x, norm, wqkv, wgate, walpha, wbeta, conv, dt_bias, a_log, config: Config):
    """q, k [B, T, k_heads, S] of length 1, v [B, T, v_heads, S], log decay g and beta float32 [B, T, v_heads], z."""
    c = config
    batch, length = x.shape[:2]
    y = rms_norm(x, norm, c.eps)
    u = y @ wqkv.t()
    padded = F.pad(u, (0, 0, c.conv_width - 1, 0))
    mixed = sum(padded[:, tap : tap + length].float() * conv[:, tap] for tap in range(c.conv_width))
    mixed = F.silu(mixed).to(x.dtype)
    q, k, v = mixed.split([c.k_heads * c.state, c.k_heads * c.state, c.v_heads * c.state], -1)
    q, k = (_unit(t.view(batch, length, c.k_heads, c.state)) for t in (q, k))
    v = v.reshape(batch, length, c.v_heads, c.state)
    small = y.float()
    beta = torch.sigmoid(small @ wbeta.t())
    g = -a_log.exp() * F.softplus(small @ walpha.t() + dt_bias)
    return q, k, v, g, beta, y @ wgate.t()


def delta_output(x, o, z, norm, wout, config: Config):
    """x + projected, gated and normed DeltaNet output."""
    o = rms_norm(o, norm, config.eps).float() * F.silu(z.view(o.shape).float())
    return x + o.to(x.dtype).reshape(*x.shape[:2], -1) @ wout.t()


def route(x, norm, router, shared_gate, w_gate_up, w_down, config: Config):
    """Before the experts: normed rows [N, H], shared expert's output + x, weights and ids [N, used], balance loss, load."""
    c = config
    y = rms_norm(x, norm, c.eps)
    gate, up = (y @ w_gate_up.t()).chunk(2, -1)
    shared = (F.silu(gate.float()) * up.float()).to(x.dtype) @ w_down.t()
    shared = x + shared * torch.sigmoid(y.float() @ shared_gate)[..., None].to(x.dtype)
    y = y.reshape(-1, c.hidden)
    logits = y.float() @ router.t()
    probs = torch.softmax(logits, -1)
    weights, ids = probs.topk(c.num_used, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    load = (ids[..., None] == torch.arange(c.num_experts, device=x.device)).sum((0, 1)).float() / ids.numel()
    balance = c.num_experts * (load.detach() * probs.mean(0)).sum()
    z_loss = torch.logsumexp(logits, -1).square().mean()
    return y, shared, weights, ids, balance + 0.1 * z_loss, load.detach()


def head_loss(h, embedding, targets):
    """Mean cross entropy in nats; h [B, T, H], targets [B, T]."""
    logits = h.reshape(-1, h.shape[-1]) @ embedding.t()
    return F.cross_entropy(logits.float(), targets.reshape(-1))


def mtp_input(embedded, hidden, enorm, hnorm, eh_proj, config: Config):
    """The MTP block's residual stream from embeddings of the next tokens and hidden states of these."""
    joined = torch.cat([rms_norm(embedded, enorm, config.eps), rms_norm(hidden, hnorm, config.eps)], -1)
    return joined @ eh_proj.t()


class Model:
    """Runs the functions above. `compiled`: through torch.compile; `delta`: the DeltaNet kernel, of `kernels`."""

    def __init__(self, config: Config, device, compiled: bool = False, delta: str = "torch"):
        self.config, self.device = config, device
        self.delta = kernels.delta_rule(delta)
        wrap = torch.compile(dynamic=False) if compiled else (lambda f: f)
        self._norm, self._attention, self._delta_in, self._delta_out, self._route, self._loss, self._mtp_in = (
            wrap(f) for f in (rms_norm, attention_mixer, delta_inputs, delta_output, route, head_loss, mtp_input)
        )
        self._cos, self._sin = rope_table(config, config.max_ctx, device)

    def block(self, w: Tensors, layer: int, x: torch.Tensor, stats: list) -> torch.Tensor:
        """One block on [B, T, H]; appends (balance loss, load of the experts) to stats."""
        c, b = self.config, f"blk.{layer}."
        length = x.shape[1]

        def at(*names: str) -> list[torch.Tensor]:
            return [w[b + name] for name in names]

        if c.recurrent(layer):
            names = "attn_norm.weight attn_qkv.weight attn_gate.weight ssm_alpha.weight ssm_beta.weight"
            names += " ssm_conv1d.weight ssm_dt.bias ssm_a_log"
            *inputs, z = self._delta_in(x, *at(*names.split()), c)
            x = self._delta_out(x, self.delta(*inputs), z, *at("ssm_norm.weight", "ssm_out.weight"), c)
        else:
            names = "attn_norm.weight attn_q.weight attn_k.weight attn_v.weight attn_output.weight"
            names += " attn_q_norm.weight attn_k_norm.weight"
            x = self._attention(x, *at(*names.split()), self._cos[:length], self._sin[:length], c)
        names = "post_attention_norm.weight ffn_gate_inp.weight ffn_gate_inp_shexp.weight"
        names += " ffn_gate_up_shexp.weight ffn_down_shexp.weight"
        y, shared, weights, ids, balance, load = self._route(x, *at(*names.split()), c)
        stats.append((balance, load))
        routed = kernels.experts(y, weights, ids, *at("ffn_gate_up_exps.weight", "ffn_down_exps.weight"))
        return shared + routed.view(x.shape)

    def trunk(self, w: Tensors, ids: torch.Tensor, stats: list) -> torch.Tensor:
        """Hidden states after the last norm, [B, T, H]."""
        x = F.embedding(ids, w["token_embd.weight"])
        for layer in range(self.config.num_layers):
            x = self.block(w, layer, x, stats)
        return self._norm(x, w["output_norm.weight"], self.config.eps)

    def draft(self, w: Tensors, hidden: torch.Tensor, next_ids: torch.Tensor, stats: list) -> torch.Tensor:
        """Hidden states of the MTP block: hidden [B, T, H] of tokens p, next_ids [B, T] of tokens p + 1."""
        n = f"blk.{self.config.num_layers}.nextn."
        names = (n + "enorm.weight", n + "hnorm.weight", n + "eh_proj.weight")
        x = self._mtp_in(F.embedding(next_ids, w["token_embd.weight"]), hidden, *(w[name] for name in names), self.config)
        x = self.block(w, self.config.num_layers, x, stats)
        return self._norm(x, w[n + "shared_head_norm.weight"], self.config.eps)

    def losses(self, w: Tensors, ids: torch.Tensor, drafts: int = 1) -> dict[str, torch.Tensor]:
        """ids [B, T + 1 + drafts]: next-token loss, one MTP loss for each chained draft, balance; load [blocks, E]."""
        length = ids.shape[1] - 1 - drafts
        stats: list = []
        hidden = self.trunk(w, ids[:, :length], stats)
        embedding = w["token_embd.weight"]
        out = {"next": self._loss(hidden, embedding, ids[:, 1 : length + 1])}
        for depth in range(1, drafts + 1):
            hidden = self.draft(w, hidden, ids[:, depth : length + depth], stats)
            out[f"mtp{depth}"] = self._loss(hidden, embedding, ids[:, depth + 1 : length + depth + 1])
        out["balance"] = torch.stack([balance for balance, _ in stats]).mean()
        out["load"] = torch.stack([load for _, load in stats])
        return out

    def logits(self, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the trunk after every token, [B, T, vocab]."""
        return self.trunk(w, ids, []) @ w["token_embd.weight"].t()

    def draft_logits(self, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the MTP block: row p, from hidden p and token p + 1, predicts token p + 2. [B, T - 1, vocab]."""
        hidden = self.trunk(w, ids[:, :-1], [])
        return self.draft(w, hidden, ids[:, 1:], []) @ w["token_embd.weight"].t()
