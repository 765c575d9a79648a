"""Translator: a model of pairs of text, opened for use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from regard.errors import RegardError
from regard.marks import END, MASK, PAD, START, UNKNOWN
from regard.model.base import Model, arithmetic
from regard.model.parallel import AT_ONCE, ONE_BY_ONE, WIDTH, Filling, in_rounds, refuse, told
from regard.nn.network import Network
from regard.nn.networks import NETWORKS
from regard.nn.parallel import Parallel
from regard.recipe import Recipe
from regard.search import Hypothesis, Round, beam_search, greedy, sample
from regard.search.tree import Looked
from regard.text.tokenizer import Tokenizer


class Translation(NamedTuple):
    """One translation of one text."""

    text: str
    score: float
    """log-probability over length penalty, or its mean over the words: what the search ranks by"""
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
    command = "translate"
    network: Network

    @staticmethod
    def build(recipe: Recipe, tokenizer: Tokenizer) -> Network:
        section = recipe.model
        return NETWORKS[section.architecture](section, tokenizer.source.size, tokenizer.target.size)

    def answer(self, sources: Sequence[str], *, quick: bool = False) -> list[str]:
        one = "candidates" if isinstance(self.network, Parallel) else "beam"
        return self.translate(sources, **({one: 1} if quick else {}))

    def search_by(self, **options: float) -> None:
        if isinstance(self.network, Parallel):
            refuse(AT_ONCE, beam=options.get("beam"), alpha=options.get("alpha"))
        else:
            refuse(ONE_BY_ONE, rounds=options.get("rounds"), candidates=options.get("candidates"))
        super().search_by(**options)

    def translate(self, texts: Sequence[str], **options: Any) -> list[str]:
        """The best translation of each text; options as in ``search``."""
        if isinstance(texts, str):
            raise RegardError("translate takes a list of texts: translate([text])")
        return [best.text for best, *_ in self.search(texts, **options)]

    def search(
        self,
        texts: Sequence[str],
        *,
        beam: int | None = None,
        alpha: float | None = None,
        nbest: int = 1,
        prefixes: Sequence[str] | None = None,
        rounds: int | None = None,
        candidates: int | None = None,
        length: int | None = None,
    ) -> list[list[Translation]]:
        """The nbest translations of each text, best first.

        A model that says one word after another takes beam, alpha, and prefixes: how each translation must begin. One
        that says all at once takes rounds, candidates (how many lengths are tried), or length: how many tokens each
        translation has.
        """
        options = self.recipe.search
        if isinstance(self.network, Parallel):
            refuse(AT_ONCE, beam=beam, alpha=alpha, prefixes=prefixes)
            filling = in_rounds(self.network, options, rounds, candidates, length, nbest)
            return self._run(texts, None, filling, WIDTH * filling.candidates)
        refuse(ONE_BY_ONE, rounds=rounds, candidates=candidates, length=length)
        beam = max(options.beam, nbest) if beam is None else beam
        alpha = options.alpha if alpha is None else alpha
        if beam < 1 or alpha < 0 or not 1 <= nbest <= beam:
            raise RegardError(
                f"beam {beam}, alpha {alpha}, nbest {nbest}: beam must be at least 1, "
                "alpha at least 0, nbest between 1 and beam"
            )
        way = partial(beam_search, beam=beam, alpha=alpha, nbest=nbest)
        if beam == 1:
            way = partial(_greedy, alpha=alpha)
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
        if isinstance(self.network, Parallel):
            raise RegardError("this model says all words at once: it has no beam to be seen")
        (source,) = self.encode([text])
        (forced,) = self.tokenizer.target.encode([prefix])
        way = partial(beam_search, beam=beam, alpha=alpha, watch=watch)
        ((best, *_),) = self._search([source], [forced], way)
        return best

    @torch.inference_mode()
    def find_at_once(
        self,
        text: str,
        *,
        rounds: int | None = None,
        candidates: int | None = None,
        length: int | None = None,
    ) -> Filling:
        """The best hypothesis for one text from a model that says all words at once, and how it came about."""
        if not isinstance(self.network, Parallel):
            raise RegardError("this model says one word after another: it has no rounds to be seen")
        seen: list[Round] = []
        way = in_rounds(self.network, self.recipe.search, rounds, candidates, length)
        (source,) = self.tokenizer.source.encode([text])
        ((best,),) = self._search([source], [[]], replace(way, watch=seen.append))
        return told(best, seen)

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
        if isinstance(self.network, Parallel):
            refuse(AT_ONCE, temperature=temperature)
        way = partial(_sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        return [drawn for (drawn,) in self._run(texts, prefixes, way, 1)]

    @torch.inference_mode()
    def _run(
        self, texts: Sequence[str], prefixes: Sequence[str] | None, way: Way, beam: int
    ) -> list[list[Translation]]:
        """Batches of like length through the network; results in the order of the texts."""
        if prefixes is not None and len(prefixes) != len(texts):
            raise RegardError(f"{len(prefixes)} prefixes for {len(texts)} texts: give one for each")
        sources = self.encode(texts)
        forced = self.tokenizer.target.encode(prefixes or [""] * len(texts))
        results = [[EMPTY] for _ in texts]
        filled = [row for row, text in enumerate(texts) if text.strip()]
        for part in self.in_batches([len(sources[row]) for row in filled], beam):
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
        if self.network.longest is not None:
            limits = [min(limit, self.network.longest - 1) for limit in limits]
        batch = self.padded([[*source, END] for source in sources])
        with arithmetic(self.precision, self.device):
            return way(
                self.network.step,
                self.network.start(self.network.encode(batch)),
                limits=limits,
                start=START,
                end=END,
                prefixes=prefixes,
                banned=(PAD, START, UNKNOWN, MASK, *self.tokenizer.target.line_breaks),
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
