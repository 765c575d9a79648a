"""Settings of the server; request and response bodies: how a body is read and validated, its OpenAPI description."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from regard.data.formats.base import abbreviate
from regard.data.glossary import Glossary
from regard.errors import RegardError

# ---------------------------------------------------------------------------------------------
# Settings: limits of the server. A request that exceeds one is refused with the reason in JSON.


@dataclass(frozen=True)
class Settings:
    """Each comment names the HTTP status of the refusal."""

    api_keys: tuple[str, ...] = ()
    """accepted API keys (403); if empty, no key is needed"""
    allowed_hosts: tuple[str, ...] = ()
    """names of this server besides localhost and IP addresses, for the Host header (421); ``*`` allows every name"""
    cors_origins: tuple[str, ...] = ()
    """origins whose pages may use the API from a browser, such as ``https://example.org``; ``*``: all"""
    rate_limit: int = 0
    """POST requests of one client per minute (429); 0: no limit"""
    access_log: bool = False
    """write a JSON object for each request to the logger ``regard.access``; it contains no texts"""
    memory: int | None = None
    """bytes for the weights of all models; the least recently used ones are evicted; None: no limit"""
    pivots: tuple[str, ...] = ()
    """languages through which two models may be combined"""
    max_body_bytes: int = 1 << 20
    """size of a request body, checked while it is read (413)"""
    max_file_bytes: int = 4 << 20
    """size of an uploaded file with its form (413)"""
    document_seconds: int = 20
    """CPU time to read an uploaded file, and again to write its translation (413)"""
    file_folder: Path | None = None
    """where translated files are kept; None: in a temporary folder of this process"""
    file_store_bytes: int = 64 << 20
    """size of all translated files; the oldest ones are deleted"""
    file_seconds: float = 600.0
    """how long a translated file can be fetched"""
    max_characters: int = 100_000
    """total characters of all texts of a request (413)"""
    max_trace_characters: int = 2_000
    """characters of a text to trace (413)"""
    max_trace_tokens: int = 512
    """tokens of a text to trace, and of a forced prefix: attention grows with the square of the length (413)"""
    inline_trace_bytes: int = 1 << 20
    """attention weights sent with the trace; larger ones must be fetched layer by layer"""
    trace_cache_bytes: int = 64 << 20
    """memory for recent traces, all of their objects counted; the newest one is kept whatever its size"""
    max_texts: int = 128
    """texts in one request (413)"""
    max_alternatives: int = 10
    """alternative translations of a text (400)"""
    max_beam: int = 20
    """beam size of a request (400)"""
    max_queued_sentences: int = 4096
    """sentences in the queue; a request that would exceed it is refused (429)"""
    timeout: float = 60.0
    """seconds to receive a request, and again to translate it (503)"""
    max_tokens: int = 50_000
    """source tokens of all texts of a request (413)"""
    max_sentence_tokens: int = 1_024
    """source tokens of a sentence, and of its glossary terms; the splitter makes no sentence of more than 600
    characters (413)"""
    max_sentence_terms: int = 16
    """glossary terms in a sentence: the time of constrained search grows with the square of their number (400)"""
    max_batch_cost: int = 4_096
    """the cost of one batch: its tokens, more for long sentences (``batching.cost``)"""
    batch_delay: float = 0.005
    """seconds that a sentence waits at most for others to share its batch"""


class RequestRefused(Exception):  # noqa: N818
    """The server refuses a request with this HTTP status, for this reason.

    retry_after: seconds after which the client may try again, for 429 and 503.
    """

    def __init__(self, status: int, reason: str, retry_after: int = 1) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.retry_after = retry_after


MAX_TOKEN_IDS = 2_000
"""token ids in one request"""
MAX_MUTED_HEADS = 10_000
"""more heads than any model has"""

Beam = Annotated[int, Field(ge=1)] | None
LengthPenalty = Annotated[float, Field(ge=0, le=10)] | None
Texts = str | Annotated[list[str], Field(fail_fast=True)]

MAX_GLOSSARY_TERMS = 1_000
"""terms in a glossary (400)"""
MAX_TERM_CHARACTERS = 100
"""characters of a term, and of its translation (400)"""


def read_glossary(value: object) -> Glossary | None:
    """The field ``glossary``: an object with terms and their translations, or the text of a glossary file."""
    if value is None:
        return None
    if isinstance(value, str):
        glossary = Glossary.parse(value.split("\n"), "glossary")
    elif isinstance(value, dict):
        for term, translation in value.items():
            if not isinstance(translation, str):
                raise RegardError(
                    f"glossary: {abbreviate(term)} is translated as {abbreviate(translation)}, which is not a text"
                )
        glossary = Glossary(value)
    else:
        raise RegardError(
            f"glossary {abbreviate(value)}: must be an object of terms and their translations, "
            "or lines of source term, tab, target term"
        )
    if len(glossary.terms) > MAX_GLOSSARY_TERMS:
        raise RegardError(
            f"glossary: {len(glossary.terms):,} terms, at most {MAX_GLOSSARY_TERMS:,} are allowed"
        )
    for term in (*glossary.terms, *glossary.terms.values()):
        if len(term) > MAX_TERM_CHARACTERS:
            raise RegardError(
                f"glossary: {abbreviate(term)} has {len(term):,} characters, at most {MAX_TERM_CHARACTERS} are allowed"
            )
    return glossary if glossary.terms else None


GLOSSARY_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "additionalProperties": {"type": "string", "maxLength": MAX_TERM_CHARACTERS},
            "maxProperties": MAX_GLOSSARY_TERMS,
        },
        {"type": "string"},
        {"type": "null"},
    ]
}
GlossaryField = Annotated[
    Glossary | None, PlainValidator(read_glossary), WithJsonSchema(GLOSSARY_SCHEMA)
]

# ---------------------------------------------------------------------------------------------
# Requests


class RequestBody(BaseModel):
    model_config = ConfigDict(
        use_attribute_docstrings=True, allow_inf_nan=False, arbitrary_types_allowed=True
    )

    api_key: str | None = None
    """API key, if the server requires one; ``Authorization: Bearer KEY`` works too"""


class ModelRequest(RequestBody):
    model: str | None = None
    """name of the model, if the server has several; as a query parameter also with JSON: ``?model=NAME``"""


class TextRequest(ModelRequest):
    source: str
    """code of the source language, or ``auto``"""
    target: str
    """code of the target language"""
    format: Literal["text", "html"] = "text"
    """``html`` keeps tags and translates the text between them"""
    beam: Beam = None
    """beam size; the default is the model's"""
    length_penalty: LengthPenalty = None
    """length penalty; the default is the model's"""
    glossary: GlossaryField = None
    """how terms must be translated: ``{"dog": "Hund"}``, or lines of source term, tab, target term"""


class TranslateRequest(TextRequest):
    q: Texts
    """one text, or a list of texts"""
    alternatives: Annotated[int, Field(ge=0)] = 0
    """number of alternative translations of each text"""
    confidence: bool = False
    """also return the confidence of each translation, between 0 and 1: the lowest of its sentences"""


class DetailedRequest(TextRequest):
    q: Texts
    """one text, or a list of texts"""
    alignment: bool = False
    """also return the source word that each word of a translation comes from"""


class StreamRequest(TextRequest):
    q: str
    """the text"""


class FileRequest(TextRequest):
    """The fields of a form; the document is the field ``file``."""

    columns: str | None = None
    """of a CSV or TSV file: the columns to translate, by name or number, separated by commas"""


class DetectRequest(RequestBody):
    q: Texts
    """one text, or a list of texts"""


class LiveRequest(ModelRequest):
    q: str
    """a short text"""
    glossary: GlossaryField = None
    """how terms must be translated: ``{"dog": "Hund"}``, or lines of source term, tab, target term"""


HeadName = Annotated[
    str, Field(pattern=r"^(encoder|decoder|cross_attention)[.][0-9]{1,4}[.][0-9]{1,4}$")
]


class TraceRequest(ModelRequest):
    q: str
    """one sentence"""
    prefix: str = ""
    """text that the translation must begin with"""
    beam: Beam = None
    """beam size; the default is the model's"""
    length_penalty: LengthPenalty = None
    """length penalty; the default is the model's"""
    forced: Annotated[list[int], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)] = []
    """ids of the tokens that the translation must begin with, before ``prefix``"""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """above 0: sample the translation at this temperature instead of beam search"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """random seed for sampling; the default is the model's"""
    mute: Annotated[list[HeadName], Field(max_length=MAX_MUTED_HEADS, fail_fast=True)] = []
    """heads whose output is set to zero, as ``site.layer.head``, counted from 0: ``cross_attention.0.1``"""


class AlignRequest(ModelRequest):
    q: str
    """one sentence"""
    outputs: Annotated[list[int], Field(min_length=1, max_length=MAX_TOKEN_IDS, fail_fast=True)]
    """token ids of the translation, from a trace"""
    step: Annotated[int, Field(ge=0)]
    """training step of a checkpoint that the run has kept"""


class LensRequest(ModelRequest):
    q: str
    """one sentence"""
    outputs: Annotated[list[int], Field(min_length=1, max_length=MAX_TOKEN_IDS, fail_fast=True)]
    """token ids of the translation, from a trace"""


class AttributionRequest(LensRequest):
    position: Annotated[int, Field(ge=0)]
    """position of the token in the translation"""
    foil: Annotated[int, Field(ge=0)] | None = None
    """id of the token that it is compared with; the default is the second best"""


class PatchingRequest(ModelRequest):
    q: str
    """one sentence"""
    other: str
    """another sentence with as many tokens and another translation"""


# ---------------------------------------------------------------------------------------------
# Responses


class DetectedLanguage(BaseModel):
    confidence: float
    language: str


class TranslateResponse(BaseModel):
    translatedText: str | list[str]  # noqa: N815
    alternatives: list[str] | list[list[str]] | None = None
    detectedLanguage: DetectedLanguage | list[DetectedLanguage] | None = None  # noqa: N815
    confidence: float | list[float] | None = None
    model: str | list[str] | None = None
    """the models that were used, if the server has several; ``a, b`` for two with a pivot language between them"""


class DetailedSentence(BaseModel):
    """A sentence and its translation, as ``regard translate --json`` prints it."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    source: str
    text: str
    confidence: float
    """between 0 and 1"""
    score: float
    log_probability: float
    tokens: list[str]
    token_log_probabilities: list[float]
    """of each token, then of the end of the sentence"""
    finished: bool
    """false if the translation was cut off at its maximum length"""
    alignment: list[tuple[int, int]] | None = None
    """numbers of words, source and target; words are separated by spaces"""


class DetailedTranslation(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    text: str
    confidence: float
    """the lowest of its sentences"""
    detectedLanguage: DetectedLanguage | None = None  # noqa: N815
    model: str
    sentences: list[DetailedSentence]


class DetailedResponse(BaseModel):
    translations: list[DetailedTranslation]


class FileResponse(BaseModel):
    translatedFileUrl: str  # noqa: N815


class Language(BaseModel):
    code: str
    name: str
    targets: list[str]


class ModelInfo(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    name: str
    pairs: list[tuple[str, str]]
    """source and target languages"""
    loaded: bool
    """whether it is in the memory of the process that answered"""
    parameters: int | None
    scores: list[str]
    """on the test set, such as ``BLEU 42.7``"""
    examples: list[str]
    """sentences to try, from the data of the run, if it is there"""


class InfoResponse(BaseModel):
    version: str
    languages: list[Language]
    models: list[ModelInfo]
    card: dict[str, Any]


class ErrorResponse(BaseModel):
    error: str


class StatusResponse(BaseModel):
    status: str


def server_sent_event(name: str, data: Mapping[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"


# ---------------------------------------------------------------------------------------------
# Reading a request

Body = TypeVar("Body", bound=RequestBody)
T = TypeVar("T")


async def read_body(request: Request, schema: type[Body], settings: Settings) -> Body:
    """Read and validate a request body, and check its API key.

    A body is JSON or a form. As with LibreTranslate, query parameters complete a form, or replace an empty body.
    """
    content_type = request.headers.get("content-type", "none").split(";")[0].strip().lower()
    data = await read_bytes(request, settings.max_body_bytes, settings)
    try:
        if content_type == "application/json":
            body = schema.model_validate_json(bytes(data))
            if isinstance(body, ModelRequest) and body.model is None:
                body.model = request.query_params.get("model")
        elif content_type in FORMS or (not data and request.url.query):
            fields = [*_query_fields(request), *await _form_fields(request, content_type, data)]
            body = schema.model_validate(_group(fields))
        else:
            raise RequestRefused(
                415, f"content type {content_type}: send application/json, {' or '.join(FORMS)}"
            )
    except ValidationError as error:
        raise RequestRefused(400, describe_problems(error)) from None
    except ValueError:
        raise RequestRefused(
            400, "the form is not valid UTF-8 text, or has too many fields"
        ) from None
    check_api_key(request, body.api_key, settings)
    return body


async def read_bytes(request: Request, max_bytes: int, settings: Settings) -> bytearray:
    """Read a body within the limits of size and time."""
    data = bytearray()
    async with TimeLimit(settings.timeout, "the request was not received"):
        async for chunk in request.stream():
            data += chunk
            if len(data) > max_bytes:
                raise RequestRefused(413, f"the request is larger than {max_bytes:,} bytes")
    return data


def describe_problems(error: ValidationError) -> str:
    problems = [
        f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
    ]
    return "; ".join(problem.removeprefix(": ") for problem in problems)


FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")
MAX_FIELDS = 1_000
"""fields of a form"""

Fields = list[tuple[str, str]]


def _parse_fields(text: str) -> Fields:
    return parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)


def _query_fields(request: Request) -> Fields:
    return _parse_fields(request.url.query)


async def _form_fields(request: Request, content_type: str, data: bytearray) -> Fields:
    """The fields of a form; files are refused."""
    if content_type != "multipart/form-data":
        return _parse_fields(data.decode())

    async def stream() -> AsyncGenerator[bytes, None]:
        yield bytes(data)

    try:
        parser = MultiPartParser(
            request.headers, stream(), max_files=0, max_fields=MAX_FIELDS, max_part_size=len(data)
        )
        form = await parser.parse()
    except (MultiPartException, KeyError) as error:
        raise RequestRefused(400, f"multipart/form-data: {error}") from None
    return [(name, value) for name, value in form.multi_items() if isinstance(value, str)]


def _group(fields: Fields) -> dict[str, str | list[str]]:
    """The value of each field, or the list of its values if it occurs several times."""
    values: dict[str, list[str]] = {}
    for name, value in fields:
        values.setdefault(name, []).append(value)
    return {
        name: field_values if len(field_values) > 1 else field_values[0]
        for name, field_values in values.items()
    }


def check_api_key(request: Request, given: str | None, settings: Settings) -> None:
    """Refuse a request without a valid API key, from its body (``given``) or its Authorization header."""
    if not given:  # clients of LibreTranslate send an empty one
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
    # Compare with all keys, each in constant time, so that the time reveals nothing about them.
    matches = [hmac.compare_digest(given.encode(), key.encode()) for key in settings.api_keys]
    if settings.api_keys and not any(matches):
        raise RequestRefused(403, "this server requires a valid api_key")


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await the work; cancel it if the client disconnects first."""
    task, disconnected = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal disconnected
        while (await request.receive())["type"] != "http.disconnect":
            pass
        disconnected = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if disconnected and not task.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()


class TimeLimit:
    """Async context manager that refuses the request if its block takes longer than this.

    start: when the time begins; the default is now.
    """

    def __init__(self, seconds: float, problem: str, start: float | None = None) -> None:
        begin = asyncio.get_running_loop().time() if start is None else start
        self._timeout = asyncio.timeout_at(begin + seconds)
        self._reason = f"{problem} within {seconds:g} seconds"

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._timeout.__aexit__(*error)
        except TimeoutError:
            raise RequestRefused(503, self._reason) from None


def openapi_body(
    schema: type[RequestBody], pairs: Sequence[tuple[str, str]], settings: Settings
) -> dict[str, Any]:
    """The OpenAPI description of a body. FastAPI cannot derive it, because ``read_body`` enforces limits itself."""
    described = schema.model_json_schema()
    sources, targets = (list(dict.fromkeys(codes)) for codes in zip(*pairs, strict=True))
    limits: dict[str, dict[str, Any]] = {
        "source": {"enum": [*sources, "auto"]},
        "target": {"enum": targets},
        "alternatives": {"maximum": settings.max_alternatives},
        "beam": {"maximum": settings.max_beam},
    }
    for name in limits.keys() & described["properties"].keys():
        described["properties"][name] |= limits[name]
    content = {media_type: {"schema": described} for media_type in ("application/json", *FORMS)}
    return {"requestBody": {"required": True, "content": content}}
