"""Drafts by the model's own multi-token prediction (MTP) block, which guesses the token after next from the trunk's
hidden state and the next token, and goes on from its own hidden state.

The block has a cache of its own. Row p of it belongs to the pair (hidden state of position p, token at p + 1), so it
follows the trunk one token behind. Pairs with hidden states of drafts are overwritten once the true ones are known.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from types import ModuleType

import numpy as np

from tandem.native import Native
from tandem.ops.base import Weight
from tandem.ops.program import Pool
from tandem.ops.state_cpu import CpuState, KvPrefix
from tandem.runtime.step import EXACT_ROWS, Part, Runner

MAX_HEAD_ROWS = 32768
MIN_HEAD_ROWS = 4096
BACKLOG = 64  # pairs that wait for the next drafting pass; of more, the cache begins anew with the last KEPT
KEPT = 32


class DraftHead:
    """The rows of the output matrix for the tokens that a model uses: drafts need no others, since the full head
    verifies them. Starts with the lowest ids, which byte-pair encoders give the most frequent tokens, and takes in the
    tokens that the model reads and writes in place of those seen least.

    weight: [size, hidden] copy of the rows, or the full matrix when that is no larger. coverage: decayed share of
    written tokens that were in the head beforehand.
    """

    def __init__(self, full: Weight, size: int):
        vocab_size = full.shape[0]
        self.full = full
        self.whole = size >= vocab_size
        self.coverage = 1.0
        self.ids = np.arange(vocab_size if self.whole else size)
        if self.whole:
            self.weight = full
            return
        self.weight = replace(full, shape=(size, full.shape[1]), blocks=full.blocks[:size].copy())
        self._slot = np.full(vocab_size, -1, np.int32)
        self._slot[:size] = np.arange(size)
        self._seen = np.zeros(size, np.float32)
        self._seen -= np.arange(size) / size  # among tokens not seen, the highest id goes first

    def wrote(self, token: int) -> None:
        """Tells a token of an answer."""
        if self.whole:
            return
        slot = self._slot[token]
        self.coverage += 0.05 * ((1.0 if slot >= 0 else 0.0) - self.coverage)
        if slot < 0:
            self._take_in(np.array([token]))
        else:
            self._seen[slot] += 1

    def read(self, tokens: Sequence[int]) -> None:
        """Tells tokens of a prompt."""
        if self.whole:
            return
        tokens = np.unique(np.asarray(tokens, np.int64))
        self._take_in(tokens[self._slot[tokens] < 0][: len(self.ids) // 4])
        slots = self._slot[tokens]
        self._seen[slots[slots >= 0]] += 1

    def _take_in(self, tokens: np.ndarray) -> None:
        if not len(tokens):
            return
        slots = np.argpartition(self._seen, len(tokens) - 1)[: len(tokens)]
        self._slot[self.ids[slots]] = -1
        self._slot[tokens], self.ids[slots], self._seen[slots] = slots, tokens, 1
        self.weight.blocks[slots] = self.full.blocks[tokens]


def head_rows(vocab_size: int) -> int:
    """Rows of the draft head for a vocabulary."""
    return min(vocab_size, max(MIN_HEAD_ROWS, min(MAX_HEAD_ROWS, vocab_size // 6)))


class MtpDrafter:
    """The recorded drafting pass of a model, for any number of sequences. `specs`: its state, one layer."""

    def __init__(self, native: Native, model: ModuleType, config, weights):
        self.specs = model.draft_state(config)
        full = model.draft_head(config, weights)
        self.head = DraftHead(full, head_rows(full.shape[0]))
        self.runner = Runner(native, lambda ops: model.draft(ops, config, weights, self.head.weight))
        # The full head alone, over hidden rows: for text that the cut head does not cover.
        self.full_head = None
        if not self.head.whole:
            width = full.shape[1]
            record = lambda ops: ops.matmul(ops.output_rows(ops.hidden_rows(width)), full)[0]  # noqa: E731
            self.full_head = Runner(native, record, max_rows=8)
        self.use_full_head = False

    @property
    def scratch_bytes(self) -> int:
        """Bytes of buffers, and of the copied rows of the head."""
        extra = self.full_head.scratch_bytes + self.head.weight.blocks.nbytes if self.full_head else 0
        return self.runner.scratch_bytes + extra

    def allocate(self, pool: Pool) -> None:
        """Takes the memory of the recorded passes."""
        for runner in filter(None, (self.runner, self.full_head)):
            runner.allocate(pool)

    def close(self) -> None:
        """Frees it; safe to call twice."""
        for runner in filter(None, (self.runner, self.full_head)):
            runner.close()

    def draft(self, wanted: Sequence[tuple["MtpDraft", int, int]]) -> list[list[int]]:
        """For each (sequence, its next token, n >= 1): n drafted tokens to follow that token; [] where the hidden state
        is not known. Each round of the chain is one pass over all sequences."""
        drafts: list[list[int]] = [[] for _ in wanted]
        alive = [i for i, (sequence, _, _) in enumerate(wanted) if sequence.last_hidden is not None]
        if not alive:
            return drafts
        parts, hidden = zip(*(wanted[i][0].catch_up(wanted[i][1]) for i in alive), strict=True)
        self.runner.run(parts, hidden[0] if len(hidden) == 1 else np.concatenate(hidden))
        rows = list(accumulate((len(part.tokens) for part in parts), initial=-1))[1:]
        likely = self._likely(rows)
        while True:
            for i, token in zip(alive, likely, strict=True):
                drafts[i].append(token)
            going = [at for at, i in enumerate(alive) if len(drafts[i]) < wanted[i][2]]
            if not going:
                return drafts
            states = self.runner.hidden()[[rows[at] for at in going]]
            alive = [alive[at] for at in going]
            likely = self._chain([wanted[i][0].chained(drafts[i]) for i in alive], states)
            rows = range(len(alive))

    def _chain(self, parts: Sequence[Part], states: np.ndarray) -> list[int]:
        """The most likely token after each of these parts of one row."""
        if self.use_full_head and self.full_head:
            self.runner.run(parts, states)
            return self._likely(range(len(parts)))
        return self._named(self.runner.run_to_logits(parts, states))

    def _likely(self, rows: Sequence[int]) -> list[int]:
        """The most likely token after each of those rows of the last pass."""
        if self.use_full_head and self.full_head:
            self.full_head.run_hidden(self.runner.hidden()[rows])
            return self.full_head.logits(range(len(rows))).argmax(axis=1).tolist()
        return self._named(self.runner.logits(rows))

    def _named(self, logits: np.ndarray) -> list[int]:
        """Token ids of the largest logit of each row of the cut head."""
        return [int(self.head.ids[row.argmax()]) for row in logits]


class MtpDraft:
    """The MTP block's view of one sequence. `state` is its cache, `length` the rows in it that hold true pairs."""

    def __init__(self, drafter: MtpDrafter, ctx: int, kv: str):
        self.drafter = drafter
        self.state = CpuState(drafter.specs, ctx, kv, drafter.runner.max_rows)
        self.first = 0  # the pair in row 0: later than 0 after pairs were passed over, since rows turn by distance alone
        self.length = 0
        self.last_hidden: np.ndarray | None = None  # of the last token that the trunk has run
        self._tokens: list[int] = []  # pairs that are known and not run yet
        self._hidden: list[np.ndarray] = []

    @property
    def known(self) -> int:
        """Pairs up to here are in the cache or wait to be run; the next one is that of the token at known + 1."""
        return self.first + self.length + len(self._tokens)

    def follow(self, start: int, tokens: Sequence[int], hidden: np.ndarray) -> None:
        """The trunk has run these tokens, the first at position start: hidden float32 [n, hidden_size], not kept."""
        if self.known < start - 1:  # pairs in between were never told
            self._begin_at(start - 1)
            self.last_hidden = None
        skip = self.known - (start - 1)  # tokens whose pair is known already, or that have none (position 0)
        if skip == 0 and self.last_hidden is None:
            self._begin_at(start)
            skip = 1
        if skip < len(tokens):
            before = hidden[max(skip, 1) - 1 : len(tokens) - 1]
            if skip == 0:
                before = np.concatenate((self.last_hidden[None], before))
            self._tokens.extend(int(token) for token in tokens[skip:])
            self._hidden.append(before.copy())
        self.last_hidden = hidden[len(tokens) - 1].copy()
        if len(tokens) > EXACT_ROWS:  # a prompt: drafts will want all of it
            self._flush()
        elif len(self._tokens) > BACKLOG:
            tokens, hidden = self._tokens[-KEPT:], np.concatenate(self._hidden)[-KEPT:]
            self._begin_at(self.known - KEPT)
            self._tokens, self._hidden = tokens, [hidden]

    def pass_over(self) -> None:
        """The trunk has run tokens that this block will not see."""
        self.last_hidden = None

    def cut(self, length: int, hidden: np.ndarray | None) -> None:
        """The sequence now has `length` tokens; hidden: state of the last one, None if it is not known."""
        rows = max(0, length - 1) - self.first
        if rows <= 0:
            self._begin_at(max(0, length - 1))
        elif rows < self.length:
            self.length, self._tokens, self._hidden = rows, [], []
        elif rows < self.length + len(self._tokens):
            self._tokens = self._tokens[: rows - self.length]
            self._hidden = [np.concatenate(self._hidden)[: len(self._tokens)]] if self._tokens else []
        self.last_hidden = hidden

    def adopt(self, other: "MtpDraft", length: int, hidden: np.ndarray | None) -> None:
        """Makes this the view of a sequence that shares its first `length` tokens with the other's; hidden as in `cut`."""
        self.first = other.first
        self.length = min(other.length, max(0, length - 1 - other.first))
        self.state.copy_prefix(other.state, self.length)
        whole = self.length == other.length
        self._tokens, self._hidden = (list(other._tokens), list(other._hidden)) if whole else ([], [])
        self.cut(length, hidden)

    def cached(self) -> KvPrefix:
        """The cache of all pairs that are known, for `restore`; valid until the next pass."""
        self._flush()
        return self.state.prefix(self.length)

    def restore(self, cached: KvPrefix, length: int, hidden: np.ndarray | None) -> None:
        """Makes this what it was when `cached` was taken, of a sequence of `length` tokens; hidden: state of the last one.
        Raises ShapeError if it is another model's."""
        self.state.load_prefix(cached)
        self.first, self.length = max(0, length - 1 - cached.length), cached.length
        self._tokens, self._hidden, self.last_hidden = [], [], hidden

    def _begin_at(self, pair: int) -> None:
        """Empties the cache; its first row will be that pair's."""
        self.first, self.length, self._tokens, self._hidden = pair, 0, [], []

    def catch_up(self, token: int) -> tuple[Part, np.ndarray]:
        """The pass that runs the known pairs and the one of the next token; they then count as run."""
        tokens, hidden = [*self._tokens, token], self.last_hidden[None]
        if self._hidden:
            hidden = np.concatenate([*self._hidden, hidden])
        part = Part(self.state, tokens, self.length)
        self.length += len(tokens)
        self._tokens, self._hidden = [], []
        return part, hidden

    def chained(self, drafts: Sequence[int]) -> Part:
        """The pass that goes on from the last of these drafts; its row does not count."""
        return Part(self.state, [drafts[-1]], self.length + len(drafts) - 1)

    def _flush(self) -> None:
        """Runs the known pairs, as many at a time as a step holds."""
        if not self._tokens:
            return
        tokens, hidden = self._tokens, np.concatenate(self._hidden)
        for at in range(0, len(tokens), self.drafter.runner.max_rows):
            part = tokens[at : at + self.drafter.runner.max_rows]
            self.drafter.runner.run([Part(self.state, part, self.length)], hidden[at : at + len(part)])
            self.length += len(part)
        self._tokens, self._hidden = [], []
