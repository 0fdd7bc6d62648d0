"""Muon for the matrices, AdamW for the rest, float32 masters beside the weights that are computed with.

Expert matrices can be trained for their quantized form: the weights computed with are then rounded to the Q3_K grid,
while gradients reach the masters unchanged (straight-through).
"""

from collections import defaultdict

import torch

from kernels import _maybe_compiled
from model import Tensors, is_matrix

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
BLOCK, SUB_BLOCK = 256, 16
SCALE_FACTORS = (1.0, 0.9, 0.8, 0.7)


def fake_q3_k(x: torch.Tensor) -> torch.Tensor:
    """Values of the nearest Q3_K blocks: 16 values share a 6-bit scale, 16 scales one f16 factor; codes are -4..3."""
    groups = x.float().reshape(-1, BLOCK // SUB_BLOCK, SUB_BLOCK)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -4.0
    best, best_error = largest, torch.full_like(largest, float("inf"))
    for factor in SCALE_FACTORS:
        scale = largest * factor
        safe = torch.where(scale == 0, 1.0, scale)
        error = ((groups / safe).round().clamp(-4, 3) * scale - groups).square().sum(-1, keepdim=True)
        best, best_error = torch.where(error < best_error, scale, best), torch.minimum(error, best_error)
    d = best.abs().amax(1, keepdim=True) / 31.0
    d = d.half().float()
    scale = (best / torch.where(d == 0, 1.0, d)).round().clamp(-32, 31) * d
    safe = torch.where(scale == 0, 1.0, scale)
    return ((groups / safe).round().clamp(-4, 3) * scale).reshape(x.shape)


def orthogonal(g: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A batch of matrices [n, r, c] with their singular values pushed to about 1 (Newton-Schulz, Muon's update)."""
    a, b, c = NEWTON_SCHULZ
    x = g.to(dtype)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.float().norm(dim=(1, 2), keepdim=True).to(dtype) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Optimizer:
    """Holds masters and moments; `weights` are the leaf tensors that the model computes with."""

    def __init__(self, masters: Tensors, device, dtype: torch.dtype):
        self.masters = {name: t.to(device, torch.float32) for name, t in masters.items()}
        self.dtype = dtype
        self.matrices = [n for n, t in masters.items() if is_matrix(n, t.shape) and n != "token_embd.weight"]
        self.others = [n for n in masters if n not in set(self.matrices)]
        self.momentum = {n: torch.zeros_like(self.masters[n]) for n in self.matrices}
        self.moments = {n: torch.zeros_like(self.masters[n]).repeat(2, *[1] * masters[n].dim()) for n in self.others}
        self.steps = 0
        self.quantize = False
        self.weights: Tensors = {}
        for name, master in self.masters.items():
            low = is_matrix(name, master.shape)
            self.weights[name] = master.to(dtype if low else torch.float32, copy=True).requires_grad_()

    def set_weights(self) -> None:
        """Copies masters into the weights, rounding experts to their quantized form if `quantize`."""
        with torch.no_grad():
            plain = []
            for name, master in self.masters.items():
                if self.quantize and name.endswith("_exps.weight") and master.shape[-1] % BLOCK == 0:
                    self.weights[name].copy_(_maybe_compiled(fake_q3_k, master)(master))
                else:
                    plain.append(name)
            torch._foreach_copy_([self.weights[n] for n in plain], [self.masters[n] for n in plain])

    def gradients(self) -> list[torch.Tensor]:
        """Gradients in a fixed order, for all-reduce."""
        return [w.grad for w in self.weights.values()]

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float = 0.1, momentum: float = 0.95) -> None:
        """One update from `weights[...].grad`, which are cleared."""
        self.steps += 1
        self._step_matrices(lr, weight_decay, momentum)
        self._step_others(lr, (0.9, 0.95))
        self.set_weights()
        for w in self.weights.values():
            w.grad = None

    def _step_matrices(self, lr: float, weight_decay: float, momentum: float) -> None:
        moving = [self.momentum[name] for name in self.matrices]
        grads = [self.weights[name].grad.float() for name in self.matrices]
        torch._foreach_lerp_(moving, grads, 1 - momentum)
        torch._foreach_lerp_(grads, moving, momentum)
        batches = defaultdict(list)  # matrices of one shape are orthogonalized together
        for name, update in zip(self.matrices, grads, strict=True):
            halves = 2 if "gate_up" in name else 1
            update = update.reshape(-1, update.shape[-2] // halves, update.shape[-1])
            batches[update.shape[1:]].append((name, update))
        compute = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        torch._foreach_mul_([self.masters[name] for name in self.matrices], 1 - lr * weight_decay)
        for shape, items in batches.items():
            result = orthogonal(torch.cat([update for _, update in items]), compute)
            scale = 0.2 * max(shape) ** 0.5  # gives updates the size of AdamW's
            masters = [self.masters[name] for name, _ in items]
            parts = result.float().split([len(update) for _, update in items])
            updates = [part.reshape(master.shape) for part, master in zip(parts, masters, strict=True)]
            torch._foreach_add_(masters, updates, alpha=-lr * scale)

    def _step_others(self, lr: float, betas: tuple[float, float]) -> None:
        first, second = ([self.moments[name][i] for name in self.others] for i in range(2))
        grads = [self.weights[name].grad.float() for name in self.others]
        torch._foreach_lerp_(first, grads, 1 - betas[0])
        torch._foreach_lerp_(second, torch._foreach_mul(grads, grads), 1 - betas[1])
        bottom = torch._foreach_sqrt(torch._foreach_div(second, 1 - betas[1] ** self.steps))
        torch._foreach_add_(bottom, 1e-10)
        updates = torch._foreach_div(torch._foreach_div(first, 1 - betas[0] ** self.steps), bottom)
        torch._foreach_add_([self.masters[name] for name in self.others], updates, alpha=-lr)

    def state(self) -> dict:
        """Everything needed to go on."""
        return {"masters": self.masters, "momentum": self.momentum, "moments": self.moments, "steps": self.steps}

    def load_state(self, state: dict) -> None:
        """Takes over a state from `state()`."""
        with torch.no_grad():
            for key in ("masters", "momentum", "moments"):
                for name, t in getattr(self, key).items():
                    t.copy_(state[key][name])
        self.steps = state["steps"]
        self.set_weights()
