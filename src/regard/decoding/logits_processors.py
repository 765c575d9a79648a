"""LogitsProcessorList: what else has a say in a search, each one class, any of them side by side.

A search asks the model what is probable and its ``SequenceRules`` what may come. A guide may besides

- ``allow``: forbid tokens, by what was said so far;
- ``choose``: decide which continuations go on, and which are finished;
- ``bonus``: add to the score of what is finished;
- ``complete``: say what may be given back, should it come to be cut off.

It lives for one search, of one batch, and keeps what it must know of each hypothesis itself; ``go_on`` tells it which
of them grew by which token. With no guide a search is as lean as if there were none of this.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decoding.hypotheses import NEG_INF, ActiveHypotheses, BeamCandidates, S
from regard.errors import RegardError


class BeamSelection(NamedTuple):
    """What comes of a step."""

    best: BeamCandidates
    """those looked at"""
    ended: Bool[Tensor, "sentences count"]
    """which of them finish a hypothesis"""
    going: BeamCandidates
    """those that go on"""

    @classmethod
    def of(cls, best: BeamCandidates, end: int, beam: int) -> "BeamSelection":
        """EOS among the first ``beam`` finishes a hypothesis; the first ``beam`` that are not EOS go on."""
        is_end = best.tokens == end
        if not is_end.any():  # as in most steps
            return cls(best, is_end, best.first(beam))
        rank = torch.arange(is_end.shape[1], device=is_end.device)
        ended = is_end & (rank < beam) & (best.totals > NEG_INF)
        order = is_end.int().argsort(dim=1, stable=True)[:, :beam]
        going = best.select(order)
        # In a tiny vocabulary there may be fewer: EOS fills the places, and no hypothesis stands there.
        totals = going.totals.masked_fill(is_end.gather(1, order), NEG_INF)
        return cls(best, ended, replace(going, totals=totals))


class LogitsProcessor:
    """One that has nothing to say."""

    groups: int = 1
    """how many beams, side by side, the beam is made of"""

    def allow(
        self, live: ActiveHypotheses[S], log_probabilities: Float[Tensor, "sentences beams V"]
    ) -> Float[Tensor, "sentences beams V"]:
        """The log-probabilities, ``NEG_INF`` for what may not come; asked once in each step, before all else."""
        return log_probabilities

    def choose(
        self,
        live: ActiveHypotheses[S],
        log_probabilities: Float[Tensor, "sentences beams V"],
        beam: int,
        end: int,
    ) -> BeamSelection | None:
        """None: as beam search does by itself. One guide at most may choose."""
        return None

    def bonus(self, live: ActiveHypotheses[S]) -> Float[Tensor, "sentences beams"] | None:
        """What is added to the score of a hypothesis that finishes now; 0 at most."""
        return None

    def complete(self, live: ActiveHypotheses[S]) -> Bool[Tensor, "sentences beams"] | None:
        """Which hypotheses lack nothing but an end; None: all."""
        return None

    def go_on(self, kept: Int[Tensor, "kept"], chosen: BeamCandidates) -> None:
        """These sentences go on, by their number among the present ones, each with what was chosen."""


class LogitsProcessorList(LogitsProcessor):
    """Several as one."""

    def __init__(self, each: Sequence[LogitsProcessor]) -> None:
        self.each = each
        self.groups = max((guide.groups for guide in each), default=1)

    def allow(
        self, live: ActiveHypotheses[S], log_probabilities: Float[Tensor, "sentences beams V"]
    ) -> Float[Tensor, "sentences beams V"]:
        for guide in self.each:
            log_probabilities = guide.allow(live, log_probabilities)
        return log_probabilities

    def choose(
        self,
        live: ActiveHypotheses[S],
        log_probabilities: Float[Tensor, "sentences beams V"],
        beam: int,
        end: int,
    ) -> BeamSelection | None:
        chosen = (guide.choose(live, log_probabilities, beam, end) for guide in self.each)
        return next((choice for choice in chosen if choice is not None), None)

    def bonus(self, live: ActiveHypotheses[S]) -> Float[Tensor, "sentences beams"] | None:
        found = [bonus for guide in self.each if (bonus := guide.bonus(live)) is not None]
        return sum(found[1:], found[0]) if found else None

    def complete(self, live: ActiveHypotheses[S]) -> Bool[Tensor, "sentences beams"] | None:
        found = [whole for guide in self.each if (whole := guide.complete(live)) is not None]
        return found[0] if found else None

    def go_on(self, kept: Int[Tensor, "kept"], chosen: BeamCandidates) -> None:
        for guide in self.each:
            guide.go_on(kept, chosen)


# ---------------------------------------------------------------------------------------------
# A guard against repetition: no n words the same, in the same order, twice.


class NoRepeatNgram(LogitsProcessor):
    """No n-gram of tokens comes twice in a hypothesis (Paulus et al. 2017).

    Where nothing else may come it yields: to a prefix that repeats itself, or to a phrase that must be said.
    """

    def __init__(self, n: int) -> None:
        assert n >= 1
        self.n = n

    def allow(
        self, live: ActiveHypotheses[S], log_probabilities: Float[Tensor, "sentences beams V"]
    ) -> Float[Tensor, "sentences beams V"]:
        said = live.tokens[:, :, 1:]  # BOS belongs to no n-gram
        if said.shape[2] < self.n:
            return log_probabilities
        grams = said.unfold(2, self.n, 1)  # [sentences, beams, places, n]
        now = said[:, :, said.shape[2] - self.n + 1 :].unsqueeze(2)
        again = (grams[..., :-1] == now).all(-1)
        # One place more takes what need not be forbidden.
        V = log_probabilities.shape[2]
        forbidden = grams[..., -1].masked_fill(~again, V)
        marked = log_probabilities.new_zeros(*again.shape[:2], V + 1).scatter(2, forbidden, 1.0)
        allowed = log_probabilities.masked_fill(marked[..., :V].bool(), NEG_INF)
        stuck = (allowed == NEG_INF).all(2, keepdim=True)
        return torch.where(stuck, log_probabilities, allowed)


# ---------------------------------------------------------------------------------------------
# CoveragePenalty: a translation that has looked at every word of its source is better (Wu et al. 2016, equation 14).


BeamStep = Callable[[], Float[Tensor, "sentences beams S"]]
"""where each hypothesis looked in the step just taken, as shares that sum to 1"""


class CoveragePenalty(LogitsProcessor):
    """beta * sum over the source words of log(min(1, all attention the word got)), added to the score.

    It ranks what is finished; which hypotheses grow is the model's business alone, as in the paper.
    """

    def __init__(self, beta: float, words: Bool[Tensor, "sentences S"], looked: BeamStep) -> None:
        assert beta >= 0
        self.beta = beta
        self.words = words
        self.looked = looked
        self.got = torch.zeros(*words.shape, device=words.device)[:, None]

    def allow(
        self, live: ActiveHypotheses[S], log_probabilities: Float[Tensor, "sentences beams V"]
    ) -> Float[Tensor, "sentences beams V"]:
        self.got = self.got + self.looked()
        return log_probabilities

    def bonus(self, live: ActiveHypotheses[S]) -> Float[Tensor, "sentences beams"]:
        covered = self.got.clamp(1e-9, 1).log().masked_fill(~self.words[:, None], 0.0)
        return self.beta * covered.sum(2).double()

    def go_on(self, kept: Int[Tensor, "kept"], chosen: BeamCandidates) -> None:
        self.got = self.got[kept.unsqueeze(1), chosen.beams[kept]]
        self.words = self.words[kept]


# ---------------------------------------------------------------------------------------------
# Diverse beam search (Vijayakumar et al. 2016): groups of beams that avoid saying what the others say.


class DiverseBeamGroups(LogitsProcessor):
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
        live: ActiveHypotheses[S],
        log_probabilities: Float[Tensor, "sentences beams V"],
        beam: int,
        end: int,
    ) -> BeamSelection:
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
            real = (choice.going.totals > NEG_INF).unsqueeze(1)
            cost = cost.scatter_add(2, said, self.penalty * real.double())
        return BeamSelection(
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
) -> BeamSelection:
    """As beam search chooses, by the totals less the cost."""
    V = added.shape[2]
    added = added.masked_fill(added.isnan(), NEG_INF)
    ranked = (totals.unsqueeze(2) + added - cost).flatten(1)
    order = ranked.topk(min(2 * beam, ranked.shape[1])).indices
    beams, tokens = order // V, order % V
    log_probabilities = added.flatten(1).gather(1, order)
    each_total = totals.gather(1, beams) + log_probabilities
    best = BeamCandidates(beams + first, tokens, log_probabilities, each_total)
    return BeamSelection.of(best, end, beam)


def _joined(some: list[BeamCandidates]) -> BeamCandidates:
    return BeamCandidates(
        torch.cat([one.beams for one in some], dim=1),
        torch.cat([one.tokens for one in some], dim=1),
        torch.cat([one.log_probabilities for one in some], dim=1),
        torch.cat([one.totals for one in some], dim=1),
    )
