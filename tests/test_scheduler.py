"""The scheduler keeps its promises: in a million random events, in sequences by Hypothesis, and in the cases named."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_world import World

from tandem.errors import SettingError
from tandem.serve import scheduler as act
from tandem.serve.fair_queue import ChunkClock, FairQueue
from tandem.serve.lifecycle import SleepPolicy
from tandem.serve.scheduler import Limits, Scheduler, Submission

SLEEPY = SleepPolicy(light_after_s=5.0, deep_after_s=20.0)
ENDS = ("ended", "cancelled", "deadline", "slow_reader", "load_deadline", "load_failed", "stopping", "failed", "broke")


def world_limits(sequences: int, queue: int, every: int) -> Limits:
    return Limits(
        max_sequences=sequences, max_queue=queue, background_every=every, reader_timeout_s=20.0, load_deadline_s=1.5,
        sleep=SLEEPY,
    )  # fmt: skip


def test_a_million_random_events_break_no_promise():
    total = Counter()
    for sequences, queue, every in ((1, 4, 0), (2, 8, 5), (4, 32, 16), (8, 16, 3)):
        world = World(random.Random(sequences), world_limits(sequences, queue, every))
        world.run(250_000)
        world.drain()
        assert sum(world.counts.get(end, 0) for end in ENDS) == world.counts["accepted"]
        total.update(world.counts)
    rarest = min((*ENDS, "refused", "Evict", "Sleep", "Wake", "Embed", "restarts"), key=lambda what: total[what])
    assert total[rarest] >= 10, f"hardly ever happened: {rarest}"


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 6), st.sampled_from([0, 2, 4]))
def test_sequences_found_by_hypothesis_break_no_promise(rng, sequences, queue, every):
    world = World(rng, world_limits(sequences, queue, every))
    world.run(120)
    world.drain()
    assert sum(world.counts.get(end, 0) for end in ENDS) == world.counts.get("accepted", 0)


# ---- a scheduler by hand


class Driver:
    """A loaded scheduler; `go` carries out actions with the durations given until the next one of interest."""

    def __init__(self, **limits):
        self.now, self.scheduler = 0.0, Scheduler(Limits(**limits))
        assert self.scheduler.next(0.0) == act.Wake()
        self.scheduler.woke(0.0)
        self.left: dict[int, int] = {}  # prompt tokens
        self.tokens: dict[int, int] = {}
        self.log: list = []

    def submit(self, id, client="a", prompt=10, tokens=1000, priority="interactive", **more):
        self.left[id], self.tokens[id] = prompt, tokens
        return self.scheduler.submit(Submission(id, client, prompt, tokens, priority, **more), self.now)

    def step(self, chunk_s=lambda n: 0.001 * n, round_s=0.01):
        s = self.scheduler
        action = s.next(self.now)
        self.log.append((self.now, action))
        if isinstance(action, act.Open):
            s.opened(action.id, self.now)
        elif isinstance(action, act.Prefill):
            count = min(action.max_tokens, self.left[action.id])
            self.left[action.id] -= count
            self.now += chunk_s(count)
            total = s.requests[action.id].prompt_tokens
            s.prefilled(action.id, total - self.left[action.id], count, chunk_s(count), self.now)
        elif isinstance(action, act.Decode):
            self.now += round_s
            for id in action.ids:
                self.tokens[id] -= 1
            s.decoded([(id, 1, self.tokens[id] == 0) for id in action.ids], round_s, self.now)
        elif isinstance(action, act.Evict):
            self.left[action.id] = s.requests[action.id].prompt_tokens
        return action

    def until(self, kind, **timing):
        for _ in range(10_000):
            action = self.step(**timing)
            if isinstance(action, kind):
                return action
        raise AssertionError(f"no {kind}")


def test_a_light_client_is_next_although_a_heavy_one_came_first():
    d = Driver(max_sequences=1)
    for id in range(20):
        d.submit(id, "heavy", tokens=5)
    d.until(act.Decode)
    d.submit(100, "light", tokens=5)
    assert d.until(act.Open).id == 100


def test_idle_time_is_no_credit():
    d = Driver(max_sequences=1)
    for id in range(20):
        d.submit(id, "busy", tokens=5)
    for _ in range(8):
        d.until(act.Open)
    for id in range(100, 120):
        d.submit(id, "late", tokens=5)
    opened = [d.until(act.Open).id >= 100 for _ in range(10)]
    assert 4 <= sum(opened) <= 6


def test_costly_requests_get_fewer_turns_than_cheap_ones():
    d = Driver(max_sequences=1, max_queue=1000)
    for id in range(200):
        d.submit(id, "long", tokens=40, prompt=1)
        d.submit(1000 + id, "short", tokens=10, prompt=1)
    opened = [d.until(act.Open).id for _ in range(100)]
    assert 18 <= sum(id < 1000 for id in opened) <= 22


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 100)), max_size=120), st.integers(0, 2**32))
@settings(deadline=None)
def test_two_clients_that_wait_are_served_alike(pushes, seed):
    rng, queue, arrived = random.Random(seed), FairQueue(10_000), 0
    served, since = {}, {}  # tokens by client; at which both of a pair began to wait

    class Item:
        def __init__(self, client, cost):
            self.client, self.cost, self.arrived = client, cost, arrived

    while pushes or len(queue):
        if pushes and (not len(queue) or rng.random() < 0.6):
            item = Item(*pushes.pop())
            if not any(w.client == item.client for w in queue):
                for other in {w.client for w in queue}:
                    pair = frozenset((item.client, other))
                    since[pair] = served.get(item.client, 0) - served.get(other, 0)
            queue.push(item)
        else:
            item = queue.pop()
            served[item.client] = served.get(item.client, 0) + item.cost
            waiting = {w.client for w in queue} | {item.client}
            for other in waiting - {item.client}:
                behind = since[frozenset((item.client, other))]
                gap = served.get(item.client, 0) - served.get(other, 0)
                assert abs(gap) - abs(behind) <= 200 + abs(behind)
        arrived += 1


def test_one_client_cannot_fill_the_queue():
    d = Driver(max_sequences=1, max_queue=10)
    refused = [d.submit(id, "greedy") for id in range(20)]
    assert [r is None for r in refused] == [True] * 9 + [False] * 11
    assert d.submit(100, "modest") is None


def test_a_full_queue_says_when_to_come_back_from_measured_times():
    d = Driver(max_sequences=2, max_queue=4)
    for id in range(3):
        d.submit(id, tokens=100)
    while 0 in d.scheduler.requests:
        d.step(round_s=0.2)  # an answer takes 20 s
    for id in range(10, 20):
        hint = d.submit(id)
    waiting = d.scheduler.waiting()
    assert 18 * (waiting / 2 + 1) / 2 < hint < 22 * (waiting / 2 + 1) / 2


def test_background_work_stops_after_one_step_and_goes_on_afterwards():
    d = Driver(max_sequences=4, background_every=0)
    d.submit(1, priority="background", tokens=50)
    d.until(act.Decode)
    d.submit(2, tokens=5)
    served = []
    while 2 in d.scheduler.requests:
        action = d.step()
        served += action.ids if isinstance(action, act.Decode) else [action.id]
    assert set(served) == {2}
    assert d.until(act.Decode).ids == (1,)


def test_a_background_prompt_comes_in_short_chunks_so_that_others_find_the_engine_free():
    d = Driver(max_sequences=4, stall_s=0.1)
    d.submit(1, priority="background", prompt=4000)
    d.until(act.Decode)
    chunks = [action.max_tokens for _, action in d.log if isinstance(action, act.Prefill)]
    assert max(chunks) <= 128 and min(chunks[8:-1]) >= 64


def test_background_work_keeps_a_trickle_beside_interactive_work():
    d = Driver(max_sequences=4, background_every=10)
    d.submit(1, priority="background", tokens=5000)
    d.until(act.Decode)
    d.submit(2, tokens=1000)
    while 2 in d.scheduler.requests:
        d.step()
    rounds = [action.ids for _, action in d.log if isinstance(action, act.Decode) and 2 in action.ids]
    both = sum(1 in ids for ids in rounds)
    assert 95 <= both <= 101


def test_a_background_answer_gives_its_sequence_to_an_interactive_one_and_is_written_again():
    d = Driver(max_sequences=2)
    d.submit(1, priority="background", tokens=50)
    d.submit(2, priority="background", tokens=50, client="b")
    while not (2 in d.scheduler.open and d.scheduler.open[2].decoding):
        d.step()
    for _ in range(3):
        d.step()
    d.submit(3, tokens=5)
    assert isinstance(d.step(), act.Evict)
    assert d.step() == act.Open(3)
    while d.scheduler.requests:
        d.step()
    assert {a.id for _, a in d.log if isinstance(a, act.Open)} == {1, 2, 3}


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_a_cancelled_request_ends_before_the_next_step(phase):
    d = Driver(max_sequences=1)
    d.submit(1, prompt=2000)
    d.submit(2)
    target = 2 if phase == "queued" else 1
    d.until(act.Decode if phase == "decode" else act.Prefill)
    d.scheduler.cancel(target, d.now)
    if phase == "queued":
        assert d.scheduler.take_endings() == [act.Ending(2, "cancelled")]
    else:
        assert d.scheduler.next(d.now) == act.Close(1, "cancelled")
    d.scheduler.cancel(target, d.now)
    assert d.scheduler.take_endings() == [] and not isinstance(d.scheduler.next(d.now), act.Close)


def test_deadlines_end_waiting_and_running_requests():
    d = Driver(max_sequences=1)
    d.submit(1, deadline=5.0)
    d.submit(2, deadline=3.0)
    d.until(act.Decode)
    d.now = 3.0
    d.scheduler.tick(d.now)
    assert d.scheduler.take_endings() == [act.Ending(2, "deadline")]
    d.now = 5.0
    assert d.scheduler.next(d.now) == act.Close(1, "deadline")


def test_a_slow_reader_pauses_its_own_answer_only_and_is_given_up_in_the_end():
    d = Driver(max_sequences=2, reader_timeout_s=7.0)
    d.submit(1)
    d.submit(2)
    while d.until(act.Decode).ids != (1, 2):
        pass
    d.scheduler.reader_slow(1, d.now)
    assert d.until(act.Decode).ids == (2,)
    d.scheduler.reader_ready(1, d.now)
    assert d.until(act.Decode).ids == (1, 2)
    d.scheduler.reader_slow(1, d.now)
    begin = d.now
    close = d.until(act.Close)
    assert close == act.Close(1, "slow_reader") and 7.0 <= d.now - begin < 7.1


def test_a_long_prompt_does_not_stall_a_running_answer():
    d = Driver(max_sequences=2, stall_s=0.2, prefill_share=0.8)
    timing = {"chunk_s": lambda n: 0.03 + 0.001 * n, "round_s": 0.04}
    d.submit(1, tokens=10**9)
    d.until(act.Decode, **timing)
    d.submit(2, prompt=20_000, tokens=10**9)
    begin = d.now
    while d.scheduler.requests[2].done < 20_000:
        d.step(**timing)
    rounds = [at for at, action in d.log if isinstance(action, act.Decode) and at >= begin]
    gaps = [b - a for a, b in zip(rounds, rounds[1:], strict=False)]
    assert max(gaps) <= 0.2 * 1.35 + 0.04
    chunks_s = d.now - begin - len(rounds) * 0.04
    assert 0.6 < chunks_s / (d.now - begin) <= 0.81
    # 128 tokens take 0.158 s, 256 take 0.286 s
    sizes = [action.max_tokens for _, action in d.log if isinstance(action, act.Prefill)]
    assert sorted(sizes)[len(sizes) // 2] == 128


def test_rounds_that_take_no_time_do_not_starve_a_prompt():
    d = Driver(max_sequences=2)
    d.submit(1, tokens=10**9)
    d.until(act.Decode, round_s=0.0)
    d.submit(2, prompt=200, tokens=10**9)
    for _ in range(20 * (act.MOST_ROUNDS + 2)):
        d.step(round_s=0.0)
    assert d.scheduler.requests[2].done == 200


def test_without_running_answers_prompts_go_in_full_chunks():
    d = Driver()
    d.submit(1, prompt=2000)
    d.until(act.Decode)
    assert [a.max_tokens for _, a in d.log if isinstance(a, act.Prefill)] == [512] * 4


def test_a_short_prompt_does_not_wait_for_a_long_one():
    d = Driver()
    d.submit(1, prompt=100_000)
    for _ in range(5):
        d.step()
    d.submit(2, prompt=100)
    begin = d.now
    while d.scheduler.requests[2].done < 100:
        d.step()
    assert d.now - begin < 0.7  # a full chunk takes 0.5 s
    assert d.scheduler.requests[1].done < 100_000


def test_the_prompt_that_came_first_is_not_overtaken_for_ever():
    d = Driver(max_sequences=8)
    d.submit(0, "first", prompt=4000)
    id = 0
    while d.scheduler.requests[0].done < 4000:
        id += 1
        d.submit(id, "flood", prompt=400, tokens=1)
        d.step()
        d.step()
        assert d.now < 60, "4 s of work are starved"


@given(st.lists(st.tuples(st.integers(1, 600), st.floats(0.0, 10.0)), max_size=60), st.floats(0.001, 10.0))
def test_chunk_sizes_stay_within_their_bounds_and_times_rise_with_them(measured, target):
    clock = ChunkClock(16, 512)
    for tokens, seconds in measured:
        clock.tell(tokens, seconds)
    assert clock.tokens_in(target) in clock.sizes and (clock.sizes[0], clock.sizes[-1]) == (16, 512)
    times = [clock.seconds_of(size) for size in clock.sizes]
    assert all(a <= b * (1 + 1e-9) for a, b in zip(times, times[1:], strict=False))


def test_one_slow_chunk_does_not_shrink_chunks_for_ever():
    clock = ChunkClock(16, 512)

    def seconds(tokens):
        return 0.15 + 0.0003 * tokens

    for size in (512, 256, 128, 64, 32, 16) * 20:
        clock.tell(size, seconds(size))
    assert clock.tokens_in(0.2) == 128
    clock.tell(128, 5.0)
    assert clock.tokens_in(0.2) == 64
    sizes = []
    for _ in range(400):
        sizes.append(clock.tokens_in(0.2))
        clock.tell(sizes[-1], seconds(sizes[-1]))
    assert 128 in sizes[:350] and sizes[-20:].count(128) >= 10


def test_embeddings_need_no_sequence_and_take_turns_with_rounds():
    d = Driver(max_sequences=1)
    d.submit(1)
    d.until(act.Decode)
    d.scheduler.submit(Submission(2, "b", 100, kind="embed"), d.now)
    d.scheduler.submit(Submission(3, "b", 100, kind="embed"), d.now)
    assert d.step() == act.Embed(2)
    d.scheduler.embedded(2, 0.1, d.now)
    assert isinstance(d.step(), act.Decode)


def test_stopping_ends_what_does_not_end_in_the_grace():
    d = Driver(max_sequences=2)
    d.submit(1, tokens=3)
    d.submit(2, tokens=10**9)
    d.until(act.Decode)
    d.scheduler.stop(10.0, d.now)
    assert d.submit(3) > 0
    while 2 in d.scheduler.requests:
        action = d.step()
    assert action == act.Close(2, "stopping") and 10.0 <= d.now < 10.2
    assert d.step() == act.Exit()


@pytest.mark.parametrize(
    "name,value", [("max_sequences", 0), ("prefill_share", 1.0), ("max_chunk", 4), ("background_every", 1)]
)
def test_limits_out_of_range_are_refused(name, value):
    with pytest.raises(SettingError, match=name):
        Limits(**{name: value})
