"""How many tokens to draft in a round: what acceptance at each position promises against what rounds have cost here.

Pure arithmetic. In: outcomes and seconds of past rounds. Out: numbers of drafts, 0 included.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

MAX_DRAFTS = 7  # with the token before them, the most rows that a step computes exactly
_MEMORY = 48  # rounds after which an outcome has lost most of its weight
_GUESSED, _INHERITED = 2, 6  # outcomes that a belief is worth: one from nowhere, one from earlier answers
_RECENT, _FRESH = 9, 150  # timings kept of each size, and rounds after which the next one replaces them
_STALE = 400  # rounds after which a timing is forgotten, so that what once looked dear is tried again
_ROW_COST, _DRAFT_COST = 0.15, 0.05  # of a plain pass: another row of it, one draft; until they are measured
_GAIN_WANTED = 1.02  # promised speed over plain decoding that is worth drafts: estimates flatter the best of several
_STALL = 1.5  # times the expected seconds: more is not believed of a single timing
_WARM_UP = 3  # plain rounds before the first draft: they measure what drafts are compared with
_DUE = 64  # rounds after which one is plain to measure it again: the machine may be slower or faster by then
_SHORTEST_REST, _LONGEST_REST = 16, 512  # rounds without drafts before one draft is tried again
_WAKE_BEFORE = 32  # rounds before that trial from which on the drafting pass follows the text again
_TRIALS = 2  # rounds of such a trial
_LOSS_ALLOWED = 0.01  # of the rounds: more lost to drafts than this, and they rest
_CREDIT, _MOST_CREDIT = 1.3, 5.0  # rounds that may be lost on top: at the start, and after gains


class Acceptance:
    """How often a draft at each position was accepted when those before it were, by decaying averages."""

    def __init__(self, prior: float | Sequence[float] = 0.7):
        """prior: belief before any outcome: one for all positions, or from earlier answers one for each."""
        guessed = isinstance(prior, float)
        self.rates = [prior] * MAX_DRAFTS if guessed else list(prior)
        self._worth = _GUESSED if guessed else _INHERITED
        self._told = [0] * MAX_DRAFTS

    def tell(self, drafted: int, accepted: int) -> None:
        """One round's outcome: the first `accepted` of `drafted` drafts were right."""
        for position in range(min(accepted + 1, drafted)):
            self._told[position] += 1
            weight = 1 / min(self._told[position] + self._worth, _MEMORY)
            change = weight * ((position < accepted) - self.rates[position])
            self.rates[position] += change
            for later in range(position + 1, MAX_DRAFTS):  # what is not known yet follows what is
                if not self._told[later] and self._worth == _GUESSED:
                    self.rates[later] = self.rates[position]

    def gain(self, position: int) -> float:
        """The chance that drafts 0..position are all accepted: what drafting one more adds to a round, in tokens."""
        chance = 1.0
        for rate in self.rates[: position + 1]:
            chance *= rate
        return chance


class RoundCosts:
    """Seconds of the two parts of a round, as measured lately: the pass over `rows` rows, `chain` drafting passes."""

    def __init__(self) -> None:
        self.rounds = 0
        self._passes = _Timings(_ROW_COST)
        self._drafts = _Timings(1.0)

    def tell(self, rows: int, pass_s: float, chain: int, draft_s: float) -> None:
        """One round."""
        self.rounds += 1
        self._passes.tell(rows, pass_s, self.rounds)
        if chain:
            self._drafts.tell(chain, draft_s, self.rounds)

    def due(self, rows: int) -> bool:
        """Whether the next pass should be one of so many rows, without drafts, to know what they are compared with."""
        return self._passes.due(rows, self.rounds)

    @property
    def most_rows(self) -> int:
        """Rows of the largest pass that was timed lately, 0: none."""
        return self._passes.largest

    def round_s(self, rows: int, chain: int) -> float:
        """Expected seconds: measured, or along a line through what was."""
        pass_s = self._passes.expected(rows)
        if pass_s is None:
            return 1.0
        if not chain:
            return pass_s
        draft_s = self._drafts.expected(chain)
        return pass_s + (_DRAFT_COST * self._passes.expected(1) * chain if draft_s is None else draft_s)


class _Timings:
    """Medians of recent seconds by size; sizes never timed lie on a line through their neighbours.

    slope: cost of one more unit as a share of the first, while only one size is known.
    """

    def __init__(self, slope: float):
        self._slope = slope
        self._times: dict[int, deque[tuple[float, int]]] = {}  # seconds and round
        self._medians: dict[int, float] = {}

    def tell(self, size: int, seconds: float, now: int) -> None:
        times = self._times.get(size)
        if times is None:
            times = self._times[size] = deque(maxlen=_RECENT)
        while times and times[0][1] < now - _FRESH:
            times.popleft()
        times.append((seconds, now))
        self._medians.pop(size, None)
        if now % _STALE == 0:
            for old in [known for known, told in self._times.items() if told[-1][1] <= now - _STALE]:
                del self._times[old]
                self._medians.pop(old, None)

    def due(self, size: int, now: int) -> bool:
        """Whether a size should be timed because others are compared with it."""
        times = self._times.get(size)
        return times is None or (len(times) < _WARM_UP and now < _DUE) or times[-1][1] < now - _DUE

    @property
    def largest(self) -> int:
        """The largest size that is known, 0: none."""
        return max(self._times, default=0)

    def expected(self, size: int) -> float | None:
        """Seconds; None while nothing is known."""
        if size not in self._times:
            return self._line(size)
        if len(self._times[size]) == 1 and len(self._times) > 1:  # a single timing may be a stall
            return min(self._median(size), _STALL * self._line(size))
        return self._median(size)

    def _line(self, size: int) -> float | None:
        """Seconds of a size by those of the others."""
        others = [other for other in self._times if other != size]
        below = max((other for other in others if other < size), default=None)
        above = min((other for other in others if other > size), default=None)
        if below is None and above is None:
            return None
        if below is None:
            return self._median(above) * (1 + self._slope * (size - 1)) / (1 + self._slope * (above - 1))
        if above is not None:
            share = (size - below) / (above - below)
            return self._median(below) * (1 - share) + self._median(above) * share
        before = max((other for other in others if other < below), default=None)
        step = self._slope * self._median(below) / (1 + self._slope * (below - 1))
        if before is not None:
            step = max(0.0, (self._median(below) - self._median(before)) / (below - before))
        return self._median(below) + step * (size - below)

    def _median(self, size: int) -> float:
        if size not in self._medians:
            seconds = sorted(seconds for seconds, _ in self._times[size])
            self._medians[size] = seconds[(len(seconds) - 1) // 2]
        return self._medians[size]


@dataclass(frozen=True)
class Offer:
    """Drafts that one sequence could use: at most `limit`; chained: each costs a drafting pass."""

    acceptance: Acceptance | None
    limit: int
    chained: bool = False


def best_lengths(offers: Sequence[Offer], costs: RoundCosts, max_rows: int) -> tuple[list[int], float]:
    """(drafts for each sequence that promise the most tokens a second together, that promise).

    Passes of at most one row more than were timed are asked for, so that costs are found out step by step.
    """
    max_rows = min(max_rows, max(costs.most_rows, len(offers)) + 1)
    lengths = [0] * len(offers)
    tokens, rows = float(len(offers)), len(offers)
    plain = tokens / costs.round_s(rows, 0)
    best, promise = list(lengths), plain
    while rows < max_rows:
        open_ = [i for i, offer in enumerate(offers) if lengths[i] < offer.limit]
        if not open_:
            break
        gains = {i: offers[i].acceptance.gain(lengths[i]) for i in open_}
        chosen = max(open_, key=gains.__getitem__)
        lengths[chosen] += 1
        tokens, rows = tokens + gains[chosen], rows + 1
        chain = max((n for n, offer in zip(lengths, offers, strict=True) if offer.chained), default=0)
        rate = tokens / costs.round_s(rows, chain)
        if rate > max(promise, plain * _GAIN_WANTED):
            best, promise = list(lengths), rate
    return best, promise


class DraftGuard:
    """Keeps drafts from costing: an account, over all answers, of the rounds that drafts lost against plain decoding.

    Each round pays back _LOSS_ALLOWED; while more than the credit is lost, drafts rest. So n rounds lose at most
    n * _LOSS_ALLOWED + _CREDIT of them, and what the last one before a rest lost. Where drafts promise nothing, one is
    tried after longer and longer rests.
    """

    def __init__(self) -> None:
        self._lost = -_CREDIT
        self._rest, self._next_rest, self._trials = 0, _SHORTEST_REST, 0

    def tell(self, tokens: int, spent_s: float, plain_s: float) -> None:
        """One round with drafts of one sequence: its tokens, and the seconds that such a round and a plain one take."""
        self._lost = max(self._lost + spent_s / plain_s - tokens, -_MOST_CREDIT)

    @property
    def asleep(self) -> bool:
        """Whether drafts that cost passes are so far away that nothing needs to follow the text for them."""
        return self._rest > _WAKE_BEFORE

    def resting(self) -> bool:
        """Whether this round goes without drafts that cost passes; asked once a round."""
        if self._lost > -_CREDIT:
            self._lost -= _LOSS_ALLOWED
        self._rest -= self._rest > 0
        return self._rest > 0

    def limit(self, wanted: int) -> int:
        """How many drafts may be made where `wanted` promise the most."""
        if self._lost > 0:
            self._rest = int(self._lost / _LOSS_ALLOWED) + 1
            return 0
        if wanted:
            self._next_rest, self._trials = _SHORTEST_REST, _TRIALS
            return wanted
        if self._trials:
            self._trials -= 1
            return 1
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
        self._trials = _TRIALS
        return 0
