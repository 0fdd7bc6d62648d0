"""Cost of tentative rows of DeltaNet layers, beside one plain row, with states that no cache holds (Qwen3.5-35B sizes).

    python bench/tentative.py --threads 2

Prints, for each kind of pass, the least and the median milliseconds over all layers, and the ratio to one plain row.
"""

import argparse
import time
from ctypes import addressof
from dataclasses import dataclass

import numpy as np

from tandem.native import native
from tandem.ops.base import Delta, Weight
from tandem.ops.delta_cpu import record_delta_rule, record_short_conv
from tandem.ops.program import Pool, Program, StepArgs
from tandem.ops.state_cpu import CpuState
from tandem.quant import pack_tensor

SPEC = Delta(num_k_heads=16, num_v_heads=32, head_dim=128, conv_width=4, eps=1e-6)
CHANNELS = (2 * SPEC.num_k_heads + SPEC.num_v_heads) * SPEC.head_dim


@dataclass(frozen=True)
class LayerSpec:
    """The fields of a DeltaNet layer's state spec."""

    num_v_heads: int = SPEC.num_v_heads
    key_dim: int = SPEC.head_dim
    value_dim: int = SPEC.head_dim
    conv_channels: int = CHANNELS
    conv_width: int = SPEC.conv_width


def floats(name: str, values: np.ndarray) -> Weight:
    values = np.ascontiguousarray(values, np.float32)
    return Weight(name, values.shape, 0, pack_tensor(values, 0).reshape(*values.shape[:-1], -1))


class Layers:
    """All DeltaNet layers as one program, without the projections between them."""

    def __init__(self, count: int, threads: int, max_rows: int = 8):
        rng = np.random.default_rng(0)
        library = native()
        self.program, self.pool = Program(library, max_rows, max_rows), Pool(library, threads)
        heads = SPEC.num_v_heads
        inputs = [self.program.buffer(width) for width in (CHANNELS, heads, heads)]
        taps = floats("taps", rng.standard_normal((CHANNELS, SPEC.conv_width)))
        a, bias = floats("a", -np.exp(rng.standard_normal(heads))), floats("bias", rng.standard_normal(heads))
        for layer in range(count):
            mixed = record_short_conv(self.program, inputs[0], taps, layer)
            out = record_delta_rule(self.program, mixed, *inputs[1:], a, bias, layer, SPEC)
        for used in inputs:
            used.first_call, used.keep = 0, True
        self.program.place((out,))
        self.program.finish()
        for used in inputs:
            rows = self.program.rows(used, max_rows)
            rows[:] = rng.standard_normal(rows.shape)
        self.state = CpuState([LayerSpec()] * count, 1 << 30, "f16", 512, max_tentative=8)

    def pass_s(self, rows: int, accepted: int | None) -> float:
        """Seconds of one pass; accepted: of its tentative rows, None for an ordinary pass."""
        segment = self.state.segment(0, rows, 0, tentative=accepted is not None)
        step = StepArgs(rows=rows, n_segments=1, segments=addressof(segment))
        begin = time.perf_counter()
        self.program.run_trunk(self.pool, step)
        took = time.perf_counter() - begin
        if accepted is not None:
            self.state.accept(accepted)
        return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    layers = Layers(args.layers, args.threads)
    print(f"{native().isa}, {args.threads} threads, states {layers.state.recurrent_memory.nbytes / 1e6:.1f} MB")
    kinds = [(1, None), (2, None), (4, None)] + [(r, a) for r in (1, 2, 4, 8) for a in sorted({0, r // 2, r})]
    times: dict[tuple, list[float]] = {kind: [] for kind in kinds}
    for _ in range(args.repeats):
        for rows, accepted in kinds:
            for _ in range(2):  # the second pays for what the first left pending
                took = layers.pass_s(rows, accepted)
            times[rows, accepted].append(took)
    base = np.median(times[1, None])
    for (rows, accepted), taken in times.items():
        kind = "plain" if accepted is None else f"tentative, {accepted} accepted before"
        least, median = min(taken) * 1e3, np.median(taken) * 1e3
        print(f"{rows} rows {kind:32} {least:7.2f} {median:7.2f} ms  {median / base / 1e3:.2f}")


if __name__ == "__main__":
    main()
