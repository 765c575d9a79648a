"""Translator: a model of pairs of text, opened for use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from regard.errors import RegardError
from regard.marks import END, PAD, START
from regard.model.base import Model, arithmetic
from regard.nn.network import Network
from regard.nn.networks import NETWORKS
from regard.recipe import Manner, Recipe
from regard.search import MANNERS, Hypothesis, beam_search, greedy, sample
from regard.search.tree import Looked
from regard.text.batches import plan_in_order
from regard.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    pass

TOKENS_AT_ONCE = {"cpu": 8_192, "cuda": 131_072}
"""source tokens, padding included, times beam: what is translated in one batch"""


class Translation(NamedTuple):
    """One translation of one text."""

    text: str
    score: float
    """log-probability over length penalty: what beam search ranks by"""
    log_probability: float
    tokens: list[str]
    token_log_probabilities: list[float]
    finished: bool
    """False: cut at the greatest length before the end was said"""


EMPTY = Translation("", 0.0, 0.0, [], [], True)
"""A blank line has a blank translation."""

Way = Callable[..., list[list[Hypothesis]]]
"""A search: step function, state and limits in, hypotheses for each sentence out."""


class Translator(Model):
    """Text in one language in, text in another out; or whatever the two sides of the pairs were."""

    task = "translate"
    network: Network

    @staticmethod
    def build(recipe: Recipe, tokenizer: Tokenizer) -> Network:
        section = recipe.model
        return NETWORKS[section.architecture](section, tokenizer.source.size, tokenizer.target.size)

    def answer(self, sources: Sequence[str], *, quick: bool = False) -> list[str]:
        return self.translate(sources, beam=1 if quick else None)

    def translate(
        self,
        texts: Sequence[str],
        *,
        beam: int | None = None,
        alpha: float | None = None,
        manner: Manner | None = None,
    ) -> list[str]:
        """The best translation of each text."""
        if isinstance(texts, str):
            raise RegardError("translate takes a list of texts: translate([text])")
        return [best.text for best, *_ in self.search(texts, beam=beam, alpha=alpha, manner=manner)]

    def search(
        self,
        texts: Sequence[str],
        *,
        beam: int | None = None,
        alpha: float | None = None,
        manner: Manner | None = None,
        nbest: int = 1,
        prefixes: Sequence[str] | None = None,
    ) -> list[list[Translation]]:
        """The nbest translations of each text, best first. prefixes: how each translation must begin."""
        options = self.recipe.search
        beam = options.beam if beam is None else beam
        alpha = options.alpha if alpha is None else alpha
        if beam < 1 or alpha < 0 or not 1 <= nbest <= beam:
            raise RegardError(
                f"beam {beam}, alpha {alpha}, nbest {nbest}: beam must be at least 1, "
                "alpha at least 0, nbest between 1 and beam"
            )
        kind = MANNERS[manner or options.manner]
        way = partial(beam_search, beam=beam, alpha=alpha, nbest=nbest, manner=kind)
        if beam == 1:
            way = partial(_greedy, alpha=alpha, penalty=kind.penalty)
        return self._run(texts, prefixes, way, beam)

    @torch.inference_mode()
    def find(
        self,
        text: str,
        prefix: str = "",
        *,
        beam: int,
        alpha: float,
        watch: Callable[[Looked], None] | None = None,
    ) -> Hypothesis:
        """The best hypothesis for one text, by beam search that may be watched."""
        (source,) = self.tokenizer.source.encode([text])
        (forced,) = self.tokenizer.target.encode([prefix])
        manner = MANNERS[self.recipe.search.manner]
        way = partial(beam_search, beam=beam, alpha=alpha, watch=watch, manner=manner)
        ((best, *_),) = self._search([source], [forced], way)
        return best

    def sample(
        self,
        texts: Sequence[str],
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 1,
        prefixes: Sequence[str] | None = None,
    ) -> list[Translation]:
        """One translation of each text drawn at random, as likely as the model thinks it."""
        way = partial(_sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        return [drawn for (drawn,) in self._run(texts, prefixes, way, 1)]

    @torch.inference_mode()
    def _run(
        self, texts: Sequence[str], prefixes: Sequence[str] | None, way: Way, beam: int
    ) -> list[list[Translation]]:
        """Batches of like length through the network; results in the order of the texts."""
        if prefixes is not None and len(prefixes) != len(texts):
            raise RegardError(f"{len(prefixes)} prefixes for {len(texts)} texts: give one for each")
        sources = self.tokenizer.source.encode(texts)
        forced = self.tokenizer.target.encode(prefixes or [""] * len(texts))
        results = [[EMPTY] for _ in texts]
        filled = [row for row, text in enumerate(texts) if text.strip()]
        lengths = np.array([len(sources[row]) for row in filled])
        for part in plan_in_order(lengths, lengths, TOKENS_AT_ONCE[self.device.type] // beam):
            rows = [filled[index] for index in part]
            found = self._search([sources[row] for row in rows], [forced[row] for row in rows], way)
            for row, hypotheses in zip(rows, found, strict=True):
                results[row] = [self._read(hypothesis) for hypothesis in hypotheses]
        return results

    def _search(
        self, sources: Sequence[list[int]], prefixes: Sequence[list[int]], way: Way
    ) -> list[list[Hypothesis]]:
        options = self.recipe.search
        limits = [len(source) + options.extra_length for source in sources]
        if options.max_length is not None:
            limits = [min(limit, options.max_length) for limit in limits]
        if self.network.longest is not None:
            limits = [min(limit, self.network.longest - 1) for limit in limits]
        ids = [torch.tensor([*source, END]) for source in sources]
        batch = pad_sequence(ids, batch_first=True, padding_value=PAD).to(self.device)
        with arithmetic(self.precision, self.device):
            return way(
                self.network.step,
                self.network.start(self.network.encode(batch)),
                limits=limits,
                start=START,
                end=END,
                prefixes=prefixes,
                banned=self.tokenizer.target.never_said,
                device=self.device,
            )

    def _read(self, hypothesis: Hypothesis) -> Translation:
        (text,) = self.tokenizer.target.decode([hypothesis.tokens])
        return Translation(
            text,
            hypothesis.score,
            hypothesis.log_probability,
            self.tokenizer.target.pieces(hypothesis.tokens),
            hypothesis.token_log_probabilities,
            hypothesis.finished,
        )


def _greedy(*arguments: Any, **options: Any) -> list[list[Hypothesis]]:
    return [[hypothesis] for hypothesis in greedy(*arguments, **options)]


def _sample(*arguments: Any, **options: Any) -> list[list[Hypothesis]]:
    return [[hypothesis] for hypothesis in sample(*arguments, **options)]
