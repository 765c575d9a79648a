"""Perplexity: exp of the mean negative log-probability; between how many equal choices a model wavers, on average.

No text shows it, so it is made of counts that the model gives: for each line the sum of the negative
log-probabilities, and over how many tokens or words.
"""

import math
from collections.abc import Sequence

from regard.score.bootstrap import Counts, Floats
from regard.score.counted import Counted, Lines


def _perplexity(sums: Floats) -> float:
    total, count = sums.tolist()
    return math.exp(min(total / count, 700.0))  # beyond, a float has no room


def _impossible(systems: Sequence[Lines], references: Lines) -> list[Counts]:
    raise AssertionError("perplexity is counted by the model itself")


TOKENS = Counted(
    "perplexity", "perplexity per token", _impossible, _perplexity, "unit:token", False
)
WORDS = Counted(
    "word_perplexity", "perplexity per word", _impossible, _perplexity, "unit:word", False
)
LIKELIHOODS = (TOKENS, WORDS)
