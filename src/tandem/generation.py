"""One answer while it is being written: prefill, then round by round, as an iterator over pieces of text.

In: a session, a request. Out: text, and GenerationStats when it has ended.
"""

import time
from collections.abc import Callable, Iterator

import numpy as np

from tandem.errors import EngineError
from tandem.requests import DecodeStep, GenerationRequest, GenerationStats, Piece, PrefillStep, StopReason, TokenLogprob
from tandem.runtime.decode import NO_DRAFTS, Decoder, DraftHistory, DraftSettings, decode_round
from tandem.runtime.draft_model import ModelDraft
from tandem.runtime.loop_guard import LoopGuard
from tandem.runtime.sampler import Sampler
from tandem.runtime.session import Prefill, Session
from tandem.text.stop import StopMatcher
from tandem.text.tokenizer import Tokenizer


class AnswerText:
    """Tokens of an answer -> pieces of text, and why it ends. `pieces` collects what has not been fetched."""

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest):
        sampling = request.sampling
        self.tokenizer, self.logprobs, self.limit = tokenizer, request.logprobs, sampling.max_tokens
        self.decoder = tokenizer.decoder(continues=request.prompt.continues)
        self.stops = StopMatcher(sampling.stop)
        self.guard = LoopGuard() if sampling.loop_guard else None
        self.token_ids: list[int] = []
        self.pieces: list[Piece] = []
        self.reason: StopReason | None = "length" if self.limit is not None and self.limit < 1 else None

    def take(self, token: int, logits: np.ndarray) -> bool:
        """One token; whether it ends the answer. The token that means the end is no part of it."""
        if token in self.tokenizer.eog_ids:
            self.reason = "eos"
            return True
        self.token_ids.append(token)
        text, stopped = self.stops.push(self.decoder.push(token))
        control = self.tokenizer.token_text(token) if token in self.tokenizer.control_ids else None
        logprob, top = (None, ()) if self.logprobs is None else _logprobs(token, logits, self.logprobs)
        self.pieces.append(Piece(token, text, control, logprob, top))
        if stopped:
            self.reason = "stop"
        elif self.guard and self.guard.push(token):
            self.reason = "loop"
        elif self.limit is not None and len(self.token_ids) >= self.limit:
            self.reason = "length"
        return self.reason is not None

    def tokens_left(self) -> int:
        """Most tokens that may still come."""
        return 1 << 30 if self.limit is None else self.limit - len(self.token_ids)

    def fetch(self, ended: bool) -> tuple[Piece, ...]:
        """The pieces since the last call; at the end with what was held back for a stop string or a character."""
        if ended and self.stops.matched is None:
            tail, stopped = self.stops.push(self.decoder.flush())
            tail += "" if stopped else self.stops.flush()
            if stopped:
                self.reason = "stop"
            if tail:
                self.pieces.append(Piece(-1, tail))
        pieces, self.pieces = tuple(self.pieces), []
        return pieces


class Answer:
    """One request on its session: `prefill` until it is done, then rounds, until `reason` says why it has ended."""

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        request: GenerationRequest,
        history: DraftHistory,
        drafts: DraftSettings = NO_DRAFTS,
        draft_model: ModelDraft | None = None,
    ):
        self.session, self.request, self.text = session, request, AnswerText(tokenizer, request)
        self.sampler = Sampler(request.sampling, session.vocab_size)
        if request.drafts is not None:
            drafts = DraftSettings(drafts.sources, min(request.drafts, drafts.longest), drafts.adaptive)
        self.decoder = Decoder(
            session,
            self.sampler,
            self.text.take,
            history=history,
            drafts=drafts,
            constraint=request.constraint() if request.constraint else None,
            draft_model=draft_model,
            tokens_left=self.text.tokens_left,
        )
        self._prefill: Prefill | None = None
        self._began = self._prefilled = self._first = self._last = time.perf_counter()
        self._cancelled: StopReason | None = None

    @property
    def reason(self) -> StopReason | None:
        """Why the answer has ended, None while it goes on."""
        return self._cancelled or self.text.reason or ("context" if self.decoder.full else None)

    @property
    def prefilled(self) -> bool:
        """Whether the prompt is in the session and rounds may begin."""
        return self._prefill is not None and self._prefill.logits is not None

    @property
    def reused(self) -> int:
        """Prompt tokens whose state was there already."""
        return self._prefill.reused if self._prefill else 0

    def prefill(self, max_tokens: int | None = None) -> PrefillStep:
        """Runs one chunk of the prompt; the first call cuts the session to what of it can be reused."""
        if self._prefill is None:
            self._began = self._prefilled = self._first = self._last = time.perf_counter()
            self._prefill = Prefill(self.session, self.request.prompt.ids, self.request.prompt.borders)
        self._prefill.step(max_tokens)
        if self.prefilled:
            self._prefilled = self._first = self._last = time.perf_counter()
            self.sampler.accept_prompt(self.request.prompt.ids)
            self.decoder.start(self._prefill.logits)
        return PrefillStep(len(self.session.tokens), len(self.request.prompt.ids), self.reused)

    def after_round(self) -> DecodeStep:
        """What the round that has just run added."""
        self._last = time.perf_counter()
        if self._first == self._prefilled:
            self._first = self._last
        return DecodeStep(self.text.fetch(ended=self.reason is not None), self.reason)

    def stop(self, reason: StopReason) -> None:
        """Ends the answer before its time."""
        if self.reason is None:
            self._cancelled = reason

    def stats(self) -> GenerationStats:
        """How it went."""
        counts = self.decoder.counts
        return GenerationStats(
            prompt_tokens=len(self.request.prompt.ids),
            reused_tokens=self.reused,
            completion_tokens=len(self.text.token_ids),
            prefill_s=self._prefilled - self._began,
            decode_s=self._last - self._first,
            first_token_s=self._first - self._began,
            stop_reason=self.reason or "cancelled",
            drafted=sum(counts.drafted),
            accepted=sum(counts.accepted),
            rounds=counts.rounds,
        )


class Generation:
    """Iterate for pieces of text. `stats` is None until the end. `cancel()` ends it within one step."""

    def __init__(self, answer: Answer, on_progress: Callable[[int, int], None] | None):
        self.answer, self.on_progress = answer, on_progress
        self.stats: GenerationStats | None = None
        self._cancelled = False
        self._pieces = self._write()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def token_ids(self) -> list[int]:
        """Tokens so far, without the one that ended the answer."""
        return self.answer.text.token_ids

    @property
    def sampler(self) -> Sampler:
        """The state of its sampling; `seed` is the one in use."""
        return self.answer.sampler

    @property
    def stop_reason(self) -> StopReason | None:
        """Why it has ended, None while it goes on."""
        return self.answer.reason

    def cancel(self) -> None:
        """Ends the answer before its next step; may be called from another thread."""
        self._cancelled = True

    def text(self) -> str:
        """Runs to the end and returns the whole text."""
        return "".join(self)

    def _write(self) -> Iterator[str]:
        answer = self.answer
        try:
            while not answer.prefilled and not self._ended(answer):
                step = answer.prefill()
                if self.on_progress:
                    self.on_progress(step.done, step.total)
            while not self._ended(answer):
                decode_round(answer.session.runner, [answer.decoder])
                for piece in answer.after_round().pieces:
                    if piece.text:
                        yield piece.text
        finally:
            answer.stop("cancelled")
            self.stats = answer.stats()

    def _ended(self, answer: Answer) -> bool:
        if self._cancelled:
            answer.stop("cancelled")
        return answer.reason is not None


def _logprobs(token: int, logits: np.ndarray, count: int) -> tuple[TokenLogprob, tuple[TokenLogprob, ...]]:
    """The token's log-probability and those of the `count` most likely ones, most likely first."""
    if count < 0 or count > len(logits):
        raise EngineError(f"logprobs of {count} tokens: the vocabulary has {len(logits)}")
    peak = float(logits.max())
    log_sum = peak + float(np.log(np.exp(logits - np.float32(peak), dtype=np.float64).sum()))
    best = np.argpartition(logits, len(logits) - count)[len(logits) - count :] if count else np.empty(0, int)
    best = best[np.argsort(-logits[best], kind="stable")]
    top = tuple(TokenLogprob(int(i), float(logits[i]) - log_sum) for i in best)
    return TokenLogprob(token, float(logits[token]) - log_sum), top
