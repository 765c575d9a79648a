"""Ways to search: what a recipe and a caller ask for, as a function over ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from reprlib import repr as short
from typing import Any, NamedTuple

import numpy as np

from regard.errors import RegardError
from regard.recipe import Search, change_search
from regard.search import MANNERS, Hypothesis, beam_search, greedy, sample

AT_ONCE = "this model says all words at once: it takes rounds, candidates and length instead"
ONE_BY_ONE = "this model says one word after another: it takes beam and alpha instead"
IN_ROUNDS = {"rounds", "candidates"}
ALONG = {*Search.model_fields} - {*IN_ROUNDS, "extra_length", "max_length"}
"""options of search that are for one kind of network only: one that says all at once, or one word after another"""
QUICK = {"beam": 1, "groups": 1, "coverage": 0.0, "mbr": 0, "keep": ()}
"""a search that is fast, for validation"""
QUICK_AT_ONCE = {"candidates": 1}

Way = Callable[..., list[list[Hypothesis]]]
"""A search: step function, state and limits in, hypotheses for each sentence out."""


class Sampling(NamedTuple):
    """Draw at random; what is drawn depends on the seed, the text and the number of the draw alone, not on its row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1

    def of(self, sources: Sequence[Sequence[int]], draws: Sequence[int]) -> Way:
        """The search of texts, in ids, each for the draw of this number."""
        every = zip(draws, sources, strict=True)
        mixed = (np.random.SeedSequence([self.seed, number, *ids]) for number, ids in every)
        way = partial(
            sample,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seeds=[int(one.generate_state(1)[0]) for one in mixed],
        )
        return OneEach(way)


def along(search: Search, nbest: int) -> Way:
    """Word after word: a beam, or the most probable word each time."""
    if search.beam > 1:
        return in_a_beam(search, search.beam, nbest)
    return OneEach(partial(greedy, alpha=search.alpha, manner=MANNERS[search.manner]))


def in_a_beam(search: Search, beam: int, nbest: int = 1) -> Way:
    """However narrow: it can be watched, and led to what must be said."""
    manner = MANNERS[search.manner]
    return partial(beam_search, beam=beam, alpha=search.alpha, nbest=nbest, manner=manner)


@dataclass(frozen=True)
class OneEach:
    """A search that finds one for each sentence, as one that finds several."""

    find: Callable[..., list[Hypothesis]]

    def __call__(self, *arguments: Any, **options: Any) -> list[list[Hypothesis]]:
        return [[hypothesis] for hypothesis in self.find(*arguments, **options)]


def options_of(search: Search, given: Mapping[str, Any], at_once: bool) -> Search:
    """How to search: as the recipe says, but for what is given. Refused is what a kind of network cannot do."""
    given = {name: value for name, value in given.items() if value is not None}
    others, why = (ALONG, AT_ONCE) if at_once else (IN_ROUNDS, ONE_BY_ONE)
    refuse(why, **{name: value for name, value in given.items() if name in others})
    changed = change_search(search, given)
    if changed.mbr and "beam" in given and given["beam"] != 1:
        raise RegardError(
            f"beam {given['beam']}, mbr {changed.mbr}: mbr draws samples; give one (mbr 0 is none)"
        )
    return changed


def check_along(search: Search, nbest: int, constraints: object) -> None:
    """That what is asked for goes together, word after word."""
    if search.mbr:
        refuse("mbr draws samples, which cannot be made to say them", constraints=constraints)
        if nbest > search.mbr:
            raise RegardError(f"nbest {nbest}: mbr draws {search.mbr} only")
    elif not 1 <= nbest <= search.beam:
        raise RegardError(f"beam {search.beam}, nbest {nbest}: nbest must be between 1 and beam")
    if search.groups > 1 and constraints is not None:
        raise RegardError(
            f"groups {search.groups}: with constraints there are no groups; both say what goes on"
        )


def refuse(why: str, **given: object) -> None:
    """Options that this kind of network has no use for are not passed over in silence."""
    if asked := [f"{name} {short(value)}" for name, value in given.items() if value is not None]:
        raise RegardError(f"{', '.join(asked)}: {why}")
