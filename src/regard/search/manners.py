"""Manners of beam search: how a hypothesis is scored by its length, and when a sentence is done.

The hypotheses that grow are the same in all of them; they differ in which of the finished ones is best and in when
to stop looking for better ones.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard import recipe
from regard.search.hypothesis import Penalty, length_penalty
from regard.search.rules import NEVER


@dataclass(frozen=True)
class Standing:
    """How the sentences stand after a step."""

    live: Float[Tensor, "sentences"]
    """the best log-probability of a hypothesis that goes on"""
    scores: Float[Tensor, "sentences beam"]
    """the best finished hypotheses, ``NEVER`` where there are fewer"""
    length: int
    """of the hypotheses that go on"""
    longest: Float[Tensor, "sentences"]
    """the length penalty of the longest sequence allowed"""


class Paper:
    """((5 + length) / 6) ** alpha. Stops when nothing better can come, or when enough are finished and none leads.

    With a small beam, poor hypotheses can fill it while the best one is still on its way: it waits for a leader.
    """

    penalty: Penalty = staticmethod(length_penalty)
    forces_end = False
    """whether END is free at the limit, and nothing else may come there"""
    cuts_at_limit = False
    """whether a hypothesis is finished, without END, by the last word there is room for: no step asks for its END"""

    @classmethod
    def done(cls, now: Standing, alpha: float, nbest: int) -> Bool[Tensor, "sentences"]:
        wanted = now.scores[:, nbest - 1]
        hopeless = now.live / now.longest <= wanted
        leading = now.live / cls.penalty(now.length, alpha) > wanted
        return hopeless | ((now.scores[:, -1] > NEVER) & ~leading)


def power(length: int, alpha: float) -> float:
    """length ** alpha, END counted."""
    return float(length**alpha)


class Transformers(Paper):
    """length ** alpha, and the stop, of ``generate(early_stopping=False)`` in Hugging Face's transformers.

    Stops when ``beam`` hypotheses are finished and no live one, scored at its present length, is ahead of the worst
    of them. At the limit every hypothesis is closed by an END that costs nothing (``forced_eos_token_id``).
    """

    penalty: Penalty = staticmethod(power)
    forces_end = True

    @classmethod
    def done(cls, now: Standing, alpha: float, nbest: int) -> Bool[Tensor, "sentences"]:
        worst = now.scores[:, -1]
        nothing = torch.isneginf(now.live)
        return nothing | ((worst > NEVER) & (now.live / cls.penalty(now.length, alpha) <= worst))


class CTranslate2(Paper):
    """length ** alpha, and the stop, of CTranslate2: at ``beam`` finished hypotheses, whatever is still on its way.

    Where length is no matter it stops when nothing better can come. At the limit hypotheses are given as they stand.
    """

    penalty: Penalty = staticmethod(power)
    cuts_at_limit = True

    @classmethod
    def done(cls, now: Standing, alpha: float, nbest: int) -> Bool[Tensor, "sentences"]:
        if alpha == 0:
            return now.live <= now.scores[:, nbest - 1]
        return torch.isneginf(now.live) | (now.scores[:, -1] > NEVER)


MANNERS: dict[recipe.Manner, type[Paper]] = {
    "paper": Paper,
    "transformers": Transformers,
    "ctranslate2": CTranslate2,
}
