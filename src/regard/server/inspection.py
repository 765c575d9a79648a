"""Traces: one sentence, and all that can be seen of it. Large ones stay here and are handed out layer by layer."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from pydantic import Field

from regard.errors import RegardError
from regard.inspection.history import Checkpoints, course, curves
from regard.inspection.hooks import PLACES, Floats, Head
from regard.inspection.trace import Trace, trace
from regard.nn.state_dict import copy_weights
from regard.server.batching import RequestRefused
from regard.server.schemas import (
    RequestBody,
    TraceRequest,
    check_key,
    describe,
    read,
    while_connected,
)
from regard.server.service import Service
from regard.server.settings import Settings
from regard.tasks import Translator

PARTS = ("query", "key", "value", "output")


class Kept:
    """The last traces, by id, as many as fit; the newest always stays."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._traces: OrderedDict[str, Trace] = OrderedDict()

    def keep(self, found: Trace) -> str:
        name = secrets.token_hex(8)
        self._traces[name] = found
        while len(self._traces) > 1 and sum(map(_bytes, self._traces.values())) > self._most:
            self._traces.popitem(last=False)
        return name

    def layer(self, name: str, place: str, number: str, part: str | None = None) -> Floats:
        """The weights of one layer, [head, query, key], or one of the parts they were made of."""
        found = self._traces.get(name)
        if found is None:
            raise RequestRefused(
                404, "no such trace: the server keeps only the last few; ask again"
            )
        self._traces.move_to_end(name)
        layers = _layers(found, place, part)
        if not number.isdecimal() or int(number[:9]) >= len(layers):
            raise RequestRefused(404, f"no such layer: {place} has {len(layers)}, counted from 0")
        return layers[int(number[:9])]


def _bytes(found: Trace) -> int:
    parts: list[list[Floats]] = [
        getattr(one, name) for one in found.parts.values() for name in PARTS
    ]
    return found.bytes_of_attention + sum(array.nbytes for layers in parts for array in layers)


def _layers(found: Trace, place: str, part: str | None) -> Floats | list[Floats]:
    for known in PLACES:
        if place == known and part is None:
            return found.weights(known)
        if place == known and part in PARTS and known in found.parts:
            layers: list[Floats] = getattr(found.parts[known], part)
            return layers
    if place == "nodes" and part is None:
        return found.nodes
    raise RequestRefused(404, "no such numbers in this trace")


def add_trace(app: FastAPI, service: Service, model: Translator) -> None:
    settings, pairs = service.settings, service.pairs
    kept = Kept(settings.traces_bytes)

    @app.post("/v1/trace", openapi_extra=describe(TraceRequest, pairs, settings))
    async def trace_text(request: Request) -> dict[str, Any]:
        """Translate one sentence and tell all: attention of every head, candidates, the beam as a tree.

        Queries, keys and values, and all attention where there is much of it, are left out (`data` is null): `id` names
        the trace, and `/v1/trace/{id}/{place}/{layer}` has them.
        """
        asked = await read(request, TraceRequest, settings)
        _check(asked, settings, model)

        def work() -> Trace:
            return trace(
                model,
                asked.q,
                beam=asked.beam,
                length_penalty=asked.length_penalty,
                prefix=asked.prefix,
                forced=asked.forced,
                temperature=asked.temperature or None,
                seed=asked.seed,
                mute=[Head.named(name) for name in asked.mute],
            )

        found = await while_connected(request, service.in_time(service.batcher.call(work)))
        small = found.bytes_of_attention <= settings.trace_bytes
        told = found.to_json("attention" if small else "apart")
        return {"id": kept.keep(found), **told}

    @app.get(
        "/v1/trace/{id}/{place}/{layer}",
        response_class=Response,
        responses={200: {"content": {"application/octet-stream": {}}}},
    )
    async def trace_weights(request: Request, id: str, place: str, layer: str) -> Response:
        """Attention of one layer of a trace, as little-endian float32: [head, query, key], row by row.

        place is encoder, decoder, cross, or nodes, whose queries are the nodes in `parents`.
        """
        check_key(request, None, settings)
        return _binary(kept.layer(id, place, layer))

    @app.get(
        "/v1/trace/{id}/{place}/{layer}/{part}",
        response_class=Response,
        responses={200: {"content": {"application/octet-stream": {}}}},
    )
    async def trace_part(request: Request, id: str, place: str, layer: str, part: str) -> Response:
        """What the weights of one layer were made of: query, key, value, or output, the W_O of each head."""
        check_key(request, None, settings)
        return _binary(kept.layer(id, place, layer, part))


def _check(asked: TraceRequest, settings: Settings, model: Translator) -> None:
    characters = len(asked.q) + len(asked.prefix)
    if characters > settings.trace_characters:
        most = settings.trace_characters
        raise RequestRefused(
            413, f"{characters:,} characters: at most {most:,} can be traced at once"
        )
    (source,), (prefix,) = (
        vocabulary.encode([text])
        for vocabulary, text in (
            (model.tokenizer.source, asked.q),
            (model.tokenizer.target, asked.prefix),
        )
    )
    tokens = max(len(source), len(asked.forced) + len(prefix))
    if tokens > settings.trace_tokens:
        raise RequestRefused(
            413, f"{tokens:,} tokens: at most {settings.trace_tokens:,} can be traced"
        )
    if (asked.beam or 1) > settings.beam:
        raise RequestRefused(400, f"a beam of at most {settings.beam} is allowed")


def _binary(numbers: Floats) -> Response:
    content = numbers.astype("<f4").tobytes()
    return Response(content, media_type="application/octet-stream")


# ---------------------------------------------------------------------------------------------
# How the served model learned: its run for the page to draw, and a run that still learns is followed.


log = logging.getLogger("regard.server")

LONGEST_SAID = 2_000
"""tokens whose alignment may be asked for"""
LOOK_AGAIN = 5.0
"""seconds between two looks for better weights of a run that still learns"""


class AlignRequest(RequestBody):
    q: str
    """one sentence"""
    said: Annotated[list[int], Field(min_length=1, max_length=LONGEST_SAID, fail_fast=True)]
    """ids of the tokens that a trace said"""
    step: Annotated[int, Field(ge=0)]
    """of a checkpoint that the run keeps"""


def add_course(app: FastAPI, service: Service, model: Translator) -> None:
    settings, pairs = service.settings, service.pairs
    checkpoints = Checkpoints(model)

    @app.get("/v1/run")
    async def run(request: Request) -> dict[str, Any]:
        """What the model is built on and how it learned: positions, rate, targets, curves, checkpoints."""
        check_key(request, None, settings)
        return await service.in_time(service.batcher.call(lambda: course(model)))

    @app.get("/v1/run/curves")
    async def learned(request: Request) -> dict[str, Any]:
        """The numbers of the run's log so far, and which checkpoints there are."""
        check_key(request, None, settings)
        found = await asyncio.to_thread(curves, model.run) if model.run else None
        return {"curves": found, "checkpoints": checkpoints.steps()}

    @app.post("/v1/align", openapi_extra=describe(AlignRequest, pairs, settings))
    async def align(request: Request) -> dict[str, Any]:
        """Where the model looked at an earlier checkpoint, had it said the same."""
        asked = await read(request, AlignRequest, settings)
        if len(asked.q) > settings.trace_characters:
            raise RequestRefused(
                413, f"at most {settings.trace_characters:,} characters can be traced"
            )
        if not all(0 <= token < model.tokenizer.target.size for token in asked.said):
            raise RequestRefused(400, "said: no tokens of this model")

        def work() -> dict[str, Any]:
            return checkpoints.alignment(asked.step, model.request(asked.q), asked.said)

        return await service.in_time(service.batcher.call(work))


async def follow(service: Service, model: Translator) -> None:
    """While the run still learns, take over each better model as it is written, between two batches."""
    run = model.run
    if run is None:
        return
    seen = run.weights_file.stat().st_mtime_ns

    def take() -> None:
        copy_weights(model.network, run.weights(), str(run.weights_file))
        model.freeze()

    finished = run.card_file.is_file()
    while not finished:
        await asyncio.sleep(LOOK_AGAIN)
        # In this order: what is written with the card, or before it, is taken below.
        finished = run.card_file.is_file()
        try:
            now = run.weights_file.stat().st_mtime_ns
            if now != seen:
                await service.batcher.call(take)
                seen = now
                log.info("took over the weights that %s has now", run)
        except (OSError, RegardError, RequestRefused) as error:
            log.warning("%s: kept the weights from before: %s", run, error)
