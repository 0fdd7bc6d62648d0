"""The loop guard stops exact cycles soon after they have begun, and nothing else."""

import time

import numpy as np
import pytest

from tandem.runtime.loop_guard import Loop, LoopGuard


def _first_hit(guard: LoopGuard, tokens) -> tuple[int, Loop] | None:
    for place, token in enumerate(tokens):
        loop = guard.push(int(token))
        if loop is not None:
            return place, loop
    return None


def _varied(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 248320, count).tolist()


@pytest.mark.parametrize("period", [1, 2, 3, 7, 16, 31, 32, 33, 48, 63, 65, 127, 128, 255, 256])
@pytest.mark.parametrize("lead", [0, 1, 63, 1000])
def test_every_period_is_found_within_one_check_of_its_limit(period, lead):
    before = _varied(lead, seed=1)
    cycle = list(range(period))
    found = _first_hit(LoopGuard(), before + cycle * (1000 // period + 4))
    assert found is not None
    place, loop = found
    assert loop.period == period
    enough = lead + max(96, 3 * period)
    assert enough <= place + 1 < enough + 16
    assert loop.copies == pytest.approx((place + 1 - lead) / period)


@pytest.mark.parametrize("period, copies", [(32, 2), (128, 2), (256, 2), (10, 9)])
def test_too_few_copies_or_tokens_are_not_a_loop(period, copies):
    # the varied tail moves every check place over the end of the cycle
    for shift in range(16):
        tokens = _varied(shift, seed=2) + list(range(period)) * copies + _varied(64, seed=3)
        assert _first_hit(LoopGuard(), tokens) is None


def test_a_cycle_longer_than_the_limit_is_not_found():
    assert _first_hit(LoopGuard(max_period=64), list(range(65)) * 20) is None
    assert _first_hit(LoopGuard(max_period=65), list(range(65)) * 20) is not None


def test_one_changed_token_per_copy_is_not_an_exact_cycle():
    tokens = [token for line in range(200) for token in [1, 2, 3, 1000 + line, 4, 5, 6, 7, 8, 9]]
    assert _first_hit(LoopGuard(), tokens) is None


def test_a_cycle_that_ended_before_the_check_is_not_reported():
    tokens = [9] * 95 + _varied(200, seed=4)
    assert _first_hit(LoopGuard(), tokens) is None


def test_a_table_and_code_with_repeated_structure_pass():
    table = [t for row in range(100) for t in (124, 500 + row, 124, 700 + row * row % 97, 124, 10)]
    code = [t for name in range(60) for t in (1, 2000 + name, 2, 3, 4, 5, 2000 + name, 6, 7, 8, 10, 10)]
    assert _first_hit(LoopGuard(), table + code + _varied(5000, seed=5)) is None


def test_agrees_with_the_definition_on_streams_of_few_symbols():
    random = np.random.default_rng(6)
    for trial in range(150):
        guard = LoopGuard(max_period=9, min_copies=3, min_tokens=12, check_every=4)
        tokens = random.integers(0, 2, 60).tolist()
        expected = None
        for end in range(4, 61, 4):
            for period in range(1, 10):
                needed = max(3 * period, 12)
                tail = tokens[max(0, end - needed) : end]
                if len(tail) == needed and all(tail[i] == tail[i - period] for i in range(period, needed)):
                    expected = (end - 1, period)
                    break
            if expected:
                break
        found = _first_hit(guard, tokens)
        assert (found and (found[0], found[1].period)) == expected, trial


def test_the_description_names_period_and_copies():
    assert str(Loop(8, 12.0)) == "the last 8 tokens came 12.0 times in a row"


def test_memory_and_time_per_token_stay_flat_over_long_streams():
    guard = LoopGuard()
    tokens = _varied(40_000, seed=7)
    sizes, begin = set(), time.perf_counter()
    for token in tokens:
        assert guard.push(token) is None
        sizes.add(guard._tokens.nbytes)
    assert len(sizes) == 1
    assert (time.perf_counter() - begin) / len(tokens) < 100e-6
