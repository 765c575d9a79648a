"""How good answers are: BLEU, chrF and TER; error rates of sounds; ROUGE; accuracy and F1; perplexity."""

from regard.score.measures import NOT_OF_TEXT, compare, score
from regard.score.result import Comparison, Result

__all__ = ["NOT_OF_TEXT", "Comparison", "Result", "compare", "score"]
