"""Translator: a model of pairs of text, opened for use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from regard.errors import RegardError
from regard.marks import END, MASK, PAD, START, UNKNOWN
from regard.model.base import Model, arithmetic
from regard.nn.network import Network
from regard.nn.networks import NETWORKS
from regard.nn.parallel import Parallel
from regard.recipe import Recipe
from regard.search import Hypothesis, Round, beam_search, greedy, mask_predict, sample
from regard.search.tree import Looked
from regard.text.batches import plan_in_order
from regard.text.tokenizer import Tokenizer

TOKENS_AT_ONCE = {"cpu": 8_192, "cuda": 131_072}
"""source tokens, padding included, times beam: what is translated in one batch"""
PLACES_AT_ONCE = {"cpu": 1_024, "cuda": 16_384}
"""the same, times candidates, where all words are said at once: each has its row of logits"""

AT_ONCE = "this model says all words at once: it takes rounds, candidates and length instead"
ONE_BY_ONE = "this model says one word after another: it takes beam and alpha instead"


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
Find = Callable[[Sequence[list[int]], Sequence[list[int]]], list[list[Hypothesis]]]
"""Sources, and how their translations must begin, to hypotheses."""


class Filling(NamedTuple):
    """How a text was translated by a model that says all words at once."""

    hypothesis: Hypothesis
    read: list[list[int]]
    """in each round what stood at each place before it: words, or MASK"""
    said: list[list[int]]
    """and after it"""


class Translator(Model):
    """Text in one language in, text in another out; or whatever the two sides of the pairs were."""

    task = "translate"
    network: Network

    @staticmethod
    def build(recipe: Recipe, tokenizer: Tokenizer) -> Network:
        section = recipe.model
        return NETWORKS[section.architecture](section, tokenizer.source.size, tokenizer.target.size)

    def answer(self, sources: Sequence[str], *, quick: bool = False) -> list[str]:
        if not quick:
            return self.translate(sources)
        one = "candidates" if isinstance(self.network, Parallel) else "beam"
        return self.translate(sources, **{one: 1})

    def translate(self, texts: Sequence[str], **options: Any) -> list[str]:
        """The best translation of each text; options as in ``search``."""
        if isinstance(texts, str):
            raise RegardError("translate takes a list of texts: translate([text])")
        return [best.text for best, *_ in self.search(texts, **options)]

    def search(
        self,
        texts: Sequence[str],
        *,
        nbest: int = 1,
        beam: int | None = None,
        alpha: float | None = None,
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
        if isinstance(self.network, Parallel):
            _refuse(AT_ONCE, beam=beam, alpha=alpha, prefixes=prefixes)
            rounds, candidates = self._filling_options(rounds, candidates, length, nbest)
            fill = partial(
                self._fill, rounds=rounds, candidates=candidates, length=length, nbest=nbest
            )
            return self._run(texts, None, fill, PLACES_AT_ONCE[self.device.type] // candidates)
        _refuse(ONE_BY_ONE, rounds=rounds, candidates=candidates, length=length)
        options = self.recipe.search
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
        return self._by_steps(texts, prefixes, way, beam)

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
        (source,) = self.tokenizer.source.encode([text])
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
        rounds, candidates = self._filling_options(rounds, candidates, length, nbest=1)
        (source,) = self.tokenizer.source.encode([text])
        seen: list[Round] = []
        ((best,),) = self._fill(
            [source], [], rounds=rounds, candidates=candidates, length=length, watch=seen.append
        )
        row = _row_of(best, seen[-1])
        places = int((seen[-1].said[row] != PAD).sum())
        read, said = zip(*((one.read[row], one.said[row]) for one in seen), strict=True)
        return Filling(
            best,
            [row[:places].tolist() for row in read],
            [row[:places].tolist() for row in said],
        )

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
            _refuse(AT_ONCE, temperature=temperature)
        way = partial(_sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        return [drawn for (drawn,) in self._by_steps(texts, prefixes, way, 1)]

    def _by_steps(
        self, texts: Sequence[str], prefixes: Sequence[str] | None, way: Way, beam: int
    ) -> list[list[Translation]]:
        tokens = TOKENS_AT_ONCE[self.device.type] // beam
        return self._run(texts, prefixes, partial(self._search, way=way), tokens)

    @torch.inference_mode()
    def _run(
        self, texts: Sequence[str], prefixes: Sequence[str] | None, find: Find, tokens: int
    ) -> list[list[Translation]]:
        """Batches of like length through the network; results in the order of the texts."""
        if prefixes is not None and len(prefixes) != len(texts):
            raise RegardError(f"{len(prefixes)} prefixes for {len(texts)} texts: give one for each")
        sources = self.tokenizer.source.encode(texts)
        forced = self.tokenizer.target.encode(prefixes or [""] * len(texts))
        results = [[EMPTY] for _ in texts]
        filled = [row for row, text in enumerate(texts) if text.strip()]
        lengths = np.array([len(sources[row]) for row in filled])
        for part in plan_in_order(lengths, lengths, tokens):
            rows = [filled[index] for index in part]
            found = find([sources[row] for row in rows], [forced[row] for row in rows])
            for row, hypotheses in zip(rows, found, strict=True):
                results[row] = [self._read(hypothesis) for hypothesis in hypotheses]
        return results

    # One word after another

    def _search(
        self, sources: Sequence[list[int]], prefixes: Sequence[list[int]], way: Way
    ) -> list[list[Hypothesis]]:
        limits = self._limits(sources)
        if self.network.longest is not None:
            limits = [min(limit, self.network.longest - 1) for limit in limits]
        with arithmetic(self.precision, self.device):
            return way(
                self.network.step,
                self.network.start(self.network.encode(self._batch(sources))),
                limits=limits,
                start=START,
                end=END,
                prefixes=prefixes,
                banned=self._banned(),
                device=self.device,
            )

    # All words at once

    def _filling_options(
        self, rounds: int | None, candidates: int | None, length: int | None, nbest: int
    ) -> tuple[int, int]:
        """Rounds and candidates, given or the recipe's; all that is given is possible."""
        assert isinstance(self.network, Parallel)
        options = self.recipe.search
        rounds = options.rounds if rounds is None else rounds
        if length is not None:
            if self.network.length.says_end:
                raise RegardError(
                    f"length {length}: this model ends where it says END (model.parallel.length: cut); "
                    "its length cannot be set"
                )
            if candidates not in (None, 1) or length < 1:
                raise RegardError(
                    f"length {length}, candidates {candidates or 1}: a length must be at least 1, "
                    "and with a length given there is one candidate"
                )
            candidates = 1
        elif candidates is None:
            candidates = max(options.candidates, nbest)
        if rounds < 1 or candidates < 1 or not 1 <= nbest <= candidates:
            raise RegardError(
                f"rounds {rounds}, candidates {candidates}, nbest {nbest}: rounds and candidates must "
                "be at least 1, nbest between 1 and candidates"
            )
        return rounds, candidates

    def _fill(
        self,
        sources: Sequence[list[int]],
        prefixes: Sequence[list[int]],
        *,
        rounds: int,
        candidates: int,
        length: int | None,
        nbest: int = 1,
        watch: Callable[[Round], None] | None = None,
    ) -> list[list[Hypothesis]]:
        network = self.network
        assert isinstance(network, Parallel)
        limits = self._limits(sources)
        if network.longest is not None:
            limits = [min(limit, network.longest) for limit in limits]
        with arithmetic(self.precision, self.device):
            memory = network.encode(self._batch(sources))
            if length is None:
                most = torch.tensor(limits, device=self.device)
                lengths = network.length.choose(memory, most, candidates)
            else:
                lengths = torch.full((len(sources), 1), length, device=self.device)
            return mask_predict(
                partial(network.fill, state=network.start(memory)),
                lengths,
                rounds=rounds,
                mask=MASK,
                pad=PAD,
                end=END,
                nbest=nbest,
                banned=(*self._banned(), *([] if network.length.says_end else [END])),
                watch=watch,
            )

    # What both need

    def _limits(self, sources: Sequence[list[int]]) -> list[int]:
        return [len(source) + self.recipe.search.extra_length for source in sources]

    def _batch(self, sources: Sequence[list[int]]) -> torch.Tensor:
        ids = [torch.tensor([*source, END]) for source in sources]
        return pad_sequence(ids, batch_first=True, padding_value=PAD).to(self.device)

    def _banned(self) -> tuple[int, ...]:
        return (PAD, START, UNKNOWN, MASK, *self.tokenizer.target.line_breaks)

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


def _refuse(why: str, **given: object) -> None:
    """Options that this kind of network has no use for are not passed over in silence."""
    if asked := [f"{name} {value}" for name, value in given.items() if value is not None]:
        raise RegardError(f"{', '.join(asked)}: {why}")


def _row_of(best: Hypothesis, last: Round) -> int:
    """The candidate that became the hypothesis: other lengths differ."""
    words = best.tokens
    matches = (
        row
        for row, said in enumerate(last.said.tolist())
        if said[: len(words)] == words and said[len(words) : len(words) + 1] in ([], [PAD], [END])
    )
    return next(matches)
