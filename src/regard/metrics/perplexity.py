"""Perplexity: exp of the mean negative log-probability; between how many equal choices a model wavers, on average.

No text shows it, so it is made of counts that the model gives: for each line the sum of the negative
log-probabilities, and over how many tokens or words.
"""

import math
from collections.abc import Sequence

from regard.metrics.base import CountMetric, Lines
from regard.metrics.bootstrap import Counts, Floats


def _perplexity(sums: Floats) -> float:
    total, count = sums.tolist()
    return math.exp(min(total / count, 700.0))  # beyond, a float has no room


def _impossible(systems: Sequence[Lines], references: Lines) -> list[Counts]:
    raise AssertionError("perplexity is counted by the model itself")


TOKENS = CountMetric(
    "perplexity", "perplexity per token", _impossible, _perplexity, "unit:token", False
)
WORDS = CountMetric(
    "word_perplexity", "perplexity per word", _impossible, _perplexity, "unit:word", False
)
LIKELIHOODS = (TOKENS, WORDS)
