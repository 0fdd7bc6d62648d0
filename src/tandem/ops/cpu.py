"""The CPU as a device: every op of `Ops` recorded into a program that the C++ library runs."""

from tandem.ops.attention_cpu import record_attention
from tandem.ops.base import Attention, Delta, Rope, Routing, Weight
from tandem.ops.delta_cpu import record_delta_rule, record_short_conv
from tandem.ops.elementwise_cpu import (
    record_add,
    record_add_gated,
    record_embed,
    record_output_rows,
    record_scale,
    record_sigmoid_gate,
    record_softcap,
    record_split_gate,
)
from tandem.ops.experts_cpu import record_experts
from tandem.ops.matmul_cpu import record_gate_up, record_matmul, record_matmul_add
from tandem.ops.norm_cpu import record_gated_rms_norm, record_rms_norm
from tandem.ops.program import Buffer, Program
from tandem.ops.rope_cpu import record_rope, record_rope_table, rope_key
from tandem.ops.route_cpu import record_route


class CpuOps:
    """`Ops` that records; rows are Buffers of the program. A wrong shape raises ShapeError when it is recorded."""

    def __init__(self, program: Program):
        self.program = program
        self.rope_tables: dict[tuple, Buffer] = {}

    def embed(self, table: Weight, scale: float = 1.0) -> Buffer:
        return record_embed(self.program, table, scale)

    def rms_norm(self, x: Buffer, weight: Weight, eps: float, heads: int = 1) -> Buffer:
        return record_rms_norm(self.program, x, weight, eps, heads)

    def matmul(self, x: Buffer, *weights: Weight) -> list[Buffer]:
        return record_matmul(self.program, x, weights)

    def matmul_add(self, x: Buffer, weight: Weight, residual: Buffer) -> Buffer:
        return record_matmul_add(self.program, x, weight, residual)

    def gate_up(self, x: Buffer, gate: Weight, up: Weight, activation: str) -> Buffer:
        return record_gate_up(self.program, x, gate, up, activation)

    def add(self, x: Buffer, y: Buffer) -> Buffer:
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
        return record_rope(self.program, x, head_dim, rope, self.rope_tables[key])

    def attention(self, q: Buffer, k: Buffer, v: Buffer, layer: int, spec: Attention) -> Buffer:
        return record_attention(self.program, q, k, v, layer, spec)

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
