"""Routes for inspection: traces of single sentences, and the training history of the model.

A large trace stays on the server, and the page fetches its arrays layer by layer.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import secrets
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import is_dataclass
from functools import cache, partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from fastapi import FastAPI, Request, Response

from regard.data.corpus import valid_pairs
from regard.demo.corpus import pronoun_test
from regard.errors import RegardError
from regard.inspection.activations import architecture_json
from regard.inspection.attribution import attribute_token
from regard.inspection.head_ablation import (
    AblationOptions,
    HeadAblation,
    HeadEffect,
    HeadTable,
    all_heads,
)
from regard.inspection.hooks import SITES, Floats, Head
from regard.inspection.page_data import depth_lenses, model_info, validation_sample
from regard.inspection.patching import patch
from regard.inspection.teacher_forcing import (
    ForcedTranslation,
    check_supported,
    check_text,
    find_word,
    force_ids,
)
from regard.inspection.trace import Trace, trace
from regard.inspection.training_history import PastCheckpoints, curves, training_history
from regard.nn.network import copy_weights
from regard.server.dynamic_batching import Batcher
from regard.server.model_pool import LoadedModel, ModelEntry
from regard.server.schemas import (
    AlignRequest,
    AttributionRequest,
    LensRequest,
    ModelRequest,
    PatchingRequest,
    RequestRefused,
    Settings,
    TimeLimit,
    TraceRequest,
    cancel_on_disconnect,
    check_api_key,
    openapi_body,
    read_body,
)
from regard.server.service import Service
from regard.tasks import Translator

log = logging.getLogger("regard.server")
T = TypeVar("T")

PROJECTIONS = ("query", "key", "value", "output")
"""arrays that can be fetched for each layer besides its attention weights"""
POLL_SECONDS = 5.0
"""how often to check for new weights of a run that is still training"""
QUEUE_PAUSE = 1.0
"""seconds before work in the background is tried again if the queue is full"""
BINARY: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}

# ---------------------------------------------------------------------------------------------
# Traces


class TraceCache:
    """Recent traces by id, up to a size in bytes. The newest one is always kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._traces: OrderedDict[str, tuple[Trace, int]] = OrderedDict()
        self.bytes = 0
        """memory of all traces"""

    def add(self, trace: Trace) -> str:
        """Store a trace, drop the least recently used ones, return its id."""
        id = secrets.token_hex(8)
        self._traces[id] = trace, memory_bytes(trace)
        self.bytes += self._traces[id][1]
        while len(self._traces) > 1 and self.bytes > self._max_bytes:
            _, (_, size) = self._traces.popitem(last=False)
            self.bytes -= size
        return id

    def layer(self, id: str, site: str, layer: str, projection: str | None = None) -> Floats:
        """The attention weights of a layer, [head, query, key], or one of its ``PROJECTIONS``."""
        if id not in self._traces:
            raise RequestRefused(
                404, "no such trace: the server keeps only recent ones; trace the text again"
            )
        self._traces.move_to_end(id)
        trace, _ = self._traces[id]
        layers = _layers(trace, site, projection)
        if not layer.isdecimal() or int(layer[:9]) >= len(layers):
            raise RequestRefused(
                404, f"no such layer: {site} has {len(layers)} layers, counted from 0"
            )
        return layers[int(layer[:9])]


def return_free_memory() -> None:
    """Give free memory back to the system.

    A trace needs far more memory than it keeps, and what it keeps lies between what is free: without this, the process
    grew by ten times the size of the stored traces.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], object] | None:
    """A function of glibc; None elsewhere."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


def memory_bytes(value: object) -> int:
    """The memory of an object and all that it holds: arrays with the memory they are views of, containers, fields."""
    seen: set[int] = set()
    total, remaining = 0, [value]
    while remaining:
        item = remaining.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            total += item.untyped_storage().nbytes()
            continue
        total += sys.getsizeof(item)
        if isinstance(item, np.ndarray):
            remaining.append(item.base)  # what a view is a view of; getsizeof does not count it
        elif isinstance(item, dict):
            remaining += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            remaining += item
        elif is_dataclass(item):
            remaining.append(vars(item))
    return total


def _layers(trace: Trace, site: str, projection: str | None) -> Floats | list[Floats]:
    for candidate in SITES:
        if site == candidate and projection is None:
            return trace.weights(candidate)
        if site == candidate and projection in PROJECTIONS and candidate in trace.projections:
            layers: list[Floats] = getattr(trace.projections[candidate], projection)
            return layers
    if site == "nodes" and projection is None:
        return trace.nodes
    raise RequestRefused(404, "no such array in this trace")


@asynccontextmanager
async def inspected_model(
    service: Service, name: str | None
) -> AsyncIterator[tuple[LoadedModel, Translator]]:
    """The model of this name, or the first one, with its first target language as the default."""
    entry = service.models.entry(name)
    async with service.models.use(entry) as loaded:
        model = loaded[entry].model
        assert isinstance(model, Translator)
        yield loaded[entry], model.with_target_language(entry.to(entry.pairs[0][1]))


def add_trace_routes(app: FastAPI, service: Service) -> None:
    settings, pairs = service.settings, service.models.pairs
    traces = TraceCache(settings.trace_cache_bytes)

    async def compute_trace(body: TraceRequest) -> Trace:
        async with inspected_model(service, body.model) as (loaded, model):
            _check_trace_size(body, settings, model)

            def run() -> Trace:
                traced = trace(
                    model,
                    body.q,
                    beam=body.beam,
                    length_penalty=body.length_penalty,
                    prefix=body.prefix,
                    forced=body.forced,
                    temperature=body.temperature or None,
                    seed=body.seed,
                    mute=[Head.parse(name) for name in body.mute],
                )
                return_free_memory()
                return traced

            return await service.with_timeout(loaded.batcher.call(run))

    @app.post("/v1/trace", openapi_extra=openapi_body(TraceRequest, pairs, settings))
    async def trace_text(request: Request) -> dict[str, Any]:
        """Translate one sentence and return its trace: attention of every head, candidates, the beam search tree.

        Queries, keys and values are left out (`data` is null), and so are the attention weights if they are large.
        `/v1/trace/{id}/{site}/{layer}` returns them.
        """
        body = await read_body(request, TraceRequest, settings)
        service.check_beam(body.beam)
        result = await cancel_on_disconnect(request, compute_trace(body))
        inline = result.attention_bytes <= settings.inline_trace_bytes
        return {"id": traces.add(result), **result.to_json("attention" if inline else "minimal")}

    @app.get("/v1/trace/{id}/{site}/{layer}", response_class=Response, responses=BINARY)
    async def trace_weights(request: Request, id: str, site: str, layer: str) -> Response:
        """Attention weights of one layer of a trace: little-endian float32, [head, query, key], row-major.

        site is encoder, decoder, cross_attention, or nodes: the cross-attention of the search nodes in `parents`.
        """
        check_api_key(request, None, settings)
        return _binary(traces.layer(id, site, layer))

    @app.get(
        "/v1/trace/{id}/{site}/{layer}/{projection}", response_class=Response, responses=BINARY
    )
    async def trace_projection(
        request: Request, id: str, site: str, layer: str, projection: str
    ) -> Response:
        """A projection of the heads of one layer: query, key, value, or output (W_O, split by head)."""
        check_api_key(request, None, settings)
        return _binary(traces.layer(id, site, layer, projection))

    add_lens_routes(app, service)


def _check_trace_size(body: TraceRequest, settings: Settings, model: Translator) -> None:
    _check_characters(body.q + body.prefix, settings)
    (source,) = model.count_tokens([body.q])
    prefix = model.encode_translation(body.prefix, body.q)
    tokens = max(source, len(body.forced) + len(prefix))
    if tokens > settings.max_trace_tokens:
        raise RequestRefused(
            413, f"{tokens:,} tokens: at most {settings.max_trace_tokens:,} can be traced"
        )


def _binary(array: Floats) -> Response:
    content = array.astype("<f4").tobytes()
    return Response(content, media_type="application/octet-stream")


def _check_characters(text: str, settings: Settings) -> None:
    if len(text) > settings.max_trace_characters:
        raise RequestRefused(
            413,
            f"{len(text):,} characters: at most {settings.max_trace_characters:,} can be traced",
        )


def _check_outputs(outputs: Sequence[int], model: Translator) -> None:
    size = model.tokenizer.target.size
    if invalid := [token for token in outputs if not 0 <= token < size]:
        raise RequestRefused(400, f"outputs: token id {invalid[0]} must be from 0 to {size - 1}")


# ---------------------------------------------------------------------------------------------
# Lenses


def add_lens_routes(app: FastAPI, service: Service) -> None:
    settings, pairs = service.settings, service.models.pairs

    async def compute(body: ModelRequest, work: Callable[[Translator], dict[str, Any]]) -> Any:
        async with inspected_model(service, body.model) as (loaded, model):
            check_supported(model)

            def run() -> dict[str, Any]:
                result = work(model)
                return_free_memory()
                return result

            return await service.with_timeout(loaded.batcher.call(run))

    def forced(body: LensRequest, model: Translator) -> ForcedTranslation:
        _check_outputs(body.outputs, model)
        return force_ids(model, model.request(body.q), body.outputs)

    def check(*texts: str) -> None:
        for text in texts:
            _check_characters(text, settings)
            check_text(text)

    @app.get("/v1/model")
    async def info(request: Request, model: str | None = None) -> dict[str, Any]:
        """Name, languages, size and score of the model, and example sentences."""
        check_api_key(request, None, settings)
        async with inspected_model(service, model) as (_, translator):
            name = translator.run.folder.resolve().name if translator.run else "model"
            return await asyncio.to_thread(model_info, translator, name)

    @app.post("/v1/lens/depth", openapi_extra=openapi_body(LensRequest, pairs, settings))
    async def depth(request: Request) -> dict[str, Any]:
        """What the model would say at each depth: the logit lens of the decoder, the DecoderLens of the encoder."""
        body = await read_body(request, LensRequest, settings)
        check(body.q)

        def work(model: Translator) -> dict[str, Any]:
            return depth_lenses(model, body.q, forced(body, model))

        result: dict[str, Any] = await cancel_on_disconnect(request, compute(body, work))
        return result

    @app.post("/v1/lens/architecture", openapi_extra=openapi_body(LensRequest, pairs, settings))
    async def architecture(request: Request) -> dict[str, Any]:
        """What flows through the network: the residual stream after each sub-layer, neurons, and embeddings."""
        body = await read_body(request, LensRequest, settings)
        check(body.q)

        def work(model: Translator) -> dict[str, Any]:
            return architecture_json(model, forced(body, model))

        result: dict[str, Any] = await cancel_on_disconnect(request, compute(body, work))
        return result

    @app.post(
        "/v1/lens/attribution", openapi_extra=openapi_body(AttributionRequest, pairs, settings)
    )
    async def attribution(request: Request) -> dict[str, Any]:
        """Why the model generates a token and not another one: the share of each word, by several methods."""
        body = await read_body(request, AttributionRequest, settings)
        check(body.q)

        def work(model: Translator) -> dict[str, Any]:
            read = forced(body, model)
            position = find_word(read, body.position)
            return attribute_token(model, read, position, body.foil).to_json()

        result: dict[str, Any] = await cancel_on_disconnect(request, compute(body, work))
        return result

    @app.post("/v1/lens/patching", openapi_extra=openapi_body(PatchingRequest, pairs, settings))
    async def patching(request: Request) -> dict[str, Any]:
        """Activation patching: which place of the network makes the translations of two sentences differ."""
        body = await read_body(request, PatchingRequest, settings)
        check(body.q, body.other)

        def work(model: Translator) -> dict[str, Any]:
            return patch(model, body.q, body.other).to_json()

        result: dict[str, Any] = await cancel_on_disconnect(request, compute(body, work))
        return result

    add_head_routes(app, service)


# ---------------------------------------------------------------------------------------------
# What each head is worth


class HeadTableJob:
    """The table of one model, computed once, in the background: one head at a time, between the other requests."""

    def __init__(self, model: Translator) -> None:
        self.model = model
        self.problem: str | None = None
        """why there is no table"""
        self.effects: list[HeadEffect] = []
        self.table: HeadTable | None = None
        self.task: asyncio.Task[None] | None = None
        try:
            check_supported(model)
            if model.run is not None and not model.run.card_file.is_file():
                raise RegardError("the run is still training")
        except RegardError as error:
            self.problem = str(error)
            return
        try:
            valid_pairs(model.recipe.data)  # checks that the files are there
        except RegardError:  # names paths of the server
            self.problem = "the validation data of the run are not on this server"

    def to_json(self) -> dict[str, Any]:
        """``HeadTableState`` of lenses.js."""
        return {
            "problem": self.problem,
            "running": self.task is not None and not self.task.done(),
            "done": len(self.effects),
            "heads": 0 if self.problem else len(all_heads(self.model)),
            "table": self.table and self.table.to_json(),
        }

    def start(self, service: Service, entry: ModelEntry, loaded: LoadedModel) -> None:
        """Compute the table, unless this is done or under way."""
        if not self.problem and not self.table and (self.task is None or self.task.done()):
            self.effects = []
            self.task = asyncio.create_task(self._run(service, entry, loaded))

    async def _run(self, service: Service, entry: ModelEntry, loaded: LoadedModel) -> None:
        async def call(function: Callable[[], T]) -> T:
            while entry.loaded is loaded:
                async with service.models.use(entry):
                    try:
                        async with TimeLimit(service.settings.timeout, "a head was not measured"):
                            return await loaded.batcher.call(function)
                    except RequestRefused as refusal:
                        if refusal.status != 429:
                            raise
                await asyncio.sleep(QUEUE_PAUSE)  # the queue is full; translations come first
            raise RequestRefused(503, "the model was unloaded")

        try:
            pairs = await asyncio.to_thread(validation_sample, self.model)
            sources, references = zip(*pairs, strict=True)
            correct = pronoun_test(self.model, references)
            options: AblationOptions = {"correct": correct, "tested": "pronouns"}
            ablation = await call(partial(HeadAblation, self.model, sources, references, **options))
            for head in ablation.heads:
                self.effects.append(await call(partial(ablation.effect, head)))
            self.table = ablation.table(self.effects)
        except RequestRefused as refusal:
            self.problem = refusal.reason
        except Exception:
            log.exception("%s: the heads could not be measured", self.model.run)
            self.problem = "it failed; see the server's log"


def add_head_routes(app: FastAPI, service: Service) -> None:
    settings, pairs = service.settings, service.models.pairs
    jobs: WeakKeyDictionary[LoadedModel, HeadTableJob] = WeakKeyDictionary()

    @asynccontextmanager
    async def job_of(name: str | None) -> AsyncIterator[tuple[LoadedModel, HeadTableJob]]:
        async with inspected_model(service, name) as (loaded, model):
            if loaded not in jobs:
                job = await asyncio.to_thread(HeadTableJob, model)
                jobs.setdefault(loaded, job)  # another request may have been faster
            yield loaded, jobs[loaded]

    @app.get("/v1/lens/heads")
    async def head_table(request: Request, model: str | None = None) -> dict[str, Any]:
        """What each head is worth on the run's validation data, as far as it is computed; this does not start it."""
        check_api_key(request, None, settings)
        async with job_of(model) as (_, job):
            return job.to_json()

    @app.post("/v1/lens/heads", openapi_extra=openapi_body(ModelRequest, pairs, settings))
    async def compute_head_table(request: Request) -> dict[str, Any]:
        """Start to measure what each head is worth: once for each model, in the background."""
        body = await read_body(request, ModelRequest, settings)
        async with job_of(body.model) as (loaded, job):
            job.start(service, service.models.entry(body.model), loaded)
            return job.to_json()


# ---------------------------------------------------------------------------------------------
# Training history


def add_history_routes(app: FastAPI, service: Service) -> None:
    settings, pairs = service.settings, service.models.pairs
    checkpoints_of: WeakKeyDictionary[LoadedModel, PastCheckpoints] = WeakKeyDictionary()

    @asynccontextmanager
    async def past_checkpoints(
        name: str | None,
    ) -> AsyncIterator[tuple[LoadedModel, Translator, PastCheckpoints]]:
        async with inspected_model(service, name) as (loaded, model):
            if loaded not in checkpoints_of:
                checkpoints_of[loaded] = PastCheckpoints(model)
            yield loaded, model, checkpoints_of[loaded]

    @app.get("/v1/run")
    async def run(request: Request, model: str | None = None) -> dict[str, Any]:
        """Positional encoding, learning-rate schedule, label smoothing, training curves and checkpoints of the run."""
        check_api_key(request, None, settings)
        async with inspected_model(service, model) as (loaded, translator):
            history = partial(training_history, translator)
            return await service.with_timeout(loaded.batcher.call(history))

    @app.get("/v1/run/curves")
    async def run_curves(request: Request, model: str | None = None) -> dict[str, Any]:
        """The training curves so far, and the steps of the checkpoints."""
        check_api_key(request, None, settings)
        async with past_checkpoints(model) as (_, translator, checkpoints):
            run = translator.run
            curves_json = await asyncio.to_thread(curves, run) if run else None
            return {"curves": curves_json, "checkpoints": checkpoints.steps()}

    @app.post("/v1/align", openapi_extra=openapi_body(AlignRequest, pairs, settings))
    async def align(request: Request) -> dict[str, Any]:
        """Cross-attention of an earlier checkpoint while it is forced to produce the given translation."""
        body = await read_body(request, AlignRequest, settings)
        _check_characters(body.q, settings)
        async with past_checkpoints(body.model) as (loaded, model, checkpoints):
            _check_outputs(body.outputs, model)

            def compute() -> dict[str, Any]:
                return checkpoints.alignment(body.step, model.request(body.q), body.outputs)

            return await service.with_timeout(loaded.batcher.call(compute))


def start_following(loaded: LoadedModel) -> asyncio.Task[None] | None:
    """Start ``follow_training`` for a model of a run folder."""
    if isinstance(loaded.model, Translator):
        return asyncio.create_task(follow_training(loaded.batcher, loaded.model))
    return None


async def follow_training(batcher: Batcher, model: Translator) -> None:
    """While the run is still training, load its best weights whenever they are replaced, between two batches."""
    run = model.run
    if run is None:
        return
    loaded = run.weights_file.stat().st_mtime_ns

    def reload() -> None:
        copy_weights(model.network, run.weights(), str(run.weights_file))
        model.freeze()

    finished = run.card_file.is_file()
    while not finished:
        await asyncio.sleep(POLL_SECONDS)
        # Check the card first: the final weights are written before it, so the code below loads them.
        finished = run.card_file.is_file()
        try:
            written = run.weights_file.stat().st_mtime_ns
            if written != loaded:
                await batcher.call(reload)
                loaded = written
                log.info("%s: loaded new weights", run)
        except (OSError, RegardError, RequestRefused) as error:
            log.warning("%s: keeping the old weights: %s", run, error)
