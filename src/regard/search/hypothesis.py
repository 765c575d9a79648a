"""What a search gives back."""

from collections.abc import Callable
from dataclasses import dataclass

Penalty = Callable[[int, float], float]
"""length, END counted, and alpha to what a log-probability is divided by"""


def length_penalty(length: int, alpha: float) -> float:
    """((5 + length) / 6) ** alpha, length counting END: the paper's, from Wu et al. (2016)."""
    return float(((5 + length) / 6) ** alpha)


@dataclass(frozen=True)
class Hypothesis:
    """One output sequence and how probable the model finds it."""

    tokens: list[int]
    """without START and END"""
    log_probability: float
    """of the whole: the sum of ``token_log_probabilities``"""
    score: float
    """``log_probability`` over the length penalty, and a guide's bonus; or their mean: what the search is best in"""
    token_log_probabilities: list[float]
    """of each token, then END's if it was said"""
    finished: bool
    """END was said, or the length was known; False where the sequence was cut off at its greatest length"""

    @classmethod
    def of(
        cls,
        tokens: list[int],
        log_probabilities: list[float],
        ranked_by: float,
        alpha: float,
        penalty: Penalty = length_penalty,
        bonus: float = 0.0,
    ) -> "Hypothesis":
        """ranked_by is the total that the search ranks by: the sum, unless a guide lets it off some of it."""
        return cls(
            tokens=tokens,
            log_probability=sum(log_probabilities, 0.0),
            score=ranked_by / penalty(max(1, len(log_probabilities)), alpha) + bonus,
            token_log_probabilities=log_probabilities,
            finished=len(log_probabilities) > len(tokens),
        )
