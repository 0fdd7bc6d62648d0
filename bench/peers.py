"""Speed of tandem beside llama.cpp and ik_llama.cpp: same files, same threads, one run on one machine, interleaved.

In: GGUF files. Out: a table a file, rows in `bench/results/<machine>.csv`, and one JSON object on the last line.
Every engine is loaded once in a process of its own (`peer_engines.py`); each repetition asks all of them in turn, so a
machine that slows down slows all. Ratios are medians of tandem's figure over the peer's, repetition by repetition.

    python bench/peers.py --threads 2 MODEL.gguf ...
"""

import argparse
import csv
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = ("llama.cpp", "ik_llama.cpp")
ENGINES = {name: (name, {}) for name in ("tandem", *PEERS)} | {
    f"tandem-{isa}": ("tandem", {"TANDEM_ISA": isa}) for isa in ("scalar", "avx2", "avx512")
}
COLUMNS = (
    "date", "cpu", "cores", "threads", "model", "file_bytes", "engine", "version", "features", "measure", "repetitions",
    "median_tok_s", "min_tok_s", "max_tok_s", "ratio_to_llama_cpp", "ratio_to_ik_llama_cpp", "load_s", "peak_rss_bytes",
)


@dataclass(frozen=True)
class Sizes:
    """What one repetition does: tokens of the prefill, depths at which decode is timed, tokens decoded at each."""

    prefill_tokens: int
    depths: tuple[int, ...]
    decode_tokens: int

    @property
    def context_tokens(self) -> int:
        most = max(self.prefill_tokens, *self.depths) + self.decode_tokens
        return -(-most // 256) * 256

    @property
    def measures(self) -> tuple[str, ...]:
        return (f"prefill_{self.prefill_tokens}", *(f"decode_at_{depth}" for depth in self.depths))


class Worker:
    """One engine with one model in its own process."""

    def __init__(self, engine: str, python: str, model: Path, context_tokens: int, threads: int) -> None:
        kind, variables = ENGINES[engine]
        command = [python, str(HERE / "peer_engines.py"), kind, str(model), str(context_tokens), str(threads)]
        # One OpenMP thread more than threads would make the peers wait for a core that is not there.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **variables}
        self.engine, self._log = engine, tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(command, env=environment, text=True, stderr=self._log,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        hello = self._read()
        self.load_s, self.version, self.features = hello["load_s"], hello["version"], hello["features"]

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"{self.engine} ended: {' | '.join(self._log.read().splitlines()[-3:])}")
        return json.loads(line)

    def measure(self, prefill_tokens: int, depth: int, decode_tokens: int) -> dict:
        command = {"do": "measure", "prefill_tokens": prefill_tokens, "depth": depth, "decode_tokens": decode_tokens}
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._log.close()


@dataclass
class Figures:
    """What one engine reached on one file: tokens/s by measure, one entry a repetition."""

    worker: Worker
    tok_s: dict[str, list[float]] = field(default_factory=dict)
    peak_rss_bytes: int = 0

    def add(self, measure: str, tok_s: float) -> None:
        self.tok_s.setdefault(measure, []).append(tok_s)


def repeat(figures: Sequence[Figures], sizes: Sizes, repetitions: int) -> None:
    """Runs the repetitions, engine after engine within each; the prefill is timed in the run of the first depth."""
    for one in figures:
        one.worker.measure(min(64, sizes.prefill_tokens), 0, 4)         # touches weights and buffers
    for turn in range(repetitions):
        for one in figures:
            for depth in sizes.depths:
                first = depth == sizes.depths[0]
                result = one.worker.measure(sizes.prefill_tokens if first else 0, depth, sizes.decode_tokens)
                if first:
                    one.add(f"prefill_{sizes.prefill_tokens}", result["prefill_tok_s"])
                one.add(f"decode_at_{depth}", result["decode_tok_s"])
                one.peak_rss_bytes = result["peak_rss_bytes"]
        print(f"  repetition {turn + 1} of {repetitions}", file=sys.stderr)


def ratio(ours: Figures, peer: Figures | None, measure: str) -> float | None:
    """Median over the repetitions of our tokens/s over the peer's in the same repetition."""
    if peer is None or peer is ours:
        return None
    return statistics.median(a / b for a, b in zip(ours.tok_s[measure], peer.tok_s[measure], strict=True))


def run_model(model: Path, args: argparse.Namespace, sizes: Sizes) -> dict[str, Figures]:
    """Measures every engine on one file; one that cannot load it is left out, with its reason printed."""
    figures: dict[str, Figures] = {}
    try:
        for engine in args.engines:
            python = sys.executable if engine.startswith("tandem") else args.peer_python
            try:
                figures[engine] = Figures(Worker(engine, python, model, sizes.context_tokens, args.threads))
            except RuntimeError as reason:
                print(f"  left out: {reason}", file=sys.stderr)
        repeat(list(figures.values()), sizes, args.repetitions)
    finally:
        for one in figures.values():
            one.worker.close()
    return figures


def rows(model: Path, figures: dict[str, Figures], args: argparse.Namespace, sizes: Sizes) -> list[dict[str, object]]:
    """One row for each engine and measure, with the columns of the CSV."""
    result = []
    for engine, one in figures.items():
        for measure in sizes.measures:
            speeds = one.tok_s[measure]
            against = [ratio(one, figures.get(peer), measure) if engine not in PEERS else None for peer in PEERS]
            result.append(dict(zip(COLUMNS, (
                time.strftime("%Y-%m-%d"), cpu_name(), os.cpu_count(), args.threads, model.stem,
                model.stat().st_size, engine, one.worker.version, one.worker.features, measure, len(speeds),
                round(statistics.median(speeds), 2), round(min(speeds), 2), round(max(speeds), 2),
                *(value and round(value, 3) for value in against), round(one.worker.load_s, 3), one.peak_rss_bytes,
            ), strict=True)))
    return result


def print_table(table: Sequence[dict[str, object]]) -> None:
    print(f"{'engine':15s} {'measure':15s} {'tok/s':>9s} {'min':>9s} {'max':>9s} {'/llama.cpp':>11s} "
          f"{'/ik_llama.cpp':>14s}")
    for row in table:
        ratios = [f"{row[key]:.2f}" if row[key] else "" for key in ("ratio_to_llama_cpp", "ratio_to_ik_llama_cpp")]
        print(f"{row['engine']:15s} {row['measure']:15s} {row['median_tok_s']:9.1f} {row['min_tok_s']:9.1f} "
              f"{row['max_tok_s']:9.1f} {ratios[0]:>11s} {ratios[1]:>14s}")


def cpu_name() -> str:
    """Name of the processor with its widest relevant instruction set, such as 'AMD EPYC avx512_vnni'."""
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*:\s*(.*)", text)
    flags = set(re.search(r"flags\s*:\s*(.*)", text)[1].split()) if "flags" in text else set()
    widest = next((flag for flag in ("amx_int8", "avx512_vnni", "avx512f", "avx2") if flag in flags), "scalar")
    return f"{name[1].strip() if name else 'unknown'} {widest}"


def append_csv(folder: Path, table: Sequence[dict[str, object]]) -> Path:
    """Adds rows to the machine's CSV."""
    slug = re.sub(r"[^a-z0-9]+", "-", f"{cpu_name()} {os.cpu_count()} cores".lower()).strip("-")
    path = folder / f"{slug}.csv"
    folder.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerows(table)
    return path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--engines", default="tandem,llama.cpp,ik_llama.cpp",
                        help=f"comma separated, of {', '.join(ENGINES)} (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--prefill-tokens", type=int, default=512)
    parser.add_argument("--depths", default="0,2048", help="tokens before the decode (default: %(default)s)")
    parser.add_argument("--decode-tokens", type=int, default=32)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with xllamacpp, ik-llama-cpp-python")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="CSV folder (default: %(default)s)")
    parser.add_argument("--no-csv", action="store_true", help="print only")
    args = parser.parse_args()
    args.engines = args.engines.split(",")
    unknown = [engine for engine in args.engines if engine not in ENGINES]
    if unknown:
        parser.error(f"unknown engine {unknown[0]!r}; known: {', '.join(ENGINES)}")
    missing = [str(model) for model in args.models if not model.is_file()]
    if missing:
        parser.error(f"no such file: {', '.join(missing)}; bench/README.md says where the files come from")
    return args


def main() -> None:
    args = parse_arguments()
    sizes = Sizes(args.prefill_tokens, tuple(int(depth) for depth in args.depths.split(",")), args.decode_tokens)
    busy = os.getloadavg()[0]
    if busy > 0.5:
        print(f"warning: the load average is {busy:.1f}; OpenMP engines collapse when another process wants a core",
              file=sys.stderr)
    summary: dict[str, object] = {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": args.threads,
                                  "load_average": [round(busy, 2)], "models": {}}
    for model in args.models:
        print(f"{model.name}, {model.stat().st_size / 1e6:.0f} MB, {args.threads} threads", flush=True)
        table = rows(model, run_model(model, args, sizes), args, sizes)
        print_table(table)
        if not args.no_csv:
            append_csv(args.results, table)
        by_engine: dict[str, dict[str, object]] = {}
        for row in table:
            by_engine.setdefault(str(row["engine"]), {})[str(row["measure"])] = {
                key: row[key] for key in ("median_tok_s", "ratio_to_llama_cpp", "ratio_to_ik_llama_cpp") if row[key]}
        summary["models"][model.stem] = by_engine
    summary["load_average"].append(round(os.getloadavg()[0], 2))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
