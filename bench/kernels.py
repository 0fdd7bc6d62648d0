"""Speed of the matrix products and of the expert layer for 1 to 8 rows, beside the measured RAM read bandwidth.

    python bench/kernels.py Q4_K IQ4_XS --threads 2
    python bench/kernels.py --experts --threads 16

Products: GB/s of weights and the time as a multiple of one row's, for weights far larger than the caches and for
weights that stay in them; 10^9 multiply-adds a second for many rows. Experts: time of a layer as a multiple of one
row's, when each row draws its own experts (even) and when all rows draw the same, beside the ratio of distinct
experts. The last line is one JSON object.
"""

import argparse
import json
import mmap
import os
import sys
import tempfile
import time

import numpy as np

from tandem.native import native
from tandem.ops.bandwidth import read_bandwidth_gb_s
from tandem.ops.base import Weight
from tandem.ops.experts_cpu import record_experts
from tandem.ops.matmul_cpu import record_matmul
from tandem.ops.program import Pool, Program, StepArgs
from tandem.quant import FORMATS, format_by_name, random_blocks

FEW = (1, 2, 3, 4, 8)
MANY = 512
CACHED_BYTES = 384 << 10  # per thread: fits the second-level cache
NUM_EXPERTS, CHOSEN = 256, 8
# hidden size, expert size, types of gate and up, of down
LAYERS = {
    "35b-iq4_xs": (2048, 512, "IQ4_XS", "IQ4_XS"),
    "35b-q4_k": (2048, 512, "Q4_K", "Q5_K"),
    "122b-iq3_s": (3072, 1024, "IQ3_S", "IQ4_XS"),
}


def placed(blocks: np.ndarray, memory: str) -> np.ndarray:
    """A copy in pages of that kind: anonymous ones, huge or small, or those of a mapped file as models are read."""
    if memory == "file":
        with tempfile.TemporaryFile() as file:
            file.write(blocks.data)
            file.flush()
            pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        pages.madvise(mmap.MADV_POPULATE_READ if hasattr(mmap, "MADV_POPULATE_READ") else mmap.MADV_WILLNEED)
        return np.frombuffer(pages, np.uint8).reshape(blocks.shape)
    pages = mmap.mmap(-1, blocks.nbytes)
    pages.madvise(mmap.MADV_HUGEPAGE if memory == "huge" else mmap.MADV_NOHUGEPAGE)
    copy = np.frombuffer(pages, np.uint8).reshape(blocks.shape)
    copy[:] = blocks
    return copy


def pinned_pool(library, threads: int) -> Pool:
    """A pool whose threads have a core each."""
    cores, before = sorted(os.sched_getaffinity(0)), set(os.listdir("/proc/self/task"))
    pool = Pool(library, threads)
    workers = sorted(int(name) for name in set(os.listdir("/proc/self/task")) - before)
    for core, thread in zip(cores, [0, *workers], strict=False):
        os.sched_setaffinity(thread, {core})
    return pool


def make_weight(ggml_type: int, cols: int, size_bytes: int, memory: str = "huge") -> Weight:
    """About size_bytes of one matrix with rows of cols values; a megabyte of random blocks, repeated."""
    form = FORMATS[ggml_type]
    row_bytes = cols // form.block_values * form.block_bytes
    n = max(32, min(size_bytes, 1 << 20) // row_bytes // 32 * 32)
    blocks = random_blocks(ggml_type, n * row_bytes // form.block_bytes, np.random.default_rng(0))
    tiled = np.tile(blocks.reshape(n, row_bytes), (-(-size_bytes // (n * row_bytes)), 1))
    return Weight(form.name, (len(tiled), cols), ggml_type, placed(tiled, memory))


def seconds(pool: Pool, weight: Weight, rows: int, budget_s: float) -> float:
    """Best time of one product of `rows` random rows."""
    program = Program(pool.native, rows, 1)
    x = program.buffer(weight.shape[1])
    (out,) = record_matmul(program, x, [weight])
    program.place(keep=(x, out))
    program.finish()
    program.rows(x, rows)[:] = np.random.default_rng(1).standard_normal((rows, weight.shape[1]), np.float32)
    return best_s(lambda _: program.run_trunk(pool, StepArgs(rows=rows)), budget_s)


def best_s(run, budget_s: float) -> float:
    """The shortest of run(0), run(1), ... within the budget, at least 3 and at most 1000 of them, after one more."""
    run(0)
    best, begin, i = float("inf"), time.perf_counter(), 0
    while i < 3 or (i < 1000 and time.perf_counter() - begin < budget_s):
        start = time.perf_counter()
        run(i)
        best, i = min(best, time.perf_counter() - start), i + 1
    return best


def measure(pool: Pool, name: str, args: argparse.Namespace) -> dict[str, float]:
    """Figures of one type, by name of the column."""
    ggml_type = format_by_name(name).ggml_type
    figures = {}
    for label, size_bytes in (("ram", args.size_mb << 20), ("cache", CACHED_BYTES * pool.threads)):
        weight = make_weight(ggml_type, args.cols, size_bytes, args.memory)
        times = [seconds(pool, weight, rows, args.budget_s) for rows in FEW]
        figures[f"{label} GB/s"] = round(weight.blocks.nbytes / times[0] / 1e9, 1)
        figures |= {f"{label} x{rows}": round(t / times[0], 2) for rows, t in zip(FEW[1:], times[1:], strict=True)}
    if args.many:
        small = make_weight(ggml_type, args.cols, 1 << 20)
        figures["GMAC/s"] = round(MANY * small.shape[0] * args.cols / seconds(pool, small, MANY, args.budget_s) / 1e9)
    return figures


def expert_stack(name: str, out: int, cols: int, memory: str) -> Weight:
    """NUM_EXPERTS matrices [out, cols] of that type; random blocks, repeated."""
    form = format_by_name(name)
    flat = make_weight(form.ggml_type, cols, NUM_EXPERTS * out * cols // form.block_values * form.block_bytes, memory)
    blocks = flat.blocks[: NUM_EXPERTS * out].reshape(NUM_EXPERTS, out, -1)
    return Weight(name, (NUM_EXPERTS, out, cols), form.ggml_type, blocks)


def draws(rows: int, same: bool) -> list[np.ndarray]:
    """Choices of successive steps, [rows, CHOSEN] each: fresh experts each time, so that none is in a cache."""
    rng = np.random.default_rng(rows)
    if same:
        order = rng.permutation(NUM_EXPERTS).reshape(-1, CHOSEN)
        return [np.tile(row, (rows, 1)) for row in order]
    return [np.stack([rng.permutation(NUM_EXPERTS)[:CHOSEN] for _ in range(rows)]) for _ in range(32)]


def measure_layer(pool: Pool, layer: str, budget_s: float, memory: str) -> dict[str, float]:
    """Median time of a step by rows, as multiples of one row's; even routing over the ratio of distinct experts."""
    hidden, size, inner_type, down_type = LAYERS[layer]
    gate, up = (expert_stack(inner_type, size, hidden, memory) for _ in range(2))
    down = expert_stack(down_type, hidden, size, memory)
    expert_bytes = sum(w.blocks[0].nbytes for w in (gate, up, down))
    figures, one_s = {}, 0.0
    for rows, same in [(1, True), *((r, s) for s in (False, True) for r in FEW[1:])]:
        program = Program(pool.native, rows, 1)
        inputs = program.buffer(hidden), program.buffer(CHOSEN, np.int32), program.buffer(CHOSEN)
        out = record_experts(program, *inputs, gate, up, down, "silu")
        program.place(keep=(*inputs, out))
        program.finish()
        program.rows(inputs[0], rows)[:] = np.random.default_rng(1).standard_normal((rows, hidden), np.float32)
        program.rows(inputs[2], rows)[:] = 1 / CHOSEN
        choices, times, begin = draws(rows, same), [], time.perf_counter()
        while len(times) < 2 * len(choices) or time.perf_counter() - begin < budget_s:
            program.rows(inputs[1], rows)[:] = choices[len(times) % len(choices)]
            start = time.perf_counter()
            program.run_trunk(pool, StepArgs(rows=rows))
            times.append(time.perf_counter() - start)
        median_s = float(np.median(times))
        if rows == 1:
            one_s = median_s
            figures = {"us": round(one_s * 1e6, 1), "GB/s": round(CHOSEN * expert_bytes / one_s / 1e9, 1)}
        elif same:
            figures[f"same x{rows}"] = round(median_s / one_s, 2)
        else:
            distinct = float(np.mean([len(np.unique(ids)) for ids in choices])) / CHOSEN
            figures[f"even x{rows} / distinct"] = round(median_s / one_s / distinct, 2)
    return figures


def show(name: str, figures: dict[str, float]) -> None:
    print(f"{name:12}", *(f"{key} {value:<7g}" for key, value in figures.items()), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="tensor types; default: all, or none with --experts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cols", type=int, default=2048, help="values per weight row")
    parser.add_argument("--size-mb", type=int, default=256, help="weights that are read from RAM")
    parser.add_argument("--budget-s", type=float, default=0.3, help="time of one measurement")
    parser.add_argument("--many", action="store_true", help=f"also products of {MANY} rows")
    parser.add_argument("--experts", nargs="*", choices=LAYERS, help="expert layers; without a name all of them")
    parser.add_argument("--memory", choices=("huge", "small", "file"), default="huge", help="pages of the weights")
    parser.add_argument("--pin", action="store_true", help="one core for each thread")
    args = parser.parse_args()
    library = native()
    pool = pinned_pool(library, args.threads) if args.pin else Pool(library, args.threads)
    ram = round(read_bandwidth_gb_s(library, args.threads), 1)
    print(f"{library.isa}, {args.threads} threads, RAM read {ram} GB/s", file=sys.stderr)
    every_type = [] if args.experts is not None else [form.name for form in FORMATS.values()]
    figures = {"isa": library.isa, "threads": args.threads, "cols": args.cols, "ram_read_gb_s": ram}
    for name in args.types or every_type:
        figures[name] = measure(pool, name, args)
        show(name, figures[name])
    for layer in [] if args.experts is None else args.experts or LAYERS:
        figures[layer] = measure_layer(pool, layer, args.budget_s, args.memory)
        show(layer, figures[layer])
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
