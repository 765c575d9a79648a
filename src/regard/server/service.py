"""The work behind the routes: texts to sentences, sentences through the queue, and together again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from regard.errors import RegardError
from regard.server.batching import Batcher, Options, RequestRefused, Searcher
from regard.server.html_markup import Document, Floats, split_html, split_plain
from regard.server.metrics import Metrics
from regard.server.schemas import (
    Detected,
    Language,
    StreamRequest,
    TextRequest,
    Translated,
    TranslateRequest,
    event,
    time_limit,
)
from regard.server.settings import Settings

if TYPE_CHECKING:
    from regard.recipe import Recipe
    from regard.tasks import Translation

T = TypeVar("T")

log = logging.getLogger("regard.server")

MISTAKE = "a mistake of the server; its log says more"

_NAMES = """
ar Arabic, bg Bulgarian, cs Czech, da Danish, de German, el Greek, en English, es Spanish, et Estonian, fa Persian,
fi Finnish, fr French, he Hebrew, hi Hindi, hu Hungarian, id Indonesian, it Italian, ja Japanese, ko Korean,
lt Lithuanian, lv Latvian, nl Dutch, no Norwegian, pl Polish, pt Portuguese, ro Romanian, ru Russian, sk Slovak,
sl Slovenian, sv Swedish, th Thai, tr Turkish, uk Ukrainian, vi Vietnamese, zh Chinese
"""
NAMES = dict(pair.split() for pair in _NAMES.split(","))
"""Of languages, by their codes; one that is not here is called by its code."""


class Served(Searcher, Protocol):
    """What is needed of a model."""

    @property
    def recipe(self) -> Recipe: ...


Align = Callable[[str, str, str | None], Floats | None]
"""A sentence, its translation and the language asked for in, their alignment out: see inline.mark"""


class Service:
    """A model, the queue before it, and its limits: all that a route needs."""

    def __init__(self, model: Served, settings: Settings, align: Align | None = None) -> None:
        self.model = model
        self.align = align
        self.settings = settings
        self.metrics = Metrics()
        self.batcher = Batcher(model, settings, self.metrics)
        self.pairs = model.recipe.data.language_pairs
        self.source, self.target = self.pairs[0]
        self.asks = bool(model.recipe.data.targets)
        """whether the model must be told which language is wanted"""

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(source for source, _ in self.pairs))

    def language(self, target: str) -> str | None:
        """What the model is told of the language wanted."""
        return target if self.asks else None

    def languages(self) -> list[Language]:
        codes = dict.fromkeys(code for pair in self.pairs for code in pair)
        return [
            Language(
                code=code,
                name=NAMES.get(code.split("-")[0], code),
                targets=[target for source, target in self.pairs if source == code],
            )
            for code in codes
        ]

    def detected(self, sources: Sequence[str]) -> list[Detected]:
        """The text is not looked at: each language it may have is as likely."""
        return [Detected(confidence=100 / len(sources), language=code) for code in sources]

    def possible(self, asked: TextRequest) -> list[str]:
        """The languages that the text may have; none where there is no such pair."""
        return [
            source
            for source, target in self.pairs
            if asked.source in (source, "auto") and target == asked.target
        ]

    async def translate(self, asked: TranslateRequest) -> Translated:
        start = asyncio.get_running_loop().time()
        texts = [asked.q] if isinstance(asked.q, str) else asked.q
        options = self.options(asked, asked.alternatives)
        documents = self.documents(texts, asked)
        sentences = [sentence for document in documents for sentence in document.sentences]
        with self.batcher.queued(sentences, options) as answers:
            found = iter(await self.in_time(asyncio.gather(*answers), start))
        best, others = [], []
        for document in documents:
            hypotheses = [next(found) for _ in document.sentences]
            ranks = [_of_rank(hypotheses, rank) for rank in range(options.nbest)]
            first, *more = [
                await self.in_time(self.join(document, one, options.to), start) for one in ranks
            ]
            best.append(first)
            others.append([text for text in dict.fromkeys(more) if text != first])
        detected = self.detected(self.possible(asked))[:1] * len(texts)
        alternatives = _like(asked.q, others)
        return Translated(
            translatedText=_like(asked.q, best),
            alternatives=alternatives if asked.alternatives else None,
            detectedLanguage=_like(asked.q, detected) if asked.source == "auto" else None,
        )

    async def stream(self, asked: StreamRequest) -> AsyncIterator[str]:
        """Server-sent events: ``start`` once it is in the queue, a ``part`` for each sentence in order, ``end``.

        The texts of all parts one after the other are the whole translation.
        """
        start = asyncio.get_running_loop().time()
        options = self.options(asked)
        (document,) = self.documents([asked.q], asked)
        with self.batcher.queued(document.sentences, options) as answers:
            yield event("start", {"sentences": len(answers)})
            try:
                for index, answer in enumerate(answers):
                    best, *_ = await self.in_time(answer, start)
                    aligning = self.aligned(document, index, best.text, options.to)
                    alignment = await self.in_time(aligning, start)
                    text = document.part(index, best.text, alignment)
                    yield event("part", {"text": text, "source": document.sentences[index]})
            except (RequestRefused, RegardError) as error:
                yield event("error", {"error": str(error)})
            except Exception:
                log.exception("a stream failed")
                yield event("error", {"error": MISTAKE})
            else:
                yield event("part", {"text": document.between[-1], "source": ""})
                yield event("end", {})

    async def join(self, document: Document, translations: Sequence[str], to: str | None) -> str:
        """The document with its translations, tags inside sentences where their words have gone."""
        alignments = [
            await self.aligned(document, index, text, to) for index, text in enumerate(translations)
        ]
        return document.join(translations, alignments)

    async def aligned(
        self, document: Document, index: int, translation: str, to: str | None
    ) -> Floats | None:
        """Request of the model only where there are tags to be moved."""
        sentence = document.sentences[index]
        if self.align is None or index not in document.elements or translation == sentence:
            return None
        try:
            return await self.batcher.call(partial(self.align, sentence, translation, to))
        except RegardError:  # longer than the model can read
            return None

    async def in_time(self, answer: Awaitable[T], start: float | None = None) -> T:
        async with time_limit(self.settings.seconds, "the translation was not ready", start):
            return await answer

    def options(self, asked: TextRequest, alternatives: int = 0) -> Options:
        """How to search, if the request may ask for this."""
        settings = self.settings
        if not self.possible(asked):
            known = ", ".join(f"{source} to {target}" for source, target in self.pairs)
            named = self.model.recipe.data.named
            unnamed = "" if named else " (its languages were not named)"
            raise RequestRefused(
                400,
                f"{asked.source} to {asked.target} is not supported: "
                f"this server translates {known}{unnamed}",
            )
        if alternatives > settings.alternatives:
            raise RequestRefused(400, f"at most {settings.alternatives} alternatives are allowed")
        if (asked.beam or 1) > settings.beam:
            raise RequestRefused(400, f"a beam of at most {settings.beam} is allowed")
        nbest = alternatives + 1
        beam = None if asked.beam is None else max(asked.beam, nbest)
        return Options(beam, asked.length_penalty, nbest, self.language(asked.target))

    def documents(self, texts: Sequence[str], asked: TextRequest) -> list[Document]:
        self.check_texts(texts)
        split = split_html if asked.format == "html" else split_plain
        source = self.possible(asked)[0]
        return [split(text, source) for text in texts]

    def check_texts(self, texts: Sequence[str]) -> None:
        settings = self.settings
        if len(texts) > settings.texts:
            raise RequestRefused(
                413, f"{len(texts):,} texts: at most {settings.texts:,} are allowed"
            )
        count = sum(map(len, texts))
        if count > settings.characters:
            raise RequestRefused(
                413, f"{count:,} characters: at most {settings.characters:,} are allowed"
            )


def _like(asked: str | list[str], answers: list[T]) -> T | list[T]:
    """One answer to one text, a list to a list."""
    return answers[0] if isinstance(asked, str) else answers


def _of_rank(hypotheses: Sequence[Sequence[Translation]], rank: int) -> list[str]:
    """The hypotheses of this rank; a sentence that has fewer gives its last."""
    return [found[min(rank, len(found) - 1)].text for found in hypotheses]
