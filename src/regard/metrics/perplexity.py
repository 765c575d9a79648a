"""Perplexity: exp of the mean negative log-probability of the tokens, or of the words.

It cannot be computed from output texts. The model provides the counts: for each line the sum of the negative
log-probabilities, and the number of tokens or words.
"""

import math
from collections.abc import Sequence

from regard.errors import RegardError
from regard.metrics.base import CountMetric, Lines, register_metric
from regard.metrics.bootstrap import Counts, Floats

MAX_EXPONENT = 700.0
"""exp of more overflows a float"""


def _perplexity(sums: Floats) -> float:
    total, count = sums.tolist()
    return math.exp(min(total / count, MAX_EXPONENT))


def _no_counts(systems: Sequence[Lines], references: Lines, sources: Lines) -> list[Counts]:
    raise RegardError("perplexity cannot be computed from texts, only by a model")


TOKEN_PERPLEXITY = register_metric(
    CountMetric(
        "perplexity",
        "perplexity per token",
        _no_counts,
        _perplexity,
        signature="unit:token",
        higher_is_better=False,
        scored_on="model",
    )
)
WORD_PERPLEXITY = register_metric(
    CountMetric(
        "word_perplexity",
        "perplexity per word",
        _no_counts,
        _perplexity,
        signature="unit:word",
        higher_is_better=False,
        scored_on="model",
    )
)
