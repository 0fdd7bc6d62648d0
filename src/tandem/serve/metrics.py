"""What `/metrics` and `/status` tell: counters and times seen by the HTTP side, and the worker's own numbers.

In: observations of requests, and the worker's snapshot, which never wakes or waits. Out: Prometheus text, plain data.
"""

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector

from tandem.serve.snapshot import WorkerSnapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("loading", "loaded", "sleeping", "failed", "stopping")
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)


class Metrics:
    """The numbers of one server. take_snapshot: of its worker.

    Requests are counted by endpoint and status as they end; times are those that a client sees: from the request to
    the first token that is read, and between two deliveries, for each token of the later one.
    """

    def __init__(self, take_snapshot: Callable[[], WorkerSnapshot], model: str, version: str):
        self._take_snapshot = take_snapshot
        self.registry = CollectorRegistry(auto_describe=False)
        self._requests = Counter(
            "tandem_requests", "HTTP requests that have ended", ("endpoint", "status"), registry=self.registry
        )
        self._open = Gauge("tandem_requests_open", "HTTP requests being answered", registry=self.registry)
        self._first = Histogram(
            "tandem_first_token_seconds",
            "from the request to its first token",
            buckets=_FIRST_TOKEN_S,
            registry=self.registry,
        )
        self._between = Histogram(
            "tandem_inter_token_seconds", "between tokens of an answer", buckets=_INTER_TOKEN_S, registry=self.registry
        )
        about = Gauge("tandem_info", "1; what runs here", ("model", "version"), registry=self.registry)
        about.labels(model, version).set(1)
        self.registry.register(_SnapshotCollector(take_snapshot))
        ProcessCollector(registry=self.registry)

    def request_began(self) -> None:
        """One more HTTP request is open."""
        self._open.inc()

    def request_ended(self, endpoint: str, status: int) -> None:
        """An HTTP request has ended; endpoint: one of a fixed set of paths. status 0: the client left before one."""
        self._open.dec()
        self._requests.labels(endpoint, str(status)).inc()

    def first_token(self, seconds: float) -> None:
        """An answer's first token was read that long after its request."""
        self._first.observe(seconds)

    def later_tokens(self, seconds: float, tokens: int) -> None:
        """More tokens of an answer were read that long after those before."""
        self._between.observe(seconds / tokens)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


class _SnapshotCollector:
    """The worker's numbers, read at the moment they are asked for."""

    def __init__(self, take_snapshot: Callable[[], WorkerSnapshot]):
        self._take_snapshot = take_snapshot

    def collect(self) -> Iterable:
        now = self._take_snapshot()
        yield _labelled(
            GaugeMetricFamily,
            "tandem_state",
            "1 for the state of the model",
            "state",
            {name: float(now.state == name) for name in STATES},
        )
        yield _labelled(
            GaugeMetricFamily,
            "tandem_queue_length",
            "requests that wait for a sequence",
            "priority",
            {"interactive": now.queued - now.queued_background, "background": now.queued_background},
        )
        yield GaugeMetricFamily("tandem_running", "answers being written", now.running)
        yield GaugeMetricFamily(
            "tandem_tokens_per_second", "tokens written of late, all answers together", now.tokens_per_s
        )
        yield GaugeMetricFamily("tandem_sleep_level", "0: awake, 1: caches are freed, 2: weights too", now.sleep_level)
        yield _labelled(GaugeMetricFamily, "tandem_memory_bytes", "memory of the model by role", "role", now.memory)
        yield from self._counters(now.totals)

    def _counters(self, totals: Any) -> Iterable:
        yield _labelled(CounterMetricFamily, "tandem_answers", "answers that have ended", "finish", totals.finished)
        yield CounterMetricFamily("tandem_cancelled", "answers whose reader left", totals.finished.get("cancelled", 0))
        yield _labelled(
            CounterMetricFamily,
            "tandem_tokens",
            "tokens of prompts (reused: without computing them) and answers",
            "kind",
            {"prompt": totals.prompt_tokens, "reused": totals.reused_tokens, "completion": totals.completion_tokens},
        )
        plain = (
            ("accepted", totals.accepted, "requests that were accepted"),
            ("refused", totals.refused, "requests that were refused as overloaded"),
            ("failed", totals.failed, "accepted requests that ended in an error"),
            ("evicted", totals.evicted, "background answers that gave way"),
            ("drafted_tokens", totals.drafted, "tokens that were guessed"),
            ("draft_accepted_tokens", totals.draft_accepted, "guessed tokens that the model agreed with"),
            ("decode_rounds", totals.rounds, "decode passes, counted for each answer"),
            ("prefill_seconds", totals.prefill_s, "time spent on prompts"),
            ("decode_seconds", totals.decode_s, "time spent on answers"),
            ("sleeps", totals.sleeps, "times that memory was given back"),
            ("wakes", totals.wakes, "times that the model was made ready"),
            ("load_failures", totals.load_failures, "times that this failed"),
            ("engine_breaks", totals.breaks, "times that the engine failed while running"),
        )
        for name, value, about in plain:
            yield CounterMetricFamily(f"tandem_{name}", about, value)


def _labelled(family: type, name: str, about: str, label: str, values: Any) -> Any:
    made = family(name, about, labels=(label,))
    for key, value in values.items():
        made.add_metric((str(key),), value)
    return made


def status(snapshot: WorkerSnapshot, model: str) -> dict[str, Any]:
    """The live state as the page shows it: load, speed, acceptance and memory; no text of anybody."""
    totals = snapshot.totals
    return {
        "model": model,
        "state": snapshot.state,
        "reason": snapshot.reason,
        "sleep_level": snapshot.sleep_level,
        "queued": snapshot.queued,
        "running": snapshot.running,
        "tokens_per_s": round(snapshot.tokens_per_s, 2),
        "acceptance": round(totals.draft_accepted / totals.drafted, 4) if totals.drafted else None,
        "drafted": totals.drafted,
        "draft_accepted": totals.draft_accepted,
        "prompt_tokens": totals.prompt_tokens,
        "reused_tokens": totals.reused_tokens,
        "completion_tokens": totals.completion_tokens,
        "cancelled": totals.finished.get("cancelled", 0),
        "failed": totals.failed,
        "memory": dict(snapshot.memory),
        "slots": [
            {
                "phase": r.phase,
                "priority": r.priority,
                "prompt_done": r.prompt_done,
                "prompt_tokens": r.prompt_tokens,
                "tokens": r.tokens,
                "age_s": round(r.age_s, 1),
            }
            for r in snapshot.requests
        ],
    }
