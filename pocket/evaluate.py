"""Measures a model with Tandem on text from packages that it was not trained on.

In: GGUF files and `held.jsonl.xz`. Out: one JSON with bits per byte, parse rate and chat answers; a table on stdout.
Every text starts after the model's end-of-text token, so each byte of it is predicted.
"""

import argparse
import ast
import json
import math
import random
import re
import textwrap
from pathlib import Path

import numpy as np

import chat
import tandem
from tokenizer import read_documents

PIECE_CHARS = 3500
SEED = 11


def pieces(documents: list[dict], kind: str, total_chars: int) -> list[str]:
    """Random pieces of held-out files, cut at line ends, without test files."""
    rng, out, size = random.Random(f"{SEED}{kind}"), [], 0
    chosen = [d for d in documents if d["kind"] == kind and not re.search(r"(^|/)tests?[/.]|test_", d["path"])]
    rng.shuffle(chosen)
    for d in chosen * 3:
        lines = d["text"].splitlines(keepends=True)
        start = rng.randrange(max(1, len(lines) - 80))
        text = ""
        for line in lines[start:]:
            if len(text) + len(line) > PIECE_CHARS:
                break
            text += line
        if len(text) > 500 and text not in out:
            out.append(text)
            size += len(text)
        if size >= total_chars:
            return out
    return out


def log_probability(logits: np.ndarray, ids: list[int]) -> float:
    """Sum of log probabilities of ids, predicted by the rows of logits."""
    top = logits.max(-1, keepdims=True)
    norm = np.log(np.exp((logits - top).astype(np.float64)).sum(-1)) + top[:, 0]
    return float((logits[np.arange(len(ids)), ids] - norm).sum())


def bits_per_byte(engine: tandem.Engine, texts: list[str]) -> float:
    """Bits per byte of UTF-8 over all texts."""
    start = engine.tokenizer.encode("<|endoftext|>", parse_special=True)
    nats, size = 0.0, 0
    for text in texts:
        ids = engine.tokenize(text)
        logits = engine.logits([*start, *ids[:-1]])[len(start) - 1 :]
        nats -= log_probability(logits, ids)
        size += len(text.encode())
    return nats / math.log(2) / size


def prompts(documents: list[dict], count: int) -> list[str]:
    """Signatures with docstrings of held-out functions."""
    out = []
    for d in documents:
        if d["kind"] != "code" or re.search(r"(^|/)tests?[/.]|test_", d["path"]):
            continue
        tree = ast.parse(d["text"])
        found = [f for f in chat.functions(tree, d["text"].split("\n")) if f.summary and f.body_lines >= 1]
        out += [f.head + "\n" for f in found if len(f.head) < 900]
    return random.Random(SEED).sample(out, count)


def function_only(prompt: str, completion: str) -> str:
    """The function that a raw completion wrote: up to the first line that is outside it."""
    lines = []
    for line in completion.split("\n"):
        if line.strip() and not line.startswith((" ", "\t")):
            break
        lines.append(line)
    return prompt + "\n".join(lines)


def parses(code: str) -> bool:
    """Whether Python accepts it."""
    try:
        ast.parse(textwrap.dedent(code))
    except (SyntaxError, ValueError):
        return False
    return True


def completions(engine: tandem.Engine, heads: list[str], max_tokens: int) -> list[dict]:
    """Greedy completions with the verdict of the parser. A function cut by the token limit ends at its last whole line."""
    out = []
    for head in heads:
        generation = engine.generate(head, raw=True, temperature=0.0, max_tokens=max_tokens, stop=["\ndef ", "\nclass ", "\n@"])
        text = generation.text()
        if generation.stats.stop_reason == "length":
            text = text.rpartition("\n")[0]
        code = function_only(head, text)
        out.append({"code": code, "parses": parses(code), "stop": generation.stats.stop_reason})
    return out


# Questions whose answers are judged by reading: about the model, about Python, about held-out code and documentation.
QUESTIONS = (
    "Hello!", "Who are you?", "What can you do?", "Which program runs you?", "Can I trust your answers?",
    "How do I read a file in Python?", "What is a decorator?", "Explain list comprehensions.", "How do I sort a list by a key?",
    "What does `yield` do?", "Write a function `square(x)` that returns x squared.",
    "Write a Python function `is_even(n)` that returns whether n is even.",
    "Write a Python function `count_lines(path)` that counts the lines of a file.",
    "Write a Python function `mean(values)` that returns the average of a list of numbers.",
)  # fmt: skip


def chat_prompts(documents: list[dict], count: int) -> list[str]:
    """The questions above, then held-out functions to explain or complete and modules to describe."""
    rng, made = random.Random(SEED + 1), []
    for d in documents:
        if d["kind"] == "code":
            for conversation in chat.conversations(d["kind"], d["source"], d["path"], d["text"], SEED):
                user = next(m["content"] for m in conversation["messages"] if m["role"] == "user")
                if "```" in user and len(user) < 900 and "tools" not in conversation:
                    made.append(user)
    return [*QUESTIONS, *rng.sample(made, count - len(QUESTIONS))]


def answers(engine: tandem.Engine, users: list[str], max_tokens: int) -> list[dict]:
    """Greedy answers, without thinking."""
    out = []
    for user in users:
        generation = engine.generate(user, temperature=0.0, max_tokens=max_tokens, template_options={"enable_thinking": False})
        out.append({"user": user, "answer": generation.text(), "stop": generation.stats.stop_reason})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path, nargs="+", help="the first one is also asked to complete and to chat")
    parser.add_argument("--held", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chars", type=int, default=150_000, help="of each kind of text")
    parser.add_argument("--completions", type=int, default=100)
    parser.add_argument("--answers", type=int, default=30)
    args = parser.parse_args()
    documents = list(read_documents(args.held))
    result: dict = {"text": {}}
    for number, path in enumerate(args.models):
        with tandem.load(path, ctx=4096) as engine:
            row = {}
            for kind in ("code", "docs"):
                texts = pieces(documents, kind, args.chars)
                result["text"][kind] = {"pieces": len(texts), "bytes": sum(len(t.encode()) for t in texts)}
                row[kind] = round(bits_per_byte(engine, texts), 4)
            result[path.name] = row
            print(path.name, row, flush=True)
            if number == 0:
                done = completions(engine, prompts(documents, args.completions), 200)
                result["parses"], result["completions"] = sum(c["parses"] for c in done), done
                print("completions that parse:", result["parses"], "of", len(done), flush=True)
                result["answers"] = answers(engine, chat_prompts(documents, args.answers), 300)
    args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
