"""The worker: events arrive once and in order, faults stay where they belong, readers cannot hold others up."""

import asyncio
import threading
import time
from collections import Counter
from contextlib import asynccontextmanager

import numpy as np
import pytest
from fake_batch import FakeBatch, Script, request_of, split_pieces

from tandem.errors import EngineError, RequestError, SettingError
from tandem.serve.events import Failed, Finished, Generated, Overloaded, Prefilling, Waiting
from tandem.serve.scheduler import Limits
from tandem.serve.worker import Worker

LONG = "word " * 10_000


@asynccontextmanager
async def running(make_batch=FakeBatch, limits=None, wait=True, **options):
    """A started worker, stopped at the end; every request must have ended by then."""
    worker = Worker(make_batch, limits or Limits(), **options)
    await worker.start()
    if wait:
        await worker.wait_loaded()
    try:
        yield worker
    finally:
        await worker.stop(0.0)
        assert not worker._thread.is_alive()
        assert not worker.snapshot().requests


async def events_of(stream):
    async with stream:
        return [event async for event in stream]


def text_of(events):
    return "".join(piece.text for e in events if isinstance(e, Generated) for piece in e.pieces)


def check_order(events):
    """Waiting*, then prefill, then text, then one final event, and nothing after it."""
    kinds = [type(event).__name__ for event in events]
    assert sum(kind in ("Finished", "Failed") for kind in kinds) == 1 and kinds[-1] in ("Finished", "Failed")
    order = ["Waiting", "Prefilling", "Generated", "Finished", "Failed"]
    assert [order.index(k) for k in kinds] == sorted(order.index(k) for k in kinds)


async def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        await asyncio.sleep(0.002)


def test_many_requests_get_their_own_text_in_order_and_one_end_each():
    async def main():
        def script(request):
            return f"Answer to {len(request.prompt.ids)} tokens, <think>controls</think> and all."

        async with running(lambda: FakeBatch(script), Limits(max_sequences=3)) as worker:
            sizes = [1 + 37 * i % 1500 for i in range(40)]
            streams = [worker.generate(request_of(n), client=str(n % 4)) for n in sizes]
            answers = await asyncio.gather(*map(events_of, streams))
            for size, events in zip(sizes, answers, strict=True):
                check_order(events)
                assert text_of(events) == f"Answer to {size} tokens, controls and all."
                assert [e.step.total for e in events if isinstance(e, Prefilling)][-1:] == [size]
                assert isinstance(events[-1], Finished) and events[-1].stats.prompt_tokens == size
            assert worker.batch.most_open == 3
            totals = worker.snapshot().totals
            assert totals.finished == {"eos": 40} and totals.prompt_tokens == sum(sizes)
            assert totals.completion_tokens == sum(len(split_pieces(script(request_of(n)))) for n in sizes)

    asyncio.run(main())


def test_a_step_costs_one_call_into_the_event_loop_whatever_the_number_of_answers():
    async def main():
        async with running(lambda: FakeBatch(LONG, decode_s=0.001), Limits(max_sequences=4)) as worker:
            loop, calls = asyncio.get_running_loop(), Counter()
            real = loop.call_soon_threadsafe

            def counted(callback, *args, **kwargs):
                calls[callback.__name__] += 1
                return real(callback, *args, **kwargs)

            loop.call_soon_threadsafe = counted
            await asyncio.gather(*[events_of(worker.generate(request_of(5, max_tokens=50))) for _ in range(4)])
            del loop.call_soon_threadsafe
            assert worker.batch.rounds < 60 and worker.snapshot().totals.completion_tokens == 200
            assert calls["_deliver"] <= worker.batch.rounds + 4  # prompts are four steps more

    asyncio.run(main())


def test_a_reader_that_is_late_gets_several_rounds_in_one_event():
    async def main():
        async with running(lambda: FakeBatch("0123456789" * 20)) as worker:
            stream = worker.generate(request_of())
            await until(lambda: not worker.snapshot().requests)
            await asyncio.sleep(0)
            events = await events_of(stream)
            assert text_of(events) == "0123456789" * 20
            assert sum(isinstance(e, Generated) for e in events) == 1

    asyncio.run(main())


def test_a_slow_reader_pauses_only_its_own_answer_and_loses_nothing():
    async def main():
        async with running(lambda: FakeBatch(LONG), Limits(max_sequences=2), buffer_tokens=20) as worker:
            slow = worker.generate(request_of(5, max_tokens=300))
            await until(lambda: any(r.phase == "paused" for r in worker.snapshot().requests))
            fast = await events_of(worker.generate(request_of(5, max_tokens=500)))
            assert fast[-1].stats.completion_tokens == 500
            paused = worker.snapshot().requests[0]
            assert paused.phase == "paused" and paused.tokens <= 22
            events = await events_of(slow)
            assert text_of(events) == LONG[: 300 * 4]
            assert events[-1].reason == "length"

    asyncio.run(main())


def test_a_reader_that_stays_away_is_given_up_and_its_sequence_is_free():
    async def main():
        limits = Limits(max_sequences=1, reader_timeout_s=0.2)
        async with running(lambda: FakeBatch(LONG), limits, buffer_tokens=10) as worker:
            lost = worker.generate(request_of())
            events = await asyncio.wait_for(events_of(worker.generate(request_of(5, max_tokens=5))), 5)
            assert events[-1].reason == "length"
            assert (await events_of(lost))[-1].reason == "cancelled"

    asyncio.run(main())


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_leaving_ends_the_request_within_a_step_or_chunk(phase):
    async def main():
        make = lambda: FakeBatch(LONG, decode_s=0.01, prefill_token_s=0.0002 if phase == "prefill" else 0.0)  # noqa: E731
        async with running(make, Limits(max_sequences=1, max_chunk=128)) as worker:
            first = worker.generate(request_of(4000 if phase == "prefill" else 5))
            wanted = Prefilling if phase == "prefill" else Generated
            async for event in first:
                if isinstance(event, wanted):
                    break
            other = worker.generate(request_of())
            leaver = other if phase == "queue" else first
            worker.batch.log = log = []
            await leaver.aclose()
            await until(lambda: len(worker.snapshot().requests) == 1)
            steps = [entry for entry in log if entry[0] in ("prefill", "decode")]
            assert len(steps) <= 2 or phase == "queue"
            assert [event async for event in leaver] == []
            await first.aclose()
            await other.aclose()

    asyncio.run(main())


def test_a_full_queue_refuses_at_once_and_before_any_event():
    async def main():
        limits = Limits(max_sequences=1, max_queue=4)
        async with running(lambda: FakeBatch(LONG, decode_s=0.005), limits) as worker:
            streams, refused = [], []
            for i in range(12):
                try:
                    streams.append(worker.generate(request_of(), client=str(i)))
                except Overloaded as error:
                    refused.append(error)
            assert 4 <= len(streams) <= 5 and all(e.retry_after_s >= 1 and "overloaded" in str(e) for e in refused)
            assert worker.snapshot().totals.refused == len(refused)
            for stream in streams:
                await stream.aclose()

    asyncio.run(main())


def test_requests_wait_while_the_model_loads_and_can_be_pinged():
    async def main():
        async with running(lambda: FakeBatch("done", load_s=0.3), wait=False) as worker:
            assert worker.snapshot().state == "loading"
            stream = worker.generate(request_of())
            assert await stream.next(0.05) == Waiting("loading", 0)
            pings = 0
            while (event := await stream.next(0.05)) is None or isinstance(event, Waiting):
                pings += event is None
            assert pings >= 3 and isinstance(event, Prefilling)
            assert text_of(await events_of(stream)) == "done"

    asyncio.run(main())


def test_a_request_that_waits_too_long_for_the_model_ends_while_it_still_loads():
    async def main():
        async with running(lambda: FakeBatch(load_s=1.2), Limits(load_deadline_s=0.1), wait=False) as worker:
            begin = time.monotonic()
            events = await events_of(worker.generate(request_of()))
            assert isinstance(events[-1].error, Overloaded) and time.monotonic() - begin < 1.0
            assert worker.snapshot().state == "loading"

    asyncio.run(main())


def test_leaving_during_a_load_is_harmless():
    async def main():
        async with running(lambda: FakeBatch("done", load_s=0.2), wait=False) as worker:
            stream = worker.generate(request_of())
            await stream.aclose()
            assert not worker.snapshot().requests
            assert text_of(await events_of(worker.generate(request_of()))) == "done"

    asyncio.run(main())


def faulty(request):
    """Prompts of 100 tokens and more are faulty, each in its own way."""
    return {
        100: Script(open_error=RequestError("no")),
        101: Script(prefill_error=RequestError("no")),
    }.get(len(request.prompt.ids), LONG)


@pytest.mark.parametrize("prompt", [100, 101])
def test_a_faulty_request_fails_alone(prompt):
    async def main():
        async with running(lambda: FakeBatch(faulty, decode_s=0.001), Limits(max_sequences=3)) as worker:
            others = [asyncio.ensure_future(events_of(worker.generate(request_of(5, max_tokens=80)))) for _ in range(2)]
            await asyncio.sleep(0.01)
            events = await events_of(worker.generate(request_of(prompt)))
            check_order(events)
            assert isinstance(events[-1], Failed) and isinstance(events[-1].error, RequestError)
            assert all(e[-1].reason == "length" for e in await asyncio.gather(*others))
            assert not worker.batch.open_answers and worker.snapshot().totals.breaks == 0

    asyncio.run(main())


class Breaking:
    """A constraint that fails at its third token."""

    def __init__(self, error):
        self.error, self.tokens = error, 0

    def allowed(self):
        return None

    def forced(self):
        return ()

    def accept(self, token):
        self.tokens += 1
        if self.tokens == 3:
            raise self.error


@pytest.mark.parametrize("error", [RuntimeError("parser is in error state"), RequestError("grammar")])
def test_a_constraint_that_breaks_ends_its_own_answer_only(error):
    async def main():
        async with running(lambda: FakeBatch(LONG, decode_s=0.001), Limits(max_sequences=2)) as worker:
            other = asyncio.ensure_future(events_of(worker.generate(request_of(5, max_tokens=60))))
            events = await events_of(worker.generate(request_of(5, constraint=lambda: Breaking(error))))
            assert isinstance(events[-1].error, RequestError)
            assert (await other)[-1].reason == "length"
            assert not worker.batch.open_answers

    asyncio.run(main())


def test_a_broken_engine_fails_what_runs_keeps_what_waits_and_is_loaded_again():
    async def main():
        made = []

        def script(request):
            if len(request.prompt.ids) == 66 and len(made) == 1:
                return Script(LONG, decode_error=MemoryError("bad alloc"), error_at=5)
            return LONG if len(request.prompt.ids) == 7 else "fine"

        def make():
            made.append(FakeBatch(script))
            return made[-1]

        async with running(make, Limits(max_sequences=2)) as worker:
            tasks = [asyncio.ensure_future(events_of(worker.generate(request_of(n)))) for n in (7, 66, 8, 9)]
            answers = await asyncio.wait_for(asyncio.gather(*tasks), 10)
            for events in answers:
                check_order([e for e in events if not isinstance(e, Waiting)])
            assert [type(events[-1]) for events in answers] == [Failed, Failed, Finished, Finished]
            assert isinstance(answers[0][-1].error, EngineError) and "bad alloc" in str(answers[0][-1].error)
            assert len(made) == 2 and made[0].model_state == "unloaded"
            assert worker.snapshot().totals.breaks == 1 and worker.snapshot().state == "loaded"

    asyncio.run(main())


def test_an_answer_that_cannot_be_closed_costs_the_engine_and_not_the_server():
    async def main():
        made = []

        class Sticky(FakeBatch):
            def close(self, answer, reason=None):
                if len(made) == 1:
                    raise MemoryError("no room to keep the conversation")
                return super().close(answer, reason)

        def make():
            made.append(Sticky("done"))
            return made[-1]

        async with running(make) as worker:
            assert text_of(await events_of(worker.generate(request_of()))) == "done"
            events = await asyncio.wait_for(events_of(worker.generate(request_of())), 5)
            assert text_of(events) == "done" and isinstance(events[-1], Finished)
            assert len(made) == 2 and worker.snapshot().totals.breaks == 1

    asyncio.run(main())


def test_a_failed_load_is_told_and_a_later_request_tries_again():
    async def main():
        errors = [EngineError("file is gone"), OSError("disk")]

        def make():
            time.sleep(0.05)
            if errors:
                raise errors.pop(0)
            return FakeBatch("back")

        async with running(make, wait=False) as worker:
            waiting = worker.generate(request_of())
            with pytest.raises(EngineError, match="file is gone"):
                await worker.wait_loaded()
            assert "file is gone" in str((await events_of(waiting))[-1].error)
            snapshot = worker.snapshot()
            assert (snapshot.state, snapshot.reason) == ("failed", "file is gone")
            with pytest.raises(Overloaded) as refusal:
                worker.generate(request_of())
            assert 0 < refusal.value.retry_after_s <= 1 and "file is gone" in str(refusal.value)
            await asyncio.sleep(refusal.value.retry_after_s + 0.01)
            assert "disk" in str((await events_of(worker.generate(request_of())))[-1].error)
            await asyncio.sleep(2.02)  # the pause doubles
            assert text_of(await events_of(worker.generate(request_of()))) == "back"
            assert worker.snapshot().totals.load_failures == 2

    asyncio.run(main())


def test_an_interrupted_background_answer_repeats_nothing_and_loses_nothing():
    async def main():
        text = "".join(f"{i} " for i in range(400))

        def script(request):
            return text if len(request.prompt.ids) == 50 else "short"

        async with running(lambda: FakeBatch(script, decode_s=0.0005), Limits(max_sequences=1)) as worker:
            background = asyncio.ensure_future(events_of(worker.generate(request_of(50), priority="background")))
            for _ in range(3):
                await asyncio.sleep(0.03)
                assert text_of(await asyncio.wait_for(events_of(worker.generate(request_of())), 1)) == "short"
            events = await background
            assert text_of(events) == text
            assert worker.snapshot().totals.evicted == 3
            again = [r.constraint() for r in worker.batch.opened if len(r.prompt.ids) == 50 and r.constraint]
            assert len(again) == 3 and all(len(c.forced()) for c in again)

    asyncio.run(main())


def test_an_answer_that_comes_out_differently_the_second_time_fails():
    async def main():
        made = []

        def script(request):
            if len(request.prompt.ids) != 50:
                return "short"
            made.append(1)
            return "abcd" * 300 if len(made) == 1 else "abcd<think>" * 300

        async with running(lambda: FakeBatch(script, decode_s=0.001), Limits(max_sequences=1)) as worker:
            background = asyncio.ensure_future(events_of(worker.generate(request_of(50), priority="background")))
            await asyncio.sleep(0.05)
            await events_of(worker.generate(request_of()))
            assert "differently" in str((await background)[-1].error)

    asyncio.run(main())


def test_deadlines_end_waiting_and_running_requests():
    async def main():
        async with running(lambda: FakeBatch(LONG, decode_s=0.002), Limits(max_sequences=1)) as worker:
            first = asyncio.ensure_future(events_of(worker.generate(request_of(), deadline_s=0.4)))
            await asyncio.sleep(0.01)
            second = await events_of(worker.generate(request_of(), deadline_s=0.1))
            assert isinstance(second[-1].error, Overloaded)
            events = await first
            assert events[-1].reason == "deadline" == events[-1].stats.stop_reason and text_of(events)

    asyncio.run(main())


def test_embeddings_come_back_beside_running_answers():
    async def main():
        async with running(lambda: FakeBatch(LONG, decode_s=0.001), Limits(max_sequences=1)) as worker:
            stream = worker.generate(request_of())
            vectors = await asyncio.gather(*[worker.embed([1, 2, i]) for i in range(5)])
            assert all(v.dtype == np.float32 for v in vectors) and len({v.tobytes() for v in vectors}) == 5
            with pytest.raises(RequestError):
                await worker.embed([])
            await stream.aclose()

    asyncio.run(main())


def test_stopping_waits_for_the_grace_and_then_ends_everything():
    async def main():
        worker = Worker(lambda: FakeBatch(LONG, decode_s=0.002), Limits(max_sequences=2))
        await worker.start()
        await worker.wait_loaded()
        short = asyncio.ensure_future(events_of(worker.generate(request_of(5, max_tokens=20))))
        endless = asyncio.ensure_future(events_of(worker.generate(request_of())))
        await asyncio.sleep(0.01)
        stopping = asyncio.ensure_future(worker.stop(0.3))
        await asyncio.sleep(0)
        assert worker.snapshot().state == "stopping"
        with pytest.raises(Overloaded):
            worker.generate(request_of())
        await stopping
        assert (await short)[-1].reason == "length"
        assert isinstance((await endless)[-1].error, Overloaded)
        assert not worker._thread.is_alive() and worker.batch.model_state == "unloaded"

    asyncio.run(main())


def test_our_own_mistake_on_the_engine_thread_leaves_nobody_waiting(caplog):
    async def main():
        worker = Worker(lambda: FakeBatch(LONG, decode_s=0.002))
        await worker.start()
        task = asyncio.ensure_future(events_of(worker.generate(request_of())))
        await asyncio.sleep(0.02)
        worker._scheduler.next = lambda now: 1 / 0
        assert "ZeroDivision" in str((await asyncio.wait_for(task, 5))[-1].error)
        with pytest.raises(EngineError):
            worker.generate(request_of())
        assert worker.snapshot().state == "failed"
        await worker.stop(0.0)

    asyncio.run(main())


def test_the_snapshot_neither_waits_for_a_step_nor_wakes_the_model():
    async def main():
        async with running(lambda: FakeBatch(prefill_token_s=0.001)) as worker:
            stream = worker.generate(request_of(500))
            await asyncio.sleep(0.05)
            begin = time.monotonic()
            snapshot = worker.snapshot()
            assert time.monotonic() - begin < 0.1  # the chunk takes half a second
            assert snapshot.running == 1 and snapshot.requests[0].phase == "prefill"
            await stream.aclose()

    asyncio.run(main())


def test_all_calls_of_the_batch_are_on_one_thread_of_that_name():
    async def main():
        names = set()

        class Named(FakeBatch):
            def decode(self, answers):
                names.add(threading.current_thread().name)
                return super().decode(answers)

        async with running(Named) as worker:
            await events_of(worker.generate(request_of()))
        assert names == {"tandem-engine"}

    asyncio.run(main())


def test_more_answers_at_once_than_the_batch_holds_is_an_error_of_the_load():
    async def main():
        async with running(FakeBatch, Limits(max_sequences=8), wait=False) as worker:
            with pytest.raises(SettingError, match="8 answers"):
                await worker.wait_loaded()

    asyncio.run(main())
