"""Checks on the GPU what the CPU cannot: the kernels against plain PyTorch in float32, and the speed of a step.

Out: one line per check; `delta=fla` or `delta=torch` for `train.py` in a file; exit status 1 if the experts are wrong.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

import kernels
from model import Config, Model, init_weights
from optimizer import Optimizer, fake_q3_k


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative error, as a float; NaN stays NaN."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def gradients(f, inputs: list[torch.Tensor], direction: torch.Tensor) -> list[torch.Tensor]:
    """[output, gradients of <output, direction> by every input]."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = f(*leaves)
    return [out.detach(), *torch.autograd.grad((out.float() * direction).sum(), leaves)]


def check_delta(batch: int, length: int) -> float:
    """Largest relative error of outputs and gradients of the fla kernels."""
    c = Config()
    torch.manual_seed(int(time.time()))
    unit = torch.nn.functional.normalize
    q, k = (unit(torch.randn(batch, length, c.k_heads, c.state, device="cuda"), dim=-1) for _ in range(2))
    v = torch.randn(batch, length, c.v_heads, c.state, device="cuda")
    g = -torch.rand(batch, length, c.v_heads, device="cuda") * torch.tensor([0.01, 0.1, 1.0, 3.0], device="cuda")
    beta = torch.rand(batch, length, c.v_heads, device="cuda")
    direction = torch.randn_like(v)
    low = [t.bfloat16() for t in (q, k, v)] + [g, beta]
    reference = gradients(kernels.delta_rule("torch"), [t.float() for t in low], direction)
    found = gradients(kernels.delta_rule("fla"), low, direction)
    errors = [distance(a, b) for a, b in zip(found, reference, strict=True)]
    print("delta fla: o dq dk dv dg dbeta", [f"{e:.1e}" for e in errors], flush=True)
    return max(errors) if all(e == e for e in errors) else float("nan")


def check_experts() -> float:
    """Largest relative error of the grouped products against loops in float32."""
    c = Config()
    x = torch.randn(1000, c.hidden, device="cuda")
    weights, ids = torch.softmax(torch.randn(1000, c.num_experts, device="cuda"), -1).topk(c.num_used)
    ids = torch.where(ids == 5, 6, ids)  # an expert without tokens
    gate_up = torch.randn(c.num_experts, 2 * c.ff, c.hidden, device="cuda") / 16
    down = torch.randn(c.num_experts, c.hidden, c.ff, device="cuda") / 16
    direction = torch.randn_like(x)
    low = [x.bfloat16(), weights, gate_up.bfloat16(), down.bfloat16()]
    reference = gradients(lambda a, w, u, d: kernels.experts(a, w, ids, u, d), [t.float() for t in low], direction)
    found = gradients(lambda a, w, u, d: kernels.experts(a, w, ids, u, d), low, direction)
    errors = [distance(a, b) for a, b in zip(found, reference, strict=True)]
    print("experts: y dx dw dgate_up ddown", [f"{e:.1e}" for e in errors], flush=True)
    return max(errors) if all(e == e for e in errors) else float("nan")


def time_step(delta: str, batch: int, length: int, drafts: int, steps: int) -> float:
    """Tokens a second of forward, backward and update; prints the loss before and after on one batch."""
    c = Config()
    model = Model(c, torch.device("cuda"), compiled=True, delta=delta)
    optimizer = Optimizer(init_weights(c, 1), torch.device("cuda"), torch.bfloat16)
    optimizer.quantize = True
    ids = torch.randint(0, c.vocab_size, (batch, length + 1 + drafts), device="cuda")

    def step() -> torch.Tensor:
        losses = model.losses(optimizer.weights, ids, drafts)
        (losses["next"] + 0.2 * losses["mtp1"] + 0.01 * losses["balance"]).backward()
        optimizer.step(3e-3)
        return losses["next"]

    start = time.monotonic()
    first = step().item()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    compiled_s, start = time.monotonic() - start, time.monotonic()
    for _ in range(steps):
        last = step()
    issued_s = time.monotonic() - start
    torch.cuda.synchronize()
    step_s = (time.monotonic() - start) / steps
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"{delta} B={batch} T={length}: {step_s * 1e3:.0f} ms a step (issued in {issued_s / steps * 1e3:.0f}), "
          f"{batch * length / step_s / 1e6:.3f} M tokens/s, {peak:.0f} GiB, compiling {compiled_s:.0f} s, "
          f"loss {first:.3f} -> {last.item():.3f}", flush=True)  # fmt: skip
    if step_s > 0:
        profile(step)
    return batch * length / step_s


def profile(step) -> None:
    """Prints the kernels that take most of a step."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as record:
        step()
        torch.cuda.synchronize()
    for event in sorted(record.key_averages(), key=lambda e: -e.self_device_time_total)[:22]:
        print(f"  {event.self_device_time_total / 1e3:8.2f} ms {event.count:5d} {event.key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    print(torch.__version__, torch.cuda.get_device_name(), torch.cuda.device_count(), flush=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    error = check_experts()
    if not error < 2e-2:
        print("the experts' grouped products are wrong", flush=True)
        sys.exit(1)
    delta = "torch"
    try:
        if check_delta(2, 512) < 2e-2:
            delta = "fla"
    except Exception as failure:  # a kernel that does not compile here is the other outcome of this check
        print("fla:", type(failure).__name__, str(failure)[:600], flush=True)
    x = torch.randn(512, 256, device="cuda")
    print("rounding to Q3_K, relative error:", f"{distance(fake_q3_k(x), x):.3f}", flush=True)
    torch.set_float32_matmul_precision("high")
    speed = time_step(delta, args.batch, args.length, 1, args.steps)
    args.out.write_text(json.dumps({"delta": delta, "tok_s": speed}))
    print("delta =", delta, flush=True)


if __name__ == "__main__":
    main()
