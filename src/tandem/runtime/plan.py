"""What a model is and what it will take: sizes by role, and a plan of every byte before any of it is allocated.

In: a GGUF header, the model's tensor and state tables, the machine. Out: ModelSummary and Plan, or PlanError with
the largest context that would fit.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.errors import PlanError
from tandem.gguf import GGML_TYPES, GGUFFile, read_gguf
from tandem.machine import Machine
from tandem.models import model_for
from tandem.models.base import DeltaState, KvState
from tandem.ops.state_cpu import size_bytes as state_bytes
from tandem.runtime.step import EXACT_ROWS, MAX_ROWS

DEFAULT_CTX = 8192
CHECKPOINTS = 8
RESERVE_BYTES = 256 << 20  # interpreter, tokenizer, logits, allocator slack


@dataclass(frozen=True)
class RoleSummary:
    """Tensors of one role: parameters, bytes, and bytes by format name."""

    role: str
    n_params: int
    size_bytes: int
    formats: dict[str, int]


@dataclass(frozen=True)
class ModelSummary:
    """A model file without its weights loaded. bytes_per_token: weight bytes that one token reads (no MTP)."""

    name: str
    architecture: str
    paths: tuple[Path, ...]
    n_params: int
    file_bytes: int
    roles: tuple[RoleSummary, ...]
    ctx_train: int
    bytes_per_token: int
    specs: tuple[KvState | DeltaState, ...]
    draft_specs: tuple[KvState, ...] = ()

    def draft_state_bytes(self, ctx: int, kv: str) -> int:
        """Bytes of one sequence's cache of the MTP block; 0 without one."""
        return state_bytes(self.draft_specs, ctx, kv, MAX_ROWS) if self.draft_specs else 0

    def state_bytes(self, ctx: int, kv: str) -> int:
        """Bytes of one sequence's cache and recurrent state at that context."""
        return state_bytes(self.specs, ctx, kv, MAX_ROWS, EXACT_ROWS)

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of one checkpoint of the recurrent layers; 0 for pure attention models."""
        recurrent = tuple(s for s in self.specs if isinstance(s, DeltaState))
        return state_bytes(recurrent, 1, "f16", MAX_ROWS) if recurrent else 0

    def kv_bytes_per_token(self, kv: str) -> int:
        """Cache bytes that one more token of context costs (windowed layers not counted: theirs are fixed)."""
        growing = tuple(s for s in self.specs if isinstance(s, KvState) and s.window is None)
        return (state_bytes(growing, 2048, kv, MAX_ROWS) - state_bytes(growing, 1024, kv, MAX_ROWS)) // 1024


@dataclass(frozen=True)
class Plan:
    """Every byte of a CPU engine, decided before loading. Weights are mapped from the file, the rest is allocated."""

    ctx: int
    kv: str
    threads: int
    weights_bytes: int
    state_bytes: int
    checkpoints: int
    checkpoint_bytes: int
    scratch_bytes: int
    free_bytes: int
    draft_bytes: int = 0  # the MTP block's cache, buffers and copied head rows

    @property
    def total_bytes(self) -> int:
        """Weights and everything allocated, with the reserve for the interpreter."""
        return (
            self.weights_bytes
            + self.state_bytes
            + self.checkpoints * self.checkpoint_bytes
            + self.scratch_bytes
            + self.draft_bytes
            + RESERVE_BYTES
        )

    def lines(self) -> list[str]:
        """The plan as text, one line per part."""
        rows = [("weights (mapped from the file)", self.weights_bytes), (f"cache and state, {self.ctx} tokens, {self.kv}", self.state_bytes)]
        if self.checkpoint_bytes:
            rows.append((f"checkpoints, up to {self.checkpoints}", self.checkpoints * self.checkpoint_bytes))
        if self.draft_bytes:
            rows.append(("drafting", self.draft_bytes))
        rows += [("scratch", self.scratch_bytes), ("interpreter and slack", RESERVE_BYTES), ("total", self.total_bytes), ("free memory", self.free_bytes)]
        return [f"{label:<36} {mib(size)}" for label, size in rows]


def mib(size_bytes: int) -> str:
    """Bytes as right-aligned MiB."""
    return f"{size_bytes / 2**20:10,.1f} MiB"


def describe(path: str | Path) -> ModelSummary:
    """The summary of a model file, from its header alone. Raises FormatError."""
    with read_gguf(path) as file:
        return summarise(file)


def summarise(file: GGUFFile) -> ModelSummary:
    """The summary of an open file. Raises FormatError if its architecture or config is not supported."""
    model = model_for(file.metadata)
    config = model.Config.from_gguf(file.metadata, file.tensors)
    role_of = {spec.name: spec.role for spec in model.tensors(config)}
    role_of |= {fused.name: role_of[fused.parts[0]] for fused in model.fused(config)}
    architecture = str(file.metadata["general.architecture"])
    return ModelSummary(
        name=str(file.metadata.get("general.name", Path(file.paths[0]).stem)),
        architecture=architecture,
        paths=tuple(Path(p) for p in file.paths),
        n_params=sum(_values(t) for t in file.tensors.values()),
        file_bytes=file.size_bytes,
        roles=_roles(file, role_of),
        ctx_train=int(file.metadata.get(f"{architecture}.context_length", DEFAULT_CTX)),
        bytes_per_token=_bytes_per_token(file, role_of, config),
        specs=tuple(model.state(config)),
        draft_specs=tuple(model.draft_state(config)) if hasattr(model, "draft_state") else (),
    )


def _values(tensor) -> int:
    n = 1
    for extent in tensor.shape:
        n *= extent
    return n


def _roles(file: GGUFFile, role_of: dict[str, str]) -> tuple[RoleSummary, ...]:
    params, sizes, formats = Counter(), Counter(), {}
    for name, tensor in file.tensors.items():
        role = role_of.get(name, "other")
        params[role] += _values(tensor)
        sizes[role] += tensor.size_bytes
        formats.setdefault(role, Counter())[GGML_TYPES[tensor.ggml_type].name] += tensor.size_bytes
    return tuple(RoleSummary(role, params[role], size, dict(formats[role])) for role, size in sizes.most_common())


def _bytes_per_token(file: GGUFFile, role_of: dict[str, str], config) -> int:
    """Dense weights in full, experts by the share that a token uses; one row of an untied embedding is nothing."""
    share = config.num_experts_per_tok / config.num_experts if getattr(config, "num_experts", 0) else 1.0
    tied = "output.weight" not in file.tensors
    total = 0.0
    for name, tensor in file.tensors.items():
        role = role_of.get(name, "other")
        if role == "mtp" or (role == "embed" and not tied):
            continue
        total += tensor.size_bytes * (share if role == "expert" else 1.0)
    return int(total)


def make_plan(
    summary: ModelSummary,
    machine: Machine,
    *,
    ctx: int | None,
    kv: str,
    threads: int,
    scratch_bytes: int,
    draft_scratch_bytes: int | None = None,
) -> Plan:
    """The plan for that context, or for the default one (at most what the model was trained on and what fits).

    draft_scratch_bytes: what drafting takes besides its cache, None without drafts of the model's own. Raises PlanError when it does not fit, naming the largest context that would.
    """
    wanted = ctx or min(DEFAULT_CTX, summary.ctx_train)

    def sizes(n: int) -> dict[str, int]:
        drafting = 0 if draft_scratch_bytes is None else draft_scratch_bytes + summary.draft_state_bytes(n, kv)
        return {"ctx": n, "state_bytes": summary.state_bytes(n, kv), "draft_bytes": drafting}

    plan = Plan(
        **sizes(wanted),
        kv=kv,
        threads=threads,
        weights_bytes=sum(role.size_bytes for role in summary.roles),
        checkpoints=CHECKPOINTS if summary.recurrent_bytes else 0,
        checkpoint_bytes=summary.recurrent_bytes,
        scratch_bytes=scratch_bytes,
        free_bytes=machine.free_bytes,
    )
    if plan.total_bytes <= machine.free_bytes:
        return plan

    def resized(n: int) -> Plan:
        return replace(plan, **sizes(n))

    largest = _largest(lambda n: resized(n).total_bytes <= machine.free_bytes, wanted)
    if largest and ctx is None:
        return resized(largest)
    advice = f"the largest context that fits is {largest}" if largest else "no context fits: use a smaller or more strongly quantized file"
    raise PlanError(
        f"{summary.name} with a context of {wanted} needs {mib(plan.total_bytes).strip()}, "
        f"{mib(machine.free_bytes).strip()} are free; {advice}"
    )


def _largest(fits: Callable[[int], bool], below: int) -> int:
    """The largest n < below for which fits(n), a falling property; 0 if none."""
    low, high = 0, below
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
