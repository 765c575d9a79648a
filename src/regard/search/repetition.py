"""A guard against repetition: no n words the same, in the same order, twice."""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.search.guides import Guide
from regard.search.live import Live
from regard.search.rules import NEVER, S


class NoRepeat(Guide):
    """No n-gram of tokens comes twice in a hypothesis (Paulus et al. 2017).

    Where nothing else may come it yields: to a prefix that repeats itself, or to a phrase that must be said.
    """

    def __init__(self, n: int) -> None:
        assert n >= 1
        self.n = n

    def allow(
        self, live: Live[S], log_probabilities: Float[Tensor, "sentences beams V"]
    ) -> Float[Tensor, "sentences beams V"]:
        said = live.tokens[:, :, 1:]  # START belongs to no n-gram
        if said.shape[2] < self.n:
            return log_probabilities
        grams = said.unfold(2, self.n, 1)  # [sentences, beams, places, n]
        now = said[:, :, said.shape[2] - self.n + 1 :].unsqueeze(2)
        again = (grams[..., :-1] == now).all(-1)
        # One place more takes what need not be forbidden.
        V = log_probabilities.shape[2]
        forbidden = grams[..., -1].masked_fill(~again, V)
        marked = log_probabilities.new_zeros(*again.shape[:2], V + 1).scatter(2, forbidden, 1.0)
        allowed = log_probabilities.masked_fill(marked[..., :V].bool(), NEVER)
        stuck = (allowed == NEVER).all(2, keepdim=True)
        return torch.where(stuck, log_probabilities, allowed)
