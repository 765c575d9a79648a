"""How good translations are: BLEU, chrF and TER; for sounds, word and phoneme error rate."""

from regard.score.measures import compare, score
from regard.score.result import Comparison, Result

__all__ = ["Comparison", "Result", "compare", "score"]
