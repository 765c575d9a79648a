"""Prometheus metrics. They contain no text, no API key and no client address."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The metrics of one server, in a registry of their own."""

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
            buckets=SIZE_BUCKETS,
            registry=registry,
        )
        self.batch_seconds = Histogram(
            "regard_batch_seconds",
            "Time to translate a batch.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.queue = Gauge(
            "regard_queue_sentences", "Number of sentences in the queue.", registry=registry
        )
        self.sentences = Counter(
            "regard_sentences", "Number of translated sentences.", registry=registry
        )
        self.tokens = Counter(
            "regard_tokens", "Number of generated target tokens.", registry=registry
        )
