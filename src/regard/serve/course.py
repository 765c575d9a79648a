"""How the served model learned: its run for the page to draw, and a run that still learns is followed."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import Field

from regard.course import Checkpoints, course, curves
from regard.errors import RegardError
from regard.model import Translator, put_weights
from regard.serve.asked import Asked, check_key, describe, read
from regard.serve.batching import Refused
from regard.serve.service import Service

log = logging.getLogger("regard.serve")

LONGEST_SAID = 2_000
"""tokens whose alignment may be asked for"""
LOOK_AGAIN = 5.0
"""seconds between two looks for better weights of a run that still learns"""


class AlignAsked(Asked):
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

    @app.post("/v1/align", openapi_extra=describe(AlignAsked, pairs, settings))
    async def align(request: Request) -> dict[str, Any]:
        """Where the model looked at an earlier checkpoint, had it said the same."""
        asked = await read(request, AlignAsked, settings)
        if len(asked.q) > settings.trace_characters:
            raise Refused(413, f"at most {settings.trace_characters:,} characters can be traced")
        if not all(0 <= token < model.tokenizer.target.size for token in asked.said):
            raise Refused(400, "said: no tokens of this model")

        def work() -> dict[str, Any]:
            return checkpoints.alignment(asked.step, model.asked(asked.q), asked.said)

        return await service.in_time(service.batcher.call(work))


async def follow(service: Service, model: Translator) -> None:
    """While the run still learns, take over each better model as it is written, between two batches."""
    run = model.run
    if run is None:
        return
    seen = run.weights_file.stat().st_mtime_ns

    def take() -> None:
        put_weights(model.network, run.weights(), str(run.weights_file))
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
        except (OSError, RegardError, Refused) as error:
            log.warning("%s: kept the weights from before: %s", run, error)
