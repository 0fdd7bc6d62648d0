"""One timeline of tokens and the state that belongs to it. Callers hand over the whole token list; what is still valid
of the state is reused, the rest is computed.

Attention caches can be cut at any position, recurrent state only restored from a checkpoint: those are taken at the
borders the caller names and every CHECKPOINT_EVERY tokens, and capped in number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.errors import RequestError
from tandem.ops.state_cpu import CpuState
from tandem.runtime.draft_mtp import MtpDraft, MtpDrafter
from tandem.runtime.step import EXACT_ROWS, Part, Runner

CHECKPOINT_EVERY = 4096


@dataclass(frozen=True)
class Checkpoint:
    """Recurrent state after the first `length` tokens of the session's list; hidden: the last one's state after the
    trunk's last norm, float32 [hidden_size], None where no drafts need it."""

    length: int
    recurrent: np.ndarray
    hidden: np.ndarray | None = None

    @property
    def size_bytes(self) -> int:
        return self.recurrent.nbytes + (0 if self.hidden is None else self.hidden.nbytes)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    same = np.asarray(a[:n]) == np.asarray(b[:n])
    return n if same.all() else int(np.argmin(same))


class Session:
    """State of one sequence. `tokens` are exactly those that the state has seen.

    drafter: the MTP block's pass, None for models without one or without speculation; `mtp` is then its view of this
    sequence, which follows every run.
    """

    def __init__(
        self, runner: Runner, specs: Sequence, ctx: int, kv: str, max_checkpoints: int, drafter: MtpDrafter | None = None
    ):
        self.runner, self.ctx, self.max_checkpoints = runner, ctx, max_checkpoints
        self.state = CpuState(specs, ctx, kv, runner.max_rows, EXACT_ROWS, runner.native)
        self.recurrent = self.state.recurrent
        self.mtp = MtpDraft(drafter, ctx, kv) if drafter else None
        self.tokens: list[int] = []
        self.checkpoints: list[Checkpoint] = []
        self._interrupted = False

    @property
    def vocab_size(self) -> int:
        """Width of the logits; a file may have more rows in its head than tokens in its vocabulary."""
        return self.runner.output.width

    @property
    def room(self) -> int:
        """Tokens that the context still holds."""
        return self.ctx - len(self.tokens)

    def sync(
        self,
        tokens: Sequence[int],
        borders: Sequence[int] = (),
        on_progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> tuple[np.ndarray | None, int]:
        """Brings the state to exactly these tokens; returns (logits float32 [vocab] after the last, tokens reused).

        borders: lengths worth a checkpoint, such as ends of messages. on_progress(done, total) after each chunk.
        Cancelling between chunks returns (None, reused) and leaves a valid, shorter timeline.
        Raises RequestError if the tokens do not fit the context or there are none.
        """
        prefill = Prefill(self, tokens, borders)
        while prefill.logits is None:
            if cancelled():
                return None, prefill.reused
            prefill.step()
            if on_progress:
                on_progress(len(self.tokens), len(tokens))
        return prefill.logits, prefill.reused

    def append(self, token: int) -> np.ndarray:
        """Advances by one token; returns its logits float32 [vocab]. Raises RequestError when the context is full."""
        if not self.room:
            raise RequestError(f"the context of {self.ctx} tokens is full")
        self.advance([token])
        return self.runner.logits([0])[0].copy()

    def all_logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits after every token of a fresh timeline, float32 [T, vocab_size]. Raises RequestError as `sync`."""
        if not 0 < len(tokens) <= self.ctx:
            raise RequestError(f"{len(tokens)} tokens given, 1 to {self.ctx} fit the context")
        self.clear()
        parts = []
        for at in range(0, len(tokens), self.runner.max_rows):
            part = tokens[at : at + self.runner.max_rows]
            self.advance(part)
            parts.append(self.runner.logits(range(len(part))).copy())
        return np.concatenate(parts)

    def mean_hidden(self, tokens: Sequence[int]) -> np.ndarray:
        """Mean of the hidden states of a fresh timeline, float32 [hidden_size]. Raises RequestError as `sync`."""
        if not 0 < len(tokens) <= self.ctx:
            raise RequestError(f"{len(tokens)} tokens given, 1 to {self.ctx} fit the context")
        self.clear()
        total = 0.0
        for at in range(0, len(tokens), self.runner.max_rows):
            self.advance(tokens[at : at + self.runner.max_rows])
            total = total + self.runner.hidden().sum(axis=0, dtype=np.float64)
        return (total / len(tokens)).astype(np.float32)

    def clear(self) -> None:
        """Forgets everything; keeps the memory."""
        self.state.reset()
        self.tokens, self.checkpoints = [], []
        if self.mtp:
            self.mtp.cut(0, None)
        self._interrupted = False

    def release(self) -> None:
        """Forgets everything and gives the memory back; the session stays usable."""
        self.clear()
        self.state.release()
        if self.mtp:
            self.mtp.state.release()

    def advance(self, tokens: Sequence[int]) -> None:
        """Runs these tokens as the next ones; the runner then holds their logits."""
        part = self.begin(tokens, tentative=False)
        self.runner.run([part])
        self.keep(part, len(tokens), self.runner.hidden)

    def begin(self, tokens: Sequence[int], *, tentative: bool) -> Part:
        """These tokens as a part of a step. `keep` must follow the step; an exception before it costs the timeline."""
        self._interrupted = True  # state and tokens are at odds until `keep`
        return Part(self.state, tokens, len(self.tokens), tentative)

    def keep(self, part: Part, count: int, hidden: Callable[[], np.ndarray] | None) -> None:
        """After the step: the first `count` tokens of the part are the timeline's, the others never were.

        hidden: gives the part's rows of the step's hidden states, asked for only if the MTP block follows; None: it does
        not follow this step.
        """
        if part.tentative:
            self.state.accept(count)
        kept = part.tokens[:count]
        if self.mtp and count and hidden is None:
            self.mtp.pass_over()
        elif self.mtp and count:
            self.mtp.follow(part.start_pos, kept, hidden())
        self.tokens.extend(kept)
        self._interrupted = False

    def checkpoint(self) -> None:
        """Remembers the recurrent state as it is now, at the cost of the least useful older one."""
        if not self.recurrent or any(c.length == len(self.tokens) for c in self.checkpoints):
            return
        if len(self.checkpoints) >= self.max_checkpoints:
            del self.checkpoints[self._least_useful()]
        hidden = self.mtp.last_hidden if self.mtp else None
        self.checkpoints.append(Checkpoint(len(self.tokens), self.state.snapshot(), hidden))

    def place(self) -> Checkpoint:
        """Where the timeline is now, for `back_to`."""
        recurrent = self.state.snapshot() if self.recurrent else np.empty(0, np.uint8)
        return Checkpoint(len(self.tokens), recurrent, self.mtp.last_hidden if self.mtp else None)

    def back_to(self, place: Checkpoint) -> None:
        """Undoes what was run since that place, a few tokens at most: windowed caches keep little more."""
        if self.recurrent:
            self.state.restore(place.recurrent)
        del self.tokens[place.length :]
        if self.mtp:
            self.mtp.cut(place.length, place.hidden)

    def reusable(self, tokens: Sequence[int]) -> int:
        """How many of these tokens' states are at hand: what `rewind` would keep."""
        if self._interrupted:
            return 0
        shared = min(common_prefix(self.tokens, tokens), len(tokens) - 1)
        if shared < len(self.tokens) and self.recurrent:
            shared = max((c.length for c in self.checkpoints if c.length <= shared), default=0)
        return shared if self.state.can_cut(len(self.tokens), shared) else 0

    def rewind(self, tokens: Sequence[int]) -> int:
        """Cuts the state to the longest reusable prefix of tokens, at least one short of them all; returns its length."""
        shared = self.reusable(tokens)
        if shared == 0:
            self.clear()
        elif shared < len(self.tokens):
            hidden = None
            if self.recurrent:
                self.checkpoints = [c for c in self.checkpoints if c.length <= shared]
                self.state.restore(self.checkpoints[-1].recurrent)
                hidden = self.checkpoints[-1].hidden
            del self.tokens[shared:]
            if self.mtp:
                self.mtp.cut(shared, hidden)
        return shared

    def _least_useful(self) -> int:
        """The checkpoint closest to its successor: dropping it costs the fewest recomputed tokens. The last two stay."""
        lengths = [c.length for c in self.checkpoints]
        gaps = [after - before for before, after in zip(lengths, lengths[1:-1], strict=False)]
        return int(np.argmin(gaps)) if gaps else 0


class Prefill:
    """A prompt on its way into a session, one chunk a `step`. reused: tokens whose state was there already.

    `logits` float32 [vocab] after the last token, None until all are done. Stopping early leaves a valid, shorter
    timeline. Raises RequestError if the tokens do not fit the context or there are none.
    """

    def __init__(self, session: Session, tokens: Sequence[int], borders: Sequence[int] = ()):
        if not len(tokens):
            raise RequestError("the prompt is empty: at least one token is needed")
        if len(tokens) > session.ctx:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, the context holds {session.ctx}: shorten it or load with a larger ctx"
            )
        self.session, self.tokens = session, tokens
        self.reused = session.rewind(tokens)
        self.logits: np.ndarray | None = None
        self._stops = sorted({b for b in borders if self.reused < b < len(tokens)} | {len(tokens)})
        if session.mtp:
            session.mtp.drafter.head.read(tokens[self.reused :])

    def step(self, max_tokens: int | None = None) -> None:
        """Runs the next chunk, at most max_tokens (None: as many as a step holds); borders end chunks."""
        session, at = self.session, len(self.session.tokens)
        border = next(stop for stop in self._stops if stop > at)
        periodic = (at // CHECKPOINT_EVERY + 1) * CHECKPOINT_EVERY
        most = min(max_tokens or session.runner.max_rows, session.runner.max_rows)
        chunk = self.tokens[at : min(border, periodic, at + most)]
        session.advance(chunk)
        if len(session.tokens) in (border, periodic):
            session.checkpoint()
        if len(session.tokens) == len(self.tokens):
            self.logits = session.runner.logits([len(chunk) - 1])[0].copy()
