"""Trains the pocket model; resumable, on one GPU or several (torchrun), and on the CPU for the miniature.

In: a folder of token streams (`tokenize_text.py`). Out: `state.pt` there (to go on from), `log.jsonl`, and at the end
`weights.*` (bf16, in parts). Progress is training time over --total-minutes, steps over --total-steps, or the share of
the time until --deadline; learning rate, mixture, sequence length, drafts and rounding of experts are functions of
progress, so a run ends decayed. `--recipe more` trains a finished model further (`--init`).
"""

import argparse
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import weights_io
from export import read_gguf
from model import TINY, Config, Model, Tensors, init_weights
from optimizer import Optimizer
from streams import Stream, split_batch

SYNC_STEPS = 10
WINDOW = 2048


@dataclass(frozen=True)
class Phase:
    """How training goes until `until` (progress): mixture of streams, sequence length factor, drafts, loss weights."""

    until: float
    mixture: dict[str, float]
    length_factor: int = 1
    mtp_weights: tuple[float, ...] = (0.3,)
    quantize: bool = False


@dataclass(frozen=True)
class Recipe:
    """Phases, and the learning rate: up until `warmup`, its peak until `decay_from`, then down to `last` of it."""

    phases: tuple[Phase, ...]
    warmup: float
    decay_from: float
    last: float = 0.01

    def phase_at(self, progress: float) -> Phase:
        """The phase that holds at this progress."""
        return next(phase for phase in self.phases if progress < phase.until)

    def lr_factor(self, progress: float) -> float:
        """Warm up, stay, decay linearly to almost nothing."""
        if progress < self.warmup:
            return (progress + 1e-4) / (self.warmup + 1e-4)
        if progress < self.decay_from:
            return 1.0
        return max(self.last, 1.0 - (1.0 - self.last) * (progress - self.decay_from) / (1.0 - self.decay_from))


FRESH = (
    Phase(0.45, {"code": 0.76, "docs": 0.22, "chat": 0.02}),
    Phase(0.72, {"code": 0.74, "docs": 0.22, "chat": 0.04}, mtp_weights=(0.2,), quantize=True),
    Phase(0.88, {"code": 0.52, "docs": 0.20, "chat": 0.28}, mtp_weights=(0.2, 0.05), quantize=True),
    Phase(9.99, {"code": 0.34, "docs": 0.16, "chat": 0.50}, 2, (0.2, 0.1), True),
)
MORE = (
    Phase(0.45, {"code": 0.46, "docs": 0.14, "func": 0.10, "chat": 0.30}, mtp_weights=(0.2,), quantize=True),
    Phase(0.80, {"code": 0.42, "docs": 0.13, "func": 0.11, "chat": 0.34}, mtp_weights=(0.2, 0.1), quantize=True),
    Phase(9.99, {"code": 0.34, "docs": 0.12, "func": 0.12, "chat": 0.42}, mtp_weights=(0.2, 0.1), quantize=True),
)
RECIPES = {"fresh": Recipe(FRESH, 0.01, 0.55), "more": Recipe(MORE, 0.02, 0.30)}
BALANCE_WEIGHT = 0.01
HELD_OUT = ("held_code", "held_docs", "held_chat", "held_func")


@dataclass
class Counters:
    """Where a run is. positions: stream and window -> [epoch, next window]."""

    step: int = 0
    elapsed_s: float = 0.0
    tokens: int = 0
    positions: dict[str, list[int]] | None = None

    def position(self, name: str, length: int) -> list[int]:
        """The mutable reading position of a stream at one window length."""
        if self.positions is None:
            self.positions = {}
        return self.positions.setdefault(f"{name}:{length}", [0, 0])


class Trainer:
    """One process's share of a run."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        cuda = torch.cuda.is_available() and not args.cpu
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        if self.world > 1:
            dist.init_process_group("nccl" if cuda else "gloo")
        self.config = TINY if args.tiny else Config()
        self.model = Model(self.config, self.device, compiled=cuda and not args.eager, delta=args.delta)
        self.optimizer = Optimizer(
            init_weights(self.config, args.seed), self.device, torch.bfloat16 if cuda else torch.float32
        )
        self.recipe = RECIPES[args.recipe]
        self.counters = Counters()
        self.log = open(args.out / "log.jsonl", "a") if self.rank == 0 else None
        self.start, self.started_at = time.monotonic(), time.time()
        self._resume()
        if cuda:
            self._compile()
        self._wait_for_data()
        names = sorted({name for phase in self.recipe.phases for name in phase.mixture})
        self.streams = {n: Stream(args.data / f"{n}.bin", self.device, args.seed + i) for i, n in enumerate(names)}
        self.start, self.started_at = time.monotonic(), time.time()

    def _resume(self) -> None:
        path = self.args.state
        if path.exists():
            state = torch.load(path, map_location=self.device, weights_only=True)
            self.optimizer.load_state(state["optimizer"])
            self.counters = Counters(**state["counters"])
        elif self.args.init:
            is_gguf = self.args.init.is_file()
            masters = read_gguf(self.args.init, self.config) if is_gguf else weights_io.load(self.args.init)[0]
            for name, t in self.optimizer.masters.items():
                t.copy_(masters[name])
        self.optimizer.quantize = self.recipe.phase_at(self.progress()).quantize
        self.optimizer.set_weights()

    def _compile(self) -> None:
        """One pass for every shape that will come, on random tokens, while `tokenize_text.py` may still be at work."""
        for factor, drafts in sorted({(p.length_factor, len(p.mtp_weights)) for p in self.recipe.phases}):
            length = self.args.window * factor
            shape = (self.args.batch_tokens // length, length + 1 + drafts)
            ids = torch.randint(0, self.config.vocab_size, shape, device=self.device)
            losses = self.model.losses(self.optimizer.weights, ids, drafts)
            sum(v for v in losses.values() if v.dim() == 0).backward()
            for w in self.optimizer.weights.values():
                w.grad = None
        torch.cuda.synchronize()
        print(f"compiled, {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB", flush=True)

    def _wait_for_data(self) -> None:
        """`sizes.json` is written last."""
        while not (self.args.data / "sizes.json").exists():
            if not self.args.wait:
                raise FileNotFoundError(f"{self.args.data / 'sizes.json'}: run tokenize_text.py first")
            time.sleep(0.5)

    def progress(self) -> float:
        """0 at the start, 1 at the end."""
        if self.args.total_steps:
            return self.counters.step / self.args.total_steps
        if self.args.deadline:
            return (time.monotonic() - self.start) / max(1.0, self.args.deadline - self.started_at)
        return self.counters.elapsed_s / (60 * self.args.total_minutes)

    def batch(self, phase: Phase) -> torch.Tensor:
        """This rank's tokens, [B, T + 1 + drafts]."""
        length = self.args.window * phase.length_factor
        count, extra = self.args.batch_tokens // length, 1 + len(phase.mtp_weights)
        parts = [
            self.streams[name].take(n, length, extra, self.counters.position(name, length), self.rank, self.world)
            for name, n in split_batch(phase.mixture, count).items()
        ]
        return torch.cat(parts)

    def step(self, phase: Phase, lr: float) -> dict[str, torch.Tensor]:
        """One update; returns its losses, not yet read."""
        quantize = phase.quantize and not self.args.no_quantize
        if quantize != self.optimizer.quantize:
            self.optimizer.quantize = quantize
            self.optimizer.set_weights()
        ids = self.batch(phase)
        losses = self.model.losses(self.optimizer.weights, ids, len(phase.mtp_weights))
        total = losses["next"] + BALANCE_WEIGHT * losses["balance"]
        for depth, weight in enumerate(phase.mtp_weights, 1):
            total = total + weight * losses[f"mtp{depth}"]
        total.backward()
        if self.world > 1:
            self._reduce()
        self.optimizer.step(lr)
        self.counters.step += 1
        self.counters.tokens += ids.shape[0] * (ids.shape[1] - 1 - len(phase.mtp_weights)) * self.world
        return {name: value.detach() for name, value in losses.items()}

    def _reduce(self) -> None:
        grads = self.optimizer.gradients()
        for dtype in {g.dtype for g in grads}:
            part = [g for g in grads if g.dtype == dtype]
            flat = torch._utils._flatten_dense_tensors(part)
            dist.all_reduce(flat, dist.ReduceOp.SUM)
            flat /= self.world
            for g, piece in zip(part, torch._utils._unflatten_dense_tensors(flat, part), strict=True):
                g.copy_(piece)

    def run(self) -> bool:
        """Trains until progress 1 or the time limit; whether the run is finished."""
        if self.args.init and not self.counters.step:
            self.evaluate()
        block_start, saved, evaluated, fresh = time.monotonic(), time.monotonic(), self.progress(), True
        shape_seen: set = set()
        stop, block_steps = False, 0
        while self.progress() < 1 and not stop:
            if self.args.stop_after and self.counters.step >= self.args.stop_after:
                break
            phase = self.recipe.phase_at(self.progress())
            lr = self.args.lr * self.recipe.lr_factor(self.progress())
            shape = (phase.length_factor, len(phase.mtp_weights), phase.quantize)
            fresh = fresh or shape not in shape_seen
            shape_seen.add(shape)
            losses = self.step(phase, lr)
            block_steps += 1
            if self.counters.step % SYNC_STEPS and not fresh:
                continue
            values = {name: round(v.item(), 4) for name, v in losses.items() if v.dim() == 0}
            now = time.monotonic()
            if not fresh:  # steps that compile count for nothing
                self.counters.elapsed_s += now - block_start
            stop = self._share(now - self.start > 60 * self.args.minutes)
            if self.counters.step % (SYNC_STEPS * 2) == 0 or fresh:
                self._write(values, losses["load"], lr, (now - block_start) / block_steps)
            if now - saved > self.args.save_every_s:
                self.save()
                saved = time.monotonic()
            if self.progress() - evaluated >= self.args.eval_every:
                evaluated = self.progress()
                self.evaluate()
            block_start, fresh, block_steps = time.monotonic(), False, 0
        self.save()
        return self.progress() >= 1

    def _share(self, stop: bool) -> bool:
        """Rank 0's clock and decision for all."""
        if self.world == 1:
            return stop
        shared = torch.tensor([self.counters.elapsed_s, float(stop)], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        self.counters.elapsed_s, stop_flag = shared.tolist()
        return bool(stop_flag)

    def _write(self, values: dict, load: torch.Tensor, lr: float, step_s: float) -> None:
        if self.log is None:
            return
        tokens = self.args.batch_tokens * self.world
        entry = {"step": self.counters.step, "progress": round(self.progress(), 5), "tokens": self.counters.tokens}
        entry |= {"elapsed_s": round(self.counters.elapsed_s, 2), "lr": round(lr, 7), "tok_s": round(tokens / step_s)}
        entry |= values | {"load_max": round(load.max().item() * load.shape[1], 2)}
        entry |= {"load_min": round(load.min().item() * load.shape[1], 3)}
        if self.device.type == "cuda":
            entry["gpu_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        self._print(entry)

    def _print(self, entry: dict) -> None:
        line = json.dumps(entry)
        print(line, flush=True)
        print(line, file=self.log, flush=True)

    def evaluate(self, **note) -> None:
        """Bits per byte on the held-out streams, written to the log."""
        sizes = json.loads((self.args.data / "sizes.json").read_text())
        length, entry = self.args.window, {"step": self.counters.step, "progress": round(self.progress(), 5), **note}
        for name in HELD_OUT:
            path = self.args.data / f"{name}.bin"
            if self.rank or not path.exists():
                continue
            stream = Stream(path, self.device, 0)
            batch = self.args.batch_tokens // length
            windows = (len(stream.tokens) - 2) // length // batch
            values = []
            for i in range(min(windows, self.args.eval_batches)):
                starts = torch.arange(i * batch, (i + 1) * batch, device=self.device) * length
                ids = stream.tokens[starts[:, None] + torch.arange(length + 2, device=self.device)].long()
                losses = self.model.losses(self.optimizer.weights, ids, 1)
                values.append([losses["next"].item(), losses["mtp1"].item()])
                del losses  # and with it what a backward pass would need
            if values:
                nats, mtp = (sum(column) / len(values) for column in zip(*values, strict=True))
                bits = nats / math.log(2) / sizes[name]["bytes_per_token"]
                entry[name] = {"nats": round(nats, 4), "bits_per_byte": round(bits, 4), "mtp_nats": round(mtp, 4)}
        if self.rank == 0:
            self._print(entry)

    def save(self) -> None:
        """Writes the state to go on from."""
        if self.rank == 0:
            part = self.args.state.with_suffix(".part")
            torch.save({"optimizer": self.optimizer.state(), "counters": vars(self.counters)}, part)
            os.replace(part, self.args.state)

    def finish(self) -> Tensors:
        """Evaluates, also without rounding; returns the masters on the CPU."""
        self.evaluate()
        if self.optimizer.quantize:
            self.optimizer.quantize = False
            self.optimizer.set_weights()
            self.evaluate(unrounded=True)
        return {name: t.detach().float().cpu() for name, t in self.optimizer.masters.items()}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path)
    parser.add_argument("--init", type=Path, help="weights to start from: a folder of weights.*, or our GGUF file")
    parser.add_argument("--recipe", choices=tuple(RECIPES), default="fresh")
    parser.add_argument("--deadline", type=float, default=0.0, help="seconds since 1970 at which progress is 1")
    parser.add_argument("--wait", action="store_true", help="for the streams, if they are not whole yet")
    parser.add_argument("--minutes", type=float, default=8.0, help="wall time of this call")
    parser.add_argument("--total-minutes", type=float, default=15.0, help="training time of the whole run")
    parser.add_argument("--total-steps", type=int, default=0)
    parser.add_argument("--stop-after", type=int, default=0, help="leave after this step, as if the time were over")
    parser.add_argument("--batch-tokens", type=int, default=131072, help="per process and step")
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--eval-every", type=float, default=0.1, help="of progress")
    parser.add_argument("--eval-batches", type=int, default=4)
    parser.add_argument("--save-every-s", type=float, default=200.0)
    parser.add_argument("--delta", choices=("torch", "fla"), default="fla" if torch.cuda.is_available() else "torch")
    for flag in ("tiny", "cpu", "eager", "no-quantize"):
        parser.add_argument(f"--{flag}", action="store_true")
    args = parser.parse_args()
    args.state = args.state or args.data / "state.pt"
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    args = parse()
    torch.set_float32_matmul_precision("high")
    trainer = Trainer(args)
    finished = trainer.run()
    masters = trainer.finish() if finished or args.stop_after == 0 else None
    if trainer.rank == 0:
        if masters:
            weights_io.save(args.data / "weights", masters, trainer.config)
        print(json.dumps({"finished": finished, "step": trainer.counters.step, "progress": trainer.progress()}))
    if trainer.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
