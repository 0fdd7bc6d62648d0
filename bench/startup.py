"""Time from the command to the first character of its answer, and the most memory it takes, for `tandem run`.

In: GGUF files. Out: a table, and one JSON object on the last line. Each repetition is a process of its own; one run
before them warms the page cache. Memory beyond file and state is what the engine itself costs.

    python bench/startup.py --threads 2 MODEL.gguf ...
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

PROMPT = "Name three uses of a lighthouse."
TANDEM = [sys.executable, "-m", "tandem"]


@dataclass(frozen=True)
class Startup:
    """Medians over the repetitions. beyond_bytes: peak RSS less the file and less the context's state."""

    model: str
    first_token_s: float
    slowest_first_token_s: float
    peak_rss_bytes: int
    file_bytes: int
    state_bytes: int
    beyond_bytes: int


def run_once(model: Path, ctx: int, threads: int) -> tuple[float, int]:
    """(seconds until the first byte on standard output, peak RSS in bytes) of a run that answers with a few tokens."""
    command = [*TANDEM, "run", str(model), PROMPT, "--raw", "--quiet", "--temperature", "0", "--max-tokens", "4",
               "--ctx", str(ctx), "--threads", str(threads)]
    with tempfile.TemporaryFile("w+") as log:
        started = time.perf_counter()
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        first = os.read(run.stdout.fileno(), 1)
        first_token_s = time.perf_counter() - started
        run.stdout.read()
        _, status, usage = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
        if run.returncode or not first:
            log.seek(0)
            raise SystemExit(f"{' '.join(command)}: exit code {run.returncode}, output {first!r}; {log.read()}")
    return first_token_s, usage.ru_maxrss * 1024


def state_bytes(model: Path, ctx: int) -> tuple[int, int]:
    """(bytes of the file, bytes of cache and recurrent state for that context), from `tandem info`."""
    told = json.loads(subprocess.run([*TANDEM, "info", "--json", str(model)], capture_output=True, check=True).stdout)
    return told["file_bytes"], told["kv_bytes_per_token"]["f16"] * ctx + told["recurrent_bytes"]


def measure(model: Path, ctx: int, threads: int, repetitions: int) -> Startup:
    run_once(model, ctx, threads)
    runs = [run_once(model, ctx, threads) for _ in range(repetitions)]
    file_bytes, state = state_bytes(model, ctx)
    rss = int(statistics.median(rss for _, rss in runs))
    times = [seconds for seconds, _ in runs]
    return Startup(model.stem, round(statistics.median(times), 3), round(max(times), 3), rss, file_bytes, state,
                   rss - file_bytes - state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    results = []
    print(f"{'model':24s} {'first token':>11s} {'slowest':>8s} {'peak RSS':>9s} {'beyond file and state':>22s}")
    for model in args.models:
        one = measure(model, args.ctx, args.threads, args.repetitions)
        results.append(asdict(one))
        print(f"{one.model:24s} {one.first_token_s:9.2f} s {one.slowest_first_token_s:6.2f} s "
              f"{one.peak_rss_bytes / 1e6:6.0f} MB {one.beyond_bytes / 1e6:19.0f} MB", flush=True)
    print(json.dumps({"ctx": args.ctx, "threads": args.threads, "models": results}))


if __name__ == "__main__":
    main()
