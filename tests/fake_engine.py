"""An engine without a model: it says what a script tells it, through the interface that the commands use.

Run as a program, it is the command `tandem` with such an engine: `python fake_engine.py SCRIPT.json ARGS...`.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import tandem
from tandem.errors import RequestError
from tandem.requests import GenerationStats
from tandem.runtime.sampling import Sampling, resolve


class FakeTokenizer:
    """One token per byte."""

    vocab_size = 256

    def token_bytes(self, token):
        return bytes([token])


class FakeGeneration:
    def __init__(self, pieces, sampling, prompt_tokens, delay_s, on_progress):
        self.pieces, self.sampling, self.prompt_tokens, self.delay_s = pieces, sampling, prompt_tokens, delay_s
        self.on_progress, self.cancelled, self.stats, self.token_ids = on_progress, False, None, []
        self.sampler = SimpleNamespace(seed=sampling.seed if sampling.seed is not None else 77)

    def cancel(self):
        self.cancelled = True

    def __iter__(self):
        reason = "eos"
        for done in range(1, 4):
            self.on_progress(done, 3)
        for piece in self.pieces:
            time.sleep(self.delay_s)
            if isinstance(piece, dict):
                reason = piece["stop"]
                break
            if self.cancelled:
                break
            self.token_ids.append(len(self.token_ids))
            yield piece
        self.stats = GenerationStats(
            self.prompt_tokens, 0, len(self.token_ids), 0.5, 2.0, 0.6, "cancelled" if self.cancelled else reason
        )


@dataclass
class FakeEngine:
    """answers: for each call of generate, pieces of text; {"stop": reason} ends one, {"error": text} refuses."""

    answers: list
    opening: str = ""
    delay_s: float = 0.0
    metadata: dict = field(default_factory=dict)
    calls: list = field(default_factory=list)
    closed: bool = False

    def __post_init__(self):
        self.tokenizer = FakeTokenizer()
        self.summary = SimpleNamespace(name="fake")
        self.plan = SimpleNamespace(threads=2, lines=lambda: ["weights 1 MiB", "total 2 MiB"])

    def load(self, path, *, on_plan, **options):
        self.load_options = options
        on_plan(self.plan)
        return self

    def apply_chat_template(self, messages, tools=None, add_generation_prompt=True, **extra):
        opening = "<think>\n\n</think>\n\n" if extra.get("enable_thinking") is False else self.opening
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]" + opening

    def sampling(self, base=None, *, profile=None, thinking=True, **overrides):
        return resolve(self.metadata, None, thinking, overrides, profile)

    def generate(self, prompt, *, sampling: Sampling, template_options, raw, on_progress):
        copy = prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
        self.calls.append(SimpleNamespace(prompt=copy, sampling=sampling, options=template_options, raw=raw))
        pieces = self.answers[len(self.calls) - 1]
        if isinstance(pieces, dict):
            raise RequestError(pieces["error"])
        return FakeGeneration(pieces, sampling, 10 * len(prompt), self.delay_s, on_progress)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.closed = True


if __name__ == "__main__":
    from tandem.cli import main

    with open(sys.argv[1], encoding="utf-8") as script:
        tandem.load = FakeEngine(**json.load(script)).load
    main(sys.argv[2:])
