"""Request queue with dynamic batching: a thread translates the sentences of all requests.

Translating sixty sentences takes little more time than translating one. So a sentence waits a few milliseconds for
others, and while one batch is being translated the next one fills up. Large requests have a queue and a thread of their
own, of low priority, so that small ones need not wait for them. The queues are used by the event loop only; the threads
receive lists of texts and return lists of translations.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from regard.inference.engine import SearchInterrupted
from regard.inference.worker_pool import lower_priority
from regard.server.prometheus import ModelMetrics
from regard.server.schemas import RequestRefused, Settings

if TYPE_CHECKING:
    from regard.tasks import Translation


T = TypeVar("T")


class Flag(Protocol):
    def set(self) -> None: ...

    def clear(self) -> None: ...


class SearchModel(Protocol):
    """What the queue needs of a model."""

    @property
    def interrupt(self) -> Flag:
        """While it is set, ``search`` stops at its next step with ``SearchInterrupted``."""

    def count_tokens(self, texts: Sequence[str]) -> list[int]: ...

    def search(
        self,
        texts: Sequence[str],
        *,
        beam: int | None,
        length_penalty: float | None,
        nbest: int,
        constraints: Sequence[Sequence[str]] | None = None,
    ) -> list[list[Translation]]: ...


class SearchOptions(NamedTuple):
    """Options of ``Translator.search``; None keeps the recipe's value. Sentences of a batch have equal options."""

    beam: int | None = None
    length_penalty: float | None = None
    nbest: int = 1
    to: str | None = None
    """target language of a multilingual model"""

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``search``; ``to`` is passed to multilingual models only."""
        return {name: value for name, value in self._asdict().items() if name != "to" or value}


TranslationsFuture = asyncio.Future[list["Translation"]]


INTERRUPT_SECONDS = 0.001
"""before a stopped search begins again, so that the abandoned one can stop first"""
LONG_SENTENCE = 128
"""tokens; a longer sentence costs more for each of its tokens"""


def cost(tokens: int) -> float:
    """What a sentence adds to the cost of a batch. A long one needs as many steps as tokens, each with more attention.

    So a batch of a few long sentences takes about as long as one of many short sentences.
    """
    return tokens * max(1.0, tokens / LONG_SENTENCE)


CONSTRAINED_COST = 8
"""times the cost of a sentence without terms: constrained search is not in native code, and its beam is wider"""


class QueuedSentence(NamedTuple):
    text: str
    cost: float
    future: TranslationsFuture
    terms: Sequence[str] = ()
    """what the translation must contain"""


class BatchKind(NamedTuple):
    """What the sentences of a batch have in common."""

    options: SearchOptions
    constrained: bool
    """whether they have terms: others would have to wait for them"""


@dataclass(eq=False)
class QueuedRequest:
    """The sentences of one request that are not in a batch yet; those with and without terms are two of them."""

    kind: BatchKind
    sentences: deque[QueuedSentence]
    queued_at: float


SMALL_SENTENCE = 40
"""tokens of the longest sentence of a small request"""
SMALL_REQUEST = 1_024
"""tokens of all sentences of a small request, multiplied by the beam size"""
DEFAULT_BEAM = 4


def is_small(tokens: Sequence[int], beam: int) -> bool:
    """Whether a request is translated with normal priority; it takes about as long as a few short sentences."""
    return max(tokens, default=0) <= SMALL_SENTENCE and sum(tokens) * beam <= SMALL_REQUEST


class Speed:
    """How fast recent batches were: cost per second. Of the last few, the fastest one counts.

    valid_for: seconds; what was measured before may be due to other work on the machine.
    """

    def __init__(self, valid_for: float, now: Callable[[], float] = time.monotonic) -> None:
        self._valid_for, self._now = valid_for, now
        self._recent: deque[tuple[float, float]] = deque(maxlen=8)  # when, cost per second

    def add(self, cost: float, seconds: float) -> None:
        self._recent.append((self._now(), cost / max(seconds, 1e-6)))

    def seconds(self, cost: float) -> float:
        """How long this will take; 0 if nothing is known."""
        since = self._now() - self._valid_for
        return cost / max((speed for when, speed in self._recent if when > since), default=inf)


class Lane:
    """A part of the queue, and the thread that translates it. valid_for: of its speeds."""

    def __init__(self, thread: ThreadPoolExecutor, valid_for: float) -> None:
        self.thread = thread
        self.speeds = Speed(valid_for), Speed(valid_for)
        """of batches without and with terms"""
        self.requests: list[QueuedRequest] = []
        self.queued = 0
        """number of sentences of all requests"""
        self.worker: asyncio.Task[None] | None = None  # runs only while there are requests

    def add(self, request: QueuedRequest) -> None:
        self.requests.append(request)
        self.queued += len(request.sentences)

    def seconds(self, request: QueuedRequest) -> float:
        """How long the rest of a request will take; 0 if nothing is known."""
        cost = sum(sentence.cost for sentence in request.sentences)
        return self.speeds[request.kind.constrained].seconds(cost)

    def remove(self, request: QueuedRequest) -> bool:
        """Remove what is left of a request; returns whether there was any."""
        if request not in self.requests:
            return False
        self.requests.remove(request)
        self.queued -= len(request.sentences)
        return True


class SentenceBatch(NamedTuple):
    kind: BatchKind
    sentences: list[QueuedSentence]


class Batcher:
    """The queue of a model, and the threads that use the model.

    concurrent: whether several threads may use the model at the same time. Then small requests, large requests and
    calls have a thread each; otherwise they share one. beam: the model's default.
    """

    def __init__(
        self,
        model: SearchModel,
        settings: Settings,
        metrics: ModelMetrics,
        concurrent: bool = False,
        beam: int = DEFAULT_BEAM,
    ) -> None:
        self._model = model
        self._settings = settings
        self._metrics = metrics
        self._beam = beam
        self._calls = 0
        valid_for = settings.timeout
        self._small = Lane(ThreadPoolExecutor(1, thread_name_prefix="model"), valid_for)
        self._large, self._call_thread = self._small, self._small.thread
        if concurrent:
            background = ThreadPoolExecutor(
                1, thread_name_prefix="model-background", initializer=lower_priority
            )
            self._large = Lane(background, valid_for)
            self._call_thread = ThreadPoolExecutor(1, thread_name_prefix="model-calls")
        self._running_work: dict[int, Callable[[], bool]] = {}
        """for each thread that uses the model, whether its work is abandoned"""
        self._lock = threading.Lock()  # for _running_work and the model's interrupt flag
        self.closed = False
        """if set, for example by a signal handler, new requests are refused"""
        metrics.queue.set(0)

    @property
    def _lanes(self) -> list[Lane]:
        return [self._small] if self._large is self._small else [self._small, self._large]

    @property
    def queued(self) -> int:
        """Number of sentences that are not in a batch yet, plus unfinished requests that use ``run``."""
        return sum(lane.queued for lane in self._lanes) + self._calls

    def _report_queued(self) -> None:
        self._metrics.queue.set(self.queued)

    @contextmanager
    def submit(
        self,
        texts: Sequence[str],
        tokens: Sequence[int],
        options: SearchOptions,
        terms: Sequence[Sequence[str]] | None = None,
        *,
        admitted: bool = False,
    ) -> Iterator[list[TranslationsFuture]]:
        """Put texts with these numbers of tokens in the queue; yield the futures of their translations, in order.

        On exit, sentences that are still in the queue are removed from it, and a search that is mostly for this
        request is stopped: the client disconnected or timed out. terms: what each translation must contain; their
        tokens count too. admitted: the request was admitted before.
        """
        if not admitted:
            self._admit(len(texts))
        loop = asyncio.get_running_loop()
        futures: list[TranslationsFuture] = [loop.create_future() for _ in texts]
        beam = options.beam or self._beam
        lane_without_terms = self._small if is_small(tokens, beam) else self._large
        added: list[tuple[Lane, QueuedRequest]] = []
        for constrained in (False, True) if terms and any(terms) else (False,):
            factor = max(1.0, beam / self._beam) * (CONSTRAINED_COST if constrained else 1)
            sentences = deque(
                QueuedSentence(text, factor * cost(count), future, text_terms)
                for text, count, future, text_terms in zip(
                    texts, tokens, futures, terms or [()] * len(texts), strict=True
                )
                if bool(text_terms) is constrained
            )
            if sentences:
                batch_kind = BatchKind(options, constrained)
                lane = self._large if constrained else lane_without_terms
                added.append((lane, QueuedRequest(batch_kind, sentences, time.monotonic())))
        if not admitted:
            self._refuse_late(added)
        for lane, request in added:
            lane.add(request)
            self._report_queued()
            if lane.worker is None or lane.worker.done():
                lane.worker = loop.create_task(self._translate_queue(lane))
        try:
            yield futures
        finally:
            if [lane for lane, request in added if lane.remove(request)]:
                self._report_queued()
            for future in futures:
                if not future.cancel() and not future.cancelled():
                    future.exception()  # mark it as retrieved, or asyncio logs a warning
            self._stop_if_abandoned()

    async def call(self, function: Callable[[], T]) -> T:
        """Admit a request that needs one call, and run it."""
        with self.admit():
            return await self.run(function)

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Admit a request that uses ``run``; it is refused here, or never."""
        self._admit(1)
        self._calls += 1
        self._report_queued()
        try:
            yield
        finally:
            self._calls -= 1
            self._report_queued()

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function that uses the model, for a request that was admitted before. Only one runs at a time.

        If the caller is cancelled, the search of the function is stopped.
        """
        cancelled = threading.Event()

        def run_function() -> T:
            while True:
                with self._running(cancelled.is_set):
                    try:
                        return function()
                    except SearchInterrupted:
                        if cancelled.is_set():
                            raise
                time.sleep(INTERRUPT_SECONDS)  # another search was stopped

        try:
            return await asyncio.get_running_loop().run_in_executor(self._call_thread, run_function)
        except asyncio.CancelledError:
            cancelled.set()
            self._stop_if_abandoned()
            raise

    @contextmanager
    def _running(self, is_abandoned: Callable[[], bool]) -> Iterator[None]:
        """Marks what the calling thread is working on, so that it can be stopped."""
        thread = threading.get_ident()
        with self._lock:
            self._running_work[thread] = is_abandoned
        self._stop_if_abandoned()  # while it waited for the thread
        try:
            yield
        finally:
            with self._lock:
                del self._running_work[thread]
                if not any(abandoned() for abandoned in self._running_work.values()):
                    self._model.interrupt.clear()

    def _stop_if_abandoned(self) -> None:
        """If nobody waits for a running search, stop all searches at their next step; the others begin again."""
        with self._lock:
            if any(abandoned() for abandoned in self._running_work.values()):
                self._model.interrupt.set()

    async def drain(self) -> None:
        """Refuse new requests and translate what is in the queue."""
        self.closed = True
        for lane in self._lanes:
            if lane.worker is not None:
                await lane.worker

    def close(self) -> None:
        """End the threads, after all requests have ended."""
        for thread in (*(lane.thread for lane in self._lanes), self._call_thread):
            thread.shutdown(wait=False)
        self._metrics.queue.set(0)

    def _admit(self, count: int) -> None:
        limit = self._settings.max_queued_sentences
        if self.closed:
            raise RequestRefused(503, "the server is shutting down")
        if count > limit:
            raise RequestRefused(
                413, f"{count:,} sentences in one request: at most {limit:,} are allowed"
            )
        if self.queued + count > limit:
            raise RequestRefused(
                429, f"the queue is full ({self.queued:,} sentences): try again later"
            )

    def _refuse_late(self, added: Sequence[tuple[Lane, QueuedRequest]]) -> None:
        """Refuse a request that would not be finished within its time, as far as is known from recent batches.

        The requests of a lane take turns, so it waits for each of them at most as long as it takes itself.
        """
        limit, total = self._settings.timeout, 0.0
        for lane, request in added:
            seconds = lane.seconds(request)
            if seconds > limit:
                raise RequestRefused(
                    413,
                    f"the translation would take about {seconds:,.0f} seconds: at most {limit:g} are allowed; "
                    "send the text in parts",
                )
            waiting = seconds * len(lane.requests)
            if waiting > limit / 4:  # else the exact sum makes no difference
                waiting = sum(min(seconds, lane.seconds(other)) for other in lane.requests)
            total += seconds + waiting
        if total > limit:
            raise RequestRefused(
                503,
                f"the translation would take about {total:,.0f} seconds, because other requests are waiting: "
                f"at most {limit:g} are allowed; try again later",
                retry_after=ceil(total - limit),
            )

    async def _translate_queue(self, lane: Lane) -> None:
        """Translate batch after batch until the lane is empty."""
        loop = asyncio.get_running_loop()
        while lane.requests:
            await asyncio.sleep(self._delay(lane))
            if not (batch := self._next_batch(lane)):
                return
            start = time.monotonic()
            results = await loop.run_in_executor(lane.thread, self._search_batch, batch)
            batch_cost = sum(sentence.cost for sentence in batch.sentences)
            # A small batch takes long for its cost, and an abandoned one was not finished.
            finished = len(results) == len(batch.sentences)
            if finished and 2 * batch_cost >= self._settings.max_batch_cost:
                lane.speeds[batch.kind.constrained].add(batch_cost, time.monotonic() - start)
            for sentence, result in results:
                if sentence.future.done():
                    continue  # the client has disconnected
                if isinstance(result, Exception):
                    sentence.future.set_exception(result)
                else:
                    sentence.future.set_result(result)

    def _delay(self, lane: Lane) -> float:
        """Seconds to wait for more sentences; 0 if a batch is full or the oldest has waited long enough."""
        total = sum(sentence.cost for request in lane.requests for sentence in request.sentences)
        if total >= self._settings.max_batch_cost:
            return 0.0
        waited = time.monotonic() - min(request.queued_at for request in lane.requests)
        return max(0.0, self._settings.batch_delay - waited)

    def _next_batch(self, lane: Lane) -> SentenceBatch | None:
        """Take the next batch from a lane: round-robin over all requests of the same kind as the first.

        This way a short request does not wait for a long one. Requests of another kind move to the front.
        """
        if not lane.requests:
            return None
        batch = SentenceBatch(lane.requests[0].kind, [])
        turns = deque(request for request in lane.requests if request.kind == batch.kind)
        budget = float(self._settings.max_batch_cost)
        while turns and (budget >= turns[0].sentences[0].cost or not batch.sentences):
            request = turns.popleft()
            sentence = request.sentences.popleft()
            batch.sentences.append(sentence)
            budget -= sentence.cost
            if request.sentences:
                turns.append(request)
        others = [request for request in lane.requests if request.kind != batch.kind]
        lane.requests = [*others, *turns]
        lane.queued -= len(batch.sentences)
        self._report_queued()
        return batch

    def _search_batch(
        self, batch: SentenceBatch
    ) -> list[tuple[QueuedSentence, list[Translation] | Exception]]:
        """Runs in the thread of a lane: the results of the sentences whose clients still wait.

        If the clients of half of the work leave meanwhile, the search is stopped and begins again for the others.
        """
        while waiting := [sentence for sentence in batch.sentences if not sentence.future.done()]:
            with suppress(SearchInterrupted), self._running(partial(_mostly_done, waiting)):
                return list(zip(waiting, self._search(waiting, batch.kind), strict=True))
            time.sleep(INTERRUPT_SECONDS)
        return []

    def _search(
        self, sentences: Sequence[QueuedSentence], kind: BatchKind
    ) -> list[list[Translation] | Exception]:
        """The translations of sentences. If a batch fails, each is retried alone, so that only the bad one fails."""
        start = time.monotonic()
        arguments = kind.options.arguments()
        if kind.constrained:
            arguments["constraints"] = [sentence.terms for sentence in sentences]
        try:
            results = self._model.search([sentence.text for sentence in sentences], **arguments)
        except SearchInterrupted:
            raise
        except Exception as error:
            if len(sentences) == 1:
                return [error]
            return [result for sentence in sentences for result in self._search([sentence], kind)]
        self._metrics.batch_seconds.observe(time.monotonic() - start)
        self._metrics.batch_sentences.observe(len(sentences))
        self._metrics.sentences.inc(len(sentences))
        self._metrics.tokens.inc(sum(len(best.tokens) for best, *_ in results))
        return list(results)


def _mostly_done(sentences: Sequence[QueuedSentence]) -> bool:
    """Whether at least half of the work is for sentences that nobody waits for."""
    done = sum(sentence.cost for sentence in sentences if sentence.future.done())
    return 2 * done >= sum(sentence.cost for sentence in sentences)
