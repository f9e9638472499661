"""What /metrics shows, in Prometheus' format."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mt_infer.requests import EngineStatistics
from mt_infer.server.served_model import ServedModels

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class ServerMetrics:
    """The numbers of one server, in a registry of their own."""

    def __init__(self, models: ServedModels) -> None:
        # Not the package's global one: several servers may live in a process.
        self._registry = CollectorRegistry()
        # Read at each scrape, so that the engines count without a dependency on Prometheus.
        self._registry.register(EngineGauges(models))
        self.requests = self._counter("mt_requests", "Requests that have ended, by their outcome", "outcome")
        self.prompt_tokens = self._counter("mt_prompt_tokens", "Tokens of prompts")
        self.generation_tokens = self._counter("mt_generation_tokens", "Generated tokens")
        self.first_token = self._histogram("mt_time_to_first_token_seconds", "From the request to its first token")
        self.per_token = self._histogram("mt_time_per_output_token_seconds", "Between the tokens of a sequence")
        self.duration = self._histogram("mt_request_duration_seconds", "From the request to its last token")

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, doc: str, *labels: str) -> Counter:
        return Counter(name, doc, ("model", *labels), registry=self._registry)

    def _histogram(self, name: str, doc: str) -> Histogram:
        return Histogram(name, doc, ("model",), buckets=SECONDS, registry=self._registry)


class RequestClock:
    """Times one request for the metrics."""

    def __init__(self, metrics: ServerMetrics, model: str, prompt_tokens: int) -> None:
        self.metrics, self.model = metrics, model
        self._start = time.monotonic()
        self._last: dict[int, float] = {}
        metrics.prompt_tokens.labels(model).inc(prompt_tokens)

    def token(self, index: int) -> None:
        """Counts and times a token of sequence number `index`."""
        now = time.monotonic()
        if not self._last:
            self.metrics.first_token.labels(self.model).observe(now - self._start)
        if index in self._last:
            self.metrics.per_token.labels(self.model).observe(now - self._last[index])
        self._last[index] = now
        self.metrics.generation_tokens.labels(self.model).inc()

    def end(self, outcome: str) -> None:
        """outcome: finished, cancelled, timeout or failed"""
        self.metrics.requests.labels(self.model, outcome).inc()
        if outcome == "finished":
            self.metrics.duration.labels(self.model).observe(time.monotonic() - self._start)


class EngineGauges(Collector):
    """What the schedulers and caches of all replicas hold at the moment, and have counted."""

    def __init__(self, models: ServedModels) -> None:
        self.models = models

    def collect(self) -> Iterable[Metric]:
        for family, rows in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, doc, value in rows:
                metric = family(name, doc, labels=["model", "replica"])
                for model in self.models.by_name.values():
                    if model.generator is not None:
                        for replica, statistics in enumerate(model.generator.engine.statistics):
                            metric.add_metric([model.name, str(replica)], value(statistics))
                yield metric


def used_ratio(statistics: EngineStatistics) -> float:
    return statistics.used_blocks / max(statistics.blocks, 1)


Rows = Sequence[tuple[str, str, Callable[[EngineStatistics], float]]]
GAUGES: Rows = (
    ("mt_sequences_running", "Sequences that are computed", attrgetter("running")),
    ("mt_sequences_waiting", "Sequences that wait for memory", attrgetter("waiting")),
    ("mt_cache_used_ratio", "Blocks of the cache that sequences use", used_ratio),
    ("mt_preemptions", "Sequences that gave up their memory", attrgetter("preemptions")),
)
COUNTERS: Rows = (
    ("mt_prefix_cache_queried_tokens", "Tokens that were looked up in the prefix cache", attrgetter("queried_tokens")),
    ("mt_prefix_cache_hit_tokens", "Tokens that were found there", attrgetter("cached_tokens")),
    ("mt_speculation_drafted_tokens", "Tokens that were guessed", attrgetter("drafted_tokens")),
    ("mt_speculation_accepted_tokens", "Guessed tokens that were right", attrgetter("accepted_tokens")),
)
