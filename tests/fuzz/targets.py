"""Fuzz targets: each takes bytes and may raise nothing but ``RegardError``.

``python -m tests.fuzz TARGET`` lets atheris search for inputs that break a target, guided by coverage. The inputs in
``tests/fuzz/seeds/TARGET``, which are kept, are starting points and regression tests (``test_seeds.py``).
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from regard.data.formats import INPUT_FORMATS, ReadOptions, pair_format
from regard.data.formats.base import OnBadLine
from regard.data.tokenizer import load_tokenizer
from regard.documents.markup import split_html, split_plain
from regard.errors import RegardError
from regard.inference.worker_pool import SharedFlag
from regard.recipe import TokenizerConfig, make_recipe
from regard.recipe.parsing import parse_recipe
from regard.server.app import create_app
from regard.tasks import Translation

SEEDS = Path(__file__).parent / "seeds"
MAX_PAIRS = 1000
"""pairs that are read from a file; a compressed one may have millions"""


@contextmanager
def written(name: str, data: bytes) -> Iterator[Path]:
    """A file with these contents, in memory where that is possible."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="regard-fuzz-", dir=memory) as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        yield path


@cache
def suffixes() -> list[str]:
    """The suffixes of all formats, also compressed."""
    formats = [choice.value for choice in INPUT_FORMATS.choices.values()]
    plain = sorted({suffix for one in formats for suffix in getattr(one, "suffixes", ())})
    return [*plain, ".tsv.gz", ".tsv.zst", ".tsv.xz"]


def readers(data: bytes) -> None:
    """The first byte selects the suffix, the second how bad lines are handled; the others are the file."""
    if len(data) < 2:
        return
    suffix = suffixes()[data[0] % len(suffixes())]
    bad: OnBadLine = "skip" if data[1] & 1 else "error"
    with written(f"file{suffix}", data[2:]) as path, suppress(RegardError):
        reader = pair_format(path, ReadOptions(on_bad_line=bad))
        for pair in islice(reader.read(path), MAX_PAIRS):
            assert isinstance(pair.source, str)
            assert isinstance(pair.target, str)


def recipes(data: bytes) -> None:
    """A recipe in YAML; what is accepted is written and read again without a change."""
    try:
        recipe = parse_recipe(data.decode("utf-8"), "fuzz")
    except (RegardError, UnicodeDecodeError):
        return
    assert parse_recipe(recipe.to_yaml(), "again") == recipe


def tokenizers(data: bytes) -> None:
    """The file of a tokenizer."""
    with written("tokenizer.model", data) as path, suppress(RegardError):
        tokenizer = load_tokenizer(path.parent, TokenizerConfig())
        (ids,) = tokenizer.source.encode(["a b"])
        tokenizer.target.decode([ids])


def html(data: bytes) -> None:
    """Text or HTML of a request; plain text without translation is unchanged."""
    text = data.decode("utf-8", "replace")
    for split in (split_html, split_plain):
        document = split(text)
        document.join([sentence.upper() for sentence in document.sentences])
    assert document.join(document.sentences) == text


class FakeModel:
    """Translates into capitals."""

    def __init__(self) -> None:
        data = {"train": {"pairs": "pairs.tsv"}, "languages": ["en", "de"]}
        self.recipe = make_recipe({"data": data}, "fuzz")
        self.interrupt = SharedFlag()

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(text) for text in texts]

    def search(
        self,
        texts: Sequence[str],
        *,
        beam: int | None,
        length_penalty: float | None,
        nbest: int,
        constraints: Sequence[Sequence[str]] | None = None,
    ) -> list[list[Translation]]:
        return [[Translation(one.upper(), 0.0, 0.0, [one], [0.0], True)] * nbest for one in texts]


@cache
def application() -> tuple[Any, asyncio.AbstractEventLoop]:
    return create_app(FakeModel()), asyncio.new_event_loop()


ROUTES = ("/translate", "/detect", "/languages", "/v1/translate", "/v1/info", "/suggest")
TYPES = (
    b"application/json",
    b"application/x-www-form-urlencoded",
    b"multipart/form-data; boundary=x",
)


def http(data: bytes) -> None:
    """The first byte selects the route, the second the content type; the others are the body. No status is 500."""
    if len(data) < 2:
        return
    path, kind = ROUTES[data[0] % len(ROUTES)], TYPES[data[1] % len(TYPES)]
    app, loop = application()
    status = loop.run_until_complete(respond(app, path, kind, data[2:]))
    assert status < 500 or status in (501, 503), f"status {status}"


async def respond(app: Any, path: str, kind: bytes, body: bytes) -> int:
    """The status of the response to a POST request."""
    statuses: list[int] = []
    bodies = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        if (message := next(bodies, None)) is not None:
            return message
        await asyncio.sleep(3600)  # the client stays connected until it has the response
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
    }
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": ""}
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    scope |= {"headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}
    await app(scope, receive, send)
    return statuses[0]


TARGETS: dict[str, Callable[[bytes], None]] = {
    "readers": readers,
    "recipes": recipes,
    "tokenizers": tokenizers,
    "html": html,
    "http": http,
}


def seeds(target: str) -> list[Path]:
    """The kept inputs of a target."""
    return sorted(path for path in (SEEDS / target).glob("*") if path.is_file())
