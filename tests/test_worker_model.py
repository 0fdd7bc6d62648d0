"""The worker over the packaged model: answers written together are those written alone, whatever happens beside."""

import asyncio
import random

import pytest

from tandem.batch import Batch
from tandem.default_model import default_model
from tandem.engine import Engine
from tandem.requests import GenerationRequest, Prompt
from tandem.runtime.sampling import Sampling
from tandem.serve.events import Failed, Finished, Generated, Overloaded
from tandem.serve.scheduler import Limits
from tandem.serve.worker import Worker

QUESTIONS = (
    "Count from 1 to 20.",
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Repeat after me: one two three, one two three, one two three.",
    "Explain why the sky is blue, in two sentences.",
    "List five animals.",
)


@pytest.fixture(scope="module")
def prompts():
    with Engine.load(default_model(), ctx=128, threads=1) as engine:
        return [engine.template.encode([{"role": "user", "content": q}], None, True) for q in QUESTIONS]


def make_batch():
    return Batch(lambda: Engine.load(default_model(), ctx=1024, threads=1), max_sequences=4, cache_bytes=256 << 20)


def asked(ids, drafts=None, max_tokens=40, **sampling):
    return GenerationRequest(
        Prompt(list(ids), (), False), Sampling(temperature=0.0, max_tokens=max_tokens, **sampling), drafts=drafts
    )


async def answer(worker, request, **options):
    tokens, text = [], ""
    async with worker.generate(request, **options) as stream:
        async for event in stream:
            if isinstance(event, Generated):
                tokens += [piece.token for piece in event.pieces]
                text += "".join(piece.text for piece in event.pieces)
            elif isinstance(event, Failed):
                raise event.error
            elif isinstance(event, Finished):
                return tokens, text, event
    raise AssertionError("no end")


async def with_worker(body, **limits):
    worker = Worker(make_batch, Limits(max_sequences=4, **limits))
    await worker.start()
    await worker.wait_loaded()
    try:
        return await body(worker)
    finally:
        await worker.stop(0.0)


@pytest.mark.parametrize("drafts", [0, None])
def test_answers_written_together_are_those_written_alone(prompts, drafts):
    async def alone(worker):
        return [(await answer(worker, asked(ids, 0)))[:2] for ids in prompts]

    async def together(worker):
        clients = [answer(worker, asked(ids, drafts), client=str(i)) for i, ids in enumerate(prompts)]
        answers = await asyncio.gather(*clients)
        drafted = sum(end.stats.drafted for *_, end in answers)
        return [a[:2] for a in answers], drafted

    # the bits of a prompt's state depend on where it was cut into chunks
    expected = asyncio.run(with_worker(alone, min_chunk=16, max_chunk=16))
    found, drafted = asyncio.run(with_worker(together, min_chunk=16, max_chunk=16))
    assert found == expected and all(tokens for tokens, _ in expected)
    assert (drafted > 0) == (drafts is None)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7}])
def test_an_interrupted_background_answer_is_the_one_written_without_interruption(prompts, sampling):
    async def body(worker):
        endless = tuple((token, float("-inf")) for token in worker.batch.tokenizer.eog_ids)
        long = Sampling(max_tokens=150, logit_bias=endless, **sampling)
        request = GenerationRequest(Prompt(prompts[2], (), False), long)
        expected = await answer(worker, request)
        others = [asyncio.ensure_future(answer(worker, request, priority="background")) for _ in range(4)]
        while sum(r.tokens > 0 for r in worker.snapshot().requests) < 4:
            await asyncio.sleep(0)
        await answer(worker, asked(prompts[1], max_tokens=3))
        found = [await other for other in others]
        assert worker.snapshot().totals.evicted >= 1
        assert [a[:2] for a in found] == [expected[:2]] * 4

    asyncio.run(with_worker(body, min_chunk=16, max_chunk=16))


def test_clients_that_come_and_go_get_their_own_answers_and_no_error(prompts):
    """64 clients, mixed prompts, every third leaves in the middle; whoever stays gets what he would get alone."""

    async def body(worker):
        rng = random.Random(64)
        sizes = [rng.randint(1, 30) for _ in range(64)]
        expected = [(await answer(worker, asked(ids, 0, 30)))[0] for ids in prompts]

        async def client(i):
            await asyncio.sleep(rng.random() * 0.5)
            ids, priority = prompts[i % len(prompts)], "background" if i % 5 == 0 else "interactive"
            request = asked(ids, max_tokens=sizes[i])
            if i % 3 == 0:
                async with worker.generate(request, client=str(i), priority=priority) as stream:
                    for _ in range(rng.randint(1, 4)):
                        await stream.next(0.2)
                return None
            tokens, _, end = await answer(worker, request, client=str(i), priority=priority)
            assert tokens == expected[i % len(prompts)][: sizes[i]]
            return end.reason

        reasons = await asyncio.gather(*[client(i) for i in range(64)])
        assert len([r for r in reasons if r]) == 42
        while worker.snapshot().requests:
            await asyncio.sleep(0.01)
        totals = worker.snapshot().totals
        assert totals.failed == totals.breaks == totals.refused == 0

    asyncio.run(with_worker(body, min_chunk=16, max_chunk=16))


def test_a_prompt_that_does_not_fit_is_refused_and_leaves_the_others_alone(prompts):
    async def body(worker):
        other = asyncio.ensure_future(answer(worker, asked(prompts[0])))
        async with worker.generate(asked(list(range(300)) * 4)) as stream:
            events = [event async for event in stream]
        assert isinstance(events[-1], Failed) and not isinstance(events[-1].error, Overloaded)
        assert "1200" in str(events[-1].error) and "1024" in str(events[-1].error)
        assert (await other)[2].stats.completion_tokens > 0

    asyncio.run(with_worker(body))
