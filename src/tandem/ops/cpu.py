"""The CPU as a device: every op of `Ops` recorded into a program that the C++ library runs.

Norms and rotations wait until something reads them: attention does those of heads itself, an addition that of its
second argument. A call less is a barrier less, which counts where a layer takes 50 microseconds.
"""

import ctypes
from dataclasses import dataclass

from tandem.ops.attention_cpu import HeadSteps, record_attention
from tandem.ops.base import Attention, Delta, Rope, Routing, Weight
from tandem.ops.delta_cpu import record_delta_rule, record_short_conv
from tandem.ops.elementwise_cpu import (
    record_add,
    record_add_gated,
    record_concat,
    record_embed,
    record_output_rows,
    record_scale,
    record_sigmoid_gate,
    record_softcap,
    record_split_gate,
)
from tandem.ops.experts_cpu import record_experts
from tandem.ops.matmul_cpu import record_gate_up, record_matmul, record_matmul_add
from tandem.ops.norm_cpu import record_add_rms_norm, record_gated_rms_norm, record_rms_norm
from tandem.ops.program import Buffer, Program
from tandem.ops.rope_cpu import record_rope, record_rope_table, rope_key
from tandem.ops.route_cpu import record_route


@dataclass(frozen=True)
class PendingNorm:
    """An RMS norm that is not recorded yet."""

    x: Buffer
    weight: Weight
    eps: float
    heads: int


@dataclass(frozen=True)
class PendingRope:
    """A rotation of heads that is not recorded yet."""

    x: Buffer
    head_dim: int
    rope: Rope
    table: Buffer


class Recorder:
    """A program whose pending buffers are recorded as soon as a call reads them."""

    def __init__(self, program: Program):
        self.program, self.native = program, program.native
        self.buffer, self.address, self.input_rows = program.buffer, program.address, program.input_rows
        self.pending: dict[Buffer, PendingNorm | PendingRope] = {}

    def call(self, name: str, args: ctypes.Structure, **buffers: Buffer) -> None:
        self.settle(*buffers.values())
        self.program.call(name, args, **buffers)

    def split(self, x: Buffer) -> None:
        self.settle(x)
        self.program.split(x)

    def settle(self, *buffers: Buffer) -> None:
        """Records those of the buffers that are pending, and what they read."""
        for out in buffers:
            match self.pending.pop(out, None):
                case PendingNorm(x, weight, eps, heads):
                    record_rms_norm(self, x, weight, eps, heads, out)
                case PendingRope(x, head_dim, rope, table):
                    record_rope(self, x, head_dim, rope, table, out)


class CpuOps:
    """`Ops` that records; rows are Buffers of the program. A wrong shape raises ShapeError when it is recorded."""

    def __init__(self, program: Program):
        self.program = Recorder(program)
        self.rope_tables: dict[tuple, Buffer] = {}

    def embed(self, table: Weight, scale: float = 1.0) -> Buffer:
        return record_embed(self.program, table, scale)

    def hidden_rows(self, width: int) -> Buffer:
        return self.program.input_rows(width)

    def concat(self, x: Buffer, y: Buffer) -> Buffer:
        return record_concat(self.program, x, y)

    def rms_norm(self, x: Buffer, weight: Weight, eps: float, heads: int = 1) -> Buffer:
        return self._pend(PendingNorm(x, weight, eps, heads))

    def matmul(self, x: Buffer, *weights: Weight) -> list[Buffer]:
        return record_matmul(self.program, x, weights)

    def matmul_add(self, x: Buffer, weight: Weight, residual: Buffer) -> Buffer:
        return record_matmul_add(self.program, x, weight, residual)

    def gate_up(self, x: Buffer, gate: Weight, up: Weight, activation: str) -> Buffer:
        return record_gate_up(self.program, x, gate, up, activation)

    def add(self, x: Buffer, y: Buffer) -> Buffer:
        match self.program.pending.get(y):
            case PendingNorm(normed, weight, eps, 1):
                return record_add_rms_norm(self.program, x, normed, weight, eps)
        return record_add(self.program, x, y)

    def scale(self, x: Buffer, factor: float) -> Buffer:
        return record_scale(self.program, x, factor)

    def softcap(self, x: Buffer, cap: float) -> Buffer:
        return record_softcap(self.program, x, cap)

    def split_gate(self, x: Buffer, head_dim: int) -> tuple[Buffer, Buffer]:
        return record_split_gate(self.program, x, head_dim)

    def sigmoid_gate(self, x: Buffer, gate: Buffer) -> Buffer:
        return record_sigmoid_gate(self.program, x, gate)

    def rope(self, x: Buffer, head_dim: int, rope: Rope) -> Buffer:
        key = rope_key(rope)
        if key not in self.rope_tables:
            self.rope_tables[key] = record_rope_table(self.program, rope)
        return self._pend(PendingRope(x, head_dim, rope, self.rope_tables[key]))

    def attention(self, q: Buffer, k: Buffer, v: Buffer, layer: int, spec: Attention) -> Buffer:
        q, k, steps = self._absorb(q, k, spec)
        return record_attention(self.program, q, k, v, layer, spec, steps)

    def short_conv(self, x: Buffer, weight: Weight, layer: int) -> Buffer:
        return record_short_conv(self.program, x, weight, layer)

    def delta_rule(
        self, qkv: Buffer, alpha: Buffer, beta: Buffer, a: Weight, dt_bias: Weight, layer: int, spec: Delta
    ) -> Buffer:
        return record_delta_rule(self.program, qkv, alpha, beta, a, dt_bias, layer, spec)

    def gated_rms_norm(self, x: Buffer, gate: Buffer, weight: Weight, eps: float, heads: int) -> Buffer:
        return record_gated_rms_norm(self.program, x, gate, weight, eps, heads)

    def route(self, x: Buffer, router: Weight, k: int) -> Routing:
        return record_route(self.program, x, router, k)

    def experts(self, x: Buffer, routing: Routing, gate: Weight, up: Weight, down: Weight, activation: str) -> Buffer:
        return record_experts(self.program, x, routing.ids, routing.weights, gate, up, down, activation)

    def add_gated(self, base: Buffer, x: Buffer, gate_input: Buffer, gate_weight: Weight) -> Buffer:
        return record_add_gated(self.program, base, x, gate_input, gate_weight)

    def output_rows(self, x: Buffer) -> Buffer:
        return record_output_rows(self.program, x)

    def _pend(self, step: PendingNorm | PendingRope) -> Buffer:
        out = self.program.buffer(step.x.width)
        self.program.pending[out] = step
        return out

    def _absorb(self, q: Buffer, k: Buffer, spec: Attention) -> tuple[Buffer, Buffer, HeadSteps]:
        """The q and k to start from, and the pending steps from there that attention does alike for both."""
        rope = turns = q_norm = k_norm = None
        eps = 0.0
        ropes = self.program.pending.get(q), self.program.pending.get(k)
        if (
            all(isinstance(r, PendingRope) and r.head_dim == spec.head_dim for r in ropes)
            and ropes[0].table is ropes[1].table
        ):
            q, k, rope, turns = ropes[0].x, ropes[1].x, ropes[0].rope, ropes[0].table
        norms = self.program.pending.get(q), self.program.pending.get(k)
        per_head = all(isinstance(n, PendingNorm) for n in norms) and norms[0].eps == norms[1].eps
        if per_head and (norms[0].heads, norms[1].heads) == (spec.num_heads, spec.num_kv_heads):
            q, k, eps = norms[0].x, norms[1].x, norms[0].eps
            q_norm, k_norm = norms[0].weight, norms[1].weight
        return q, k, HeadSteps(rope, turns, q_norm, k_norm, eps)
