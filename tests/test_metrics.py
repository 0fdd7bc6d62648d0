"""Metrics and the request log: what a scripted engine does is what they tell, and asking wakes nothing."""

import asyncio
import json

import structlog
from fake_batch import BROKEN, FakeBatch, Script, request_of
from prometheus_client.parser import text_string_to_metric_families

from tandem.serve.events import Failed, Finished
from tandem.serve.lifecycle import SleepPolicy
from tandem.serve.metrics import Metrics, status
from tandem.serve.observe import ObservedApp, ObservedWorker
from tandem.serve.scheduler import Limits
from tandem.serve.worker import Worker

TEXT = "abcd" * 10  # ten tokens


def samples(metrics: Metrics) -> dict[tuple, float]:
    """Values by name and labels."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


async def observed(script=TEXT, limits=None, texts=False, **options):
    worker = Worker(lambda: FakeBatch(script, **options), limits or Limits())
    metrics = Metrics(worker.snapshot, "tiny", "1.0")
    await worker.start()
    await worker.wait_loaded()
    return worker, metrics, ObservedWorker(worker, metrics, "tiny", texts)


def run(scenario):
    """Runs a coroutine; returns its value and the lines that it logged."""
    with structlog.testing.capture_logs() as logged:
        return asyncio.run(scenario()), logged


def test_counters_and_times_are_those_of_what_happened():
    async def scenario():
        worker, metrics, seen = await observed(Script(TEXT, reused=3), decode_s=0.01)
        for _ in range(2):
            async with seen.generate(request_of(prompt_tokens=8)) as stream:
                assert isinstance([event async for event in stream][-1], Finished)
        found = samples(metrics)
        await worker.stop(1)
        return found

    found, logged = run(scenario)
    assert found["tandem_answers_total", "eos"] == 2
    assert found["tandem_tokens_total", "prompt"] == 16
    assert found["tandem_tokens_total", "reused"] == 6
    assert found["tandem_tokens_total", "completion"] == 20
    assert found["tandem_state", "loaded"] == 1 and found["tandem_state", "sleeping"] == 0
    assert found["tandem_memory_bytes", "weights"] == 1 << 20
    assert found["tandem_running",] == 0 and found["tandem_queue_length", "interactive"] == 0
    assert found["tandem_first_token_seconds_count",] == 2
    assert found["tandem_first_token_seconds_sum",] > 0.02
    assert 0 < found["tandem_inter_token_seconds_sum",]
    assert found["tandem_inter_token_seconds_bucket", "0.0025"] == 0, "a token took 10 ms"
    assert found["tandem_info", "tiny", "1.0"] == 1
    answers = [line for line in logged if line["event"] == "answer"]
    assert len(answers) == 2
    assert {key: answers[0][key] for key in ("model", "prompt_tokens", "reused", "tokens", "finish")} == {
        "model": "tiny",
        "prompt_tokens": 8,
        "reused": 3,
        "tokens": 10,
        "finish": "eos",
    }
    assert answers[0]["first_token_s"] > 0.009 and 0 < answers[0]["tok_s"] < 110


def test_a_reader_who_leaves_is_counted_and_logged_once():
    async def scenario():
        worker, metrics, seen = await observed(TEXT * 100, decode_s=0.005)
        async with seen.generate(request_of()) as stream:
            async for _ in stream:
                if stream._watch.tokens >= 3:
                    break
        while worker.snapshot().running:
            await asyncio.sleep(0.01)
        found = samples(metrics)
        await worker.stop(1)
        return found

    found, logged = run(scenario)
    assert found["tandem_cancelled_total",] == 1
    [line] = [line for line in logged if line["event"] == "answer"]
    assert line["finish"] == "cancelled" and line["tokens"] == 3


def test_an_answer_that_fails_is_a_warning_with_its_error():
    async def scenario():
        worker, metrics, seen = await observed(Script(TEXT, decode_error=BROKEN, error_at=4))
        events = [event async for event in seen.generate(request_of())]
        await worker.stop(1)
        return events, samples(metrics)

    (events, found), logged = run(scenario)
    assert isinstance(events[-1], Failed)
    assert found["tandem_failed_total",] == 1
    [line] = [line for line in logged if line["event"] == "answer"]
    assert line["finish"] == "failed" and line["log_level"] == "warning" and line["error"] is events[-1].error


def test_texts_are_in_the_log_only_when_asked_for():
    async def scenario(texts):
        worker, metrics, seen = await observed(texts=False)
        seen._texts = texts
        if texts:
            worker._batch.tokenizer = type("T", (), {"decode": staticmethod(lambda ids: f"prompt of {len(ids)}")})
        async for _ in seen.generate(request_of()):
            pass
        await worker.stop(1)

    _, logged = run(lambda: scenario(False))
    assert "abcd" not in json.dumps(logged, default=str)
    _, logged = run(lambda: scenario(True))
    [line] = [line for line in logged if line["event"] == "answer"]
    assert line["prompt"] == "prompt of 5" and line["answer"] == TEXT


def test_metrics_and_status_of_a_sleeping_model_do_not_wake_it():
    async def scenario():
        worker, metrics, seen = await observed(limits=Limits(sleep=SleepPolicy(deep_after_s=0.05)))
        async for _ in seen.generate(request_of()):
            pass
        while worker.snapshot().state != "sleeping":
            await asyncio.sleep(0.01)
        for _ in range(20):
            metrics.text()
            told = status(worker.snapshot(), "tiny")
            await asyncio.sleep(0.005)
        found = samples(metrics)
        wakes = worker._batch.wakes
        await worker.stop(1)
        return told, found, wakes

    (told, found, wakes), _ = run(scenario)
    assert wakes == 0 and told["state"] == "sleeping" and found["tandem_state", "sleeping"] == 1
    assert told["sleep_level"] == 2 and sum(told["memory"].values()) == 0
    assert found["tandem_sleeps_total",] == 1


def test_status_shows_answers_while_they_are_written_and_no_text():
    async def scenario():
        worker, metrics, seen = await observed("s3cret text " * 100, decode_s=0.005)
        stream = seen.generate(request_of(prompt_tokens=7))
        for _ in range(5):
            await stream.next()
        told = status(worker.snapshot(), "tiny")
        await stream.aclose()
        await worker.stop(1)
        return told

    told, _ = run(scenario)
    [slot] = told["slots"]
    assert slot["phase"] == "decode" and slot["prompt_tokens"] == 7 and slot["tokens"] >= 1
    assert told["running"] == 1 and told["tokens_per_s"] > 0 and "s3cret" not in json.dumps(told)


async def call(app, path, method="GET"):
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    await app({"type": "http", "path": path, "method": method, "headers": []}, receive, send)
    return sent


def test_requests_are_counted_by_known_endpoints_and_named():
    async def scenario():
        worker, metrics, seen = await observed()

        async def app(scope, receive, send):
            if scope["path"] == "/v1/chat/completions":
                async for _ in seen.generate(request_of()):
                    pass
            status = 500 if scope["path"] == "/boom" else 200
            if scope["path"] == "/raise":
                raise RuntimeError("x")
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        watched = ObservedApp(app, metrics, frozenset({"/v1/chat/completions", "/v1/responses", "/health"}))
        sent = await call(watched, "/v1/chat/completions", "POST")
        for path in ("/v1/responses/resp_1/input", "/health", "/boom", *(f"/{n}" for n in range(50))):
            await call(watched, path)
        try:
            await call(watched, "/raise")
        except RuntimeError:
            pass
        await worker.stop(1)
        return dict(sent[0]["headers"])[b"x-request-id"].decode(), samples(metrics)

    (name, found), logged = run(scenario)
    assert found["tandem_requests_total", "/v1/chat/completions", "200"] == 1
    assert found["tandem_requests_total", "/v1/responses", "200"] == 1
    assert found["tandem_requests_total", "other", "200"] == 50, "paths of clients make no series of their own"
    assert found["tandem_requests_total", "other", "500"] == 2
    assert found["tandem_requests_open",] == 0
    [answer] = [line for line in logged if line["event"] == "answer"]
    assert answer["id"] == name and answer["endpoint"] == "/v1/chat/completions"
    assert [line["status"] for line in logged if line["event"] == "request" and line["log_level"] == "info"] == [
        500,
        500,
    ]


def test_watching_costs_microseconds_a_token():
    import time

    async def scenario():
        worker, metrics, seen = await observed("abcd" * 1000, ctx=100_000)
        times = []
        for watched in (seen, worker, seen, worker):
            began = time.process_time()
            async for _ in watched.generate(request_of()):
                pass
            times.append((time.process_time() - began) / 1000)
        await worker.stop(1)
        return times

    times, _ = run(scenario)
    extra_s = min(times[0], times[2]) - min(times[1], times[3])
    assert extra_s < 50e-6, f"{extra_s * 1e6:.1f} µs a token"
