"""How often the MTP block's drafts are what the model writes, and how tokens spread over experts, on held-out text.

In: a GGUF file and `held.jsonl.xz`. Out: a JSON and the card's tables. Greedy text of code and of documentation,
written by Tandem with 1 to 4 drafts a round; routing of held-out text as it stands (the figures of `tandem bench routing`).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import evaluate
import tandem
from tandem.bench import routing
from tandem.runtime.decode import DraftSettings
from tokenizer import read_documents

DRAFTS = (1, 2, 3, 4)
PIECE_START_CHARS = 400


def starts(documents: list[dict], kind: str, count: int) -> list[str]:
    """Held-out signatures with docstrings, or first lines of pieces of documentation, to be continued."""
    if kind == "code":
        return evaluate.prompts(documents, count)
    return [text[:PIECE_START_CHARS] for text in evaluate.pieces(documents, kind, 150_000)[:count]]


def acceptance(path: Path, heads: dict[str, list[str]], drafts: int, max_tokens: int, threads: int | None) -> dict:
    """By kind of text: tokens, tokens a round, and the share of drafts accepted at each position (all, and reached)."""
    out = {}
    settings = DraftSettings(("mtp",), drafts, adaptive=False)
    with tandem.load(path, ctx=2048, drafts=settings, threads=threads) as engine:
        for kind, texts in heads.items():
            drafted, accepted, rounds, tokens = [0] * drafts, [0] * drafts, 0, 0
            for text in texts:
                generation = engine.generate(text, raw=True, temperature=0.0, max_tokens=max_tokens)
                generation.text()
                counts = generation.answer.decoder.counts
                drafted = [a + b for a, b in zip(drafted, counts.drafted, strict=False)]
                accepted = [a + b for a, b in zip(accepted, counts.accepted, strict=False)]
                rounds, tokens = rounds + counts.rounds, tokens + len(generation.token_ids)
            shares = [round(a / max(1, d), 4) for a, d in zip(accepted, drafted, strict=True)]
            out[kind] = {"tokens": tokens, "rounds": rounds, "tokens_per_round": round(tokens / max(1, rounds), 3),
                         "acceptance": round(sum(accepted) / max(1, sum(drafted)), 4), "by_position": shares}  # fmt: skip
    return out


def routed(path: Path, documents: list[dict], chars: int, threads: int | None) -> dict:
    """By kind of text the report of `tandem bench routing`."""
    out = {}
    with tandem.load(path, ctx=2048, threads=threads) as engine:
        for kind in ("code", "docs"):
            texts = [engine.tokenize(text) for text in evaluate.pieces(documents, kind, chars)]
            out[kind] = routing.report(engine, routing.measure(engine, texts), f"held-out {kind}")
    return out


def table(rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; the first row is its head."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def tables(result: dict) -> str:
    """The card's three tables: acceptance, busiest quarter, distinct experts."""
    names = {"code": "code", "docs": "documentation"}
    rows: list[list] = [["text, drafts a round", "tokens", "right at 1", "2", "3", "4", "tokens a round"]]
    for kind, name in names.items():
        for drafts, measured in result["acceptance"].items():
            m = measured[kind]
            shares = [f"{share:.2f}" for share in m["by_position"]]
            rows.append(
                [f"{name}, {drafts}", m["tokens"], *shares, *[""] * (4 - len(shares)), f"{m['tokens_per_round']:.2f}"]
            )
    layers = result["routing"]["code"]["layers"]
    head = [layer["layer"] for layer in layers]
    quarter = [["", *head]]
    distinct: list[list] = [["tokens", *head]]
    for kind, name in names.items():
        found = result["routing"][kind]["layers"]
        quarter.append([name, *(f"{layer['busiest_quarter']:.2f}" for layer in found)])
        for window in range(5):
            distinct.append([f"{name}, {window + 1}", *(f"{layer['distinct'][window]:.1f}" for layer in found)])
    distinct.append(
        ["drawn evenly, 1 to 5", " ".join(f"{count:.1f}" for count in layers[0]["even"]), *[""] * (len(head) - 1)]
    )
    return "\n\n".join(map(table, (rows, quarter, distinct)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--held", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=40, help="of each kind")
    parser.add_argument("--tokens", type=int, default=96, help="of each text")
    parser.add_argument("--chars", type=int, default=30_000, help="of each kind that are routed")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    documents = list(read_documents(args.held))
    heads = {kind: starts(documents, kind, args.texts) for kind in ("code", "docs")}
    measured = {d: acceptance(args.model, heads, d, args.tokens, args.threads) for d in DRAFTS}
    result = {"acceptance": measured, "routing": routed(args.model, documents, args.chars, args.threads)}
    args.out.write_text(json.dumps(result, indent=1))
    print(tables(result))


if __name__ == "__main__":
    main()
