"""Translation of uploaded documents, with the LibreTranslate API: upload a file, get the address of its translation."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import secrets
import shutil
import signal
import sys
import time
import weakref
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from regard.documents import DOCUMENT_FORMATS, DocumentOptions
from regard.documents.worker import DocumentTask
from regard.server.schemas import (
    MAX_FIELDS,
    FileRequest,
    FileResponse,
    RequestRefused,
    Settings,
    cancel_on_disconnect,
    check_api_key,
    describe_problems,
    openapi_body,
    read_bytes,
)
from regard.server.service import DocumentSentences, Service

SUFFIXES = sorted({suffix for one in DOCUMENT_FORMATS.values() for suffix in one.suffixes})
MAX_PROCESSES = 2
"""that read or write documents at the same time"""
MAX_ARCHIVE_BYTES = 16 << 20
"""of the parts of an uploaded archive together when they are decompressed"""


class FileStore:
    """Translated files, until they expire. They are in a folder, which all processes of the server share.

    folder: default a temporary one. max_bytes: of all files; the oldest ones are deleted. seconds: how long they stay.
    """

    def __init__(self, folder: Path | None, max_bytes: int, seconds: float) -> None:
        self._folder = folder
        self.max_bytes = max_bytes
        self.seconds = seconds

    @property
    def folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(mkdtemp(prefix="regard-files-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def add(self, content: bytes, suffix: str) -> str:
        """Store a file; returns its name, which cannot be guessed."""
        self._delete_old(len(content))
        name = secrets.token_hex(16) + suffix
        partial = self.folder / f"{name}.partial"
        partial.write_bytes(content)
        partial.rename(self.folder / name)
        return name

    def read(self, name: str) -> bytes:
        self._delete_old(0)
        if re.fullmatch(r"[0-9a-f]{32}(\.[a-z0-9]{1,12}){1,2}", name):
            with suppress(FileNotFoundError):
                return (self.folder / name).read_bytes()
        raise RequestRefused(404, "no such file: translated files are deleted after a few minutes")

    def _delete_old(self, needed: int) -> None:
        """Delete expired files, and the oldest ones until there is room for ``needed`` bytes."""
        files: list[tuple[float, int, Path]] = []
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another process may delete it
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for written, size, path in sorted(files):
            if time.time() - written > self.seconds or total + needed > self.max_bytes:
                path.unlink(missing_ok=True)
                total -= size


class Upload(NamedTuple):
    request: FileRequest
    content: bytes
    suffix: str

    def task(self, source: str) -> DocumentTask:
        """What is to be read. source: its language; empty if it is not known."""
        columns_field = self.request.columns
        columns = tuple(name.strip() for name in columns_field.split(",")) if columns_field else ()
        options = DocumentOptions(source, self.request.target, columns, MAX_ARCHIVE_BYTES)
        return DocumentTask(f"file{self.suffix}", self.content, options)


class MemoryParser(MultiPartParser):
    """Keeps uploaded files in memory; their size is limited before."""

    spool_max_size = 1 << 30


async def read_upload(request: Request, settings: Settings) -> Upload:
    """Read and validate a multipart form with one file, and check its API key."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise RequestRefused(415, "send multipart/form-data with the field file")
    data = await read_bytes(request, settings.max_file_bytes, settings)

    async def stream() -> AsyncGenerator[bytes, None]:
        yield bytes(data)

    try:
        parser = MemoryParser(
            request.headers, stream(), max_files=1, max_fields=MAX_FIELDS, max_part_size=len(data)
        )
        form = await parser.parse()
    except (MultiPartException, KeyError) as error:
        raise RequestRefused(400, f"multipart/form-data: {error}") from None
    try:
        fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
        body = FileRequest.model_validate(fields)
        check_api_key(request, body.api_key, settings)
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise RequestRefused(400, "file: Field required")
        suffix = _suffix(file.filename or "")
        if body.columns and suffix not in DOCUMENT_FORMATS["table"].suffixes:
            raise RequestRefused(400, f"columns={body.columns}: only for CSV and TSV files")
        return Upload(body, await file.read(), suffix)
    except ValidationError as error:
        raise RequestRefused(400, describe_problems(error)) from None
    finally:
        await form.close()


def _suffix(name: str) -> str:
    """The suffix of a file name that tells its format."""
    suffixes = [suffix for suffix in SUFFIXES if name.lower().endswith(suffix)]
    if not suffixes:
        raise RequestRefused(
            400,
            f"file: unknown format; the file name must end in one of {', '.join(SUFFIXES)}",
        )
    return max(suffixes, key=len)


async def perform(task: DocumentTask, seconds: int) -> tuple[dict[str, Any], bytes]:
    """Read or write a document in a separate process, which is killed if it takes too long or the client disconnects.

    seconds: of CPU time.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "regard.documents.worker", str(seconds)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    try:
        output, _ = await process.communicate(pickle.dumps(task))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise RequestRefused(
            413, f"file: reading it takes more than {seconds} seconds; it is too large"
        )
    if process.returncode:
        raise RuntimeError(f"the process for a document ended with status {process.returncode}")
    line, _, content = output.partition(b"\n")
    description: dict[str, Any] = json.loads(line)
    if "error" in description:
        reason = description["error"].replace("--columns ", "columns=")
        raise RequestRefused(400, f"file: {reason}")
    return description, content


def add_file_routes(app: FastAPI, service: Service) -> None:
    settings = service.settings
    store = FileStore(settings.file_folder, settings.file_store_bytes, settings.file_seconds)
    reading = asyncio.Semaphore(MAX_PROCESSES)

    async def read(upload: Upload, source: str) -> DocumentSentences:
        """The sentences of an uploaded file. source: its language, on which formats and sentences may depend."""
        async with reading:
            description, _ = await perform(upload.task(source), settings.document_seconds)
        document = DocumentSentences(**description)
        service.check_texts([" ".join(document.sentences)])
        return document

    async def translate(upload: Upload) -> str:
        """Translate an uploaded file and store it; returns the name of the translation."""
        request = upload.request
        service.models.check_open()
        service.check_options(request)
        source = request.source
        if source == "auto":
            text = " ".join((await read(upload, "")).sentences)
            detected = await service.sources_of([text], request)
            assert detected is not None
            source = detected[0].language
        document = await read(upload, source)
        translations = await service.translate_document(document, source, request)
        async with reading:  # it is read again, so that it takes no memory during the translation
            task = upload.task(source)._replace(translations=translations)
            _, content = await perform(task, settings.document_seconds)
        return await asyncio.to_thread(store.add, content, upload.suffix)

    described = openapi_body(FileRequest, service.models.pairs, settings)
    content = described["requestBody"]["content"]["multipart/form-data"]
    file = {"type": "string", "format": "binary", "description": "the document"}
    content["schema"]["properties"]["file"] = file
    content["schema"]["required"].append("file")
    described["requestBody"]["content"] = {"multipart/form-data": content}

    @app.post("/translate_file", openapi_extra=described)
    async def translate_file(request: Request) -> FileResponse:
        """Translate a document: DOCX, PPTX, ODT, Markdown, HTML, subtitles, PO, XLIFF and others.

        The response has the address of the translated file, which is deleted after a few minutes.
        """
        upload = await read_upload(request, settings)
        name = await cancel_on_disconnect(request, service.with_timeout(translate(upload)))
        return FileResponse(translatedFileUrl=f"{request.base_url}download_file/{name}")

    @app.get("/download_file/{name}", response_class=Response)
    async def download_file(name: str) -> Response:
        """A translated file."""
        content = await asyncio.to_thread(store.read, name)
        headers = {
            "content-disposition": f'attachment; filename="translated{"".join(Path(name).suffixes)}"'
        }
        return Response(content, media_type="application/octet-stream", headers=headers)
