"""Live translation: stream the best hypothesis after each decoding step, as server-sent events."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from regard.data.sentence_splitter import split_text
from regard.data.special_tokens import BOS
from regard.decoding.beam_tree import BeamTree
from regard.decoding.search_state import BeamStep
from regard.errors import RegardError
from regard.server.dynamic_batching import Batcher, SearchOptions
from regard.server.inspection_endpoints import inspected_model
from regard.server.schemas import (
    LiveRequest,
    RequestRefused,
    openapi_body,
    read_body,
    server_sent_event,
)
from regard.server.service import INTERNAL_ERROR, Service, prepare_sentences
from regard.tasks import Translator

log = logging.getLogger("regard.server")


class ClientGone(Exception):  # noqa: N818
    """Raised in the model thread to stop a search whose client has disconnected."""


class BestHypothesisObserver(BeamTree):
    """Reports the best hypothesis after each step of a beam search: a finished one or the best active one.

    report: called with the token ids of the hypothesis, without EOS.
    """

    def __init__(self, report: Callable[[list[int]], None]) -> None:
        super().__init__(BOS)
        self.report = report

    def __call__(self, step: BeamStep) -> None:
        super().__call__(step)
        finished = [node for node in self.nodes if node.state == "finished"]
        active = [self.nodes[node] for node in self.active_nodes[:1] if node]
        if not (hypotheses := active + finished):
            return
        node = max(hypotheses, key=lambda node: node.score)
        tokens = [] if node.state == "finished" else [node.token]  # without EOS
        while node.parent:
            node = self.nodes[node.parent]
            tokens.append(node.token)
        self.report(tokens[::-1])


def add_live_route(app: FastAPI, service: Service) -> None:
    settings, pairs = service.settings, service.models.pairs

    @app.post(
        "/v1/live",
        openapi_extra=openapi_body(LiveRequest, pairs, settings),
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}}},
    )
    async def live(request: Request) -> StreamingResponse:
        """Translate a short text and stream the translation while it is being decoded, as server-sent events.

        Each `partial` event has the whole `text` so far, which may still change. The last event is `end` or `error`;
        the text before `end` is the one that `/translate` returns.
        """
        body = await read_body(request, LiveRequest, settings)
        if len(body.q) > settings.max_trace_characters:
            raise RequestRefused(
                413,
                f"{len(body.q):,} characters: "
                f"at most {settings.max_trace_characters:,} can be translated live",
            )
        return StreamingResponse(
            stream_partials(service, body),
            media_type="text/event-stream",
            headers={"cache-control": "no-store"},
        )


async def stream_partials(service: Service, body: LiveRequest) -> AsyncGenerator[str, None]:
    """The events of a live translation. Closing the generator stops the search."""
    try:
        async with inspected_model(service, body.model) as (loaded, model):
            document = split_text(body.q, model.recipe.data.language_pair[0])
            prepared = prepare_sentences(document.sentences, model, body.glossary, SearchOptions())
            service.check_sentences(prepared)
            done = ""
            with loaded.batcher.admit():
                for index, sentence in enumerate(document.sentences):
                    before = done + document.separators[index]
                    terms = prepared.terms[index] if prepared.terms else ()
                    texts = _partial_translations(service, loaded.batcher, model, sentence, terms)
                    async for text in texts:
                        done = before + text + document.space_after(index, text)
                        yield server_sent_event("partial", {"text": done})
    except (RequestRefused, RegardError) as error:
        yield server_sent_event("error", {"error": str(error)})
    except Exception:
        log.exception("live translation failed")
        yield server_sent_event("error", {"error": INTERNAL_ERROR})
    else:
        yield server_sent_event("partial", {"text": done + document.separators[-1]})
        yield server_sent_event("end", {})


async def _partial_translations(
    service: Service, batcher: Batcher, model: Translator, sentence: str, terms: Sequence[str]
) -> AsyncGenerator[str, None]:
    """The best translation of a sentence after each step; the last one is final."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[str | None] = asyncio.Queue()
    client_gone = threading.Event()

    def send(text: str) -> None:
        if client_gone.is_set():
            raise ClientGone
        loop.call_soon_threadsafe(queue.put_nowait, text)

    def report(tokens: list[int]) -> None:
        (text,) = model.tokenizer.target.decode([tokens])
        send(model.match_case(sentence, text, terms))

    def search() -> None:
        # Mask-predict has no beam to observe: only its result is sent.
        observer = None if model.non_autoregressive else BestHypothesisObserver(report)
        with suppress(ClientGone):
            constraints = [terms] if terms else None
            ((best, *_),) = model.search([sentence], observer=observer, constraints=constraints)
            send(best.text)

    searching = asyncio.ensure_future(service.with_timeout(batcher.run(search)))
    searching.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (text := await queue.get()) is not None:
            while not queue.empty() and (newer := queue.get_nowait()) is not None:
                text = newer  # the client reads more slowly than the model decodes
            yield text
            if searching.done() and queue.empty():
                break
        await searching
    finally:
        client_gone.set()
        searching.cancel()
