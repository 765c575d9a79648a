"""How good answers are: BLEU, chrF and TER; error rates of sounds; ROUGE; accuracy and F1; perplexity."""

from regard.metrics.base import Comparison, Result
from regard.metrics.scoring import MODEL_METRICS, compare, score

__all__ = ["MODEL_METRICS", "Comparison", "Result", "compare", "score"]
