"""Traces: one sentence, and all that can be seen of it. Large ones stay here and are handed out layer by layer."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from typing import Any

from fastapi import FastAPI, Request, Response

from regard.model import Translator
from regard.probe import PLACES, Floats, Head
from regard.serve.asked import TraceAsked, check_key, describe, read, while_connected
from regard.serve.batching import Refused
from regard.serve.service import Service
from regard.serve.settings import Settings
from regard.trace import Trace
from regard.tracing import trace

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
            raise Refused(404, "no such trace: the server keeps only the last few; ask again")
        self._traces.move_to_end(name)
        layers = _layers(found, place, part)
        if not number.isdecimal() or int(number[:9]) >= len(layers):
            raise Refused(404, f"no such layer: {place} has {len(layers)}, counted from 0")
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
    raise Refused(404, "no such numbers in this trace")


def add_trace(app: FastAPI, service: Service, model: Translator) -> None:
    settings, pairs = service.settings, service.pairs
    kept = Kept(settings.traces_bytes)

    @app.post("/v1/trace", openapi_extra=describe(TraceAsked, pairs, settings))
    async def trace_text(request: Request) -> dict[str, Any]:
        """Translate one sentence and tell all: attention of every head, candidates, the beam as a tree.

        Queries, keys and values, and all attention where there is much of it, are left out (`data` is null): `id` names
        the trace, and `/v1/trace/{id}/{place}/{layer}` has them.
        """
        asked = await read(request, TraceAsked, settings)
        _check(asked, settings, model)

        def work() -> Trace:
            return trace(
                model,
                asked.q,
                beam=asked.beam,
                alpha=asked.alpha,
                prefix=asked.prefix,
                forced=asked.forced,
                temperature=asked.temperature,
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


def _check(asked: TraceAsked, settings: Settings, model: Translator) -> None:
    characters = len(asked.q) + len(asked.prefix)
    if characters > settings.trace_characters:
        most = settings.trace_characters
        raise Refused(413, f"{characters:,} characters: at most {most:,} can be traced at once")
    (source,), (prefix,) = (
        vocabulary.encode([text])
        for vocabulary, text in (
            (model.tokenizer.source, asked.q),
            (model.tokenizer.target, asked.prefix),
        )
    )
    tokens = max(len(source), len(asked.forced) + len(prefix))
    if tokens > settings.trace_tokens:
        raise Refused(413, f"{tokens:,} tokens: at most {settings.trace_tokens:,} can be traced")
    if (asked.beam or 1) > settings.beam:
        raise Refused(400, f"a beam of at most {settings.beam} is allowed")


def _binary(numbers: Floats) -> Response:
    content = numbers.astype("<f4").tobytes()
    return Response(content, media_type="application/octet-stream")
