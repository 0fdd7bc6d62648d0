"""A Batch that computes nothing: answers are written by a script, and every rule of the contract is checked.

`FakeBatch(script)`: script is a text for all answers, or a function request -> str | Script. Control tokens in a text
are the strings of `controls`. Breaking the contract (another thread, a step while asleep, too many open answers,
decode before prefill or after the end) is an AssertionError.
"""

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tandem.errors import EngineError, RequestError
from tandem.requests import DecodeStep, GenerationRequest, GenerationStats, Piece, PrefillStep, Prompt
from tandem.runtime.sampling import Sampling

CONTROLS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>")
HIDDEN_SIZE = 8


@dataclass(frozen=True)
class Script:
    """One answer: its text, how many tokens a round gives, and what goes wrong. open_error, prefill_error: raised
    there; decode_error: raised by the round after error_at tokens, for the whole round (the answer is not named)."""

    text: str = "The quick brown fox jumps over the lazy dog."
    tokens_per_round: int = 1
    reused: int = 0
    open_error: Exception | None = None
    prefill_error: Exception | None = None
    decode_error: Exception | None = None
    error_at: int = 0


@dataclass(eq=False)
class FakeAnswer:
    request: GenerationRequest
    script: Script
    pieces: list[Piece]
    done: int = 0
    written: int = 0
    reason: str | None = None
    closed: bool = False
    began_s: float = field(default_factory=time.perf_counter)
    first_s: float | None = None
    rounds: int = 0
    constraint: object = None


def split_pieces(text: str, controls: Sequence[str] = CONTROLS) -> list[Piece]:
    """The text as tokens of at most four characters; control strings are tokens without text."""
    parts = re.split("(" + "|".join(map(re.escape, controls)) + ")", text) if controls else [text]
    pieces = []
    for part in parts:
        if part in controls:
            pieces.append(Piece(1000 + controls.index(part), "", part))
        else:
            pieces += [Piece(2 + len(word), word) for word in re.findall(r"(?s).{1,4}", part)]
    return pieces


def request_of(prompt_tokens: int = 5, max_tokens: int | None = None, **fields) -> GenerationRequest:
    """A greedy request with that many prompt tokens."""
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
    return GenerationRequest(Prompt(list(range(prompt_tokens)), (), False), sampling, **fields)


class FakeBatch:
    """See the module. wake_errors: raised by the next wakes, one each. *_s: how long each call takes (time.sleep)."""

    def __init__(
        self,
        script: str | Callable[[GenerationRequest], "str | Script"] = Script.text,
        *,
        ctx: int = 4096,
        max_sequences: int = 4,
        controls: Sequence[str] = CONTROLS,
        decode_s: float = 0.0,
        prefill_token_s: float = 0.0,
        load_s: float = 0.0,
        engine: object = None,
    ):
        time.sleep(load_s)
        self.ctx, self.max_sequences, self.model_state = ctx, max_sequences, "loaded"
        self.script, self.controls, self.engine = script, controls, engine
        self.decode_s, self.prefill_token_s, self.load_s = decode_s, prefill_token_s, load_s
        self.wake_errors: list[Exception] = []
        self.open_answers: set[FakeAnswer] = set()
        self.most_open = self.sleeps = self.wakes = self.rounds = 0
        self.opened: list[GenerationRequest] = []
        self.log: list[tuple] | None = None  # a list here collects (call, number of answers or tokens)
        self._thread = threading.get_ident()

    def open(self, request: GenerationRequest) -> FakeAnswer:
        self._check()
        assert len(self.open_answers) < self.max_sequences, "no free sequence"
        if len(request.prompt.ids) >= self.ctx:
            raise RequestError(f"the prompt has {len(request.prompt.ids)} tokens, the context holds {self.ctx}")
        script = self.script(request) if callable(self.script) else self.script
        script = Script(script) if isinstance(script, str) else script
        if script.open_error:
            raise script.open_error
        answer = FakeAnswer(request, script, split_pieces(script.text, self.controls))
        if request.constraint:
            answer.constraint = request.constraint()
        self.open_answers.add(answer)
        self.opened.append(request)
        self.most_open = max(self.most_open, len(self.open_answers))
        return answer

    def prefill(self, answer: FakeAnswer, max_tokens: int = 512) -> PrefillStep:
        self._check(answer)
        assert max_tokens >= 1
        if answer.script.prefill_error:
            raise answer.script.prefill_error
        total = len(answer.request.prompt.ids)
        answer.done = max(answer.done, min(answer.script.reused, total - 1))
        chunk = min(max_tokens, total - answer.done)
        time.sleep(self.prefill_token_s * chunk)
        answer.done += chunk
        self._note("prefill", chunk)
        return PrefillStep(answer.done, total, min(answer.script.reused, total - 1))

    def decode(self, answers: Sequence[FakeAnswer]) -> list[DecodeStep]:
        self._check(*answers)
        assert 0 < len(answers) <= self.max_sequences and len(set(map(id, answers))) == len(answers)
        time.sleep(self.decode_s)
        self.rounds += 1
        self._note("decode", len(answers))
        for answer in answers:
            assert answer.done == len(answer.request.prompt.ids), "decode before the end of prefill"
            assert answer.reason is None, "decode after the end"
            if answer.script.decode_error and answer.written >= answer.script.error_at:
                raise answer.script.decode_error
        return [self._step(answer) for answer in answers]

    def close(self, answer: FakeAnswer, reason=None) -> GenerationStats:
        self._check_thread()
        assert not answer.closed, "closed twice"
        answer.closed = True
        self.open_answers.discard(answer)
        self._note("close", 1)
        now = time.perf_counter()
        first = answer.first_s or now
        return GenerationStats(
            len(answer.request.prompt.ids), answer.script.reused, answer.written, first - answer.began_s, now - first,
            first - answer.began_s, answer.reason or reason or "cancelled", rounds=answer.rounds,
        )

    def embed(self, ids: Sequence[int]) -> np.ndarray:
        self._check()
        if not len(ids) or len(ids) >= self.ctx:
            raise RequestError(f"{len(ids)} tokens: 1 to {self.ctx - 1} are possible")
        self._note("embed", len(ids))
        return np.random.default_rng(list(ids)).standard_normal(HIDDEN_SIZE).astype(np.float32)

    def sleep(self, level: int) -> None:
        self._check_thread()
        assert level in (1, 2) and not self.open_answers, "sleep with open answers"
        self.sleeps += 1
        self.model_state = "unloaded" if level == 2 or self.model_state == "unloaded" else "asleep"

    def wake(self) -> None:
        self._check_thread()
        if self.wake_errors:
            raise self.wake_errors.pop(0)
        if self.model_state == "unloaded":
            time.sleep(self.load_s)
        self.wakes += 1
        self.model_state = "loaded"

    def memory(self) -> dict[str, int]:
        weights = 0 if self.model_state == "unloaded" else 1 << 20
        kv = (1 << 16) * self.max_sequences if self.model_state == "loaded" else 0
        return {"weights": weights, "kv": kv, "recurrent": kv // 2, "checkpoints": 0, "scratch": kv // 4}

    def close_all(self) -> None:
        self._check_thread()
        for answer in list(self.open_answers):
            self.close(answer, "cancelled")
        self.model_state = "unloaded"

    def _step(self, answer: FakeAnswer) -> DecodeStep:
        limit = answer.request.sampling.max_tokens
        limit = len(answer.pieces) if limit is None else min(limit, len(answer.pieces))
        answer.rounds += 1
        answer.first_s = answer.first_s or time.perf_counter()
        pieces = answer.pieces[answer.written : min(limit, answer.written + answer.script.tokens_per_round)]
        if answer.constraint:
            for piece in pieces:
                answer.constraint.allowed()
                answer.constraint.accept(piece.token)
        answer.written += len(pieces)
        room = answer.done + answer.written < self.ctx
        if answer.written >= limit:
            answer.reason = "eos" if limit == len(answer.pieces) else "length"
        elif not room:
            answer.reason = "context"
        pieces = self._until_stop(answer, pieces)
        return DecodeStep(tuple(pieces), answer.reason)

    def _until_stop(self, answer: FakeAnswer, pieces: list[Piece]) -> list[Piece]:
        """Cuts the pieces at a stop string that begins in one of them; the real one also sees it across pieces."""
        for at, piece in enumerate(pieces):
            for stop in answer.request.sampling.stop:
                if piece.text and stop in piece.text:
                    answer.reason = "stop"
                    return [*pieces[:at], Piece(piece.token, piece.text[: piece.text.index(stop)])]
        return pieces

    def _check(self, *answers: FakeAnswer) -> None:
        self._check_thread()
        if self.model_state != "loaded":
            raise AssertionError(f"a step while {self.model_state}")
        for answer in answers:
            assert not answer.closed and answer in self.open_answers, "the answer is not open"

    def _check_thread(self) -> None:
        assert threading.get_ident() == self._thread, "a Batch belongs to the thread that made it"

    def _note(self, *entry) -> None:
        if self.log is not None:
            self.log.append(entry)


BROKEN = EngineError("the fake engine is broken")
