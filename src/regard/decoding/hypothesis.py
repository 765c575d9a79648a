"""The input and output of a search: phrases and hypotheses, as plain data.

This module does not import torch, so that the native decoder can be used without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

NEG_INF = -inf
"""log-probability of an impossible token or hypothesis"""

# ---------------------------------------------------------------------------------------------
# Phrases that the output must contain


class Tokenization(NamedTuple):
    """One way to tokenize a phrase."""

    tokens: tuple[int, ...]
    boundary_before: bool = False
    """may only follow BOS or a token that ends a word"""
    boundary_after: bool = False
    """may only be followed by EOS or a token that begins a word"""

    @property
    def steps(self) -> int:
        """Largest number of tokens until it counts as generated."""
        return len(self.tokens) + self.boundary_after


class Phrase(NamedTuple):
    """A phrase to generate ``times`` times, in any of its tokenizations, one of which needs no boundary before it."""

    tokenizations: tuple[Tokenization, ...]
    times: int = 1
    free: bool = False
    """Its tokens cost no more than the most probable token. For text that no model finds probable, such as
    placeholders. Scores reflect this; log-probabilities are the model's."""

    @property
    def steps(self) -> int:
        return max(tokenization.steps for tokenization in self.tokenizations)


def tokens_needed(phrases: Sequence[Phrase]) -> int:
    """Number of tokens that suffice to generate all phrases."""
    return sum(phrase.steps * phrase.times for phrase in phrases)


# ---------------------------------------------------------------------------------------------
# Finished hypotheses


@dataclass(frozen=True)
class Hypothesis:
    """One output sequence and its probability under the model."""

    tokens: list[int]
    """without BOS and EOS"""
    log_probability: float
    """of the whole sequence: the sum of ``token_log_probabilities``"""
    score: float
    """What hypotheses are ranked by. Beam search: the total log-probability divided by the length penalty, plus the
    bonus of the logits processors. Mask-predict: the mean log-probability."""
    token_log_probabilities: list[float]
    """of each token, then of EOS if it was generated"""
    finished: bool
    """whether EOS was generated or the length was given; False if the sequence was cut at its maximum length"""
