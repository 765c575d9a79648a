"""What is counted, for Prometheus. No text, no key and no address of a client is among it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The counts of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "regard_requests", "Requests answered.", ["route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "regard_request_seconds",
            "From the first byte asked to the last answered.",
            ["route"],
            buckets=LATENCIES,
            registry=registry,
        )
        self.batch_sentences = Histogram(
            "regard_batch_sentences", "Sentences in a batch.", buckets=SIZES, registry=registry
        )
        self.batch_seconds = Histogram(
            "regard_batch_seconds", "Time of a batch.", buckets=LATENCIES, registry=registry
        )
        self.queue = Gauge("regard_queue_sentences", "Sentences that wait.", registry=registry)
        self.sentences = Counter("regard_sentences", "Sentences translated.", registry=registry)
        self.tokens = Counter("regard_tokens", "Target tokens of them.", registry=registry)
