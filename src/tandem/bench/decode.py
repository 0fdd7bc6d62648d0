"""`tandem bench MODEL`: prefill and decode speed at chosen depths, as medians, beside what RAM could deliver.

Decode must read every dense weight, the used share of the experts, the cache up to the depth and the recurrent state
once a token; `share_of_ram_bandwidth` is those bytes times tokens/s over the measured read bandwidth.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

import tandem
from tandem.engine import Engine
from tandem.machine import machine
from tandem.ops.bandwidth import read_bandwidth_gb_s

SEED = 1


@dataclass(frozen=True)
class Speed:
    """Tokens/s of one depth: medians of the repeats. bytes_per_token: least bytes that one decoded token reads."""

    depth: int
    prefill_tok_s: float
    decode_tok_s: float
    bytes_per_token: int


def measure(engine: Engine, prefill_tokens: int, depth: int, decode_tokens: int) -> dict[str, float]:
    """One run on a fresh timeline of random token ids: prefill from depth 0, then decode from `depth`.

    Returns prefill_tok_s (0 if prefill_tokens is 0) and decode_tok_s (0 if decode_tokens is 0). Decode feeds random ids,
    so the text does not matter, and takes the logits of each, as generation does.
    """
    rng = np.random.default_rng(SEED)
    ids = rng.integers(0, engine.vocab_size, max(prefill_tokens, depth) + decode_tokens).tolist()
    session, speeds = engine.session, {"prefill_tok_s": 0.0, "decode_tok_s": 0.0}
    if prefill_tokens:
        session.clear()
        start = time.perf_counter()
        session.sync(ids[:prefill_tokens])
        speeds["prefill_tok_s"] = prefill_tokens / (time.perf_counter() - start)
    if decode_tokens:
        if depth:
            session.sync(ids[:depth])
        else:
            session.clear()
        start = time.perf_counter()
        for token in ids[depth : depth + decode_tokens]:
            session.append(token)
        speeds["decode_tok_s"] = decode_tokens / (time.perf_counter() - start)
    return speeds


def bytes_per_token(engine: Engine, depth: int) -> int:
    """Least bytes that one token reads at that depth: weights, cache rows, recurrent state."""
    kv = engine.plan.kv
    cache = engine.summary.state_bytes(max(depth, 1), kv) if depth else engine.summary.recurrent_bytes
    return engine.summary.bytes_per_token + cache


def bench(
    engine: Engine, prefill_tokens: int, depths: Sequence[int], decode_tokens: int, repeats: int,
    on_run: Callable[[str], None] = lambda line: None,
) -> list[Speed]:
    """Medians over `repeats` runs of each depth, after one warm-up run."""
    measure(engine, min(prefill_tokens, 64), 0, 4)
    results = []
    for depth in depths:
        runs = [measure(engine, prefill_tokens, depth, decode_tokens) for _ in range(repeats)]
        prefill, decode = (statistics.median(run[key] for run in runs) for key in ("prefill_tok_s", "decode_tok_s"))
        results.append(Speed(depth, prefill, decode, bytes_per_token(engine, depth)))
        on_run(f"depth {depth:6d}   prefill {prefill_tokens} tokens {prefill:9.1f} tok/s   decode {decode:8.2f} tok/s")
    return results


def report(engine: Engine, speeds: Sequence[Speed], prefill_tokens: int) -> str:
    """The JSON line: the first depth's figures at the top level, all of them under `depths`."""
    read_gb_s = read_bandwidth_gb_s(engine.runner.native, engine.plan.threads)
    rows = [
        {
            "depth": s.depth,
            "prefill_tok_s": round(s.prefill_tok_s, 2),
            "decode_tok_s": round(s.decode_tok_s, 3),
            "bytes_per_token": s.bytes_per_token,
            "share_of_ram_bandwidth": round(s.bytes_per_token * s.decode_tok_s / 1e9 / read_gb_s, 4),
        }
        for s in speeds
    ]
    top = {
        "model": engine.summary.name,
        "device": f"cpu {engine.runner.native.isa}, {machine().name}",
        "threads": engine.plan.threads,
        **rows[0],
        "prefill_tokens": prefill_tokens,
        "ram_read_gb_s": round(read_gb_s, 2),
        "kv": engine.plan.kv,
        "version": tandem.__version__,
        "depths": rows,
    }
    return json.dumps(top)
