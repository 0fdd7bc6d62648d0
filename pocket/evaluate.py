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
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np

import chat
import exercises
import tandem
import toolcalls
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


RUN_EXERCISE = """import json, sys
work = json.load(sys.stdin)
results = []
for code in work["codes"]:
    names = {}
    exec(code, names)
    results.append([repr(names[work["name"]](*json.loads(json.dumps(case)))) for case in work["samples"]])
print(json.dumps(results[0] == results[1]))
"""


def code_block(answer: str) -> str:
    """The first fenced block of an answer, else all of it."""
    found = re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", answer, re.S)
    return found[1] if found else answer


def behaves_alike(exercise: exercises.Exercise, code: str) -> bool:
    """Whether code gives what the exercise's own body gives on its samples; run in a process of its own, 5 s at most."""
    work = {"codes": [exercise.code(), code], "name": exercise.name, "samples": exercise.samples}
    command = [sys.executable, "-I", "-c", RUN_EXERCISE]
    try:
        done = subprocess.run(command, input=json.dumps(work), capture_output=True, text=True, timeout=5)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and done.stdout.strip() == "true"


def exercise_answers(engine: tandem.Engine) -> list[dict]:
    """Held-out exercises, asked for in words: what the model wrote and whether it does what it should."""
    out = []
    for number, e in enumerate(exercises.held_out()):
        frame = exercises.ASK[number % len(exercises.ASK)]
        user = frame.format(sig=e.signature, name=e.name, does=e.does, doc=e.doc)
        generation = engine.generate(user, temperature=0.0, max_tokens=200, template_options={"enable_thinking": False})
        text = generation.text()
        out.append({"user": user, "answer": text, "right": behaves_alike(e, code_block(text))})
    return out


CALL = re.compile(r"<tool_call>\n<function=([^>\n]+)>\n(.*?)</function>\n</tool_call>", re.S)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n?", re.S)


def tool_call(text: str) -> tuple[str, dict[str, str]] | None:
    """Name and arguments (as texts) of the first well-formed call."""
    found = CALL.search(text)
    if not found or PARAMETER.sub("", found[2]).strip():
        return None
    return found[1], dict(PARAMETER.findall(found[2]))


def tool_answers(engine: tandem.Engine, count: int) -> list[dict]:
    """Requests with tools, half of them with tools never trained on: is the call well formed, the tool and arguments right."""
    out = []
    for q in toolcalls.questions(count, SEED):
        messages, options = [{"role": "user", "content": q["user"]}], {"enable_thinking": False}
        text = engine.generate(messages, temperature=0.0, max_tokens=200, tools=q["tools"], template_options=options).text()
        call = tool_call(text)
        wanted = {key: value if isinstance(value, str) else json.dumps(value) for key, value in q["arguments"].items()}
        out.append({"user": q["user"], "answer": text, "known": q["known"], "well_formed": call is not None,
                    "right_tool": call is not None and call[0] == q["name"], "right_arguments": call == (q["name"], wanted)})  # fmt: skip
    return out


def thinking_answers(engine: tandem.Engine, users: list[str], max_tokens: int) -> list[dict]:
    """Answers with thinking: is the thought closed, and does an answer follow."""
    out = []
    for user in users:
        generation = engine.generate(user, temperature=0.0, max_tokens=max_tokens, template_options={"enable_thinking": True})
        thought, closed, answer = generation.text().partition("</think>")
        out.append({"user": user, "thought": thought.strip(), "closed": bool(closed), "answer": answer.strip()})
    return out


def only_docstring(code: str) -> bool:
    """Whether a function that parses has nothing after its docstring."""
    function = ast.parse(textwrap.dedent(code)).body[0]
    return len(function.body) == 1


def abilities(engine: tandem.Engine, documents: list[dict], args: argparse.Namespace) -> dict:
    """Everything that is not bits per byte."""
    out: dict = {}
    done = completions(engine, prompts(documents, args.completions), 200)
    for c in done:
        c["only_docstring"] = c["parses"] and only_docstring(c["code"])
    out["parses"], out["only_docstring"] = sum(c["parses"] for c in done), sum(c["only_docstring"] for c in done)
    print("completions that parse:", out["parses"], "of", len(done), "- only a docstring:", out["only_docstring"], flush=True)
    users = chat_prompts(documents, args.answers)
    out["answers"] = answers(engine, users, 300)
    out["exercises"] = exercise_answers(engine)
    print("held-out exercises right:", sum(e["right"] for e in out["exercises"]), "of", len(out["exercises"]), flush=True)
    out["tools"] = tool_answers(engine, args.tool_prompts)
    for known in (True, False):
        part = [t for t in out["tools"] if t["known"] == known]
        counts = {k: sum(t[k] for t in part) for k in ("well_formed", "right_tool", "right_arguments")}
        print("tools", "of the training set" if known else "never trained on", counts, "of", len(part), flush=True)
    out["thinking"] = thinking_answers(engine, users, 300)
    closed = sum(t["closed"] and bool(t["answer"]) for t in out["thinking"])
    print("thinking closed and answered:", closed, "of", len(users), flush=True)
    return out | {"completions": done}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path, nargs="+", help="the first one is also asked to complete and to chat")
    parser.add_argument("--held", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chars", type=int, default=150_000, help="of each kind of text")
    parser.add_argument("--completions", type=int, default=100, help="0: bits per byte alone")
    parser.add_argument("--answers", type=int, default=30)
    parser.add_argument("--tool-prompts", type=int, default=60)
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
            if number == 0 and args.completions:
                result |= abilities(engine, documents, args)
    args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
