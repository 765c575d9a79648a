"""Writer: a model whose network says tokens; how it is built, and searched by ids."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NamedTuple

import torch

from regard.errors import RegardError
from regard.fast import Crew, Fast, Lost, at_once, pick, prepare, unfit, without_detours
from regard.marks import END, START
from regard.model.base import Model, arithmetic
from regard.model.guiding import Guiding
from regard.model.ways import Sampling, Way
from regard.nn.network import Network
from regard.nn.networks import NETWORKS
from regard.nn.positions import Tree
from regard.nn.transformer import Transformer
from regard.recipe import Recipe, Search
from regard.search import Guide, Hypothesis, Phrase, needs
from regard.text.batches import collate_trees
from regard.text.tokenizer import Tokenizer
from regard.text.trees import TokenTree

log = logging.getLogger(__name__)


class Asked(NamedTuple):
    """What is asked for one text, in ids."""

    source: list[int]
    prefix: Sequence[int] = ()
    """how it must begin"""
    phrases: Sequence[Phrase] = ()
    """what it must say"""
    tree: TokenTree | None = None
    """of the source, for ``position: tree``"""
    blank: bool = False
    """white space alone: there is nothing to say"""
    draw: int = 0
    """of those who ask for the same text at random: which this is"""


class Batch(NamedTuple):
    """What goes through the network together."""

    asked: Sequence[Asked]
    way: Way
    limits: Sequence[int]
    """how many tokens each may have"""
    guiding: Guiding | None
    of: int | None
    """how many texts were given at once; None: this is for the plain network, not for what was made ready of it"""


class Writer(Model):
    """What the models have in common that say tokens."""

    network: Network
    ready: Fast | None = None
    """the network prepared for search, where it can be"""
    crew: Crew[Batch, list[list[Hypothesis]]] | None = None
    """who works on batches; None: threads"""

    @staticmethod
    def build(recipe: Recipe, tokenizer: Tokenizer) -> Network:
        section = recipe.model
        return NETWORKS[section.architecture](section, tokenizer.source.size, tokenizer.target.size)

    def freeze(self) -> None:
        self.dismiss()  # its weights are others
        if (why := unfit(self.network)) is None:
            self.precision = pick(self.precision, self.device)
            assert isinstance(self.network, Transformer)
            self.ready = prepare(self.network, self.precision)
        elif self.precision == "int8":
            raise RegardError(
                f"precision int8: not for this model ({why}); take fp32, bf16 or auto"
            )

    @property
    def picked(self) -> str:
        """The numbers it computes in, and where, in words."""
        if self.ready is None:
            why = unfit(self.network) or "its weights may still change"
            return f"{self.precision} on {self.device.type}, in the ordinary way ({why})"
        many = f", {self.threads} at a time" if self.device.type == "cpu" else ""
        return f"{self.precision} on {self.device.type}{many}, weights of {self.ready.bytes / 1e6:.1f} MB"

    def work_in_processes(self) -> None:
        self.dismiss()
        if self.ready is None or self.threads == 1 or self.device.type != "cpu":
            return
        with suppress(OSError):  # no more processes may be had: threads do as well
            self.crew = Crew(self.search_batch, self.threads) if Crew.possible else None

    def dismiss(self) -> None:
        """From now on threads work on batches."""
        if self.crew is not None:
            self.crew.end()
            self.crew = None

    @property
    def cpu_seconds(self) -> float:
        """The time this process, and those that work for it, have had a core so far."""
        return time.process_time() + (0.0 if self.crew is None else self.crew.cpu_seconds)

    @torch.inference_mode()
    def search_ids(
        self,
        asked: Sequence[Asked],
        way: Way | Sampling,
        beam: int,
        guiding: Guiding | None = None,
    ) -> list[list[Hypothesis]]:
        """Batches of like length through the network; hypotheses in the order of what was asked."""
        # Who looks where is seen in the plain network only.
        plain = self.ready is None or bool(guiding is not None and guiding.options.coverage)
        shared = not plain and self.device.type == "cpu"
        lengths = [len(one.source) for one in asked]
        # The longest first: what is left at the end, when not all have work, is short.
        rows = [*self.in_batches(lengths, beam, self.threads if shared else 1)][::-1]
        of = None if plain else len(asked)
        parts = ([asked[row] for row in some] for some in rows)
        batches = [self.batch(part, _way_of(part, way), guiding, of) for part in parts]
        every = self._shared_out(batches) if shared else map(self.search_batch, batches)
        found = {
            row: hypotheses
            for some, each in zip(rows, every, strict=True)
            for row, hypotheses in zip(some, each, strict=True)
        }
        return [found[row] for row in range(len(asked))]

    def _shared_out(self, batches: Sequence[Batch]) -> list[list[list[Hypothesis]]]:
        if self.crew is not None:
            try:
                return self.crew.map(batches)
            except Lost as lost:
                log.warning("%s; from now on threads translate", lost)
                self.crew = None
        return at_once(self.search_batch, batches, self.threads)

    def batch(
        self,
        asked: Sequence[Asked],
        way: Way,
        guiding: Guiding | None = None,
        of: int | None = None,
    ) -> Batch:
        options = self.recipe.search if guiding is None else guiding.options
        longest = self.network.longest
        limits = [_limit(one, options, longest) for one in asked]
        return Batch(asked, way, limits, guiding, of)

    def search_batch(self, batch: Batch) -> list[list[Hypothesis]]:
        """All at once, by the network itself or by what was made ready of it."""
        asked, way, limits, guiding, of = batch
        ready = None if of is None or self.ready is None else self.ready.suited(of)
        network = ready or self.network
        sources = self.padded([[*one.source, END] for one in asked])
        phrases = [one.phrases for one in asked]
        none: AbstractContextManager[list[Guide]] = nullcontext([])
        guides = none if guiding is None else guiding.of(network, sources, phrases)
        plain = ready is None
        with (
            arithmetic(self.precision, self.device) if plain else without_detours(self.device),
            guides as each,
        ):
            return way(
                network.step,
                network.start(network.encode(sources, self.places(asked))),
                limits=limits,
                start=START,
                end=END,
                prefixes=[list(one.prefix) for one in asked],
                banned=self.tokenizer.target.never_said,
                device=self.device,
                guides=each,
            )

    def places(self, asked: Sequence[Asked]) -> Tree | None:
        """What the network must know besides the sources."""
        trees = [one.tree for one in asked if one.tree is not None]
        if not trees:
            return None
        assert len(trees) == len(asked)
        return Tree(*(part.long().to(self.device) for part in collate_trees(trees)))


def _way_of(asked: Sequence[Asked], way: Way | Sampling) -> Way:
    if not isinstance(way, Sampling):
        return way
    return way.of([one.source for one in asked], [one.draw for one in asked])


def _limit(one: Asked, options: Search, longest: int | None) -> int:
    """How many tokens there may be."""
    limit = len(one.source) + options.extra_length
    if options.max_length is not None:
        limit = min(limit, options.max_length)
    if one.phrases:  # what must be said comes whole
        limit = max(limit, len(one.prefix) + needs(one.phrases))
    return limit if longest is None else min(limit, longest - 1)
