"""Guides: what else has a say in a search, each one class, any of them side by side.

A search asks the model what is probable and its ``Rules`` what may come. A guide may besides

- ``allow``: forbid tokens, by what was said so far;
- ``choose``: decide which continuations go on, and which are finished;
- ``bonus``: add to the score of what is finished;
- ``complete``: say what may be given back, should it come to be cut off.

It lives for one search, of one batch, and keeps what it must know of each hypothesis itself; ``go_on`` tells it which
of them grew by which token. With no guide a search is as lean as if there were none of this.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.search.live import Continuations, Live
from regard.search.rules import NEVER, S


class Choice(NamedTuple):
    """What comes of a step."""

    best: Continuations
    """those looked at"""
    ended: Bool[Tensor, "sentences count"]
    """which of them finish a hypothesis"""
    going: Continuations
    """those that go on"""

    @classmethod
    def of(cls, best: Continuations, end: int, beam: int) -> "Choice":
        """END among the first ``beam`` finishes a hypothesis; the first ``beam`` that are not END go on."""
        is_end = best.tokens == end
        if not is_end.any():  # as in most steps
            return cls(best, is_end, best.first(beam))
        rank = torch.arange(is_end.shape[1], device=is_end.device)
        ended = is_end & (rank < beam) & (best.totals > NEVER)
        order = is_end.int().argsort(dim=1, stable=True)[:, :beam]
        going = best.select(order)
        # In a tiny vocabulary there may be fewer: END fills the places, and no hypothesis stands there.
        totals = going.totals.masked_fill(is_end.gather(1, order), NEVER)
        return cls(best, ended, replace(going, totals=totals))


class Guide:
    """One that has nothing to say."""

    groups: int = 1
    """how many beams, side by side, the beam is made of"""

    def allow(
        self, live: Live[S], log_probabilities: Float[Tensor, "sentences beams V"]
    ) -> Float[Tensor, "sentences beams V"]:
        """The log-probabilities, ``NEVER`` for what may not come; asked once in each step, before all else."""
        return log_probabilities

    def choose(
        self,
        live: Live[S],
        log_probabilities: Float[Tensor, "sentences beams V"],
        beam: int,
        end: int,
    ) -> Choice | None:
        """None: as beam search does by itself. One guide at most may choose."""
        return None

    def bonus(self, live: Live[S]) -> Float[Tensor, "sentences beams"] | None:
        """What is added to the score of a hypothesis that finishes now; 0 at most."""
        return None

    def complete(self, live: Live[S]) -> Bool[Tensor, "sentences beams"] | None:
        """Which hypotheses lack nothing but an end; None: all."""
        return None

    def go_on(self, kept: Int[Tensor, "kept"], chosen: Continuations) -> None:
        """These sentences go on, by their number among the present ones, each with what was chosen."""


class Guides(Guide):
    """Several as one."""

    def __init__(self, each: Sequence[Guide]) -> None:
        self.each = each
        self.groups = max((guide.groups for guide in each), default=1)

    def allow(
        self, live: Live[S], log_probabilities: Float[Tensor, "sentences beams V"]
    ) -> Float[Tensor, "sentences beams V"]:
        for guide in self.each:
            log_probabilities = guide.allow(live, log_probabilities)
        return log_probabilities

    def choose(
        self,
        live: Live[S],
        log_probabilities: Float[Tensor, "sentences beams V"],
        beam: int,
        end: int,
    ) -> Choice | None:
        chosen = (guide.choose(live, log_probabilities, beam, end) for guide in self.each)
        return next((choice for choice in chosen if choice is not None), None)

    def bonus(self, live: Live[S]) -> Float[Tensor, "sentences beams"] | None:
        found = [bonus for guide in self.each if (bonus := guide.bonus(live)) is not None]
        return sum(found[1:], found[0]) if found else None

    def complete(self, live: Live[S]) -> Bool[Tensor, "sentences beams"] | None:
        found = [whole for guide in self.each if (whole := guide.complete(live)) is not None]
        return found[0] if found else None

    def go_on(self, kept: Int[Tensor, "kept"], chosen: Continuations) -> None:
        for guide in self.each:
            guide.go_on(kept, chosen)
