"""How many tokens to draft in a round: what acceptance at each position promises against what rounds have cost here.

Pure arithmetic. In: outcomes and seconds of past rounds. Out: numbers of drafts, 0 included.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

MAX_DRAFTS = 7  # with the token before them, the most rows that a step computes exactly
_MEMORY = 24  # rounds after which an outcome has lost most of its weight
_RECENT = 9  # timings kept of each kind
_WARM_UP = 3  # plain rounds before the first draft: they measure what a round without drafts costs
_SHORTEST_REST, _LONGEST_REST = 16, 512  # rounds without drafts before one draft is tried again
_WAKE_BEFORE = 32  # rounds before that trial from which on the drafting pass follows the text again
_TRIALS = 3  # rounds of such a trial
_LOSS_ALLOWED = 0.01  # of the time spent: more than this behind plain decoding, no more trials


class Acceptance:
    """How often a draft at each position was accepted when those before it were, by decaying averages."""

    def __init__(self, prior: float | Sequence[float] = 0.7):
        """prior: belief before any outcome, worth two of them."""
        self.rates = [prior] * MAX_DRAFTS if isinstance(prior, float) else list(prior)
        self._told = [0] * MAX_DRAFTS

    def tell(self, drafted: int, accepted: int) -> None:
        """One round's outcome: the first `accepted` of `drafted` drafts were right."""
        for position in range(min(accepted + 1, drafted)):
            self._told[position] += 1
            weight = 1 / min(self._told[position] + 2, _MEMORY)
            change = weight * ((position < accepted) - self.rates[position])
            self.rates[position] += change
            for later in range(position + 1, MAX_DRAFTS):  # what is not known yet follows what is
                if not self._told[later]:
                    self.rates[later] = self.rates[position]

    def gain(self, position: int) -> float:
        """The chance that drafts 0..position are all accepted: what drafting one more adds to a round, in tokens."""
        chance = 1.0
        for rate in self.rates[: position + 1]:
            chance *= rate
        return chance


class RoundCosts:
    """Seconds of the two parts of a round, as measured lately: the pass over `rows` rows, and `chain` drafting passes."""

    def __init__(self) -> None:
        self._passes: dict[int, deque[float]] = {}
        self._drafts: dict[int, deque[float]] = {}

    def tell(self, rows: int, pass_s: float, chain: int, draft_s: float) -> None:
        """One round."""
        self._passes.setdefault(rows, deque(maxlen=_RECENT)).append(pass_s)
        if chain:
            self._drafts.setdefault(chain, deque(maxlen=_RECENT)).append(draft_s)

    def known(self, rows: int) -> int:
        """How many passes of that many rows have been timed."""
        return len(self._passes.get(rows, ()))

    def round_s(self, rows: int, chain: int) -> float:
        """Expected seconds; what was never tried costs no more than the nearest smaller thing that was."""
        return self._pass_s(rows) + self._draft_s(chain)

    def _pass_s(self, rows: int) -> float:
        if rows in self._passes:
            return _median(self._passes[rows])
        tried = [r for r in self._passes if r <= rows] or list(self._passes)
        return _median(self._passes[max(tried)]) if tried else 1.0

    def _draft_s(self, chain: int) -> float:
        if not chain:
            return 0.0
        if chain in self._drafts:
            return _median(self._drafts[chain])
        if not self._drafts:
            return 0.05 * self._pass_s(1) * chain
        nearest = min(self._drafts, key=lambda known: abs(known - chain))
        return _median(self._drafts[nearest]) * chain / nearest


def _median(values: deque[float]) -> float:
    return sorted(values)[len(values) // 2]


@dataclass(frozen=True)
class Offer:
    """Drafts that one sequence could use: at most `limit`; chained: each costs a drafting pass."""

    acceptance: Acceptance | None
    limit: int
    chained: bool = False


def best_lengths(offers: Sequence[Offer], costs: RoundCosts, max_rows: int) -> tuple[list[int], float]:
    """(drafts for each sequence that promise the most tokens a second together, that promise)."""
    lengths = [0] * len(offers)
    tokens, rows = float(len(offers)), len(offers)
    best, promise = list(lengths), tokens / costs.round_s(rows, 0)
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
        if rate > promise:
            best, promise = list(lengths), rate
    return best, promise


class DraftGuard:
    """Keeps trials from costing. Compares the time spent in rounds with drafts with what plain decoding of the same tokens
    would have taken, and rests for longer and longer while drafts do not pay."""

    def __init__(self) -> None:
        self._spent_s = self._plain_s = 0.0
        self._rest, self._next_rest, self._trials = 0, _SHORTEST_REST, 0

    def tell(self, tokens: int, spent_s: float, plain_s: float) -> None:
        """One round with drafts of one sequence: its tokens and seconds, and the seconds of a plain round."""
        self._spent_s += spent_s
        self._plain_s += tokens * plain_s

    @property
    def asleep(self) -> bool:
        """Whether drafts that cost passes are so far away that nothing needs to follow the text for them."""
        return self._rest > _WAKE_BEFORE

    def resting(self) -> bool:
        """Whether this round goes without drafts that cost passes; asked once a round."""
        self._rest -= self._rest > 0
        return self._rest > 0

    def limit(self, wanted: int, costs: RoundCosts) -> int:
        """How many drafts may be made where `wanted` promise the most."""
        if costs.known(1) < _WARM_UP:
            return 0
        if self._spent_s > self._plain_s + _LOSS_ALLOWED * self._spent_s:
            return self._pause()
        if wanted:
            self._next_rest, self._trials = _SHORTEST_REST, 0
            return wanted
        if self._trials:
            self._trials -= 1
            return 1
        return self._pause()

    def _pause(self) -> int:
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
        self._trials = _TRIALS
        return 0
