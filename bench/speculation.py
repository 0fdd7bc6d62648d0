"""Decode speed with 0 to N drafts a round and with the number that the engine chooses, on one loaded model.

For synthetic files written with `--mtp-noise`, whose text is noise that their MTP block can guess: a prompt of random
tokens, greedy, the end of text forbidden. In: GGUF files. Out: a table a file and rows in `bench/results/<machine>.csv`.
Settings take turns, so that a machine that slows down slows all; medians of the repeats. All must write the same tokens.

    python bench/speculation.py --threads 16 MODEL.gguf ...
"""

import argparse
import csv
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import tandem
from tandem.engine import Engine
from tandem.machine import machine
from tandem.ops.bandwidth import read_bandwidth_gb_s
from tandem.runtime.decode import MAX_DRAFTS, NO_DRAFTS, DraftSettings

RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    "date", "cpu", "threads", "isa", "model", "drafts", "tokens", "repetitions", "median_tok_s", "ratio_to_off",
    "drafted", "accepted", "acceptance_by_position", "rounds", "draft_ms", "pass_ms", "host_ms",
    "share_of_ram_bandwidth", "ram_read_gb_s", "version",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One answer: its tokens, their speed, and what drafting did for it."""

    ids: tuple[int, ...]
    tok_s: float
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    rounds: int
    seconds: tuple[float, float, float]  # of drafting, of passes, of the rest


def one_run(engine: Engine, drafts: DraftSettings, prompt: list[int], tokens: int) -> Run:
    """One greedy answer of that many tokens on a fresh timeline."""
    engine.drafts = drafts
    engine.session.clear()
    ends = {token: float("-inf") for token in engine.tokenizer.eog_ids}
    answer = engine.generate(prompt, temperature=0.0, max_tokens=tokens, loop_guard=False, logit_bias=ends)
    answer.text()
    counts, stats = answer.answer.decoder.counts, answer.stats
    seconds = counts.draft_s, counts.pass_s, counts.host_s
    return Run(
        tuple(answer.token_ids), stats.decode_tok_s, tuple(counts.drafted), tuple(counts.accepted), counts.rounds, seconds
    )


def by_position(run: Run) -> str:
    """Shares accepted of the drafts at each position."""
    return " ".join(f"{a / d:.2f}" for a, d in zip(run.accepted, run.drafted, strict=True) if d)


def measure(path: Path, args: argparse.Namespace) -> list[dict]:
    """All settings on one file; the rows of the table."""
    ways = {"off": NO_DRAFTS}
    ways |= {str(n): DraftSettings(("mtp",), n, adaptive=False) for n in range(1, args.most + 1)}
    ways["auto"] = DraftSettings(longest=args.most)
    prompt = np.random.default_rng(3).integers(300, 20000, args.prompt).tolist()
    rows = []
    with tandem.load(path, threads=args.threads, ctx=args.prompt + args.tokens + MAX_DRAFTS + 1) as engine:
        read_gb_s = read_bandwidth_gb_s(engine.runner.native, engine.plan.threads)
        for drafts in ways.values():
            one_run(engine, drafts, prompt, 8)
        runs: dict[str, list[Run]] = {name: [] for name in ways}
        for _ in range(args.repeats):
            for name, drafts in ways.items():
                runs[name].append(one_run(engine, drafts, prompt, args.tokens))
        off = statistics.median(run.tok_s for run in runs["off"])
        texts = {run.ids for of_one in runs.values() for run in of_one}
        assert len(texts) == 1, "the text depends on the drafts"
        for name, of_one in runs.items():
            last, tok_s = of_one[-1], statistics.median(run.tok_s for run in of_one)
            part_ms = [round(1e3 * s / last.rounds, 3) for s in last.seconds]
            share = engine.summary.bytes_per_token * off / 1e9 / read_gb_s if name == "off" else None
            rows.append(dict(zip(COLUMNS, (
                time.strftime("%Y-%m-%d"), machine().name, engine.plan.threads, engine.runner.native.isa, path.name, name,
                args.tokens, args.repeats, round(tok_s, 2), round(tok_s / off, 3), sum(last.drafted), sum(last.accepted),
                by_position(last), last.rounds, *part_ms, share and round(share, 3), round(read_gb_s, 1), tandem.__version__,
            ), strict=True)))  # fmt: skip
            print(f"{path.name:28} {name:>5}  {tok_s:8.2f} tok/s  {tok_s / off:5.2f}x  drafts {sum(last.accepted)}/"
                  f"{sum(last.drafted)} ({by_position(last)})  ms a round: draft {part_ms[0]} pass {part_ms[1]} host "
                  f"{part_ms[2]}" + (f"  {share:.1%} of {read_gb_s:.0f} GB/s" if share else ""), flush=True)  # fmt: skip
    return rows


def main() -> None:
    """Measures every file named and appends to the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--most", type=int, default=4, help="most drafts a round")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, help="the CSV to append to; default: bench/results/speculation.csv")
    args = parser.parse_args()
    rows = [row for path in args.models for row in measure(path, args)]
    file = args.results or RESULTS / "speculation.csv"
    new = not file.exists()
    with file.open("a", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
