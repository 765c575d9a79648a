"""What may be asked, how it is read, and what is answered."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qs

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request

from regard.server.batching import RequestRefused
from regard.server.settings import Settings

MOST_FORCED = 2_000
"""tokens of a translation"""
MOST_MUTED = 10_000
"""heads: more than any model has"""


class RequestBody(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False)

    api_key: str | None = None
    """needed if the server has keys; may also be sent as ``Authorization: Bearer KEY``"""


class TextRequest(RequestBody):
    source: str
    """code of the language of the text, or ``auto``"""
    target: str
    """code of the language to translate into"""
    format: Literal["text", "html"] = "text"
    beam: Annotated[int, Field(ge=1)] | None = None
    """hypotheses of the search; as the model's recipe has it unless given"""
    length_penalty: Annotated[float, Field(ge=0, le=10)] | None = None
    """length penalty; as the model's recipe has it unless given"""


class TranslateRequest(TextRequest):
    q: str | Annotated[list[str], Field(fail_fast=True)]
    """text, or several"""
    alternatives: Annotated[int, Field(ge=0)] = 0
    """so many more translations of each text"""


class StreamRequest(TextRequest):
    q: str


HeadName = Annotated[
    str, Field(pattern=r"^(encoder|decoder|cross_attention)[.][0-9]{1,4}[.][0-9]{1,4}$")
]


class TraceRequest(RequestBody):
    q: str
    """one sentence"""
    prefix: str = ""
    """how its translation must begin"""
    beam: Annotated[int, Field(ge=1)] | None = None
    length_penalty: Annotated[float, Field(ge=0, le=10)] | None = None
    forced: Annotated[list[int], Field(max_length=MOST_FORCED, fail_fast=True)] = []
    """ids of the tokens its translation must begin with, before the prefix"""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """above 0: the translation is drawn at random, the more freely the higher"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """of the drawing"""
    mute: Annotated[list[HeadName], Field(max_length=MOST_MUTED, fail_fast=True)] = []
    """heads that shall say nothing, each as place.layer.head, counted from 0: ``cross_attention.0.1``"""


class DetectRequest(RequestBody):
    q: str | Annotated[list[str], Field(fail_fast=True)]


class Detected(BaseModel):
    confidence: float
    language: str


class Translated(BaseModel):
    translatedText: str | list[str]  # noqa: N815
    alternatives: list[str] | list[list[str]] | None = None
    detectedLanguage: Detected | list[Detected] | None = None  # noqa: N815


class Language(BaseModel):
    code: str
    name: str
    targets: list[str]


class Problem(BaseModel):
    error: str


class State(BaseModel):
    status: str


# ---------------------------------------------------------------------------------------------
# Reading

Body = TypeVar("Body", bound=RequestBody)
T = TypeVar("T")


async def read(request: Request, shape: type[Body], settings: Settings) -> Body:
    """The body of a request, JSON or form, if it is as it should be and its key is known."""
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    data = bytearray()
    async with time_limit(settings.seconds, "the request did not arrive"):
        async for chunk in request.stream():
            data += chunk
            if len(data) > settings.body_bytes:
                raise RequestRefused(
                    413, f"the request is larger than {settings.body_bytes:,} bytes"
                )
    try:
        if kind == "application/json":
            asked = shape.model_validate_json(bytes(data))
        elif kind == "application/x-www-form-urlencoded":
            asked = shape.model_validate(_form(data))
        else:
            raise RequestRefused(415, "send application/json or application/x-www-form-urlencoded")
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise RequestRefused(
            400, "; ".join(problem.removeprefix(": ") for problem in problems)
        ) from None
    except ValueError:
        raise RequestRefused(400, "the form is not one of UTF-8 text") from None
    check_key(request, asked.api_key, settings)
    return asked


def _form(data: bytes | bytearray) -> dict[str, str | list[str]]:
    fields = parse_qs(data.decode(), keep_blank_values=True, errors="strict", max_num_fields=1000)
    return {name: values if len(values) > 1 else values[0] for name, values in fields.items()}


def check_key(request: Request, given: str | None, settings: Settings) -> None:
    if given is None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
    # All are compared, each in the same time, so that time tells nothing about any of them.
    matches = [hmac.compare_digest(given.encode(), key.encode()) for key in settings.api_keys]
    if settings.api_keys and not any(matches):
        raise RequestRefused(403, "this server needs an api_key, and this is none of them")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work; it is cancelled if the client goes away before."""

    async def leaves() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(leaves())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


@asynccontextmanager
async def time_limit(seconds: float, what: str, start: float | None = None) -> AsyncIterator[None]:
    """Refuse if the block is not done so many seconds after the start, which is now unless given."""
    end = (asyncio.get_running_loop().time() if start is None else start) + seconds
    try:
        async with asyncio.timeout_at(end):
            yield
    except TimeoutError:
        raise RequestRefused(503, f"{what} within {seconds:g} seconds") from None


def describe(
    shape: type[RequestBody], pairs: Sequence[tuple[str, str]], settings: Settings
) -> dict[str, Any]:
    """How a body is described in the OpenAPI document. It is read by hand, to stop at the limit."""
    schema = shape.model_json_schema()
    sources, targets = (list(dict.fromkeys(codes)) for codes in zip(*pairs, strict=True))
    known: dict[str, dict[str, Any]] = {
        "source": {"enum": [*sources, "auto"]},
        "target": {"enum": targets},
        "alternatives": {"maximum": settings.alternatives},
        "beam": {"maximum": settings.beam},
    }
    for name in known.keys() & schema["properties"].keys():
        schema["properties"][name] |= known[name]
    kinds = ("application/json", "application/x-www-form-urlencoded")
    return {
        "requestBody": {"required": True, "content": {kind: {"schema": schema} for kind in kinds}}
    }


def event(name: str, data: Mapping[str, Any]) -> str:
    """A server-sent event."""
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
