"""Where the time of one step goes: every recorded call of a model timed alone, summed by op.

    python bench/calls.py MODEL.gguf --threads 2 --rows 1 --depth 0

Best of the repeats for each call, in milliseconds; the calls after the split (the head) are listed apart. A call timed
alone pays one wake-up of the threads, so the sum is a little above the time of a whole step, printed last.
"""

import argparse
import ctypes
import statistics
import time
from collections import Counter

import numpy as np

import tandem
from tandem.ops.program import SegmentArgs, StepArgs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="default: the model of the package")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rows", type=int, default=1, help="tokens of the step, at most 512")
    parser.add_argument("--depth", type=int, default=0, help="tokens already in the cache")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    with tandem.load(args.model, ctx=args.depth + max(args.rows, 64), threads=args.threads) as engine:
        report(engine, args)


def report(engine, args: argparse.Namespace) -> None:
    program, pool = engine.runner.program, engine.runner.pool
    rng = np.random.default_rng(1)
    if args.depth:
        engine.session.sync(rng.integers(0, engine.vocab_size, args.depth).tolist())
    tokens = rng.integers(0, engine.vocab_size, args.rows, dtype=np.int32)
    positions = np.arange(args.depth, args.depth + args.rows, dtype=np.int32)
    out_rows = np.zeros(1, np.int32)
    segment = SegmentArgs(0, args.rows, args.depth, 0, engine.session.state.layer_state)
    trunk = StepArgs(args.rows, 1, 0, 0, tokens.ctypes.data, positions.ctypes.data, None, ctypes.addressof(segment))
    head = StepArgs(1, 0, 1, 0, None, None, out_rows.ctypes.data, None)
    names = {entry: name for name, entry in program.entries.items()}
    best = [float("inf")] * len(program.calls)
    whole = []
    for _ in range(args.repeats):
        for i in range(len(best)):
            best[i] = min(best[i], timed(program, pool, trunk if i < program.head_start else head, i, i + 1))
        whole.append(timed(program, pool, trunk, 0, program.head_start))
    total, count = Counter(), Counter()
    for i, (entry, _, _) in enumerate(program.calls):
        name = names[entry] + (" (head)" if i >= program.head_start else "")
        total[name] += best[i]
        count[name] += 1
    for name, seconds in total.most_common():
        print(f"{name:24} {count[name]:4d} calls {seconds * 1e3:9.3f} ms {seconds / count[name] * 1e6:9.1f} us each")
    print(f"sum {sum(best) * 1e3:.3f} ms, trunk in one run {statistics.median(whole) * 1e3:.3f} ms (median)")


def timed(program, pool, step: StepArgs, begin: int, end: int) -> float:
    start = time.perf_counter()
    program._run(pool, step, begin, end)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
