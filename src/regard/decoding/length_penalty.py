"""Manners of beam search: how a hypothesis is scored by its length, and when a sentence is done.

The hypotheses that grow are the same in all of them; they differ in which of the finished ones is best and in when
to stop looking for better ones.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.decoding.hypotheses import NEG_INF, Penalty, gnmt_length_penalty
from regard.recipe import Registry


@dataclass(frozen=True)
class BeamState:
    """How the sentences stand after a step."""

    live: Float[Tensor, "sentences"]
    """the best log-probability of a hypothesis that goes on"""
    scores: Float[Tensor, "sentences beam"]
    """the best finished hypotheses, ``NEG_INF`` where there are fewer"""
    length: int
    """of the hypotheses that go on"""
    longest: Float[Tensor, "sentences"]
    """the length penalty of the longest sequence allowed"""


LENGTH_NORMALIZATIONS: Registry[type["GNMT"]] = Registry("decoding.length_normalization")
_OPTIONS = ("decoding.length_penalty",)


@LENGTH_NORMALIZATIONS.register("gnmt", options=_OPTIONS)
class GNMT:
    """((5 + length) / 6) ** length_penalty. Stops when nothing better can come, or when enough are finished and none leads.

    With a small beam, poor hypotheses can fill it while the best one is still on its way: it waits for a leader.
    """

    penalty: Penalty = staticmethod(gnmt_length_penalty)
    forces_end = False
    """whether EOS is free at the limit, and nothing else may come there"""
    cuts_at_limit = False
    """whether a hypothesis is finished, without EOS, by the last word there is room for: no step asks for its EOS"""

    @classmethod
    def done(cls, now: BeamState, length_penalty: float, nbest: int) -> Bool[Tensor, "sentences"]:
        wanted = now.scores[:, nbest - 1]
        hopeless = now.live / now.longest <= wanted
        leading = now.live / cls.penalty(now.length, length_penalty) > wanted
        return hopeless | ((now.scores[:, -1] > NEG_INF) & ~leading)


def power(length: int, length_penalty: float) -> float:
    """length ** length_penalty, EOS counted."""
    return float(length**length_penalty)


@LENGTH_NORMALIZATIONS.register("transformers", options=_OPTIONS)
class Transformers(GNMT):
    """length ** length_penalty, and the stop, of ``generate(early_stopping=False)`` in Hugging Face's transformers.

    Stops when ``beam`` hypotheses are finished and no live one, scored at its present length, is ahead of the worst
    of them. At the limit every hypothesis is closed by an EOS that costs nothing (``forced_eos_token_id``).
    """

    penalty: Penalty = staticmethod(power)
    forces_end = True

    @classmethod
    def done(cls, now: BeamState, length_penalty: float, nbest: int) -> Bool[Tensor, "sentences"]:
        worst = now.scores[:, -1]
        nothing = torch.isneginf(now.live)
        return nothing | (
            (worst > NEG_INF) & (now.live / cls.penalty(now.length, length_penalty) <= worst)
        )


@LENGTH_NORMALIZATIONS.register("ctranslate2", options=_OPTIONS)
class CTranslate2(GNMT):
    """length ** length_penalty, and the stop, of CTranslate2: at ``beam`` finished hypotheses, whatever is still on its way.

    Where length is no matter it stops when nothing better can come. At the limit hypotheses are given as they stand.
    """

    penalty: Penalty = staticmethod(power)
    cuts_at_limit = True

    @classmethod
    def done(cls, now: BeamState, length_penalty: float, nbest: int) -> Bool[Tensor, "sentences"]:
        if length_penalty == 0:
            return now.live <= now.scores[:, nbest - 1]
        return torch.isneginf(now.live) | (now.scores[:, -1] > NEG_INF)
