"""Translation of documents: split texts into sentences, translate them through the queue, join the results."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from regard.documents.markup import Document, Floats, split_html, split_plain
from regard.errors import RegardError
from regard.server.batching import Batcher, Metrics, SearchModel, SearchOptions
from regard.server.schemas import (
    DetectedLanguage,
    Language,
    RequestRefused,
    Settings,
    StreamRequest,
    TextRequest,
    TranslateRequest,
    TranslateResponse,
    server_sent_event,
    time_limit,
)
from regard.tasks.hallucinations import language_identifier

if TYPE_CHECKING:
    from regard.recipe import Recipe
    from regard.tasks import Translation

T = TypeVar("T")

log = logging.getLogger("regard.server")

INTERNAL_ERROR = "internal server error; see the server's log"

_LANGUAGE_NAMES = """
ar Arabic, bg Bulgarian, cs Czech, da Danish, de German, el Greek, en English, es Spanish, et Estonian, fa Persian,
fi Finnish, fr French, he Hebrew, hi Hindi, hu Hungarian, id Indonesian, it Italian, ja Japanese, ko Korean,
lt Lithuanian, lv Latvian, nl Dutch, no Norwegian, pl Polish, pt Portuguese, ro Romanian, ru Russian, sk Slovak,
sl Slovenian, sv Swedish, th Thai, tr Turkish, uk Ukrainian, vi Vietnamese, zh Chinese
"""
DETECTED_CHARACTERS = 2_000
"""the beginning of a text, from which its language is detected"""
LANGUAGE_NAMES = dict(pair.split() for pair in _LANGUAGE_NAMES.split(","))
"""English names of languages by code; a language that is missing here is called by its code"""


class ServedModel(SearchModel, Protocol):
    """What the server needs of a model."""

    @property
    def recipe(self) -> Recipe: ...


Align = Callable[[str, str, str | None], Floats | None]
"""Source, translation and target language in, alignment matrix out; see ``markup.insert_elements``"""


class Service:
    """A model with its queue, limits and metrics: everything the routes need.

    align: computes word alignments to place inline tags; without it, tags are placed by position.
    """

    def __init__(self, model: ServedModel, settings: Settings, align: Align | None = None) -> None:
        self.model = model
        self.align = align
        self.settings = settings
        self.metrics = Metrics()
        self.batcher = Batcher(model, settings, self.metrics)
        self.pairs = model.recipe.data.language_pairs
        self.source, self.target = self.pairs[0]
        self.multilingual = bool(model.recipe.data.targets)
        """whether each request to the model must name its target language"""

    # Languages

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(source for source, _ in self.pairs))

    def to(self, target: str) -> str | None:
        """The ``to`` argument of the model for a target language."""
        return target if self.multilingual else None

    def languages(self) -> list[Language]:
        codes = dict.fromkeys(code for pair in self.pairs for code in pair)
        return [
            Language(
                code=code,
                name=LANGUAGE_NAMES.get(code.split("-")[0], code),
                targets=[target for source, target in self.pairs if source == code],
            )
            for code in codes
        ]

    async def detect(self, text: str, languages: Sequence[str]) -> list[DetectedLanguage]:
        """The probability of each language, in percent, most probable first.

        Equal for all without py3langid, for languages that it does not know, and for a text without letters.
        """
        equal = [
            DetectedLanguage(confidence=100 / len(languages), language=one) for one in languages
        ]
        if len(languages) == 1 or not any(map(str.isalpha, text)):
            return equal
        codes = {language.split("-")[0]: language for language in languages}
        if len(codes) < len(languages) or (identifier := language_identifier(*codes)) is None:
            return equal
        start = text[:DETECTED_CHARACTERS]
        ranked = await asyncio.to_thread(identifier.rank, start)
        return [
            DetectedLanguage(confidence=100 * float(probability), language=codes[code])
            for code, probability in ranked
        ]

    def possible_sources(self, request: TextRequest) -> list[str]:
        """The source languages that a request can have; empty if the language pair is not supported."""
        return [
            source
            for source, target in self.pairs
            if request.source in (source, "auto") and target == request.target
        ]

    # Translation

    async def translate(self, request: TranslateRequest) -> TranslateResponse:
        start = asyncio.get_running_loop().time()
        texts = [request.q] if isinstance(request.q, str) else request.q
        options = self.search_options(request, request.alternatives)
        documents, tokens = await self.split(texts, request)
        sentences = [sentence for document in documents for sentence in document.sentences]
        with self.batcher.submit(sentences, tokens, options) as futures:
            results = iter(await self.with_timeout(asyncio.gather(*futures), start))
        best: list[str] = []
        alternatives: list[list[str]] = []
        confidences: list[float] = []
        for document in documents:
            hypotheses = [next(results) for _ in document.sentences]
            ranks = [_texts_of_rank(hypotheses, rank) for rank in range(options.nbest)]
            first, *others = [
                await self.with_timeout(self.join(document, one, options.to), start)
                for one in ranks
            ]
            best.append(first)
            confidences.append(min((some[0].confidence for some in hypotheses), default=1.0))
            alternatives.append([text for text in dict.fromkeys(others) if text != first])
        possible = self.possible_sources(request) if request.source == "auto" else []
        detected = [(await self.detect(text, possible))[0] for text in texts if possible]
        others_of_text = _like_request(request.q, alternatives)
        return TranslateResponse(
            translatedText=_like_request(request.q, best),
            alternatives=others_of_text if request.alternatives else None,
            detectedLanguage=_like_request(request.q, detected)
            if request.source == "auto"
            else None,
            confidence=_like_request(request.q, confidences) if request.confidence else None,
        )

    async def stream(self, request: StreamRequest) -> AsyncIterator[str]:
        """Server-sent events: ``start`` once queued, a ``part`` for each sentence in order, then ``end``.

        The texts of all parts, concatenated, are the whole translation.
        """
        start = asyncio.get_running_loop().time()
        options = self.search_options(request)
        (document,), tokens = await self.split([request.q], request)
        with self.batcher.submit(document.sentences, tokens, options) as futures:
            yield server_sent_event("start", {"sentences": len(futures)})
            try:
                for index, future in enumerate(futures):
                    best, *_ = await self.with_timeout(future, start)
                    alignment = await self.with_timeout(
                        self.alignment(document, index, best.text, options.to), start
                    )
                    text = document.join_one(index, best.text, alignment)
                    source = document.sentences[index]
                    yield server_sent_event("part", {"text": text, "source": source})
            except (RequestRefused, RegardError) as error:
                yield server_sent_event("error", {"error": str(error)})
            except Exception:
                log.exception("stream failed")
                yield server_sent_event("error", {"error": INTERNAL_ERROR})
            else:
                yield server_sent_event("part", {"text": document.separators[-1], "source": ""})
                yield server_sent_event("end", {})

    async def join(self, document: Document, translations: Sequence[str], to: str | None) -> str:
        """The document with its translations, inline tags around the words they belong to."""
        alignments = [
            await self.alignment(document, index, text, to)
            for index, text in enumerate(translations)
        ]
        characters = sum(map(len, translations))
        return await in_thread_if_long(characters, partial(document.join, translations, alignments))

    async def alignment(
        self, document: Document, index: int, translation: str, to: str | None
    ) -> Floats | None:
        """The word alignment of a sentence; None if it has no inline tags or the model cannot align it."""
        sentence = document.sentences[index]
        if self.align is None or index not in document.elements or translation == sentence:
            return None
        try:
            return await self.batcher.run(partial(self.align, sentence, translation, to))
        except RegardError:  # longer than the model's maximum length
            return None

    async def with_timeout(self, result: Awaitable[T], start: float | None = None) -> T:
        """Await a result within the time limit of a request that began at ``start`` (default: now)."""
        async with time_limit(self.settings.timeout, "the translation was not ready", start):
            return await result

    # Limits

    def search_options(self, request: TextRequest, alternatives: int = 0) -> SearchOptions:
        """The search options of a request, after checking them against the limits."""
        settings = self.settings
        if not self.possible_sources(request):
            known = ", ".join(f"{source} to {target}" for source, target in self.pairs)
            unnamed = (
                "" if self.model.recipe.data.named else " (the model's recipe names no languages)"
            )
            raise RequestRefused(
                400,
                f"{request.source} to {request.target} is not supported: "
                f"this server translates {known}{unnamed}",
            )
        if alternatives > settings.max_alternatives:
            raise RequestRefused(
                400, f"alternatives {alternatives}: at most {settings.max_alternatives}"
            )
        self.check_beam(request.beam)
        nbest = alternatives + 1
        beam = None if request.beam is None else max(request.beam, nbest)
        return SearchOptions(beam, request.length_penalty, nbest, self.to(request.target))

    def check_beam(self, beam: int | None) -> None:
        if (beam or 1) > self.settings.max_beam:
            raise RequestRefused(400, f"beam {beam}: at most {self.settings.max_beam}")

    async def split(
        self, texts: Sequence[str], request: TextRequest
    ) -> tuple[list[Document], list[int]]:
        """The sentences of each text, and the number of tokens of all sentences, after checking the limits."""
        self.check_texts(texts)
        split = split_html if request.format == "html" else split_plain
        source = self.possible_sources(request)[0]

        def split_and_count() -> tuple[list[Document], list[int]]:
            documents = [split(text, source) for text in texts]
            sentences = [sentence for document in documents for sentence in document.sentences]
            return documents, self.model.count_tokens(sentences)

        documents, tokens = await in_thread_if_long(sum(map(len, texts)), split_and_count)
        self.check_tokens(tokens)
        return documents, tokens

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Refuse what would keep the model busy for too long, before any of it is translated."""
        settings, total, longest = self.settings, sum(tokens), max(tokens, default=0)
        if total > settings.max_tokens:
            raise RequestRefused(
                413, f"{total:,} tokens: at most {settings.max_tokens:,} are allowed in one request"
            )
        if longest > settings.max_sentence_tokens:
            raise RequestRefused(
                413,
                f"a sentence of {longest:,} tokens: at most {settings.max_sentence_tokens:,} are allowed; "
                "is it text in the source language?",
            )

    def check_texts(self, texts: Sequence[str]) -> None:
        settings = self.settings
        if len(texts) > settings.max_texts:
            raise RequestRefused(
                413, f"{len(texts):,} texts: at most {settings.max_texts:,} are allowed"
            )
        count = sum(map(len, texts))
        if count > settings.max_characters:
            raise RequestRefused(
                413, f"{count:,} characters: at most {settings.max_characters:,} are allowed"
            )


LONG_TEXT = 2_000
"""characters; longer texts are split and joined in another thread, so that other requests need not wait"""


async def in_thread_if_long(characters: int, function: Callable[[], T]) -> T:
    """Call a function in another thread if its text is long; else here, because starting a thread takes time too."""
    return await asyncio.to_thread(function) if characters > LONG_TEXT else function()


def _like_request(q: str | list[str], results: list[T]) -> T | list[T]:
    """A single result if the request had a single text, else the list."""
    return results[0] if isinstance(q, str) else results


def _texts_of_rank(hypotheses: Sequence[Sequence[Translation]], rank: int) -> list[str]:
    """The translation of this rank of each sentence, or its last one if it has fewer."""
    return [some[min(rank, len(some) - 1)].text for some in hypotheses]
