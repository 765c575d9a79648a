"""Sentences of all requests, translated together by the one thread that owns the model.

A model translates sixty sentences in little more time than one. So a sentence waits a moment for others, and while
a batch is in work the next one gathers. All that is kept here is touched by the event loop only; the thread gets
lists of texts and gives back lists of translations, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from regard.server.metrics import Metrics
from regard.server.settings import Settings

if TYPE_CHECKING:
    from regard.tasks import Translation

T = TypeVar("T")


class Searcher(Protocol):
    """What is needed of a model here."""

    def search(
        self, texts: Sequence[str], *, beam: int | None, length_penalty: float | None, nbest: int
    ) -> list[list[Translation]]: ...


class RequestRefused(Exception):  # noqa: N818
    """What the server will not do, by its HTTP status, and why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Options(NamedTuple):
    """How to search; only sentences with equal options share a batch. None: as the recipe says."""

    beam: int | None = None
    length_penalty: float | None = None
    nbest: int = 1
    to: str | None = None
    """the language wanted of a model that knows several"""

    def asked(self) -> dict[str, Any]:
        """What the model is told; one that knows a single language is not told which."""
        return {name: value for name, value in self._asdict().items() if name != "to" or value}


Answer = asyncio.Future[list["Translation"]]


class Sentence(NamedTuple):
    text: str
    answer: Answer


@dataclass(eq=False)
class Job:
    """The sentences of one request that still wait."""

    options: Options
    waiting: deque[Sentence]
    since: float


class Batcher:
    def __init__(self, model: Searcher, settings: Settings, metrics: Metrics) -> None:
        self._model = model
        self._settings = settings
        self._metrics = metrics
        self._jobs: list[Job] = []
        self._calls = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._work: asyncio.Task[None] | None = None  # alive only while there is something to do
        self.refuses = False
        """set this, from a signal handler for example, and nothing more is let in"""
        metrics.queue.set_function(lambda: self.waiting)

    @property
    def waiting(self) -> int:
        """Sentences that are in no batch yet, and calls that are not done."""
        return sum(len(job.waiting) for job in self._jobs) + self._calls

    @contextmanager
    def queued(self, texts: Sequence[str], options: Options) -> Iterator[list[Answer]]:
        """The answers to come, in the order of the texts.

        The sentences stand in the queue while the block lasts. Those that still wait when it is left, because
        the client went away or its time was over, leave the queue.
        """
        self._admit(len(texts))
        loop = asyncio.get_running_loop()
        answers: list[Answer] = [loop.create_future() for _ in texts]
        job = Job(options, deque(map(Sentence, texts, answers)), time.monotonic())
        if texts:
            self._jobs.append(job)
            if self._work is None or self._work.done():
                self._work = loop.create_task(self._translate_all())
        try:
            yield answers
        finally:
            if job in self._jobs:
                self._jobs.remove(job)
            for answer in answers:
                if not answer.cancel() and not answer.cancelled():
                    answer.exception()  # seen, or Python would report that nobody asked for it

    async def call(self, work: Callable[[], T]) -> T:
        """Anything else that needs the model, done by its thread between two batches."""
        self._admit(1)
        self._calls += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._calls -= 1

    async def finish(self) -> None:
        """Let nothing more in, and translate what is there."""
        self.refuses = True
        if self._work is not None:
            await self._work

    def _admit(self, count: int) -> None:
        room = self._settings.queue_sentences
        if self.refuses:
            raise RequestRefused(503, "the server is stopping")
        if count > room:
            raise RequestRefused(
                413, f"{count:,} sentences in one request: at most {room:,} are allowed"
            )
        if self.waiting + count > room:
            raise RequestRefused(
                429, f"{self.waiting:,} sentences are waiting already: try again soon"
            )

    async def _translate_all(self) -> None:
        """Batch after batch until no sentence waits."""
        loop = asyncio.get_running_loop()
        while self._jobs:
            await asyncio.sleep(self._moment())
            if not (batch := self._take()):
                return
            texts = [sentence.text for sentence in batch.sentences]
            found = await loop.run_in_executor(self._thread, self._search, texts, batch.options)
            for sentence, answer in zip(batch.sentences, found, strict=True):
                if sentence.answer.done():
                    continue  # the client went away meanwhile
                if isinstance(answer, Exception):
                    sentence.answer.set_exception(answer)
                else:
                    sentence.answer.set_result(answer)

    def _moment(self) -> float:
        """How long to wait for more: not at all when there is a full batch, or when one has waited."""
        characters = sum(len(sentence.text) for job in self._jobs for sentence in job.waiting)
        if characters >= self._settings.batch_characters:
            return 0.0
        waited = time.monotonic() - min(job.since for job in self._jobs)
        return max(0.0, self._settings.batch_wait - waited)

    def _take(self) -> Batch | None:
        """The next batch out of the queue: from each request with the options of the first, one sentence in turn.

        So a short request does not wait for the end of a long one. Those with other options come next.
        """
        if not self._jobs:
            return None
        batch = Batch(self._jobs[0].options, [])
        turns = deque(job for job in self._jobs if job.options == batch.options)
        room = self._settings.batch_characters
        while turns and (room >= len(turns[0].waiting[0].text) or not batch.sentences):
            job = turns.popleft()
            sentence = job.waiting.popleft()
            batch.sentences.append(sentence)
            room -= len(sentence.text)
            if job.waiting:
                turns.append(job)
        others = [job for job in self._jobs if job.options != batch.options]
        self._jobs = [*others, *turns]
        return batch

    def _search(self, texts: list[str], options: Options) -> list[list[Translation] | Exception]:
        """In the thread. An error is the answer of the sentence that caused it, not of its neighbours."""
        start = time.monotonic()
        try:
            found = self._model.search(texts, **options.asked())
        except Exception as error:
            if len(texts) == 1:
                return [error]
            return [answer for text in texts for answer in self._search([text], options)]
        self._metrics.batch_seconds.observe(time.monotonic() - start)
        self._metrics.batch_sentences.observe(len(texts))
        self._metrics.sentences.inc(len(texts))
        self._metrics.tokens.inc(sum(len(best.tokens) for best, *_ in found))
        return list(found)


class Batch(NamedTuple):
    options: Options
    sentences: list[Sentence]
