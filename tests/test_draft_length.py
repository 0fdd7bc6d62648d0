"""How many tokens to draft: pure arithmetic against simulated machines, texts and stalls."""

import itertools
import random
import statistics

import pytest

from tandem.runtime.draft_length import MAX_DRAFTS, Acceptance, DraftGuard, Offer, RoundCosts, best_lengths

PLAIN_S = 0.001


class Machine:
    """row: cost of another row of a pass, draft: of one draft, as shares of a plain pass; rates: chance of a right
    draft by position. Times scatter by 3 % and one in a hundred is a stall of four times."""

    def __init__(self, row, draft, rates, seed=0):
        self.row, self.draft, self.rates = row, draft, rates
        self.random = random.Random(seed)

    def rate(self, position):
        return self.rates[min(position, len(self.rates) - 1)]

    def round_s(self, drafts):
        return PLAIN_S * (1 + (self.row + self.draft) * drafts)

    def speed(self, drafts):
        """Tokens a second with always so many drafts."""
        chance = tokens = 1.0
        for position in range(drafts):
            chance *= self.rate(position)
            tokens += chance
        return tokens / self.round_s(drafts)

    def timed(self, seconds):
        return seconds * self.random.lognormvariate(0, 0.03) * (4 if self.random.random() < 0.01 else 1)

    def accepted(self, drafts):
        return next((p for p in range(drafts) if self.random.random() >= self.rate(p)), drafts)


def decode(machine, answers, tokens, longest=4, rates=None):
    """Ratio of plain decoding's time to that of the same answers with drafts as they are chosen; stalls not counted.

    rates: chances by position of each answer, None: the machine's.
    """
    costs, guard, history = RoundCosts(), DraftGuard(), Acceptance()
    spent_s = plain_s = 0.0
    for answer in range(answers):
        machine.rates = rates(answer) if rates else machine.rates
        acceptance, left = Acceptance(history.rates), tokens
        while left:
            most, drafts = min(longest, left - 1), 0
            if most and not guard.resting() and not costs.due(1):
                wanted = best_lengths([Offer(acceptance, most, chained=True)], costs, MAX_DRAFTS + 1)[0][0]
                drafts = min(most, guard.limit(wanted))
            accepted = machine.accepted(drafts)
            pass_s, draft_s = PLAIN_S * (1 + machine.row * drafts), PLAIN_S * machine.draft * drafts
            costs.tell(drafts + 1, machine.timed(pass_s), drafts, machine.timed(draft_s))
            if drafts:
                guard.tell(accepted + 1, costs.round_s(drafts + 1, drafts), costs.round_s(1, 0))
                acceptance.tell(drafts, accepted)
                history.tell(drafts, accepted)
            left -= accepted + 1
            spent_s += pass_s + draft_s
            plain_s += PLAIN_S * (accepted + 1)
    return plain_s / spent_s


def slower_machine_ratio(seed):
    """The ratio of `decode` where the first 300 rounds take twice as long, as beside a busy neighbour."""
    machine = Machine(0.5, 0.3, falling(0.85), seed)
    timed = machine.timed
    calls = itertools.count()
    machine.timed = lambda seconds: timed(seconds) * (2 if next(calls) < 600 else 1)
    return decode(machine, 1, 1500)


def falling(first):
    return [first, first * 0.95, first * 0.9, first * 0.85]


RATES = (0.0, 0.2, 0.4, 0.6, 0.75, 0.85, 0.95)
MACHINES = list(itertools.product((0.02, 0.1, 0.25, 0.5, 1.0), (0.02, 0.1, 0.3), RATES))


@pytest.mark.parametrize("answers, tokens", [(1, 250), (10, 30), (5, 200), (1, 1500)])
def test_drafts_never_cost_more_than_2_percent_of_a_run(answers, tokens):
    for row, draft, first in MACHINES:
        ratios = [decode(Machine(row, draft, falling(first), seed), answers, tokens) for seed in range(3)]
        assert statistics.mean(ratios) > 0.98 and min(ratios) > 0.975, (row, draft, first, ratios)


def test_the_best_number_of_drafts_is_found_within_a_few_percent():
    shares = []
    for row, draft, first in MACHINES:
        machine = Machine(row, draft, falling(first), seed=1)
        best = max(machine.speed(n) for n in range(5)) / machine.speed(0)
        shares.append(decode(machine, 3, 1500) / best)
        assert shares[-1] > 0.92, (row, draft, first, shares[-1])
    assert statistics.mean(shares) > 0.98


def test_texts_that_take_turns_between_easy_and_hard_do_not_cost():
    for row in (0.25, 0.5):
        for seed in range(3):
            ratio = decode(Machine(row, 0.1, [0.5], seed), 20, 60, rates=lambda a: [0.95] if a % 2 else [0.05])
            assert ratio > 0.98, (row, seed, ratio)


def test_a_machine_that_gets_faster_does_not_keep_drafts_that_lose():
    """Plain passes were timed while the machine was slow; drafts must not be compared with that for ever."""
    assert all(slower_machine_ratio(seed) > 0.98 for seed in range(5))


def test_hopeless_drafts_are_tried_less_and_less():
    costs, guard, acceptance = RoundCosts(), DraftGuard(), Acceptance()
    tried = []
    for at in range(3000):
        drafts = 0
        if not guard.resting() and not costs.due(1):
            drafts = guard.limit(best_lengths([Offer(acceptance, 4, True)], costs, 8)[0][0])
        costs.tell(drafts + 1, PLAIN_S * (1 + 0.8 * drafts), drafts, 0.2 * PLAIN_S * drafts)
        if drafts:
            tried.append(at)
            guard.tell(1, costs.round_s(drafts + 1, drafts), costs.round_s(1, 0))
            acceptance.tell(drafts, 0)
    assert len(tried) < 40
    assert sum(at >= 2000 for at in tried) <= sum(at < 1000 for at in tried) / 2


def test_drafts_that_begin_to_pay_are_found_again():
    costs, guard, acceptance = RoundCosts(), DraftGuard(), Acceptance()
    counts = []
    for at in range(3000):
        drafts = 0
        if not guard.resting() and not costs.due(1):
            drafts = guard.limit(best_lengths([Offer(acceptance, 2, True)], costs, 8)[0][0])
        costs.tell(drafts + 1, PLAIN_S * (1 + 0.1 * drafts), drafts, 0.05 * PLAIN_S * drafts)
        if drafts:
            right = drafts if at > 1000 else 0
            guard.tell(right + 1, costs.round_s(drafts + 1, drafts), costs.round_s(1, 0))
            acceptance.tell(drafts, right)
        counts.append(drafts)
    assert sum(counts[500:1000]) < 50 and counts[-500:].count(2) > 485


def costs_of(passes, drafts=()):
    costs = RoundCosts()
    for rows, seconds in passes:
        for _ in range(3):
            costs.tell(rows, seconds, 0, 0.0)
    for chain, seconds in drafts:
        for _ in range(3):
            costs.tell(1, dict(passes)[1], chain, seconds)
    return costs


def test_costs_between_and_beyond_what_was_timed_lie_on_a_line():
    costs = costs_of([(1, 1.0), (3, 1.4), (4, 1.7)])
    assert costs.round_s(1, 0) == 1.0 and costs.round_s(2, 0) == pytest.approx(1.2)
    assert costs.round_s(6, 0) == pytest.approx(2.3)
    assert costs_of([(1, 1.0)], [(1, 0.1)]).round_s(1, 3) == pytest.approx(1.3)
    assert costs_of([(4, 1.45)]).round_s(1, 0) == pytest.approx(1.0)


def test_one_stall_is_not_believed():
    costs = costs_of([(1, 1.0), (2, 1.2)])
    costs.tell(3, 9.0, 0, 0.0)
    assert costs.round_s(3, 0) == pytest.approx(1.5 * 1.4)
    for _ in range(2):
        costs.tell(3, 1.4, 0, 0.0)
    assert costs.round_s(3, 0) == 1.4


def test_what_looked_dear_is_tried_again():
    costs = costs_of([(1, 1.0), (2, 1.2), (3, 9.0)])
    assert costs.round_s(3, 0) == 9.0 and costs.most_rows == 3
    for _ in range(1000):
        costs.tell(1, 1.0, 0, 0.0)
    assert costs.most_rows == 1 and costs.round_s(3, 0) < 2


def test_a_plain_pass_is_due_at_first_and_every_now_and_then():
    costs = RoundCosts()
    due = []
    for _ in range(300):
        due.append(costs.due(1))
        costs.tell(1 if due[-1] else 3, 1.0, 0 if due[-1] else 2, 0.1)
    assert due[:4] == [True, True, True, False] and 4 <= sum(due[3:]) <= 6
    assert costs.due(2)  # of a batch of another size nothing is known


def test_passes_of_more_rows_are_tried_one_row_at_a_time():
    certain = Acceptance(1.0)
    assert best_lengths([Offer(certain, 7)], costs_of([(1, 1.0)]), 8)[0] == [1]
    assert best_lengths([Offer(certain, 7)], costs_of([(1, 1.0), (2, 1.1), (3, 1.2)]), 8)[0] == [3]


def test_sequences_share_the_rows_where_they_gain_most():
    flat = costs_of([(rows, 1.0 + 0.01 * rows) for rows in range(1, 9)])
    sure, doubtful = Acceptance(0.95), Acceptance(0.8)
    lengths, promise = best_lengths([Offer(sure, 7), Offer(doubtful, 7), Offer(None, 0)], flat, 8)
    assert lengths == [4, 1, 0]
    gained = sum(0.95**n for n in range(1, 5)) + 0.8
    assert promise == pytest.approx((3 + gained) / 1.08)
    steep = costs_of([(rows, float(rows)) for rows in range(1, 9)])
    assert best_lengths([Offer(sure, 7), Offer(doubtful, 7)], steep, 8)[0] == [0, 0]


def test_full_batches_leave_no_row_for_drafts():
    costs = costs_of([(8, 1.0)])
    assert best_lengths([Offer(Acceptance(0.95), 4)] * 8, costs, 8)[0] == [0] * 8


def test_a_gain_below_the_noise_of_estimates_is_not_taken():
    costs = costs_of([(1, 1.0), (2, 1.69)])
    assert best_lengths([Offer(Acceptance(0.7), 1)], costs, 8)[0] == [0]
    assert best_lengths([Offer(Acceptance(0.75), 1)], costs, 8)[0] == [1]


def test_acceptance_follows_what_is_told_by_position():
    acceptance = Acceptance(0.5)
    for _ in range(300):
        acceptance.tell(3, 1)  # the first right, the second wrong, the third thus never judged
    assert acceptance.rates[0] > 0.99 and acceptance.rates[1] < 0.01 and acceptance.rates[2] == acceptance.rates[1]
    assert acceptance.gain(0) == acceptance.rates[0] and acceptance.gain(1) == pytest.approx(0, abs=0.01)


def test_an_answer_starts_with_what_earlier_ones_taught_and_unlearns_it():
    history = [0.9, 0.8, *[0.1] * (MAX_DRAFTS - 2)]
    acceptance = Acceptance(history)
    acceptance.tell(1, 1)
    assert acceptance.rates[1:] == history[1:] and acceptance.rates[0] > 0.9
    for _ in range(40):
        acceptance.tell(1, 0)
    assert acceptance.rates[0] < 0.2 and history[0] == 0.9
