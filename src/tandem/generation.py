"""One answer while it is being written: prefill, then token by token, as an iterator over pieces of text.

In: a session, a prompt in token ids, settings. Out: text, and GenerationStats when it has ended.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tandem.runtime.loop_guard import LoopGuard
from tandem.runtime.sampler import Sampler
from tandem.runtime.sampling import Sampling
from tandem.runtime.session import Session
from tandem.text.stop import StopMatcher
from tandem.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """Token ids; lengths at which a later prompt is likely to part from this one (worth a checkpoint); whether the
    answer continues the prompt's own text, so that a space before its first word belongs to it."""

    ids: list[int]
    borders: tuple[int, ...]
    continues: bool


@dataclass(frozen=True)
class GenerationStats:
    """How an answer went. stop_reason: "eos", "stop", "length", "loop", "cancelled" or "context" (context full).

    first_token_s counts from the start of prefill; decode_s from the first token to the last.
    """

    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int
    prefill_s: float
    decode_s: float
    first_token_s: float
    stop_reason: str

    @property
    def prefill_tok_s(self) -> float:
        """Computed prompt tokens a second."""
        return (self.prompt_tokens - self.reused_tokens) / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Tokens a second after the first."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0


class Generation:
    """Iterate for pieces of text. `stats` is None until the end. `cancel()` ends it within one step."""

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        prompt: Prompt,
        sampling: Sampling,
        on_progress: Callable[[int, int], None] | None,
    ):
        self.session, self.tokenizer, self.prompt, self.sampling = session, tokenizer, prompt, sampling
        self.on_progress = on_progress
        self.sampler = Sampler(sampling, session.vocab_size)
        self.token_ids: list[int] = []
        self.stats: GenerationStats | None = None
        self.stop_reason: str | None = None
        self._cancelled = False
        self._pieces = self._write()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def cancel(self) -> None:
        """Ends the answer before its next step; may be called from another thread."""
        self._cancelled = True

    def text(self) -> str:
        """Runs to the end and returns the whole text."""
        return "".join(self)

    def _write(self) -> Iterator[str]:
        start = time.perf_counter()
        logits, reused = self.session.sync(
            self.prompt.ids, self.prompt.borders, self.on_progress, lambda: self._cancelled
        )
        prefilled = time.perf_counter()
        first = last = prefilled
        try:
            decoder, stops = self.tokenizer.decoder(continues=self.prompt.continues), StopMatcher(self.sampling.stop)
            self.sampler.accept_prompt(self.prompt.ids)
            for token in self._tokens(logits):
                last = time.perf_counter()
                first = last if len(self.token_ids) == 1 else first
                piece, stopped = stops.push(decoder.push(token))
                if piece:
                    yield piece
                if stopped:
                    self.stop_reason = "stop"
                    return
            tail, stopped = stops.push(decoder.flush())
            tail += "" if stopped else stops.flush()
            if stopped:
                self.stop_reason = "stop"
            if tail:
                yield tail
        finally:
            self.stats = GenerationStats(
                prompt_tokens=len(self.prompt.ids),
                reused_tokens=reused,
                completion_tokens=len(self.token_ids),
                prefill_s=prefilled - start,
                decode_s=last - first,
                first_token_s=first - start,
                stop_reason=self.stop_reason or "cancelled",
            )

    def _tokens(self, logits) -> Iterator[int]:
        """Sampled token ids up to, and without, the one that ends the answer; sets stop_reason."""
        guard = LoopGuard() if self.sampling.loop_guard else None
        limit = self.sampling.max_tokens
        while True:
            if self._cancelled or logits is None:
                self.stop_reason = "cancelled"
                return
            if limit is not None and len(self.token_ids) >= limit:
                self.stop_reason = "length"
                return
            token = self.sampler.sample(logits)
            self.sampler.accept(token)
            if token in self.tokenizer.eog_ids:
                self.stop_reason = "eos"
                return
            self.token_ids.append(token)
            yield token
            if guard and guard.push(token):
                self.stop_reason = "loop"
                return
            if len(self.session.tokens) >= self.session.ctx:
                self.stop_reason = "context"
                return
            if limit is None or len(self.token_ids) < limit:
                logits = self.session.append(token)
