"""The two operations of the pocket model that need more than matrix products: experts and the gated delta rule.

Experts drop no token: rows are sorted by expert into a padded buffer and multiplied group by group. The delta rule is
either plain PyTorch in chunks (any device, the reference) or the kernels of `fla-core` (GPU).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

ROW_ALIGNMENT = 8  # grouped products on the GPU want group starts of 16 bytes in bf16
_compiled: dict[str, Callable] = {}


def _maybe_compiled(f: Callable, x: torch.Tensor) -> Callable:
    """f through torch.compile on a GPU, f itself elsewhere."""
    if not x.is_cuda:
        return f
    if f.__name__ not in _compiled:
        _compiled[f.__name__] = torch.compile(f, dynamic=False)
    return _compiled[f.__name__]


def grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Rows [R, K] x [E, K, N] -> [R, N], or [M, R] x [R, N] -> [E, M, N]; group e ends before row offs[e]."""
    if a.is_cuda and a.dtype == torch.bfloat16 and hasattr(torch, "_grouped_mm"):
        return torch._grouped_mm(a, b, offs=offs)
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    if b.dim() == 2:
        return torch.stack([a[:, s:e] @ b[s:e] for s, e in zip(starts, ends, strict=True)])
    out = a.new_zeros(a.shape[0], b.shape[2])
    for expert, (s, e) in enumerate(zip(starts, ends, strict=True)):
        out[s:e] = a[s:e] @ b[expert]
    return out


def sort_rows(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each (token, choice) goes. ids [N, k] -> row_of [N, k], source token of each buffer row [R] (N: none), offs."""
    n, used = ids.shape
    flat = ids.reshape(-1)
    counts = (flat[:, None] == torch.arange(num_experts, device=ids.device)).sum(0)
    padded = ((counts + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT).clamp(min=ROW_ALIGNMENT)
    offs = padded.cumsum(0)
    order = flat.to(torch.uint8).argsort(stable=True)
    sorted_ids = flat[order]
    rank = torch.arange(n * used, device=ids.device) - (counts.cumsum(0) - counts)[sorted_ids]
    rows = (offs - padded)[sorted_ids] + rank
    row_of = torch.empty_like(flat).scatter_(0, order, rows)
    size = n * used + num_experts * ROW_ALIGNMENT
    source = torch.full((size,), n, dtype=flat.dtype, device=ids.device).scatter_(0, rows, order // used)
    return row_of.view(n, used), source, offs.to(torch.int32)


def _gather_rows(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Buffer rows from tokens; rows without a token are zero."""
    rows = x[source.clamp(max=x.shape[0] - 1)]
    return torch.where((source < x.shape[0])[:, None], rows, torch.zeros((), dtype=x.dtype, device=x.device))


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)


def _combine(y: torch.Tensor, row_of: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (y[row_of].float() * weights[..., None]).sum(1).to(y.dtype)


def _combine_backward(dout, y, row_of, weights, source):
    """Gradients of `_combine`: (dy for every buffer row, dweights)."""
    n, used = row_of.shape
    dweights = (y[row_of].float() * dout[:, None].float()).sum(-1)
    row_weight = torch.zeros(source.shape, dtype=torch.float32, device=dout.device)
    row_weight = row_weight.scatter(0, row_of.reshape(-1), weights.reshape(-1).float())
    dy = (_gather_rows(dout, source).float() * row_weight[:, None]).to(dout.dtype)
    return dy, dweights


def _swiglu_backward(gate_up: torch.Tensor, dh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(h, dgate_up); h is computed again rather than kept."""
    gate, up = (t.float() for t in gate_up.chunk(2, -1))
    sig = torch.sigmoid(gate)
    silu, d = gate * sig, dh.float()
    dgate = d * up * (sig + silu * (1 - sig))
    return (silu * up).to(dh.dtype), torch.cat([dgate, d * silu], -1).to(dh.dtype)


def _sum_rows(dx: torch.Tensor, row_of: torch.Tensor) -> torch.Tensor:
    return dx[row_of].float().sum(1).to(dx.dtype)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, ids, w_gate_up, w_down):
        row_of, source, offs = _maybe_compiled(sort_rows, x)(ids, w_down.shape[0])
        rows = _maybe_compiled(_gather_rows, x)(x, source)
        gate_up = grouped_mm(rows, w_gate_up.transpose(1, 2), offs)
        h = _maybe_compiled(_swiglu, x)(gate_up)
        y = grouped_mm(h, w_down.transpose(1, 2), offs)
        ctx.save_for_backward(weights, w_gate_up, w_down, row_of, source, offs, rows, gate_up, y)
        return _maybe_compiled(_combine, x)(y, row_of, weights)

    @staticmethod
    def backward(ctx, dout):
        weights, w_gate_up, w_down, row_of, source, offs, rows, gate_up, y = ctx.saved_tensors
        dout = dout.contiguous()
        dy, dweights = _maybe_compiled(_combine_backward, dout)(dout, y, row_of, weights, source)
        dh = grouped_mm(dy, w_down, offs)
        h, dgate_up = _maybe_compiled(_swiglu_backward, dout)(gate_up, dh)
        dw_down = grouped_mm(dy.t(), h, offs)
        drows = grouped_mm(dgate_up, w_gate_up, offs)
        dw_gate_up = grouped_mm(dgate_up.t(), rows, offs)
        return _maybe_compiled(_sum_rows, dout)(drows, row_of), dweights, None, dw_gate_up, dw_down


def experts(x, weights, ids, w_gate_up, w_down) -> torch.Tensor:
    """Weighted sum of the chosen experts: x [N, H], weights and ids [N, k], [E, 2F, H] (gate rows first), [E, H, F]."""
    return _Experts.apply(x, weights, ids, w_gate_up, w_down)


def delta_rule(name: str) -> Callable:
    """`torch` or `fla`: f(q, k [B, T, K, S], v [B, T, V, S], g, beta [B, T, V]) -> [B, T, V, S], scaled by 1/sqrt(S)."""
    return {"torch": chunked_delta_rule, "fla": _fla_delta_rule}[name]


def chunked_delta_rule(q, k, v, g, beta, chunk: int = 64):
    """The gated delta rule in chunks, float32 inside; value head j uses key head j // (V / K)."""
    batch, length, heads, size = v.shape
    repeat, pad = heads // k.shape[2], -length % chunk
    q, k = (t.repeat_interleave(repeat, 2) for t in (q, k))
    q, k, v, g, beta = (F.pad(t.float().movedim(2, 1), (0, 0) * (t.dim() - 3) + (0, pad)) for t in (q, k, v, g, beta))
    q = q * size**-0.5
    q, k, v, g, beta = (t.reshape(batch, heads, -1, chunk, *t.shape[3:]) for t in (q, k, v, g, beta))
    total = g.cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    k_beta = k * beta[..., None]
    a = (k_beta @ k.transpose(-1, -2) * decay).tril(-1)
    eye = torch.eye(chunk, device=v.device)
    inverse = torch.linalg.solve_triangular(eye + a, eye.expand_as(a), upper=False, unitriangular=True)
    u, w = inverse @ (v * beta[..., None]), inverse @ (k_beta * total.exp()[..., None])
    inner = q @ k.transpose(-1, -2) * decay
    q = q * total.exp()[..., None]
    last = total[..., -1:]
    k = k * (last - total).exp()[..., None]
    state, out = v.new_zeros(batch, heads, size, size), []
    for i in range(v.shape[2]):
        fresh = u[:, :, i] - w[:, :, i] @ state
        out.append(q[:, :, i] @ state + inner[:, :, i] @ fresh)
        state = state * last[:, :, i, :, None].exp() + k[:, :, i].transpose(-1, -2) @ fresh
    result = torch.stack(out, 2).reshape(batch, heads, -1, size)[:, :, :length]
    return result.movedim(1, 2).to(torch.bfloat16 if torch.is_autocast_enabled() else v.dtype)


def _chunk_gradients(q, k, v, do, dv, h, dh, g, scale: float):
    """The part of the backward pass inside chunks, as batched products: all chunks at once.

    q, k, v, do, dv [.., C, S]; h, dh (state before the chunk and its gradient) [.., S, S]; g: log2 decay summed inside
    the chunk [.., C]. Returns dq, dk, dw, dg.
    """
    ds = do @ v.transpose(-1, -2)
    dq, dk = (do @ h.transpose(-1, -2)).float(), (v @ dh.transpose(-1, -2)).float()
    dw = -(dv @ h.transpose(-1, -2))
    last = g[..., -1:]
    dg_last = (h.float() * dh.float()).sum((-1, -2)) * last[..., 0].exp2()
    dq = dq * (g.exp2() * scale)[..., None]
    dk = dk * (last - g).exp2()[..., None]
    dg_last = dg_last + (dk * k.float()).sum((-1, -2))
    causal = torch.ones(ds.shape[-1], ds.shape[-1], dtype=torch.bool, device=ds.device).tril()
    power = torch.where(causal, g[..., :, None] - g[..., None, :], 0.0)
    ds = torch.where(causal, ds.float() * power.exp2() * scale, 0.0).to(q.dtype)
    dq = dq + (ds @ k).float()
    dk = dk + (ds.transpose(-1, -2) @ q).float()
    dg = (dq * q.float()).sum(-1) - (dk * k.float()).sum(-1)
    tail = torch.arange(g.shape[-1], device=g.device) == g.shape[-1] - 1
    return dq, dk, dw, dg + tail * dg_last[..., None]


def chunk_gradients(q, k, v, do, h, dh, w=None, g=None, dv=None, scale=None, chunk_size=64, **unused):
    """Stands in for a kernel of fla-core that Triton 3.4 to 3.7 compiles wrongly on Hopper GPUs; same arguments."""
    batch, length, heads, size = v.shape
    repeat = heads // k.shape[2]
    if length % chunk_size:
        raise ValueError(f"sequence length {length} must be a multiple of {chunk_size}")

    def chunks(t: torch.Tensor) -> torch.Tensor:
        t = t.view(batch, -1, chunk_size, t.shape[2], *t.shape[3:]).transpose(2, 3)
        return t if t.shape[2] == heads else t.repeat_interleave(repeat, 2)

    parts = [chunks(t).contiguous() for t in (q, k, v, do, dv.to(q.dtype))]
    compute = _maybe_compiled(_chunk_gradients, q)
    dq, dk, dw, dg = compute(*parts, h.to(q.dtype), dh.to(q.dtype), chunks(g.float()), float(scale))

    def whole(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(2, 3).reshape(batch, length, heads, *t.shape[4:])

    dq, dk = (whole(t).view(batch, length, heads // repeat, repeat, size).sum(3).to(q.dtype) for t in (dq, dk))
    return dq, dk, whole(dw).to(q.dtype).contiguous(), whole(dg).float().contiguous()


def _fla_delta_rule(q, k, v, g, beta):
    if "fla" not in _compiled:
        import fla.ops.gated_delta_rule.chunk as chunk

        chunk.chunk_bwd_dqkwg = chunk_gradients
        _compiled["fla"] = torch.compiler.disable(chunk.chunk_gated_delta_rule)
    return _compiled["fla"](q.contiguous(), k.contiguous(), v.contiguous(), g, beta)[0]
