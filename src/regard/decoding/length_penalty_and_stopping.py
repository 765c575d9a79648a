"""Length normalization and stopping rules of beam search.

Active hypotheses grow in the same way under every rule. The rules differ in how a finished hypothesis is scored by its
length, and in when the search for better ones stops.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.recipe import Registry

Penalty = Callable[[int, float], float]
"""Length (EOS counted) and exponent to the divisor of a hypothesis's log-probability."""
LengthPenalty = Callable[[int], float]
"""the same with a given exponent"""


def gnmt_length_penalty(length: int, length_penalty: float) -> float:
    """((5 + length) / 6) ** length_penalty, where length counts EOS (Wu et al. 2016, equation 14)."""
    return float(((5 + length) / 6) ** length_penalty)


def power_length_penalty(length: int, length_penalty: float) -> float:
    """length ** length_penalty, where length counts EOS."""
    return float(length**length_penalty)


@dataclass(frozen=True)
class BeamState:
    """The state of each sentence after a step, as far as the stopping rule needs it."""

    best_active: Float[Tensor, "sentences"]
    """largest log-probability of an active hypothesis"""
    finished_scores: Float[Tensor, "sentences beam"]
    """scores of the best finished hypotheses, best first; minus infinity where there are fewer"""
    length: int
    """tokens of the active hypotheses"""
    max_penalty: Float[Tensor, "sentences"]
    """length penalty of the longest sequence allowed"""


class LengthNormalization:
    """A length penalty and a stopping rule."""

    penalty: Penalty
    forces_eos = False
    """At the maximum length EOS is the only possible token, and costs nothing."""
    cuts_at_limit = False
    """A hypothesis of the maximum length is finished without EOS, so no step is run to predict its EOS."""

    @classmethod
    def penalty_with(cls, length_penalty: float) -> LengthPenalty:
        """The length penalty with this exponent."""
        return lambda length: cls.penalty(length, length_penalty)

    @classmethod
    def is_done(
        cls, state: BeamState, length_penalty: float, nbest: int
    ) -> Bool[Tensor, "sentences"]:
        """Which sentences need no further step to find their ``nbest`` best hypotheses."""
        raise NotImplementedError


LENGTH_NORMALIZATIONS: Registry[type[LengthNormalization]] = Registry(
    "decoding.length_normalization"
)
_OPTIONS = ("decoding.length_penalty",)


@LENGTH_NORMALIZATIONS.register("gnmt", options=_OPTIONS)
class GNMT(LengthNormalization):
    """((5 + length) / 6) ** length_penalty; stops when no active hypothesis can still win.

    Stops when no active hypothesis can reach a better score than the ``nbest`` finished ones, or when ``beam``
    hypotheses are finished and no active one is ahead of the ``nbest``. With a small beam, poor hypotheses may fill it
    while the best one is still active; therefore the search waits for a leader.
    """

    penalty: Penalty = staticmethod(gnmt_length_penalty)

    @classmethod
    def is_done(
        cls, state: BeamState, length_penalty: float, nbest: int
    ) -> Bool[Tensor, "sentences"]:
        to_beat = state.finished_scores[:, nbest - 1]
        hopeless = state.best_active / state.max_penalty <= to_beat
        leading = state.best_active / cls.penalty(state.length, length_penalty) > to_beat
        return hopeless | ((state.finished_scores[:, -1] > -torch.inf) & ~leading)


@LENGTH_NORMALIZATIONS.register("transformers", options=_OPTIONS)
class HuggingFaceNormalization(LengthNormalization):
    """length ** length_penalty, and the stopping rule of Hugging Face's ``generate(early_stopping=False)``.

    Stops when ``beam`` hypotheses are finished and no active one, scored at its present length, is better than the
    worst of them. At the maximum length every hypothesis ends with an EOS that costs nothing (``forced_eos_token_id``).
    """

    penalty: Penalty = staticmethod(power_length_penalty)
    forces_eos = True

    @classmethod
    def is_done(
        cls, state: BeamState, length_penalty: float, nbest: int
    ) -> Bool[Tensor, "sentences"]:
        worst = state.finished_scores[:, -1]
        no_active = torch.isneginf(state.best_active)
        no_better = state.best_active / cls.penalty(state.length, length_penalty) <= worst
        return no_active | ((worst > -torch.inf) & no_better)


@LENGTH_NORMALIZATIONS.register("ctranslate2", options=_OPTIONS)
class CTranslate2(LengthNormalization):
    """length ** length_penalty, and the stopping rule of CTranslate2: stops at ``beam`` finished hypotheses.

    With length_penalty 0, stops when no active hypothesis is better than the ``nbest`` finished ones. At the maximum
    length hypotheses are returned without EOS.
    """

    penalty: Penalty = staticmethod(power_length_penalty)
    cuts_at_limit = True

    @classmethod
    def is_done(
        cls, state: BeamState, length_penalty: float, nbest: int
    ) -> Bool[Tensor, "sentences"]:
        if length_penalty == 0:
            return state.best_active <= state.finished_scores[:, nbest - 1]
        return torch.isneginf(state.best_active) | (state.finished_scores[:, -1] > -torch.inf)
