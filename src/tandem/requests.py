"""What passes between whoever asks for text (Python API, server) and the engine that writes it: plain frozen data.

A request goes in; `PrefillStep` and `DecodeStep` come back while it runs, `GenerationStats` when it has ended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from tandem.runtime.sampling import Sampling

StopReason = Literal["eos", "stop", "length", "loop", "context", "cancelled", "deadline"]


class Constraint(Protocol):
    """What the next tokens may be: a grammar, a reasoning budget. One object per answer, told every token in order."""

    def allowed(self) -> np.ndarray | None:
        """Bits of the tokens that may come next, uint32 [ceil(vocab_size / 32)], bit t % 32 of word t // 32; None: all."""

    def forced(self) -> Sequence[int]:
        """Tokens that must come next, in this order, whatever the logits say; empty: the sampler chooses."""

    def accept(self, token: int) -> None:
        """Tells one token of the answer, chosen or forced, before the next question."""


@dataclass(frozen=True)
class Prompt:
    """Token ids; lengths at which a later prompt is likely to part from this one (worth a checkpoint); whether the
    answer continues the prompt's own text, so that a space before its first word belongs to it."""

    ids: list[int]
    borders: tuple[int, ...]
    continues: bool


@dataclass(frozen=True)
class GenerationRequest:
    """One answer to write. constraint: makes a fresh Constraint, None: none. logprobs: how many of the most likely
    tokens to report with each token (0: only the token's own), None: none. drafts: most drafted tokens a round, 0: no
    speculation, None: as the engine is set."""

    prompt: Prompt
    sampling: Sampling
    constraint: Callable[[], Constraint] | None = None
    logprobs: int | None = None
    drafts: int | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log of a token's probability under the model's own distribution, before any sampling setting."""

    token: int
    logprob: float


@dataclass(frozen=True)
class Piece:
    """One token of an answer. text: what became certain with it ('' while a character or a stop string is open).
    control: the token's literal text if it is a control token (which has no text), else None."""

    token: int
    text: str
    control: str | None = None
    logprob: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class PrefillStep:
    """Prompt tokens done so far (reused ones included) of total; reused: taken over from an earlier conversation;
    diverged: position and reason at which the best earlier conversation parts from this prompt, None if it does not."""

    done: int
    total: int
    reused: int
    diverged: str | None = None


@dataclass(frozen=True)
class DecodeStep:
    """What one round added to one answer; finished: why it ended, None while it goes on. The last step may carry text
    that was held back in a piece with token -1."""

    pieces: tuple[Piece, ...]
    finished: StopReason | None


@dataclass(frozen=True)
class GenerationStats:
    """How an answer went. first_token_s counts from the start of prefill; decode_s from the first token to the last.
    drafted, accepted: tokens that were guessed, and those of them that the model agreed with; rounds: decode passes."""

    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int
    prefill_s: float
    decode_s: float
    first_token_s: float
    stop_reason: StopReason
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0

    @property
    def prefill_tok_s(self) -> float:
        """Computed prompt tokens a second."""
        return (self.prompt_tokens - self.reused_tokens) / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Tokens a second after the first."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0
