"""Metrics: BLEU, chrF and TER; word and phoneme error rate; ROUGE; accuracy and F1; perplexity.

Every metric is a ``Metric`` object in the registry ``METRICS`` (recipe key ``evaluation.metrics``). To add a metric,
register it in the file it belongs to.
"""

from regard.metrics.base import Comparison, Metric, MetricResult
from regard.metrics.scoring import METRICS, MODEL_METRICS, TEXT_METRICS, compare, score

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
