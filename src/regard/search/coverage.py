"""Coverage: a translation that has looked at every word of its source is better (Wu et al. 2016, equation 14)."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.search.guides import Guide
from regard.search.live import Continuations, Live
from regard.search.rules import S

Looked = Callable[[], Float[Tensor, "sentences beams S"]]
"""where each hypothesis looked in the step just taken, as shares that sum to 1"""


class Coverage(Guide):
    """beta * sum over the source words of log(min(1, all attention the word got)), added to the score.

    It ranks what is finished; which hypotheses grow is the model's business alone, as in the paper.
    """

    def __init__(self, beta: float, words: Bool[Tensor, "sentences S"], looked: Looked) -> None:
        assert beta >= 0
        self.beta = beta
        self.words = words
        self.looked = looked
        self.got = torch.zeros(*words.shape, device=words.device)[:, None]

    def allow(
        self, live: Live[S], log_probabilities: Float[Tensor, "sentences beams V"]
    ) -> Float[Tensor, "sentences beams V"]:
        self.got = self.got + self.looked()
        return log_probabilities

    def bonus(self, live: Live[S]) -> Float[Tensor, "sentences beams"]:
        covered = self.got.clamp(1e-9, 1).log().masked_fill(~self.words[:, None], 0.0)
        return self.beta * covered.sum(2).double()

    def go_on(self, kept: Int[Tensor, "kept"], chosen: Continuations) -> None:
        self.got = self.got[kept.unsqueeze(1), chosen.beams[kept]]
        self.words = self.words[kept]
