"""A translation while it is made: told again with each step of the search, for those who watch it grow."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from regard.data.sentence_splitter import split_text
from regard.data.special_tokens import BOS
from regard.decoding.beam_tree import BeamStep, BeamTree
from regard.errors import RegardError
from regard.server.batching import RequestRefused
from regard.server.schemas import RequestBody, describe, event, read
from regard.server.service import MISTAKE, Service
from regard.tasks import Translator

log = logging.getLogger("regard.server")


class LiveRequest(RequestBody):
    q: str


class Gone(Exception):  # noqa: N818
    """Nobody watches any more; ends the search."""


class Growing(BeamTree):
    """Tells the best hypothesis after each step, a finished one or the first of the live."""

    def __init__(self, tell: Callable[[list[int]], None]) -> None:
        super().__init__(BOS)
        self.tell = tell

    def __call__(self, looked: BeamStep) -> None:
        super().__call__(looked)
        finished = [node for node in self.nodes if node.state == "finished"]
        live = [self.nodes[node] for node in self.live[:1] if node]
        if not (known := live + finished):
            return
        node = max(known, key=lambda node: node.score)
        tokens = [] if node.state == "finished" else [node.token]  # EOS is no word
        while node.parent:
            node = self.nodes[node.parent]
            tokens.append(node.token)
        self.tell(tokens[::-1])


def add_live(app: FastAPI, service: Service, model: Translator) -> None:
    settings, pairs = service.settings, service.pairs

    @app.post(
        "/v1/live",
        openapi_extra=describe(LiveRequest, pairs, settings),
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}}},
    )
    async def live(request: Request) -> StreamingResponse:
        """Translate a short text and send it again and again while it grows, as server-sent events.

        Each `said` has the whole `text` so far, which may still change; `end` comes last, or an `error`.
        """
        asked = await read(request, LiveRequest, settings)
        if len(asked.q) > settings.trace_characters:
            most = settings.trace_characters
            raise RequestRefused(
                413, f"{len(asked.q):,} characters: at most {most:,} can be watched"
            )
        return StreamingResponse(
            growing(service, model, asked.q),
            media_type="text/event-stream",
            headers={"cache-control": "no-store"},
        )


async def growing(service: Service, model: Translator, text: str) -> AsyncGenerator[str, None]:
    """Sentence by sentence, step by step. A text that nobody waits for any more stops where it is."""
    document = split_text(text, service.source)
    done = ""
    try:
        for index, sentence in enumerate(document.sentences):
            before = done + document.between[index]
            async for said in _sentence(service, model, sentence):
                done = before + said + document.blank(index, said)
                yield event("said", {"text": done})
    except (RequestRefused, RegardError) as error:
        yield event("error", {"error": str(error)})
    except Exception:
        log.exception("a live translation failed")
        yield event("error", {"error": MISTAKE})
    else:
        yield event("said", {"text": done + document.between[-1]})
        yield event("end", {})


async def _sentence(
    service: Service, model: Translator, sentence: str
) -> AsyncGenerator[str, None]:
    loop = asyncio.get_running_loop()
    news: asyncio.Queue[str | None] = asyncio.Queue()
    gone = threading.Event()

    def send(text: str) -> None:
        if gone.is_set():
            raise Gone
        loop.call_soon_threadsafe(news.put_nowait, text)

    def tell(tokens: list[int]) -> None:
        (text,) = model.tokenizer.target.decode([tokens])
        send(text)

    def work() -> None:
        with suppress(Gone):
            ((best, *_),) = model.search([sentence], observer=Growing(tell))
            send(best.text)

    searching = asyncio.ensure_future(service.in_time(service.batcher.call(work)))
    searching.add_done_callback(lambda _: news.put_nowait(None))
    try:
        while (text := await news.get()) is not None:
            while not news.empty() and (newer := news.get_nowait()) is not None:
                text = newer  # the network was slower than the search
            yield text
            if searching.done() and news.empty():
                break
        await searching
    finally:
        gone.set()
        searching.cancel()
