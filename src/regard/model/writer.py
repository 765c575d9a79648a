"""Writer: a model whose network says tokens; how it is built, and searched by ids."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from regard.errors import RegardError
from regard.fast import Fast, at_once, pick, prepare, unfit, usual_kernels
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


class Writer(Model):
    """What the models have in common that say tokens."""

    network: Network
    ready: Fast | None = None
    """the network prepared for search, where it can be"""

    @staticmethod
    def build(recipe: Recipe, tokenizer: Tokenizer) -> Network:
        section = recipe.model
        return NETWORKS[section.architecture](section, tokenizer.source.size, tokenizer.target.size)

    def freeze(self) -> None:
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
        ready = None if guiding is not None and guiding.options.coverage else self.ready
        ready = None if ready is None else ready.suited(len(asked))
        found: list[list[Hypothesis]] = [[] for _ in asked]

        def work(rows: list[int]) -> None:
            this = way.of(rows) if isinstance(way, Sampling) else way
            some = self.search_batch([asked[row] for row in rows], this, guiding, ready)
            for row, hypotheses in zip(rows, some, strict=True):
                found[row] = hypotheses

        lengths = [len(one.source) for one in asked]
        if ready is not None and self.device.type == "cpu":
            # The longest first: what is left at the end, when not all have work, is short.
            at_once(work, [*self.in_batches(lengths, beam, self.threads)][::-1], self.threads)
        else:
            for rows in self.in_batches(lengths, beam):
                work(rows)
        return found

    def search_batch(
        self,
        asked: Sequence[Asked],
        way: Way,
        guiding: Guiding | None = None,
        ready: Fast | None = None,
    ) -> list[list[Hypothesis]]:
        """All at once, by the network itself or by what was made ready of it."""
        network = ready or self.network
        batch = self.padded([[*one.source, END] for one in asked])
        phrases = [one.phrases for one in asked]
        options = self.recipe.search if guiding is None else guiding.options
        none: AbstractContextManager[list[Guide]] = nullcontext([])
        guides = none if guiding is None else guiding.of(batch, phrases)
        plain = ready is None
        with (
            arithmetic(self.precision, self.device) if plain else usual_kernels(self.device),
            guides as each,
        ):
            return way(
                network.step,
                network.start(network.encode(batch, self.places(asked))),
                limits=[_limit(one, options, network.longest) for one in asked],
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


def _limit(one: Asked, options: Search, longest: int | None) -> int:
    """How many tokens there may be."""
    limit = len(one.source) + options.extra_length
    if options.max_length is not None:
        limit = min(limit, options.max_length)
    if one.phrases:  # what must be said comes whole
        limit = max(limit, len(one.prefix) + needs(one.phrases))
    return limit if longest is None else min(limit, longest - 1)
