"""One decode round: draft, one pass over all sequences that verifies every draft, then the tokens that the samplers take.

The output is the one of plain decoding: each row's token is chosen by the request's own sampler and constraint from the
same logits as without drafts, and a draft counts only if it is that token. At temperature 0 and above alike, since a
draft that was chosen without chance is right with the probability that the model gives it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tandem.errors import SettingError, nearest
from tandem.runtime.draft_length import MAX_DRAFTS, Acceptance, DraftGuard, Offer, RoundCosts, best_lengths
from tandem.runtime.draft_model import ModelDraft
from tandem.runtime.draft_ngram import NgramDraft
from tandem.runtime.sampler import Sampler
from tandem.runtime.session import Session
from tandem.runtime.step import EXACT_ROWS, Runner

SOURCES = ("mtp", "model", "ngram")
CHAINED = ("mtp", "model")  # each draft costs a pass
_PRIORS = {"mtp": 0.7, "model": 0.7, "ngram": 0.7}
_TRUSTED_COVERAGE = 0.85  # below, drafts use the full head: what the cut one misses costs more than it saves


@dataclass(frozen=True)
class DraftSettings:
    """Where drafts come from and how many: sources, () for none; longest: most drafts a round; adaptive: each round's
    number follows what pays, else it is always `longest`. Raises SettingError for an unknown source or a bad number."""

    sources: tuple[str, ...] = SOURCES
    longest: int = 4
    adaptive: bool = True

    def __post_init__(self):
        for source in self.sources:
            if source not in SOURCES:
                raise SettingError(f"draft source {source!r} is unknown{nearest(source, SOURCES)}")
        if not isinstance(self.longest, int) or not 0 <= self.longest <= MAX_DRAFTS:
            raise SettingError(f"{self.longest!r} drafts a round: a whole number from 0 to {MAX_DRAFTS} is needed")


NO_DRAFTS = DraftSettings(sources=(), longest=0)


@dataclass
class DraftCounts:
    """What drafting did for one answer: rounds; drafted and accepted by position; seconds by part of the rounds."""

    rounds: int = 0
    drafted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    draft_s: float = 0.0
    pass_s: float = 0.0
    host_s: float = 0.0


class DraftHistory:
    """What an engine has learned about drafting on this machine: costs, what drafts lost, and acceptance as a start for
    new answers."""

    def __init__(self) -> None:
        self.costs, self.guard = RoundCosts(), DraftGuard()
        self.acceptance = {source: Acceptance(prior) for source, prior in _PRIORS.items()}


class Decoder:
    """One answer between its prompt and its end. `start` it with the logits after the prompt, then `decode_round`.

    take: told each token of the answer in order, returns whether it was the last. tokens_left: most tokens still wanted.
    `finished` is set when take says so; `full` when the context ended it.
    """

    def __init__(
        self,
        session: Session,
        sampler: Sampler,
        take: Callable[[int, np.ndarray], bool],
        *,
        history: DraftHistory,
        drafts: DraftSettings = NO_DRAFTS,
        constraint=None,
        draft_model: ModelDraft | None = None,
        tokens_left: Callable[[], int] = lambda: EXACT_ROWS,
    ):
        self.session, self.sampler, self.take, self.constraint = session, sampler, take, constraint
        self.history, self.settings, self.tokens_left, self.model = history, drafts, tokens_left, draft_model
        available = {"mtp": session.mtp is not None, "model": draft_model is not None, "ngram": True}
        self.sources = [s for s in SOURCES if s in drafts.sources and available[s] and drafts.longest]
        self.acceptance = {s: Acceptance(history.acceptance[s].rates) for s in self.sources}
        self.counts, self.guard = DraftCounts(), history.guard
        self.finished = self.full = False
        self.last: int | None = None  # chosen, and not in the session yet
        self._logits: np.ndarray | None = None
        self._first: int | None = None  # of the tokens that the last round chose
        self._guess: list[int] = []  # what the text itself proposed for this round
        self._ngram: NgramDraft | None = None

    def start(self, logits: np.ndarray) -> None:
        """The prompt is in the session; logits float32 [vocab] after its last token."""
        self._logits = logits

    @property
    def waiting(self) -> bool:
        """Whether the first token can be taken without a pass."""
        return self._logits is not None

    def take_first(self) -> None:
        """Takes the first token from the logits of `start`."""
        logits, self._logits = self._logits, None
        self.choose(logits)
        if "ngram" in self.sources and not self.finished:
            self._ngram = NgramDraft([*self.session.tokens, self.last])

    def choose(self, logits: np.ndarray) -> int:
        """The next token of the answer, by constraint and sampler; `take` is told."""
        forced, allowed = (), None
        if self.constraint:
            forced = self.constraint.forced()
            allowed = None if len(forced) else self.constraint.allowed()
        token = int(forced[0]) if len(forced) else self.sampler.sample(logits, allowed)
        self.sampler.accept(token)
        if self.constraint:
            self.constraint.accept(token)
        if self.session.mtp:
            self.session.mtp.drafter.head.wrote(token)
        self.last = token
        self.finished = self.take(token, logits)
        return token

    def offers(self) -> dict[str, tuple[Offer, list[int]]]:
        """By source: what it could draft now, and the drafts themselves if they are known already."""
        most = min(MAX_DRAFTS, self.session.room - 1, self.tokens_left() - 1)
        if most < 1:
            return {}
        if self.constraint and len(forced := self.constraint.forced()):
            return {"forced": (Offer(Acceptance(1.0), min(most, len(forced))), [int(t) for t in forced[:most]])}
        longest = min(most, self.settings.longest)
        resting = self.settings.adaptive and self.guard.resting()
        found = {}
        for source in self.sources:
            if source != "ngram":
                if not resting:
                    found[source] = Offer(self.acceptance[source], longest, chained=True), []
            elif self._ngram:
                self._guess = self._ngram.draft(longest)
                if self._guess:
                    found[source] = Offer(self.acceptance[source], longest), self._guess
        return found

    def verify(self, drafts: Sequence[int], logits: np.ndarray) -> int:
        """Takes tokens from the rows of logits as long as the drafts are what is chosen; how many were."""
        for accepted, draft in enumerate([*drafts, None]):
            token = self.choose(logits[accepted])
            if not accepted:
                self._first = token
            if self._ngram:
                self._ngram.extend([token])
            if self.finished or token != draft:
                return accepted
        return len(drafts)

    def told(self, source: str | None, drafted: int, accepted: int) -> None:
        """Books the outcome of a round."""
        counts = self.counts
        counts.rounds += 1
        for position in range(drafted):
            counts.drafted[position] += 1
            counts.accepted[position] += position < accepted
        if drafted and source in self.acceptance:
            self._learn(source, drafted, accepted)
        if source != "ngram" and self._guess and self._first is not None:  # a guess that was not drafted teaches too
            self._learn("ngram", 1, int(self._guess[0] == self._first))
        self._guess = []
        if self.session.room < 1 and not self.finished:
            self.finished = self.full = True

    @property
    def follows(self) -> bool:
        """Whether the MTP block should see the tokens of this round."""
        return not (self.settings.adaptive and self.guard.asleep)

    def _learn(self, source: str, drafted: int, accepted: int) -> None:
        self.acceptance[source].tell(drafted, accepted)
        self.history.acceptance[source].tell(drafted, accepted)


def decode_round(runner: Runner, decoders: Sequence[Decoder]) -> None:
    """One round for answers that are not finished, at most EXACT_ROWS of them: each gets a token or more."""
    begin = time.perf_counter()
    running = []
    for decoder in decoders:
        decoder.take_first() if decoder.waiting else running.append(decoder)
    if not running:
        return
    costs = running[0].history.costs
    plan = _plan(running, costs)
    drafts = _drafts(running, plan)
    drafted = time.perf_counter()
    parts = [
        d.session.begin([d.last, *tokens], tentative=bool(tokens)) for d, tokens in zip(running, drafts, strict=True)
    ]
    logits = runner.run_to_logits(parts)
    passed = time.perf_counter()
    at, outcomes = 0, []
    for decoder, part, (source, _, _), tokens in zip(running, parts, plan, drafts, strict=True):
        rows_of_it = slice(at, at + len(part.tokens))
        accepted = decoder.verify(tokens, logits[rows_of_it])
        follow = (lambda here=rows_of_it: runner.hidden()[here]) if decoder.follows else None
        decoder.session.keep(part, accepted + 1, follow)
        decoder.told(source, len(tokens), accepted)
        outcomes.append((accepted + 1, len(tokens)))
        at = rows_of_it.stop
    end = time.perf_counter()
    chain = max((len(t) for t, (s, _, _) in zip(drafts, plan, strict=True) if s in CHAINED), default=0)
    costs.tell(len(logits), end - drafted, chain, drafted - begin)
    for decoder, (tokens, drafted_of_it), (source, _, _) in zip(running, outcomes, plan, strict=True):
        if drafted_of_it and source in CHAINED:  # what the text's own guesses gain is not theirs to lose
            spent_s, plain_s = costs.round_s(len(logits), chain), costs.round_s(len(running), 0)
            decoder.guard.tell(tokens, spent_s, plain_s)
        counts = decoder.counts
        counts.draft_s += drafted - begin
        counts.pass_s += passed - drafted
        counts.host_s += end - passed


Choice = tuple[str | None, int, list[int]]  # source, number of drafts, the drafts if they are known


def _plan(running: Sequence[Decoder], costs: RoundCosts) -> list[Choice]:
    """Each answer's source and number of drafts, together at most EXACT_ROWS rows."""
    found = [decoder.offers() if decoder.sources or decoder.constraint else {} for decoder in running]
    if not any(found):
        return [(None, 0, [])] * len(running)
    if len(running) == 1:
        options = [[source] for source in found[0]] or [[None]]
    else:
        options = [[max(offers, key=lambda s: offers[s][0].acceptance.gain(1), default=None) for offers in found]]
    sources = max(options, key=lambda sources: _promise(found, sources, costs)) if len(options) > 1 else options[0]
    lengths = _lengths(running, found, sources, costs)
    return [
        (source if count else None, count, offers[source][1][:count] if count else [])
        for source, count, offers in zip(sources, lengths, found, strict=True)
    ]


def _offers(found, sources) -> list[Offer]:
    return [by[source][0] if source else Offer(None, 0) for by, source in zip(found, sources, strict=True)]


def _promise(found, sources: Sequence[str | None], costs: RoundCosts) -> float:
    return best_lengths(_offers(found, sources), costs, EXACT_ROWS)[1]


def _lengths(running, found, sources: Sequence[str | None], costs: RoundCosts) -> list[int]:
    """Drafts of each answer from its given source."""
    offers = _offers(found, sources)
    choose = any(decoder.settings.adaptive and offer.limit for decoder, offer in zip(running, offers, strict=True))
    plain = choose and costs.due(len(running))
    lengths = best_lengths(offers, costs, EXACT_ROWS)[0] if choose else [0] * len(offers)
    room = EXACT_ROWS - len(running)
    for i, decoder in enumerate(running):
        if not offers[i].limit:
            continue
        if sources[i] == "forced" or not decoder.settings.adaptive:
            wanted = offers[i].limit
        elif plain:
            wanted = 0
        elif offers[i].chained:
            wanted = min(offers[i].limit, decoder.guard.limit(lengths[i]))
        else:
            wanted = lengths[i]
        lengths[i] = min(wanted, room)
        room -= lengths[i]
    return lengths


def _drafts(running: Sequence[Decoder], plan: Sequence[Choice]) -> list[list[int]]:
    """The drafted tokens of each answer."""
    drafts = [list(known) for _, _, known in plan]
    if not any(count for _, count, _ in plan):
        return drafts
    chained = [i for i, (source, _, _) in enumerate(plan) if source == "mtp"]
    if chained:
        drafter = running[chained[0]].session.mtp.drafter
        drafter.use_full_head = drafter.head.coverage < _TRUSTED_COVERAGE
        wanted = [(running[i].session.mtp, running[i].last, plan[i][1]) for i in chained]
        for i, tokens in zip(chained, drafter.draft(wanted), strict=True):
            drafts[i] = tokens
    for i, (source, count, _) in enumerate(plan):
        if source == "model":
            decoder = running[i]
            drafts[i] = decoder.model.draft([*decoder.session.tokens, decoder.last], count)
    return [_within(decoder, tokens) for decoder, tokens in zip(running, drafts, strict=True)]


def _within(decoder: Decoder, drafts: list[int]) -> list[int]:
    """The drafts, or none if the constraint rules out the first."""
    if drafts and decoder.constraint and not len(decoder.constraint.forced()):
        allowed = decoder.constraint.allowed()
        if allowed is not None and not (allowed[drafts[0] // 32] >> np.uint32(drafts[0] % 32)) & 1:
            return []
    return drafts
