"""What tools and constraints cost beside the model: parsers per token, masks per token, compiling per request.

    python bench/text_costs.py [MODEL.gguf]

CPU time of one thread, best of the repeats; only the vocabulary of the model is read. Masks: every step of an answer
that a random sampler writes under the constraint, so strings, numbers and structure alike.
"""

import argparse
import json
import random
import time

import numpy as np

from tandem.default_model import default_model
from tandem.errors import RequestError
from tandem.gguf import read_gguf
from tandem.text.budget import reasoning_budget
from tandem.text.grammar import ToolRequest, make_constraint
from tandem.text.masks import vocabulary_of
from tandem.text.tokenizer import Tokenizer
from tandem.text.tools import AnswerParser

TOOL = {
    "type": "function",
    "function": {
        "name": "write_file",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "text": {"type": "string"},
                "lines": {"type": "array", "items": {"type": "integer"}},
                "mode": {"enum": ["create", "append"]},
            },
            "required": ["path", "text"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
CODE = "".join(f"def function_{i}(value: int) -> int:\n    return value * {i} + 1\n\n\n" for i in range(120))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(default_model()))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_metadata(read_gguf(args.model).metadata)
    seconds = timed(lambda: vocabulary_of(tokenizer), 1)
    print(f"vocabulary of {tokenizer.vocab_size:,} tokens, once per model: {seconds:.2f} s")
    parsers(tokenizer, args.repeats)
    constraints(tokenizer, args.repeats)


def timed(call, repeats: int) -> float:
    """Least CPU seconds of a call."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        call()
        best = min(best, time.process_time() - begin)
    return best


def parsers(tokenizer: Tokenizer, repeats: int) -> None:
    """Microseconds per token of every format, over reasoning, text and a long call."""
    arguments = json.dumps({"path": "a.py", "text": CODE})
    calls = {
        "qwen-xml": "<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n"
        f"<parameter=text>\n{CODE}\n</parameter>\n</function>\n</tool_call>",
        "hermes": f'<tool_call>\n{{"name": "write_file", "arguments": {arguments}}}\n</tool_call>',
        "llama3": f'{{"name": "write_file", "parameters": {arguments}}}',
        "glm": "<tool_call>write_file<arg_key>path</arg_key><arg_value>a.py</arg_value><arg_key>text</arg_key>"
        f"<arg_value>{CODE}</arg_value></tool_call>",
        "gemma": f'<|tool_call>call:write_file{{path:<|"|>a.py<|"|>,text:<|"|>{CODE}<|"|>}}<tool_call|>',
        "harmony": f"<|channel|>commentary to=functions.write_file<|message|>{arguments}<|call|>",
    }
    prose = "I think about it, and then about something else: x < y. " * 100
    print("parsers, µs per token: prose, call")
    for format, call in calls.items():
        row = []
        for text in (prose, call):
            pieces = [tokenizer.decode([index]) for index in tokenizer.encode(text)]
            row.append(timed(lambda: parse(format, pieces), repeats) / len(pieces) * 1e6)  # noqa: B023
        print(f"  {format:9} {row[0]:5.2f} {row[1]:5.2f}")


def parse(format: str, pieces: list[str]) -> None:
    parser = AnswerParser(format, [TOOL], "none")
    for piece in pieces:
        parser.push(piece)
    parser.finish("eos")


def constraints(tokenizer: Tokenizer, repeats: int) -> None:
    """Milliseconds to compile and microseconds per token of typical constraints."""
    tools = [TOOL, *({"name": f"tool_{i}", "parameters": PERSON} for i in range(30))]
    requests = {
        "JSON schema": {"json_schema": PERSON},
        "any JSON object": {"json_schema": {"type": "object"}},
        "regex": {"regex": "[A-Z]{3}-[0-9]{4}( [a-z]+){3,20}"},
        "call, XML": {"tool_request": ToolRequest([TOOL], "required", "qwen-xml")},
        "call, JSON": {"tool_request": ToolRequest([TOOL], "required", "hermes")},
        "31 tools, XML": {"tool_request": ToolRequest(tools, "required", "qwen-xml")},
        "31 tools, JSON": {"tool_request": ToolRequest(tools, "required", "hermes")},
    }
    print("constraints: compile ms; µs per token: mean, 99th percentile, most; tokens")
    for name, request in requests.items():
        compile_ms = 1e3 * timed(lambda: compiled(tokenizer, request), repeats)  # noqa: B023
        make = make_constraint(tokenizer, prompt_end="closed", **request)
        times = np.array([t for seed in range(4) for t in steps(tokenizer, make(), seed)]) * 1e6
        spread = f"{times.mean():6.0f} {np.percentile(times, 99):6.0f} {times.max():6.0f}"
        print(f"  {name:16} {compile_ms:7.2f}  {spread}  {len(times)}")
    strict = make_constraint(tokenizer, tool_request=ToolRequest(tools, "auto", "qwen-xml"), prompt_end="closed")
    ids = tokenizer.encode("Some text that is free, with x < y in it. " * 50)
    for name, make in (("free until a call", strict), ("budget", reasoning_budget(tokenizer, 10**6, "open"))):
        print(f"  {name:16} {'':7}  {timed(lambda: ask(make(), ids), repeats) / len(ids) * 1e6:8.1f}")  # noqa: B023


def compiled(tokenizer: Tokenizer, request: dict) -> None:
    """Compiles without what is kept of earlier requests."""
    vocabulary_of(tokenizer).kept.clear()
    make_constraint(tokenizer, prompt_end="closed", **request)


def ask(constraint, ids: list[int]) -> None:
    for index in ids:
        constraint.forced()
        constraint.allowed()
        constraint.accept(index)


def steps(tokenizer: Tokenizer, constraint, seed: int, tokens: int = 200) -> list[float]:
    """Seconds of each step (forced, allowed, accept) of one random answer."""
    rng, found = random.Random(seed), []
    while len(found) < tokens:
        begin = time.perf_counter()
        forced, mask = constraint.forced(), constraint.allowed()
        spent = time.perf_counter() - begin
        if forced:
            index = forced[0]
        else:
            choices = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: tokenizer.vocab_size])
            index = int(choices[rng.randrange(len(choices))])
        if index in tokenizer.eog_ids:
            break
        begin = time.perf_counter()
        try:
            constraint.accept(index)
        except RequestError:
            break
        found.append(spent + time.perf_counter() - begin)
    return found


if __name__ == "__main__":
    main()
