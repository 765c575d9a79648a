"""Translator: a model of pairs of text, opened for use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch

from regard.errors import RegardError
from regard.fast import Fast, at_once, pick, prepare, unfit
from regard.marks import END, START
from regard.model.base import Model, arithmetic
from regard.model.guiding import Guiding, borders, phrases_of
from regard.model.parallel import AT_ONCE, ONE_BY_ONE, WIDTH, Filling, in_rounds, refuse, told
from regard.nn.network import Network
from regard.nn.networks import NETWORKS
from regard.nn.parallel import Parallel
from regard.nn.positions import Tree
from regard.nn.transformer import Transformer
from regard.recipe import Recipe, Search, change_search, language_tag
from regard.score import Result
from regard.score.alike import most_alike
from regard.search import (
    MANNERS,
    Guide,
    Hypothesis,
    Phrase,
    Round,
    beam_search,
    greedy,
    needs,
    sample,
)
from regard.search.tree import Looked
from regard.text.batches import collate_trees
from regard.text.conllu import Parsed
from regard.text.corpus import Pair, by_language, language_of, parse_of
from regard.text.kept import Kept
from regard.text.tokenizer import Tokenizer
from regard.text.trees import TokenTree, check_parse, token_tree

if TYPE_CHECKING:
    from regard.trace import Trace


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


QUICK = {"beam": 1, "groups": 1, "coverage": 0.0, "mbr": 0, "keep": ()}
"""a search that is fast, for validation"""
IN_ROUNDS = {"rounds", "candidates"}
ALONG = {*Search.model_fields} - {*IN_ROUNDS, "extra_length", "max_length"}
OTHERS = IN_ROUNDS | ALONG
"""options of search that are for one kind of network only: one that says all at once, or one word after another"""
T = TypeVar("T")

EMPTY = Translation("", 0.0, 0.0, [], [], True)
"""A blank line has a blank translation."""

Parses = Sequence[Parsed | None] | None
"""the tree of each text; a blank one has none"""

Languages = str | Sequence[str | None] | None
"""the language wanted: of all texts, or of each"""

Way = Callable[..., list[list[Hypothesis]]]
"""A search: step function, state and limits in, hypotheses for each sentence out."""


class Sampling(NamedTuple):
    """Draw at random; what is drawn for a text depends on the seed and its number alone."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1

    def of(self, rows: Sequence[int]) -> Way:
        """The search of the texts with these numbers."""
        *how, seed = self
        drawn = dict(zip(self._fields[:-1], how, strict=True))
        seeds = [int(np.random.SeedSequence([seed, row]).generate_state(1)[0]) for row in rows]
        return partial(_sample, **drawn, seeds=seeds)


class Translator(Model):
    """Text in one language in, text in another out; or whatever the two sides of the pairs were."""

    task = "translate"
    command = "translate"
    network: Network
    language: str | None = None
    """the one to translate to, of those it can, where nothing else is said"""

    def into(self, language: str | None) -> Translator:
        """The same model, to translate to this language."""
        self._tags(0, language)
        other = copy(self)
        other.language = language
        return other

    ready: Fast | None = None
    """the network prepared for search, where it can be"""

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

    @staticmethod
    def build(recipe: Recipe, tokenizer: Tokenizer) -> Network:
        section = recipe.model
        return NETWORKS[section.architecture](section, tokenizer.source.size, tokenizer.target.size)

    def answer(
        self, sources: Sequence[str], *, quick: bool = False, to: Languages = None
    ) -> list[str]:
        fastest = {"candidates": 1} if isinstance(self.network, Parallel) else QUICK
        return self.translate(sources, to=to, **(fastest if quick else {}))

    def answer_to(self, pairs: Sequence[Pair], *, quick: bool = False) -> list[str]:
        # Of two models that are compared perhaps only one asks for trees.
        if not self.asks_for_trees:
            to = [language_of(pair) for pair in pairs]
            return self.answer([pair.source for pair in pairs], quick=quick, to=to)
        parses = [parse_of(pair) for pair in pairs]
        return self.translate(
            [pair.source for pair in pairs],
            **(QUICK if quick else {}),
            parses=parses if any(parses) else None,
        )

    def evaluate(self, pairs: Sequence[Pair], *, quick: bool = False) -> list[Result]:
        """As of any model; where several languages are asked for, each is scored apart, but not for validation."""
        parts = by_language(pairs)
        whole = super().evaluate
        if quick or len(parts) == 1:
            return whole(pairs, quick=quick)
        return [
            replace(result, name=f"{result.name} to {language}")
            for language, some in parts.items()
            for result in whole(some)
        ]

    def search_by(self, **options: Any) -> None:
        self._options(options)
        super().search_by(**options)

    def _options(self, given: Mapping[str, Any]) -> Search:
        """How to search: as the recipe says, but for what is given. Refused is what this kind of network cannot do."""
        given = {name: value for name, value in given.items() if value is not None}
        ours = IN_ROUNDS if isinstance(self.network, Parallel) else ALONG
        why = AT_ONCE if isinstance(self.network, Parallel) else ONE_BY_ONE
        refuse(why, **{name: value for name, value in given.items() if name in OTHERS - ours})
        search = change_search(self.recipe.search, given)
        if search.mbr and "beam" in given and given["beam"] != 1:
            raise RegardError(
                f"beam {given['beam']}, mbr {search.mbr}: mbr draws samples; give one (mbr 0 is none)"
            )
        return search

    def encode(self, texts: Sequence[str], to: Languages = None) -> list[list[int]]:
        """Source ids of texts, with the language wanted in front where the model knows several."""
        clean = self.recipe.data.clean
        longest = clean.max_tokens if clean.cut else None
        tagged = map(
            self.tokenizer.source.tagged, super().encode(texts), self._tags(len(texts), to)
        )
        return [ids[:longest] for ids in tagged]

    def _tags(self, count: int, to: Languages) -> list[tuple[str, ...]]:
        """What stands before each of so many texts."""
        known = self.recipe.data.targets
        allowed: list[str | None] = [*known] or [None]
        given = [to] * count if to is None or isinstance(to, str) else to
        usual = self.language or (known[0] if len(known) == 1 else None)
        wanted = [code or usual for code in given]
        if isinstance(to, str):
            wanted.append(to)  # looked at even where there is no text
        if wrong := [code for code in wanted if code not in allowed]:
            can = f"translates to {', '.join(known)}" if known else "knows one language only"
            said = f"language {wrong[0]}" if wrong[0] else "no language is asked for"
            raise RegardError(
                f"{said}: this model {can} (--to on the command line, to=… in Python)"
            )
        return [(language_tag(code),) if code else () for code in wanted[:count]]

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
        prefixes: Sequence[str] | None = None,
        constraints: Sequence[Sequence[str]] | None = None,
        length: int | None = None,
        parses: Parses = None,
        to: Languages = None,
        **options: Any,
    ) -> list[list[Translation]]:
        """The nbest translations of each text, best first.

        options are any of the recipe's section ``search``, for this call. A model that says one word after another
        takes prefixes, how each translation must begin, and constraints, what each must contain. One that says all at
        once takes length, how many tokens each translation has. parses are the trees, for ``position: tree``; to is the
        language wanted of a model that knows several, for all texts or for each.
        """
        search = self._options(options)
        if options.get("beam") is None and nbest > search.beam:
            search = change_search(search, {"beam": nbest})
        if isinstance(self.network, Parallel):
            refuse(AT_ONCE, prefixes=prefixes, constraints=constraints)
            rounds, candidates = options.get("rounds"), options.get("candidates")
            filling = in_rounds(self.network, search, rounds, candidates, length, nbest)
            return self._run(texts, None, parses, filling, WIDTH * filling.candidates, to=to)
        refuse(ONE_BY_ONE, length=length)
        if nbest > (search.mbr or nbest):
            raise RegardError(f"nbest {nbest}: mbr draws {search.mbr} only")
        if search.mbr:
            refuse("mbr draws samples, which cannot be made to say them", constraints=constraints)
            return self._least_risk(texts, search, nbest, prefixes, parses, to)
        if not 1 <= nbest <= search.beam:
            raise RegardError(
                f"beam {search.beam}, nbest {nbest}: nbest must be between 1 and beam"
            )
        phrases = self._phrases(texts, constraints, search)
        if search.groups > 1 and any(phrases):
            raise RegardError(
                f"groups {search.groups}: with constraints there are no groups; both say what goes on"
            )
        wide = max(search.beam, search.constrained_beam)
        bound = [row for row, some in enumerate(phrases) if some]
        free = [row for row, some in enumerate(phrases) if not some]
        found: dict[int, list[Translation]] = {}
        for rows, beam in ((free, search.beam), (bound, wide)):
            kind = MANNERS[search.manner]
            way = partial(beam_search, beam=beam, alpha=search.alpha, nbest=nbest, manner=kind)
            if beam == 1 and rows is free:
                way = partial(_greedy, alpha=search.alpha, manner=kind)
            some = self._run(
                [texts[row] for row in rows],
                None if prefixes is None else [prefixes[row] for row in rows],
                None if parses is None else [parses[row] for row in rows],
                way,
                beam,
                [phrases[row] for row in rows],
                search,
                to if to is None or isinstance(to, str) else [to[row] for row in rows],
            )
            found |= dict(zip(rows, some, strict=True))
        return [found[row] for row in range(len(texts))]

    def _phrases(
        self,
        texts: Sequence[str],
        constraints: Sequence[Sequence[str]] | None,
        search: Search,
    ) -> list[list[Phrase]]:
        """What the translation of each text must say."""
        if constraints is None:
            constraints = [()] * len(texts)
        if len(constraints) != len(texts) or any(isinstance(some, str) for some in constraints):
            raise RegardError(
                f"{len(constraints)} constraints for {len(texts)} texts: give a list of terms for each"
            )
        kept, vocabulary = Kept(search.keep), self.tokenizer.target
        return [
            phrases_of(text, some, kept, vocabulary) if text.strip() else []
            for text, some in zip(texts, constraints, strict=True)
        ]

    def _least_risk(
        self,
        texts: Sequence[str],
        search: Search,
        nbest: int,
        prefixes: Sequence[str] | None,
        parses: Parses,
        to: Languages,
    ) -> list[list[Translation]]:
        """Of many samples those most like the others; the score is the mean chrF."""

        def times(items: Sequence[T]) -> list[T]:
            return [item for item in items for _ in range(search.mbr)]

        way = Sampling(search.temperature)
        drawn = self._run(
            times(texts),
            prefixes and times(prefixes),
            parses and times(parses),
            way,
            1,
            search=search,
            to=to if to is None or isinstance(to, str) else times(to),
        )
        found = []
        for row in range(len(texts)):
            (samples,) = zip(*drawn[row * search.mbr : (row + 1) * search.mbr], strict=True)
            best = most_alike([sample.text for sample in samples])[:nbest]
            found.append([samples[place]._replace(score=mean) for place, mean in best])
        return found

    @torch.inference_mode()
    def find(
        self,
        text: str,
        forced: Sequence[int] = (),
        *,
        beam: int,
        alpha: float,
        temperature: float = 0.0,
        seed: int = 1,
        watch: Callable[[Looked], None] | None = None,
        parse: Parsed | None = None,
    ) -> Hypothesis:
        """The best hypothesis for one text, by beam search that may be watched; forced: how it begins.

        With a temperature it is not the best but drawn at random, and there is no beam to watch.
        """
        if isinstance(self.network, Parallel):
            raise RegardError("this model says all words at once: it has no beam to be seen")
        (source,) = self.encode([text])
        manner = MANNERS[self.recipe.search.manner]
        way: Way = partial(beam_search, beam=beam, alpha=alpha, watch=watch, manner=manner)
        if temperature:
            way = Sampling(temperature, seed=seed).of([0])
        trees = self._trees([text], [source], None if parse is None else [parse])
        # What is watched is one beam, whose attention others watch: no groups, no coverage.
        watched = self.recipe.search.model_copy(update={"groups": 1, "coverage": 0.0})
        guiding = Guiding(watched, self.network)
        ((best, *_),) = self._search([source], [list(forced)], trees, way, guiding=guiding)
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
        (source,) = self.encode([text])
        ((best,),) = self._search([source], [[]], None, replace(way, watch=seen.append))
        return told(best, seen)

    def trace(self, text: str, **options: Any) -> Trace:
        """Everything seen while one text passes; in a notebook it shows itself. options: see ``traced``."""
        from regard.course import traced

        return traced(self, text, **options)

    def sample(
        self,
        texts: Sequence[str],
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 1,
        prefixes: Sequence[str] | None = None,
        parses: Parses = None,
    ) -> list[Translation]:
        """One translation of each text drawn at random, as likely as the model thinks it."""
        if isinstance(self.network, Parallel):
            refuse(AT_ONCE, temperature=temperature)
        way = Sampling(temperature, top_k, top_p, seed)
        return [drawn for (drawn,) in self._run(texts, prefixes, parses, way, 1)]

    @torch.inference_mode()
    def _run(
        self,
        texts: Sequence[str],
        prefixes: Sequence[str] | None,
        parses: Parses,
        way: Way | Sampling,
        beam: int,
        phrases: Sequence[Sequence[Phrase]] | None = None,
        search: Search | None = None,
        to: Languages = None,
    ) -> list[list[Translation]]:
        """Batches of like length through the network; results in the order of the texts."""
        if prefixes is not None and len(prefixes) != len(texts):
            raise RegardError(f"{len(prefixes)} prefixes for {len(texts)} texts: give one for each")
        sources = self.encode(texts, to)
        forced = self.tokenizer.target.encode(prefixes or [""] * len(texts))
        trees = self._trees(texts, sources, parses)
        said = phrases if phrases is not None else [()] * len(texts)
        marks = borders(self.tokenizer.target, self.device) if any(said) else None
        guiding = None if search is None else Guiding(search, self.network, marks)
        results = [[EMPTY] for _ in texts]
        filled = [row for row, text in enumerate(texts) if text.strip()]
        found = self.search_ids(
            [sources[row] for row in filled],
            way,
            beam,
            [forced[row] for row in filled],
            trees and [trees[row] for row in filled],
            [said[row] for row in filled],
            guiding,
        )
        for row, hypotheses in zip(filled, found, strict=True):
            results[row] = [self._read(hypothesis) for hypothesis in hypotheses]
        return results

    @torch.inference_mode()
    def search_ids(
        self,
        sources: Sequence[list[int]],
        way: Way | Sampling,
        beam: int,
        prefixes: Sequence[list[int]] | None = None,
        trees: Sequence[TokenTree] | None = None,
        phrases: Sequence[Sequence[Phrase]] | None = None,
        guiding: Guiding | None = None,
    ) -> list[list[Hypothesis]]:
        """The same below the level of text: source ids in, hypotheses out."""
        prefixes = prefixes if prefixes is not None else [[] for _ in sources]
        phrases = phrases if phrases is not None else [()] * len(sources)
        # Who looks where is seen in the plain network only.
        ready = None if guiding is not None and guiding.options.coverage else self.ready
        ready = None if ready is None else ready.suited(len(sources))
        network = ready or self.network
        found: list[list[Hypothesis]] = [[] for _ in sources]

        def work(rows: list[int]) -> None:
            some = self._search(
                [sources[row] for row in rows],
                [prefixes[row] for row in rows],
                trees and [trees[row] for row in rows],
                way.of(rows) if isinstance(way, Sampling) else way,
                [phrases[row] for row in rows],
                guiding,
                network,
            )
            for row, hypotheses in zip(rows, some, strict=True):
                found[row] = hypotheses

        lengths = [len(source) for source in sources]
        if ready is not None and self.device.type == "cpu":
            # The longest first: what is left at the end, when not all have work, is short.
            at_once(work, [*self.in_batches(lengths, beam, self.threads)][::-1], self.threads)
        else:
            for rows in self.in_batches(lengths, beam):
                work(rows)
        return found

    @property
    def asks_for_trees(self) -> bool:
        return self.recipe.model.position == "tree"

    def _trees(
        self, texts: Sequence[str], sources: Sequence[list[int]], parses: Parses
    ) -> list[TokenTree] | None:
        """The trees of the texts in pieces; None where the model asks for none."""
        if parses is None and not self.asks_for_trees:
            return None
        if parses is None:
            raise RegardError(
                "this model has position: tree, so it needs the parse of every text: "
                "--parses F.conllu on the command line, parses=… in Python"
            )
        if not self.asks_for_trees:
            raise RegardError(
                "parses are for a model with position: tree; this one has "
                f"position: {self.recipe.model.position}"
            )
        if len(parses) != len(texts):
            raise RegardError(f"{len(parses)} parses for {len(texts)} texts: give one for each")
        for number, (text, parse) in enumerate(zip(texts, parses, strict=True), 1):
            if parse is not None:
                check_parse(text, parse, f"text {number}")
            elif text.strip():
                raise RegardError(f"text {number} has no parse; only a blank one may go without")
        vocabulary = self.tokenizer.source
        return [
            token_tree(text, parse, vocabulary).cut(len(source))
            for text, parse, source in zip(texts, parses, sources, strict=True)
        ]

    def _search(
        self,
        sources: Sequence[list[int]],
        prefixes: Sequence[list[int]],
        trees: Sequence[TokenTree] | None,
        way: Way,
        phrases: Sequence[Sequence[Phrase]] = (),
        guiding: Guiding | None = None,
        network: Network | Fast | None = None,
    ) -> list[list[Hypothesis]]:
        network = network or self.network
        options = self.recipe.search
        limits = [len(source) + options.extra_length for source in sources]
        if options.max_length is not None:
            limits = [min(limit, options.max_length) for limit in limits]
        if any(phrases):  # what must be said comes whole
            least = [len(p) + needs(some) for p, some in zip(prefixes, phrases, strict=True)]
            limits = list(map(max, limits, least))
        if network.longest is not None:
            limits = [min(limit, network.longest - 1) for limit in limits]
        batch = self.padded([[*source, END] for source in sources])
        tree = None
        if trees is not None:
            tree = Tree(*(part.long().to(self.device) for part in collate_trees(trees)))
        none: AbstractContextManager[list[Guide]] = nullcontext([])
        guides = none if guiding is None else guiding.of(batch, phrases)
        plain = isinstance(network, Network)
        with arithmetic(self.precision, self.device) if plain else nullcontext(), guides as each:
            return way(
                network.step,
                network.start(network.encode(batch, tree)),
                limits=limits,
                start=START,
                end=END,
                prefixes=prefixes,
                banned=self.tokenizer.target.never_said,
                device=self.device,
                guides=each,
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
