"""Metrics: BLEU, chrF and TER; ROUGE; word and phoneme error rate; accuracy and F1; perplexity.

Every metric is a ``Metric`` object in the registry ``METRICS`` (recipe key ``evaluation.metrics``). To add a metric,
register it in the file it belongs to.
"""

# Importing these modules registers their metrics. The order is that of lists of metrics.
# isort: off
from regard.metrics import sacrebleu, rouge_and_error_rates, accuracy_and_perplexity  # noqa: F401
from regard.metrics.base import METRICS, Comparison, Metric, MetricResult, compare, score
# isort: on

MODEL_METRICS = {name for name, metric in METRICS.items() if metric.scored_on == "model"}
"""metrics that only a model can compute, not from texts"""

TEXT_METRICS = tuple(name for name, metric in METRICS.items() if metric.scored_on == "text")
"""metrics of output texts against reference texts"""

__all__ = [
    "METRICS",
    "MODEL_METRICS",
    "TEXT_METRICS",
    "Comparison",
    "Metric",
    "MetricResult",
    "compare",
    "score",
]
