"""Speed of the matrix products of each tensor type, beside the measured RAM read bandwidth.

Few rows: GB/s of weights read from RAM (they are far larger than the caches). Many rows: 10^9 multiply-adds a second.
The last line is one JSON object.
"""

import argparse
import json
import sys
import time

import numpy as np

from tandem.native import native
from tandem.ops.bandwidth import read_bandwidth_gb_s
from tandem.ops.base import Weight
from tandem.ops.matmul_cpu import record_matmul
from tandem.ops.program import Pool, Program, StepArgs
from tandem.quant import FORMATS, format_by_name, random_blocks

FEW = (1, 2, 4, 8)
MANY = 512


def make_weight(ggml_type: int, cols: int, size_bytes: int) -> Weight:
    """About size_bytes of one matrix with rows of cols values; a megabyte of random blocks, repeated."""
    form = FORMATS[ggml_type]
    row_bytes = cols // form.block_values * form.block_bytes
    n = max(32, min(size_bytes, 1 << 20) // row_bytes // 32 * 32)
    blocks = random_blocks(ggml_type, n * row_bytes // form.block_bytes, np.random.default_rng(0))
    tiled = np.tile(blocks.reshape(n, row_bytes), (-(-size_bytes // (n * row_bytes)), 1))
    return Weight(form.name, (len(tiled), cols), ggml_type, tiled)


def seconds(pool: Pool, weight: Weight, rows: int, repeats: int) -> float:
    """Best time of one product of `rows` random rows."""
    program = Program(pool.native, rows, 1)
    x = program.buffer(weight.shape[1])
    (out,) = record_matmul(program, x, [weight])
    program.place(keep=(x, out))
    program.finish()
    program.rows(x, rows)[:] = np.random.default_rng(1).standard_normal((rows, weight.shape[1]), np.float32)
    best_s = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        program.run_trunk(pool, StepArgs(rows=rows))
        best_s = min(best_s, time.perf_counter() - start)
    return best_s


def measure(pool: Pool, name: str, cols: int, size_bytes: int, repeats: int) -> dict[str, float]:
    """GB/s for each count of FEW rows, and GMAC/s for MANY, of one type."""
    ggml_type = format_by_name(name).ggml_type
    large, small = make_weight(ggml_type, cols, size_bytes), make_weight(ggml_type, cols, 1 << 20)
    figures = {f"gb_s_{rows}": large.blocks.nbytes / seconds(pool, large, rows, repeats) / 1e9 for rows in FEW}
    figures["gmac_s"] = MANY * small.shape[0] * cols / seconds(pool, small, MANY, repeats) / 1e9
    return {key: round(value, 1) for key, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", default=[form.name for form in FORMATS.values()], help="default: all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cols", type=int, default=2048, help="values per weight row")
    parser.add_argument("--size-mb", type=int, default=256, help="weights of the products of few rows")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    library = native()
    pool = Pool(library, args.threads)
    ram = round(read_bandwidth_gb_s(library, args.threads), 1)
    print(f"{library.isa}, {args.threads} threads, RAM read {ram} GB/s", file=sys.stderr)
    columns = [f"{rows} rows GB/s" for rows in FEW] + [f"{MANY} rows GMAC/s"]
    print(f"{'type':8}", *(f"{column:>14}" for column in columns), file=sys.stderr)
    types = {}
    for name in args.types:
        types[name] = measure(pool, name, args.cols, args.size_mb << 20, args.repeats)
        print(f"{name:8}", *(f"{value:14}" for value in types[name].values()), file=sys.stderr, flush=True)
    setup = {"isa": library.isa, "threads": args.threads, "cols": args.cols, "ram_read_gb_s": ram}
    print(json.dumps({**setup, "types": types}))


if __name__ == "__main__":
    main()
