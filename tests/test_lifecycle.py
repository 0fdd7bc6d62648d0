"""Sleep and wake: when they are due, what they free, and that hundreds of them leave nothing behind."""

import asyncio
import gc
import os
import threading
import time

import pytest
from fake_batch import FakeBatch, request_of

from tandem.batch import Batch
from tandem.default_model import default_model
from tandem.engine import Engine
from tandem.errors import EngineError, SettingError
from tandem.serve import scheduler as act
from tandem.serve.events import Failed, Finished, Overloaded
from tandem.serve.lifecycle import Lifecycle, MemoryReport, SleepPolicy
from tandem.serve.scheduler import Limits, Scheduler, Submission
from tandem.serve.snapshot import process_bytes
from tandem.serve.worker import Worker

POLICY = SleepPolicy(light_after_s=10.0, deep_after_s=60.0)


def test_sleep_levels_come_in_turn_after_idle_time():
    life = Lifecycle(POLICY, 0.0)
    life.wake_begun()
    life.woke(100.0)
    assert life.next_time_s() == 110.0 and life.sleep_due(109.9) is None and life.sleep_due(110.0) == 1
    life.slept(1, 111.0)
    assert life.state == "sleeping" and not life.loaded
    assert life.next_time_s() == 160.0 and life.sleep_due(159.0) is None and life.sleep_due(160.0) == 2
    life.slept(2, 161.0)
    assert life.next_time_s() is None and life.sleep_due(10_000.0) is None


def test_the_timer_starts_when_the_model_is_loaded_and_idle_not_while_it_loads():
    scheduler = Scheduler(Limits(sleep=POLICY), 0.0)
    assert scheduler.next(0.0) == act.Wake()
    scheduler.woke(500.0)
    assert scheduler.next(500.0) == act.Wait(510.0)
    scheduler.submit(Submission(1, "a", 5), 505.0)
    assert scheduler.next(505.0) == act.Open(1)
    scheduler.opened(1, 505.0)
    assert isinstance(scheduler.next(600.0), act.Prefill)
    scheduler.prefilled(1, 5, 5, 0.1, 600.0)
    assert isinstance(scheduler.next(600.0), act.Decode)
    scheduler.decoded([(1, 1, True)], 0.1, 700.0)
    assert scheduler.next(700.0) == act.Wait(710.0)
    assert scheduler.next(710.0) == act.Sleep(1)


def test_a_request_wakes_a_sleeping_model_once_however_many_come():
    scheduler = Scheduler(Limits(sleep=POLICY), 0.0)
    scheduler.next(0.0)
    scheduler.woke(0.0)
    assert scheduler.next(10.0) == act.Sleep(1)
    for id in range(5):
        scheduler.submit(Submission(id, "a", 5), 10.0)
    scheduler.slept(1, 11.0)
    assert scheduler.next(11.0) == act.Wake()
    for id in range(5, 9):
        scheduler.submit(Submission(id, "a", 5), 12.0)
    scheduler.woke(13.0)
    actions = []
    for _ in range(4):
        actions.append(scheduler.next(13.0))
        scheduler.opened(actions[-1].id, 13.0)
    assert actions == [act.Open(id) for id in range(4)]


def test_a_failed_wake_ends_who_waited_and_is_tried_again_after_pauses_that_double():
    scheduler, now = Scheduler(Limits(), 0.0), 0.0
    for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        assert scheduler.next(now) == act.Wake()
        scheduler.submit(Submission(int(now), "a", 5), now)
        scheduler.load_failed("out of memory", now)
        assert [ending.cause for ending in scheduler.take_endings()][-1] == "load_failed"
        assert (scheduler.life.state, scheduler.life.reason) == ("failed", "out of memory")
        assert scheduler.submit(Submission(10**6, "a", 5), now + pause_s / 2) == pytest.approx(pause_s / 2)
        assert isinstance(scheduler.next(now + pause_s), act.Wait)
        now += pause_s
        assert scheduler.submit(Submission(10**6 + int(now), "a", 5), now) is None
    assert scheduler.next(now) == act.Wake()
    scheduler.woke(now)
    assert scheduler.life.state == "loaded" and scheduler.life.reason == ""


def test_after_a_first_break_the_model_is_loaded_at_once_and_later_with_a_pause():
    life = Lifecycle(SleepPolicy(), 0.0)
    life.wake_begun()
    life.woke(1.0)
    life.failed("broke", 2.0)
    assert life.may_wake(2.0)
    life.wake_begun()
    life.woke(3.0)
    life.failed("broke", 4.0)
    assert not life.may_wake(4.0) and life.may_wake(6.0)
    life.wake_begun()
    life.woke(7.0)
    life.proved()
    life.failed("broke", 8.0)
    assert life.may_wake(8.0)


@pytest.mark.parametrize("times", [(0, None), (None, -1.0), (5.0, 5.0), (5.0, 1.0)])
def test_sleep_times_that_make_no_sense_are_refused(times):
    with pytest.raises(SettingError):
        SleepPolicy(*times)


def test_a_level_by_number_is_a_policy():
    assert SleepPolicy.at_level(1, 30.0) == SleepPolicy(light_after_s=30.0)
    assert SleepPolicy.at_level(2, 30.0) == SleepPolicy(deep_after_s=30.0)
    assert SleepPolicy.at_level(2, 0) == SleepPolicy()
    with pytest.raises(SettingError):
        SleepPolicy.at_level(3, 30.0)


def test_a_report_names_what_a_sleep_should_have_freed():
    after = {"weights": 5, "kv": 3, "checkpoints": 0, "scratch": 2}
    assert MemoryReport(1, {}, after, 0, 0).unfreed() == {"kv": 3}
    assert MemoryReport(2, {}, after, 0, 0).unfreed() == {"weights": 5, "kv": 3, "scratch": 2}


# ---- with a worker


def resources() -> tuple[int, int, int]:
    """Resident bytes, open file handles, threads."""
    gc.collect()
    return process_bytes(), len(os.listdir("/proc/self/fd")), threading.active_count()


def small_batch() -> Batch:
    return Batch(lambda: Engine.load(default_model(), ctx=512, threads=1), max_sequences=2, cache_bytes=64 << 20)


async def ends(stream):
    async with stream:
        return [event async for event in stream][-1]


async def asleep(worker, level):
    end = time.monotonic() + 10
    while not (worker.snapshot().state == "sleeping" and worker.snapshot().sleep_level == level):
        assert time.monotonic() < end, worker.snapshot()
        await asyncio.sleep(0.0005)


async def cycle(worker, make_request, level):
    """Three requests at once wake the model, one of them leaves; then it falls asleep."""
    streams = [worker.generate(make_request(i), client=str(i)) for i in range(3)]
    finished = asyncio.gather(*[ends(stream) for stream in streams[:2]])
    await streams[2].next()
    await streams[2].aclose()
    assert all(isinstance(event, Finished) for event in await finished)
    await asleep(worker, level)


async def cycles(make_batch, make_request, level, most, seconds):
    """(resources after the tenth cycle, after the last, cycles) of as many as fit."""
    worker = Worker(make_batch, Limits(max_sequences=2, sleep=SleepPolicy.at_level(level, 0.001)))
    await worker.start()
    await worker.wait_loaded()
    end, done, tenth = time.monotonic() + seconds, 0, None
    while done < most and (time.monotonic() < end or done < 12):
        await cycle(worker, make_request, level)
        done += 1
        tenth = tenth or (resources() if done == 10 else None)
    last = resources()
    snapshot = worker.snapshot()
    assert snapshot.totals.breaks == 0 and snapshot.totals.load_failures == 0
    assert snapshot.totals.sleeps >= done and snapshot.last_sleep.unfreed() == {}
    await worker.stop(1.0)
    return tenth, last, done


@pytest.mark.parametrize("level", [1, 2])
def test_five_hundred_cycles_of_a_level_leave_no_memory_no_handle_and_no_thread(level):
    tenth, last, done = asyncio.run(cycles(FakeBatch, lambda i: request_of(50), level, 500, 60))
    assert done == 500
    assert last[1:] == tenth[1:]
    assert last[0] - tenth[0] < 4 << 20


@pytest.mark.parametrize("level,seconds", [(1, 4), (2, 7)])
def test_cycles_of_a_real_model_leave_no_memory_no_handle_and_no_thread(level, seconds):
    def make_request(i):
        return request_of(20 + 7 * i, max_tokens=4)

    tenth, last, done = asyncio.run(cycles(small_batch, make_request, level, 300, seconds))
    assert done >= 12
    assert last[1:] == tenth[1:]
    assert last[0] - tenth[0] < 16 << 20


def test_the_model_answers_the_same_after_each_level_of_sleep():
    async def main():
        worker = Worker(small_batch, Limits(max_sequences=2, sleep=SleepPolicy(light_after_s=0.05, deep_after_s=0.6)))
        await worker.start()
        await worker.wait_loaded()
        texts = []
        for level in (1, 2, 1):
            async with worker.generate(request_of(40, max_tokens=12)) as stream:
                texts.append([p.token for e in [e async for e in stream] for p in getattr(e, "pieces", ())])
            await asleep(worker, level)
            if level == 1:
                report = worker.snapshot().last_sleep
                assert report.before["kv"] > 0 and report.after["kv"] == 0 and report.after["weights"] > 0
        assert texts[0] == texts[1] == texts[2] and texts[0]
        await worker.stop(1.0)

    asyncio.run(main())


def test_a_wake_that_fails_leaves_a_model_that_can_be_woken():
    async def main():
        worker = Worker(FakeBatch, Limits(sleep=SleepPolicy.at_level(2, 0.01)))
        await worker.start()
        await worker.wait_loaded()
        await asleep(worker, 2)
        batch = worker.batch
        batch.wake_errors = [EngineError("4 GiB are missing")]
        event = await ends(worker.generate(request_of()))
        assert isinstance(event, Failed) and "4 GiB are missing" in str(event.error)
        assert (worker.snapshot().state, worker.snapshot().reason) == ("failed", "4 GiB are missing")
        with pytest.raises(Overloaded) as refusal:
            worker.generate(request_of())
        await asyncio.sleep(refusal.value.retry_after_s + 0.01)
        assert isinstance(await ends(worker.generate(request_of())), Finished)
        assert worker.batch is batch
        await worker.stop(1.0)

    asyncio.run(main())


def test_looking_at_the_model_does_not_wake_it():
    async def main():
        worker = Worker(FakeBatch, Limits(sleep=SleepPolicy(light_after_s=0.02, deep_after_s=0.1)))
        await worker.start()
        await worker.wait_loaded()
        await asleep(worker, 1)
        for _ in range(60):
            worker.snapshot()
            await asyncio.sleep(0.002)
        await asleep(worker, 2)
        assert worker.snapshot().totals.wakes == 1
        await worker.stop(1.0)

    asyncio.run(main())
