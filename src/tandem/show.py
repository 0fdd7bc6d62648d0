"""What the commands print about models and runs: summaries, plans, progress, speed. Values in, lines of text out."""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TextIO

from tandem.requests import GenerationStats
from tandem.runtime.plan import CHECKPOINTS, RESERVE_BYTES, ModelSummary

STOP_NOTES = {
    "loop": "stopped: the answer had begun to repeat itself (--no-loop-guard lets it run)",
    "context": "stopped: the context is full",
    "length": "stopped: the limit on tokens is reached",
    "cancelled": "stopped",
}
_KV_TYPES = ("f16", "q8_0")
_CONTEXTS = (2048, 8192, 32768, 131072)


def printable(text: str) -> str:
    """The text without characters that command a terminal: a model's words must not move its cursor."""
    return text.translate(_CONTROLS)


_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def size(size_bytes: float) -> str:
    """Bytes in the largest binary unit that gives at least 1."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.2f} GiB"


def stats_line(stats: GenerationStats) -> str:
    """One line on a run: tokens, speeds, time to the first token, why it ended."""
    drafts = f" ({stats.accepted} of {stats.drafted} drafts accepted)" if stats.drafted else ""
    reused = f" ({stats.reused_tokens} reused)" if stats.reused_tokens else ""
    return (
        f"prompt {stats.prompt_tokens} tokens{reused} at {stats.prefill_tok_s:.1f} tok/s, "
        f"answer {stats.completion_tokens} tokens at {stats.decode_tok_s:.1f} tok/s{drafts}, "
        f"first token after {stats.first_token_s:.2f} s, ended by {stats.stop_reason}"
    )


def stats_object(stats: GenerationStats) -> dict[str, float]:
    """The times and speeds of a run, for JSON."""
    return {
        "prefill_s": round(stats.prefill_s, 6),
        "decode_s": round(stats.decode_s, 6),
        "first_token_s": round(stats.first_token_s, 6),
        "prefill_tok_s": round(stats.prefill_tok_s, 3),
        "decode_tok_s": round(stats.decode_tok_s, 3),
        "drafted": stats.drafted,
        "accepted": stats.accepted,
    }


def memory_bytes(summary: ModelSummary, ctx: int, kv: str) -> int:
    """RAM that this context takes, without the scratch of the forward pass (loading prints it)."""
    weights = sum(role.size_bytes for role in summary.roles)
    checkpoints = CHECKPOINTS * summary.recurrent_bytes
    return weights + summary.state_bytes(ctx, kv) + checkpoints + RESERVE_BYTES


def contexts(summary: ModelSummary) -> list[int]:
    """The context lengths to show: the usual ones that the model was trained for, and its longest."""
    return [ctx for ctx in _CONTEXTS if ctx < summary.ctx_train] + [summary.ctx_train]


def summary_object(summary: ModelSummary) -> dict:
    """Everything that `tandem info` tells, for JSON."""
    return {
        "name": summary.name,
        "architecture": summary.architecture,
        "paths": [str(path) for path in summary.paths],
        "n_params": summary.n_params,
        "file_bytes": summary.file_bytes,
        "bytes_per_token": summary.bytes_per_token,
        "ctx_train": summary.ctx_train,
        "roles": [asdict(role) for role in summary.roles],
        "kv_bytes_per_token": {kv: summary.kv_bytes_per_token(kv) for kv in _KV_TYPES},
        "recurrent_bytes": summary.recurrent_bytes,
        "memory_bytes": {
            kv: {str(ctx): memory_bytes(summary, ctx, kv) for ctx in contexts(summary)} for kv in _KV_TYPES
        },
    }


def summary_lines(summary: ModelSummary, free_bytes: int) -> list[str]:
    """Everything that `tandem info` tells, to read."""
    lines = [
        f"{printable(summary.name)}: {summary.architecture}, {count(summary.n_params)} parameters, "
        f"{size(summary.file_bytes)} in {len(summary.paths)} file{'s'[: len(summary.paths) > 1]}",
        f"one token reads {size(summary.bytes_per_token)} of weights; trained for {summary.ctx_train} tokens of context",
        "",
    ]
    rows = [("role", "parameters", "size", "formats")]
    for role in summary.roles:
        formats = sorted(role.formats.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{name} {size(taken)}" for name, taken in formats)
        rows.append((role.role, count(role.n_params), size(role.size_bytes), shares))
    lines += [*table(rows), ""]
    costs = [f"{kv} {size(summary.kv_bytes_per_token(kv))}" for kv in _KV_TYPES]
    lines.append(f"context: each token takes {' or '.join(costs)}, each checkpoint {size(summary.recurrent_bytes)}")
    lines += ["", f"memory for a context of ({size(free_bytes)} are free; scratch of the forward pass not counted)"]
    memory = [("tokens", *_KV_TYPES)]
    for ctx in contexts(summary):
        needs = [memory_bytes(summary, ctx, kv) for kv in _KV_TYPES]
        memory.append((str(ctx), *(size(need) + (" (too much)" if need > free_bytes else "") for need in needs)))
    return lines + table(memory)


def count(n: int) -> str:
    """A number of parameters, short: 135 M, 35.1 B."""
    for unit, divisor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= divisor:
            return f"{n / divisor:.3g} {unit}"
    return str(n)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns two spaces apart: the first and the last to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if at in (0, last) else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


class Progress:
    """Reports a long prefill on a stream: one rewritten line on a terminal, else a line every ten seconds.

    Says nothing about work that is done within `patience_s`. Call it with (done, total); `clear` removes the line.
    """

    def __init__(self, label: str, stream: TextIO | None = None, patience_s: float = 0.5):
        self._label, self._stream = label, stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._start = time.monotonic()
        self._next_s = patience_s if self._terminal else 10.0
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        elapsed_s = time.monotonic() - self._start
        if done >= total:
            self.clear()
        elif elapsed_s >= self._next_s:
            left_s = elapsed_s / max(done, 1) * (total - done)
            line = f"{self._label}: {done} of {total} tokens, {left_s:.0f} s left"
            self._stream.write(f"\r{line}\x1b[K" if self._terminal else line + "\n")
            self._stream.flush()
            self._shown = self._terminal
            self._next_s = elapsed_s + (0.1 if self._terminal else 10.0)

    def clear(self) -> None:
        """Removes the line from the terminal."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = False
