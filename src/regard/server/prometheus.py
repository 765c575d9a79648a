"""The Prometheus metrics of ``/metrics``. They contain no text, no API key and no client address."""

from __future__ import annotations

import os
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The metrics of one server, in their own registry.

    If the environment variable PROMETHEUS_MULTIPROC_DIR is set, all processes of the server share them in its files.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "regard_requests", "Number of requests.", ["route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "regard_request_seconds",
            "Time from the start of a request to the end of its response.",
            ["route"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.batch_sentences = Histogram(
            "regard_batch_sentences",
            "Number of sentences in a batch.",
            ["model"],
            buckets=SIZE_BUCKETS,
            registry=registry,
        )
        self.batch_seconds = Histogram(
            "regard_batch_seconds",
            "Time to translate a batch.",
            ["model"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.queue = Gauge(
            "regard_queue_sentences",
            "Number of sentences in the queue.",
            ["model"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.sentences = Counter(
            "regard_sentences", "Number of translated sentences.", ["model"], registry=registry
        )
        self.tokens = Counter(
            "regard_tokens", "Number of generated target tokens.", ["model"], registry=registry
        )
        self.loaded = Gauge(
            "regard_model_loaded",
            "Number of processes in which the model is in memory.",
            ["model"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.loads = Counter(
            "regard_model_loads", "How often the model was loaded.", ["model"], registry=registry
        )

    def of_model(self, name: str) -> ModelMetrics:
        return ModelMetrics(
            self.batch_sentences.labels(name),
            self.batch_seconds.labels(name),
            self.queue.labels(name),
            self.sentences.labels(name),
            self.tokens.labels(name),
        )

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus; of all processes, if they share them."""
        if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            return generate_latest(self.registry)
        merged = CollectorRegistry()
        MultiProcessCollector(merged)
        return generate_latest(merged)


class ModelMetrics(NamedTuple):
    """The metrics of one model."""

    batch_sentences: Histogram
    batch_seconds: Histogram
    queue: Gauge
    sentences: Counter
    tokens: Counter
