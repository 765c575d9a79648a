"""Translator: a model of pairs of text, opened for use. Texts and options in, translations out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from regard.errors import RegardError
from regard.model.guiding import Guiding, borders, phrase_of, phrases_of
from regard.model.languages import Languages, Targets, of_each
from regard.model.parallel import WIDTH, History, in_rounds, told
from regard.model.parses import Parses, trees_of
from regard.model.standing_in import Disguise, copied, disguises
from regard.model.ways import (
    AT_ONCE,
    ONE_BY_ONE,
    QUICK,
    QUICK_AT_ONCE,
    Sampling,
    Way,
    along,
    check_along,
    in_a_beam,
    options_of,
    refuse,
)
from regard.model.writer import Asked, Writer
from regard.nn.parallel import Parallel
from regard.recipe import Keep, Search, change_search
from regard.score import Result
from regard.score.alike import most_alike
from regard.search import Hypothesis, Round
from regard.search.tree import Looked
from regard.text.conllu import Parsed
from regard.text.corpus import Pair, by_language, language_of, parse_of
from regard.text.kept import Kept

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


EMPTY = Translation("", 0.0, 0.0, [], [], True)
"""A blank line has a blank translation."""


class Translator(Writer):
    """Text in one language in, text in another out; or whatever the two sides of the pairs were."""

    task = "translate"
    command = "translate"
    language: str | None = None
    """the one to translate to, of those it can, where nothing else is said"""
    stand_ins: dict[tuple[int, ...], list[str]] | None = None
    """for placeholders, by what stands before a source"""

    def freeze(self) -> None:
        super().freeze()
        self.stand_ins = None

    def into(self, language: str | None) -> Translator:
        """The same model, to translate to this language."""
        self.targets.tags(0, language)
        other = copy(self)
        other.language = language
        return other

    @property
    def targets(self) -> Targets:
        return Targets(self.recipe.data.targets, self.language)

    @property
    def asks_for_trees(self) -> bool:
        return self.recipe.model.position == "tree"

    @property
    def at_once(self) -> bool:
        """Whether it says all words at once, not one after another."""
        return isinstance(self.network, Parallel)

    # To be scored

    def answer(
        self, sources: Sequence[str], *, quick: bool = False, to: Languages = None
    ) -> list[str]:
        return self.translate(sources, to=to, **self._quick(quick))

    def answer_to(self, pairs: Sequence[Pair], *, quick: bool = False) -> list[str]:
        sources = [pair.source for pair in pairs]
        # Of two models that are compared perhaps only one asks for trees.
        if not self.asks_for_trees:
            return self.answer(sources, quick=quick, to=[language_of(pair) for pair in pairs])
        parses = [parse_of(pair) for pair in pairs]
        return self.translate(sources, parses=parses if any(parses) else None, **self._quick(quick))

    def _quick(self, quick: bool) -> dict[str, Any]:
        return (QUICK_AT_ONCE if self.at_once else QUICK) if quick else {}

    def evaluate(self, pairs: Sequence[Pair], *, quick: bool = False) -> list[Result]:
        """As of any model; where several languages are asked for, each is scored apart, but not for validation."""
        parts = by_language(pairs)
        whole = super().evaluate
        if quick or len(parts) <= 1:
            return whole(pairs, quick=quick)
        return [
            replace(result, name=f"{result.name} to {language}")
            for language, some in parts.items()
            for result in whole(some)
        ]

    # To translate

    def search_by(self, **options: Any) -> None:
        self._options(options)
        super().search_by(**options)

    def _options(self, given: dict[str, Any], nbest: int = 1) -> Search:
        """How to search, for so many translations of each text."""
        search = options_of(self.recipe.search, given, self.at_once)
        if given.get("beam") is None and nbest > search.beam:
            return change_search(search, {"beam": nbest})
        return search

    def translate(self, texts: Sequence[str], **options: Any) -> list[str]:
        """The best translation of each text; options as in ``search``."""
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
        if isinstance(texts, str):
            raise RegardError("give a list of texts: [text]")
        search = self._options(options, nbest)
        asked = self._asked(texts, prefixes, parses, to)
        if isinstance(self.network, Parallel):
            refuse(AT_ONCE, prefixes=prefixes, constraints=constraints)
            rounds, candidates = options.get("rounds"), options.get("candidates")
            filling = in_rounds(self.network, search, rounds, candidates, length, nbest)
            return self._run(asked, filling, WIDTH * filling.candidates, search)
        refuse(ONE_BY_ONE, length=length)
        check_along(search, nbest, constraints)
        if search.mbr:
            return self._least_risk(asked, search, nbest)
        terms = _terms(constraints, len(texts))
        found: dict[int, list[Translation]] = {}
        if "placeholders" in search.keep and not self.asks_for_trees:
            found = self._in_disguise(texts, prefixes, terms, to, search, nbest)
        rest = [row for row in range(len(texts)) if row not in found]
        bound = [
            self._with_phrases(asked[row], texts[row], terms[row], search.keep) for row in rest
        ]
        found |= dict(zip(rest, self._best(bound, search, nbest), strict=True))
        return [found[row] for row in range(len(texts))]

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
        """One translation of each text drawn at random, as likely as the model thinks it.

        It depends on the seed, the text, and how often the text stood before in this call.
        """
        if self.at_once:
            refuse(AT_ONCE, temperature=temperature)
        way = Sampling(temperature, top_k, top_p, seed)
        asked = _told_apart(self._asked(texts, prefixes, parses))
        return [drawn for (drawn,) in self._run(asked, way, 1)]

    def _best(self, asked: Sequence[Asked], search: Search, nbest: int) -> list[list[Translation]]:
        """By beam search, and a wider one where something must be said."""
        wide = max(search.beam, search.constrained_beam)
        free, bound = along(search, nbest), in_a_beam(search, wide, nbest)
        found: dict[int, list[Translation]] = {}
        for way, beam, phrases in ((free, search.beam, False), (bound, wide, True)):
            rows = [row for row, one in enumerate(asked) if bool(one.phrases) is phrases]
            some = self._run([asked[row] for row in rows], way, beam, search)
            found |= dict(zip(rows, some, strict=True))
        return [found[row] for row in range(len(asked))]

    def _in_disguise(
        self,
        texts: Sequence[str],
        prefixes: Sequence[str] | None,
        terms: Sequence[Sequence[str]],
        to: Languages,
        search: Search,
        nbest: int,
    ) -> dict[int, list[Translation]]:
        """By row, translations of texts whose placeholders were other words meanwhile; only if all came back right."""
        placeholders, kept = Kept(("placeholders",)), Kept(search.keep)
        if not any(map(placeholders.find, texts)):
            return {}
        begun, goals = prefixes or [""] * len(texts), of_each(to, len(texts))
        tries = [
            (row, disguise)
            for row, text in enumerate(texts)
            for disguise in disguises(
                text, self._copied(goals[row]), placeholders, [*terms[row], begun[row]]
            )
        ]
        rows = [row for row, _ in tries]
        plain = self._asked(
            [disguise.text for _, disguise in tries],
            [begun[row] for row in rows],
            to=[goals[row] for row in rows],
        )
        asked = [
            self._standing_in(
                self._with_phrases(one, disguise.text, terms[row], search.keep), disguise
            )
            for one, (row, disguise) in zip(plain, tries, strict=True)
        ]
        best: dict[int, list[Translation]] = {}
        for (row, disguise), some in zip(tries, self._best(asked, search, nbest), strict=True):
            lifted = [_lifted(one, disguise) for one in some]
            if any(kept.lost(texts[row], one.text) for one in lifted):
                continue
            if row not in best or lifted[0].score > best[row][0].score:
                best[row] = lifted
        return best

    def _standing_in(self, one: Asked, disguise: Disguise) -> Asked:
        """The same, with the stand-ins to be said."""
        said = [
            phrase_of(word, self.tokenizer.target, times) for word, times in disguise.times.items()
        ]
        return one._replace(phrases=[*one.phrases, *(phrase for phrase in said if phrase)])

    def _copied(self, to: str | None) -> list[str]:
        """The words that stand in for placeholders, found once."""
        (tags,) = self.encode([""], to)
        known = self.stand_ins = self.stand_ins or {}
        if tuple(tags) not in known:
            known[tuple(tags)] = copied(self, tags)
        return known[tuple(tags)]

    def _least_risk(
        self, asked: Sequence[Asked], search: Search, nbest: int
    ) -> list[list[Translation]]:
        """Of many samples those most like the others; the score is the mean chrF."""
        times = [one._replace(draw=number) for one in asked for number in range(search.mbr)]
        drawn = self._run(times, Sampling(search.temperature), 1, search)
        found = []
        for row in range(len(asked)):
            (samples,) = zip(*drawn[row * search.mbr : (row + 1) * search.mbr], strict=True)
            best = most_alike([sample.text for sample in samples])[:nbest]
            found.append([samples[place]._replace(score=mean) for place, mean in best])
        return found

    def _run(
        self,
        asked: Sequence[Asked],
        way: Way | Sampling,
        beam: int,
        search: Search | None = None,
    ) -> list[list[Translation]]:
        """Ids to translations; search says what guides the way, and how long they may be: else the recipe does."""
        bound = any(one.phrases for one in asked)
        marks = borders(self.tokenizer.target, self.device) if bound else None
        guiding = None if search is None else Guiding(search, marks)
        found = iter(self.search_ids([one for one in asked if not one.blank], way, beam, guiding))
        return [[EMPTY] if one.blank else list(map(self._read, next(found))) for one in asked]

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

    # From text to ids

    def encode(self, texts: Sequence[str], to: Languages = None) -> list[list[int]]:
        """Source ids of texts, with the language wanted in front where the model knows several."""
        clean = self.recipe.data.clean
        longest = clean.max_tokens if clean.cut else None
        tags = self.targets.tags(len(texts), to)
        tagged = map(self.tokenizer.source.tagged, super().encode(texts), tags)
        return [ids[:longest] for ids in tagged]

    def _asked(
        self,
        texts: Sequence[str],
        prefixes: Sequence[str] | None = None,
        parses: Parses = None,
        to: Languages = None,
    ) -> list[Asked]:
        if prefixes is not None and len(prefixes) != len(texts):
            raise RegardError(f"{len(prefixes)} prefixes for {len(texts)} texts: give one for each")
        sources = self.encode(texts, to)
        forced = self.tokenizer.target.encode(prefixes or [""] * len(texts))
        position = self.recipe.model.position
        trees = trees_of(texts, parses, sources, self.tokenizer.source, position)
        return [
            Asked(source, prefix, tree=tree, blank=not text.strip())
            for text, source, prefix, tree in zip(texts, sources, forced, trees, strict=True)
        ]

    def _with_phrases(
        self, one: Asked, text: str, terms: Sequence[str], keep: Sequence[Keep]
    ) -> Asked:
        """The same, with what the translation of the text must say."""
        return one._replace(phrases=phrases_of(text, terms, Kept(keep), self.tokenizer.target))

    # To be watched

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
        if self.at_once:
            raise RegardError("this model says all words at once: it has no beam to be seen")
        # What is watched is one beam, whose attention others watch: no groups, no coverage.
        changes = {"beam": beam, "alpha": alpha, "groups": 1, "coverage": 0.0}
        watched = change_search(self.recipe.search, changes)
        way: Way = partial(in_a_beam(watched, beam), watch=watch)
        asked = self.asked(text, parse)._replace(prefix=forced)
        if temperature:
            way = Sampling(temperature, seed=seed).of([asked.source], [asked.draw])
        ((best, *_),) = self.search_batch(self.batch([asked], way, Guiding(watched)))
        return best

    @torch.inference_mode()
    def find_at_once(
        self,
        text: str,
        *,
        rounds: int | None = None,
        candidates: int | None = None,
        length: int | None = None,
    ) -> History:
        """The best hypothesis for one text from a model that says all words at once, and how it came about."""
        if not isinstance(self.network, Parallel):
            raise RegardError("this model says one word after another: it has no rounds to be seen")
        seen: list[Round] = []
        way = in_rounds(self.network, self.recipe.search, rounds, candidates, length)
        watched = replace(way, watch=seen.append)
        ((best,),) = self.search_batch(self.batch([self.asked(text)], watched))
        return told(best, seen)

    def asked(self, text: str, parse: Parsed | None = None) -> Asked:
        """One text in ids, with its tree."""
        (asked,) = self._asked([text], parses=None if parse is None else [parse])
        return asked

    def trace(self, text: str, **options: Any) -> Trace:
        """Everything seen while one text passes; in a notebook it shows itself. options: see ``traced``."""
        from regard.course import traced

        return traced(self, text, **options)


def _terms(constraints: Sequence[Sequence[str]] | None, count: int) -> Sequence[Sequence[str]]:
    """What the translation of each text must contain."""
    if constraints is None:
        return [()] * count
    if len(constraints) != count or any(isinstance(some, str) for some in constraints):
        raise RegardError(
            f"{len(constraints)} constraints for {count} texts: give a list of terms for each"
        )
    return constraints


def _told_apart(asked: Sequence[Asked]) -> list[Asked]:
    """Each with its number among those of the same source: what is drawn for them differs."""
    met: Counter[tuple[int, ...]] = Counter()
    numbered = []
    for one in asked:
        source = tuple(one.source)
        numbered.append(one._replace(draw=met[source]))
        met[source] += 1
    return numbered


def _lifted(one: Translation, disguise: Disguise) -> Translation:
    tokens = list(map(disguise.lifted_piece, one.tokens))
    return one._replace(text=disguise.lifted(one.text), tokens=tokens)
