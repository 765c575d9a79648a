"""Diverse beam search (Vijayakumar et al. 2016): groups of beams that avoid saying what the others say."""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import RegardError
from regard.search.guides import Choice, Guide
from regard.search.live import Continuations, Live
from regard.search.rules import NEVER, S


class Diversity(Guide):
    """The beam in groups, each a small beam search; one chooses after the other.

    A token costs a group the penalty once for each hypothesis of the groups before it that goes on with the same token
    in the same step. The cost counts for the choice alone: scores stay the model's.
    """

    def __init__(self, groups: int, penalty: float) -> None:
        assert groups >= 1
        assert penalty >= 0
        self.groups = groups
        self.penalty = penalty

    def choose(
        self,
        live: Live[S],
        log_probabilities: Float[Tensor, "sentences beams V"],
        beam: int,
        end: int,
    ) -> Choice:
        assert beam % self.groups == 0
        each = beam // self.groups
        sentences, present, V = log_probabilities.shape
        if each >= V:
            raise RegardError(f"beam {beam}, groups {self.groups}: too many for {V} tokens")
        cost = torch.zeros(sentences, 1, V, dtype=torch.float64, device=log_probabilities.device)
        choices = []
        for group in range(self.groups):
            # In the first step there is one hypothesis, and every group begins with it.
            first = group * each if present > 1 else 0
            own = slice(first, first + each if present > 1 else 1)
            own_totals, added = live.totals[:, own], log_probabilities[:, own]
            choice = _choose(own_totals, added, cost, first, each, end)
            choices.append(choice)
            said = choice.going.tokens.unsqueeze(1)
            real = (choice.going.totals > NEVER).unsqueeze(1)
            cost = cost.scatter_add(2, said, self.penalty * real.double())
        return Choice(
            _joined([choice.best for choice in choices]),
            torch.cat([choice.ended for choice in choices], dim=1),
            _joined([choice.going for choice in choices]),
        )


def _choose(
    totals: Float[Tensor, "sentences beams"],
    added: Float[Tensor, "sentences beams V"],
    cost: Float[Tensor, "sentences 1 V"],
    first: int,
    beam: int,
    end: int,
) -> Choice:
    """As beam search chooses, by the totals less the cost."""
    V = added.shape[2]
    added = added.masked_fill(added.isnan(), NEVER)
    ranked = (totals.unsqueeze(2) + added - cost).flatten(1)
    order = ranked.topk(min(2 * beam, ranked.shape[1])).indices
    beams, tokens = order // V, order % V
    log_probabilities = added.flatten(1).gather(1, order)
    each_total = totals.gather(1, beams) + log_probabilities
    best = Continuations(beams + first, tokens, log_probabilities, each_total)
    return Choice.of(best, end, beam)


def _joined(some: list[Continuations]) -> Continuations:
    return Continuations(
        torch.cat([one.beams for one in some], dim=1),
        torch.cat([one.tokens for one in some], dim=1),
        torch.cat([one.log_probabilities for one in some], dim=1),
        torch.cat([one.totals for one in some], dim=1),
    )
