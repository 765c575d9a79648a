"""Translation of documents: split texts into sentences, translate them through the queue, join the results."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from regard.data.language_identification import LANGUAGE_NAMES, identify_among
from regard.documents.base import SentenceTranslation
from regard.documents.markup import Document, Floats, split_html, split_plain
from regard.errors import RegardError
from regard.server.dynamic_batching import SearchModel, SearchOptions, TranslationsFuture
from regard.server.model_pool import LoadedModel, ModelPool, Route, RouteStage
from regard.server.schemas import (
    DetailedRequest,
    DetailedResponse,
    DetailedSentence,
    DetailedTranslation,
    DetectedLanguage,
    Language,
    RequestRefused,
    StreamRequest,
    TextRequest,
    TimeLimit,
    TranslateRequest,
    TranslateResponse,
    server_sent_event,
)

if TYPE_CHECKING:
    from regard.data.glossary import Glossary
    from regard.tasks import Translation

T = TypeVar("T")

log = logging.getLogger("regard.server")

INTERNAL_ERROR = "internal server error; see the server's log"

DETECTED_CHARACTERS = 2_000
"""the beginning of a text, from which its language is detected"""


class TranslatedText(NamedTuple):
    text: str
    alternatives: list[str]
    confidence: float
    """the lowest of its sentences"""


class DocumentSentences(NamedTuple):
    """The sentences of a file, and whether each has inline elements."""

    sentences: list[str]
    has_elements: list[bool]


class SearchedText(NamedTuple):
    """A text whose sentences are translated, but not joined yet."""

    document: Document
    hypotheses: list[list[Translation]]
    """of each sentence"""

    @property
    def confidence(self) -> float:
        return min((nbest[0].confidence for nbest in self.hypotheses), default=1.0)


class RoutedTexts(NamedTuple):
    """The texts of a request with their models."""

    texts: Sequence[str]
    detected: list[DetectedLanguage] | None
    routes: list[Route]

    async def map(
        self, translate: Callable[[Sequence[str], Route], Coroutine[Any, Any, list[T]]]
    ) -> list[T]:
        """The result of each text; the texts of a route are translated together.

        All languages enter the queues at once. If one is refused, so is the request.
        """
        groups: dict[tuple[str, ...], tuple[Route, list[str]]] = {}
        for text, route in zip(self.texts, self.routes, strict=True):
            groups.setdefault(route.languages, (route, []))[1].append(text)
        outputs = await all_or_none([translate(group, route) for route, group in groups.values()])
        results = {key: iter(group) for key, group in zip(groups, outputs, strict=True)}
        return [next(results[route.languages]) for route in self.routes]


class Service:
    """Models with their queues, limits and metrics: everything the routes need."""

    def __init__(self, models: ModelPool) -> None:
        self.models = models
        self.settings = models.settings
        self.metrics = models.metrics

    # Languages

    def languages(self) -> list[Language]:
        pairs = self.models.pairs
        codes = dict.fromkeys(code for pair in pairs for code in pair)
        return [
            Language(
                code=code,
                name=LANGUAGE_NAMES.get(code.split("-")[0], code),
                targets=[target for source, target in pairs if source == code],
            )
            for code in codes
        ]

    @staticmethod
    async def detect(text: str, languages: Sequence[str]) -> list[DetectedLanguage]:
        """The probability of each language, in percent, most probable first.

        Equal for all without py3langid, for languages that it does not know, and for a text without letters.
        """
        equal = [
            DetectedLanguage(confidence=100 / len(languages), language=language)
            for language in languages
        ]
        if len(languages) == 1 or not any(map(str.isalpha, text)):
            return equal
        codes = {language.split("-")[0]: language for language in languages}
        if len(codes) < len(languages) or (identifier := identify_among(*codes)) is None:
            return equal
        start = text[:DETECTED_CHARACTERS]
        ranked = await asyncio.to_thread(identifier.rank, start)
        return [
            DetectedLanguage(confidence=100 * float(probability), language=codes[code])
            for code, probability in ranked
        ]

    async def sources_of(
        self, texts: Sequence[str], request: TextRequest
    ) -> list[DetectedLanguage] | None:
        """The detected language of each text if the request leaves it open, else None."""
        if request.source != "auto":
            return None
        sources = self.models.sources(request.target, request.model)
        if not sources:
            self.route(request.source, request)  # raises the error
        return [(await self.detect(text, sources))[0] for text in texts]

    # Translation

    async def translate(self, request: TranslateRequest) -> TranslateResponse:
        start = asyncio.get_running_loop().time()
        texts = [request.q] if isinstance(request.q, str) else request.q
        self.check_options(request, request.alternatives)
        routed = await self._route_texts(texts, request)

        async def translate(group: Sequence[str], route: Route) -> list[TranslatedText]:
            return await self._translate(group, route, request, start)

        results = await routed.map(translate)
        return self._response(request, results, routed.detected, routed.routes)

    async def translate_with_details(self, request: DetailedRequest) -> DetailedResponse:
        start = asyncio.get_running_loop().time()
        texts = [request.q] if isinstance(request.q, str) else request.q
        self.check_options(request)
        routed = await self._route_texts(texts, request)
        for route in routed.routes:
            refuse_pivot(route, "details")

        async def translate(group: Sequence[str], route: Route) -> list[DetailedTranslation]:
            async with self.models.use(*route.entries) as loaded:
                (stage,) = route.stages(loaded)
                return [
                    (await self._details(searched, stage, request, start)).model_copy(
                        update={"model": route.name}
                    )
                    for searched in await self._search(group, stage, request, start)
                ]

        translations = await routed.map(translate)
        for translation, detected in zip(translations, routed.detected or (), strict=False):
            translation.detectedLanguage = detected
        return DetailedResponse(translations=translations)

    async def _details(
        self, searched: SearchedText, stage: RouteStage, request: DetailedRequest, start: float
    ) -> DetailedTranslation:
        document, model, to = searched.document, stage.model, stage.to
        best = [nbest[0] for nbest in searched.hypotheses]
        sentences = []
        for source, translation in zip(document.sentences, best, strict=True):
            links = None
            if request.alignment:
                find = partial(model.word_links, source, translation.text, to)
                links = await self.with_timeout(model.batcher.run(find), start)
            sentences.append(
                DetailedSentence(source=source, alignment=links, **translation._asdict())
            )
        return DetailedTranslation(
            text=await self.join(
                document, [translation.text for translation in best], model, to, start
            ),
            confidence=searched.confidence,
            model="",
            sentences=sentences,
        )

    async def _route_texts(self, texts: Sequence[str], request: TextRequest) -> RoutedTexts:
        """Check texts, detect their languages if necessary, and find their models."""
        self.check_texts(texts)
        detected = await self.sources_of(texts, request)
        if detected is None:
            routes = [self.route(request.source, request)] * len(texts)
        else:
            routes_by_language = {
                detection.language: self.route(detection.language, request)
                for detection in detected
            }
            routes = [routes_by_language[detection.language] for detection in detected]
        return RoutedTexts(texts, detected, routes)

    def _response(
        self,
        request: TranslateRequest,
        results: Sequence[TranslatedText],
        detected: Sequence[DetectedLanguage] | None,
        routes: Sequence[Route],
    ) -> TranslateResponse:
        def like_request(values: Iterable[T], included: bool = True) -> T | list[T] | None:
            """A single value if the request had a single text, else the list."""
            if not included:
                return None
            return next(iter(values)) if isinstance(request.q, str) else list(values)

        multiple_models = len(self.models.entries) > 1
        best = like_request(result.text for result in results)
        assert best is not None
        alternatives: list[list[str]] | list[str] = [result.alternatives for result in results]
        if isinstance(request.q, str):
            alternatives = results[0].alternatives
        return TranslateResponse(
            translatedText=best,
            alternatives=alternatives if request.alternatives else None,
            detectedLanguage=like_request(detected or (), detected is not None),
            confidence=like_request((result.confidence for result in results), request.confidence),
            model=like_request((route.name for route in routes), multiple_models),
        )

    async def _translate(
        self, texts: Sequence[str], route: Route, request: TranslateRequest, start: float
    ) -> list[TranslatedText]:
        """Translate texts of one language, through a pivot language if the route has one."""
        async with self.models.use(*route.entries) as loaded:
            stages = route.stages(loaded)
            *before, last = stages
            with ExitStack() as admitted:
                for stage in stages[1:]:
                    admitted.enter_context(stage.model.batcher.admit())
                confidences = [1.0] * len(texts)
                for stage in before:
                    translated = await self._translate_stage(texts, stage, request, start)
                    texts = [text.text for text in translated]
                    confidences = [text.confidence for text in translated]
                translated = await self._translate_stage(
                    texts, last, request, start, request.alternatives
                )
        return [
            text._replace(confidence=text.confidence * confidence)
            for text, confidence in zip(translated, confidences, strict=True)
        ]

    async def _translate_stage(
        self,
        texts: Sequence[str],
        stage: RouteStage,
        request: TextRequest,
        start: float,
        alternatives: int = 0,
    ) -> list[TranslatedText]:
        """Translate texts with one model."""
        translated = []
        for searched in await self._search(texts, stage, request, start, alternatives):
            ranks = [_texts_of_rank(searched.hypotheses, rank) for rank in range(alternatives + 1)]
            first, *others = [
                await self.join(searched.document, rank_texts, stage.model, stage.to, start)
                for rank_texts in ranks
            ]
            others = [text for text in dict.fromkeys(others) if text != first]
            translated.append(TranslatedText(first, others, searched.confidence))
        return translated

    async def _search(
        self,
        texts: Sequence[str],
        stage: RouteStage,
        request: TextRequest,
        start: float,
        alternatives: int = 0,
    ) -> list[SearchedText]:
        """The hypotheses of each sentence of texts."""
        options = self.search_options(request, stage, alternatives)
        documents, queued = await self.split(texts, stage, request, options)
        with self._submit(queued, stage, options) as futures:
            results = iter(await self.with_timeout(asyncio.gather(*futures), start))
        return [
            SearchedText(document, [next(results) for _ in document.sentences])
            for document in documents
        ]

    async def stream(self, request: StreamRequest) -> AsyncIterator[str]:
        """Server-sent events: ``start`` once queued, a ``part`` for each sentence in order, then ``end``.

        The texts of all parts, concatenated, are the whole translation.
        """
        start = asyncio.get_running_loop().time()
        self.check_options(request)
        self.check_texts([request.q])
        detected = await self.sources_of([request.q], request)
        route = self.route(detected[0].language if detected else request.source, request)
        async with self.models.use(*route.entries) as loaded:
            stages = route.stages(loaded)
            *before, last = stages
            with ExitStack() as admitted:
                for stage in stages[1:]:
                    admitted.enter_context(stage.model.batcher.admit())
                text = request.q
                for stage in before:
                    ((text, *_),) = await self._translate_stage([text], stage, request, start)
                async for event in self._stream_stage(text, last, request, start):
                    yield event

    async def _stream_stage(
        self, text: str, stage: RouteStage, request: StreamRequest, start: float
    ) -> AsyncIterator[str]:
        options = self.search_options(request, stage)
        (document,), queued = await self.split([text], stage, request, options)
        with self._submit(queued, stage, options) as futures:
            yield server_sent_event("start", {"sentences": len(futures)})
            try:
                for index, future in enumerate(futures):
                    best, *_ = await self.with_timeout(future, start)
                    alignment = await self.with_timeout(
                        self.alignment(document, index, best.text, stage.model, options.to), start
                    )
                    translation = document.join_one(index, best.text, alignment)
                    source = document.sentences[index]
                    yield server_sent_event("part", {"text": translation, "source": source})
            except (RequestRefused, RegardError) as error:
                yield server_sent_event("error", {"error": str(error)})
            except Exception:
                log.exception("stream failed")
                yield server_sent_event("error", {"error": INTERNAL_ERROR})
            else:
                yield server_sent_event("part", {"text": document.separators[-1], "source": ""})
                yield server_sent_event("end", {})

    async def translate_document(
        self, document: DocumentSentences, source: str, request: TextRequest
    ) -> list[SentenceTranslation]:
        """Translate the sentences of a file, with alignments for those that have inline elements.

        The request was admitted before the file was read.
        """
        start = asyncio.get_running_loop().time()
        route = self.route(source, request)
        texts = document.sentences
        tagged = [row for row, has in enumerate(document.has_elements) if has]
        alignments: dict[int, Floats | None] = {}
        async with self.models.use(*route.entries, admitted=True) as loaded:
            stages = route.stages(loaded)
            with ExitStack() as admitted:
                for stage in stages[1:]:
                    admitted.enter_context(stage.model.batcher.admit())
                for stage in stages:
                    outputs = await self._translate_sentences(texts, stage, request, start)
                    for row in tagged:
                        alignment = await self.with_timeout(
                            self._align(texts[row], outputs[row], stage.model, stage.to), start
                        )
                        before = alignments.get(row)
                        if stage.is_first or alignment is None or before is None:
                            alignments[row] = alignment if stage.is_first else None
                        else:  # [target, pivot] @ [pivot, source]
                            alignments[row] = alignment @ before
                    texts = outputs
        return [SentenceTranslation(text, alignments.get(row)) for row, text in enumerate(texts)]

    async def _translate_sentences(
        self, sentences: Sequence[str], stage: RouteStage, request: TextRequest, start: float
    ) -> list[str]:
        options = self.search_options(request, stage)
        prepare = partial(
            prepare_sentences, sentences, stage.model.model, request.glossary, options
        )
        queued = await in_thread_if_long(work_of(sentences, request.glossary), prepare)
        self.check_sentences(queued)
        with self._submit(queued, stage, options) as futures:
            results = await self.with_timeout(asyncio.gather(*futures), start)
        return [best.text for best, *_ in results]

    @staticmethod
    def _submit(
        queued: PreparedSentences, stage: RouteStage, options: SearchOptions
    ) -> AbstractContextManager[list[TranslationsFuture]]:
        return stage.model.batcher.submit(
            queued.texts, queued.tokens, options, queued.terms, admitted=not stage.is_first
        )

    async def join(
        self,
        document: Document,
        translations: Sequence[str],
        model: LoadedModel,
        to: str | None,
        start: float,
    ) -> str:
        """The document with its translations, inline tags around the words they belong to.

        start: when the request began.
        """
        alignments: list[Floats | None] = [None] * len(translations)
        for index in document.elements:
            alignments[index] = await self.with_timeout(
                self.alignment(document, index, translations[index], model, to), start
            )
        characters = sum(map(len, translations))
        return await in_thread_if_long(characters, partial(document.join, translations, alignments))

    async def alignment(
        self, document: Document, index: int, translation: str, model: LoadedModel, to: str | None
    ) -> Floats | None:
        """The word alignment of a sentence; None if it has no inline tags or the model cannot align it."""
        if index not in document.elements:
            return None
        return await self._align(document.sentences[index], translation, model, to)

    @staticmethod
    async def _align(
        sentence: str, translation: str, model: LoadedModel, to: str | None
    ) -> Floats | None:
        if not model.can_align or translation == sentence:
            return None
        if not sentence.strip() or not translation.strip():
            return None
        try:
            return await model.batcher.run(partial(model.align, sentence, translation, to))
        except RegardError:  # longer than the model's maximum length
            return None

    async def with_timeout(self, result: Awaitable[T], start: float | None = None) -> T:
        """Await a result within the time limit of a request that began at ``start`` (default: now)."""
        async with TimeLimit(self.settings.timeout, "the translation was not ready", start):
            return await result

    # Limits

    def route(self, source: str, request: TextRequest) -> Route:
        """The models for a source language and the request's target language."""
        if route := self.models.route(source, request.target, request.model):
            if request.glossary is not None:
                refuse_pivot(route, "glossary")
            return route
        entries = self.models.entries
        pairs = self.models.entry(request.model).pairs if request.model else self.models.pairs
        supported = ", ".join(
            f"{source_language} to {target_language}" for source_language, target_language in pairs
        )
        named = all(entry.recipe.data.named for entry in entries)
        unnamed = "" if named else " (the model's recipe names no languages)"
        subject = f"model {request.model}" if request.model else "this server"
        raise RequestRefused(
            400,
            f"{source} to {request.target} is not supported: {subject} translates {supported}{unnamed}",
        )

    def check_options(self, request: TextRequest, alternatives: int = 0) -> None:
        maximum = self.settings.max_alternatives
        if alternatives > maximum:
            raise RequestRefused(400, f"alternatives {alternatives}: at most {maximum}")
        self.check_beam(request.beam)

    def search_options(
        self, request: TextRequest, stage: RouteStage, alternatives: int = 0
    ) -> SearchOptions:
        nbest = alternatives + 1
        beam = None if request.beam is None else max(request.beam, nbest)
        return SearchOptions(beam, request.length_penalty, nbest, stage.to)

    def check_beam(self, beam: int | None) -> None:
        if (beam or 1) > self.settings.max_beam:
            raise RequestRefused(400, f"beam {beam}: at most {self.settings.max_beam}")

    async def split(
        self, texts: Sequence[str], stage: RouteStage, request: TextRequest, options: SearchOptions
    ) -> tuple[list[Document], PreparedSentences]:
        """The sentences of each text, and those of all texts for the queue, after checking the limits."""
        split = split_html if request.format == "html" else split_plain
        glossary = request.glossary

        def split_and_prepare() -> tuple[list[Document], PreparedSentences]:
            documents = [split(text, stage.source) for text in texts]
            sentences = [sentence for document in documents for sentence in document.sentences]
            return documents, prepare_sentences(sentences, stage.model.model, glossary, options)

        documents, queued = await in_thread_if_long(work_of(texts, glossary), split_and_prepare)
        self.check_sentences(queued)
        return documents, queued

    def check_sentences(self, sentences: PreparedSentences) -> None:
        """Refuse what would keep the model busy for too long, before any of it is translated."""
        settings, tokens = self.settings, sentences.tokens
        total, maximum = sum(tokens), max(tokens, default=0)
        terms = max(map(len, sentences.terms or ()), default=0)
        if terms > settings.max_sentence_terms:
            raise RequestRefused(
                400,
                f"a sentence with {terms} glossary terms: at most {settings.max_sentence_terms} are allowed",
            )
        if total > settings.max_tokens:
            raise RequestRefused(
                413, f"{total:,} tokens: at most {settings.max_tokens:,} are allowed in one request"
            )
        if maximum > settings.max_sentence_tokens:
            raise RequestRefused(
                413,
                f"a sentence of {maximum:,} tokens: at most {settings.max_sentence_tokens:,} are allowed; "
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


class PreparedSentences(NamedTuple):
    """Sentences for the queue of a model."""

    texts: Sequence[str]
    tokens: list[int]
    """of each sentence and its terms"""
    terms: list[list[str]] | None
    """what each translation must contain; None without a glossary"""


def prepare_sentences(
    sentences: Sequence[str], model: SearchModel, glossary: Glossary | None, options: SearchOptions
) -> PreparedSentences:
    """Count the tokens of sentences and find their glossary terms."""
    tokens = model.count_tokens(sentences)
    if glossary is None:
        return PreparedSentences(sentences, tokens, None)
    # As on the command line: the model must be able to use every term, also those that do not occur.
    model.search([""], constraints=[[*glossary.terms.values()]], **options.arguments())
    terms = [glossary.target_terms(sentence) for sentence in sentences]
    added = model.count_tokens([" ".join(sentence_terms) for sentence_terms in terms])
    total = [
        count + term_count if sentence_terms else count
        for count, term_count, sentence_terms in zip(tokens, added, terms, strict=True)
    ]
    return PreparedSentences(sentences, total, terms)


def work_of(texts: Sequence[str], glossary: Glossary | None) -> int:
    """How much work it is to prepare texts, in characters."""
    terms = 0 if glossary is None else len(glossary.terms)
    return sum(map(len, texts)) + terms * CHARACTERS_PER_TERM


CHARACTERS_PER_TERM = 100
LONG_TEXT = 2_000
"""characters; longer texts are split and joined in another thread, so that other requests need not wait"""


async def in_thread_if_long(characters: int, function: Callable[[], T]) -> T:
    """Call a function in another thread if its text is long; else here, because starting a thread takes time too."""
    return await asyncio.to_thread(function) if characters > LONG_TEXT else function()


def refuse_pivot(route: Route, what: str) -> None:
    if len(route.entries) > 1:
        languages = " to ".join(route.languages)
        raise RequestRefused(
            400, f"{what}: not supported for {languages}, which is translated by two models"
        )


async def all_or_none(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of coroutines that run at the same time. The first error ends all of them and is raised."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _texts_of_rank(hypotheses: Sequence[Sequence[Translation]], rank: int) -> list[str]:
    """The translation of this rank of each sentence, or its last one if it has fewer."""
    return [nbest[min(rank, len(nbest) - 1)].text for nbest in hypotheses]
