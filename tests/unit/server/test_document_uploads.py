"""Uploaded documents: translation, limits, and the files that are kept."""

import asyncio
import io
import os
import re
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from regard.documents import DocumentOptions
from regard.documents.base import SentenceTranslation
from regard.documents.worker import DocumentTask, perform as perform_here
from regard.recipe import Recipe
from regard.server import document_uploads
from regard.server.app import create_app
from regard.server.document_uploads import FileStore, perform
from regard.server.schemas import RequestRefused, Settings
from regard.tasks import Translator
from tests.unit.server.client import PAIR, english_to_german, entry, run, send, until


def upload(app: Any, content: bytes | str, name: str = "a.srt", **fields: str) -> httpx.Response:
    return send(
        app, "POST", "/translate_file", files={"file": (name, content)}, data={**PAIR, **fields}
    )


def download(app: Any, response: httpx.Response) -> httpx.Response:
    url = response.json()["translatedFileUrl"]
    assert re.fullmatch(r"http://localhost/download_file/[0-9a-f]{32}\.\w+", url)
    return send(app, "GET", url.removeprefix("http://localhost"))


SUBTITLES = "1\n00:00:01,000 --> 00:00:02,000\nOne. <i>Two</i>\n"


def test_a_document_is_translated(small_recipe: Callable[..., Recipe]) -> None:
    app = create_app(english_to_german(small_recipe))
    response = download(app, upload(app, SUBTITLES))
    expected = SUBTITLES.replace("One", "ONE").replace("Two", "TWO")
    assert response.text == expected
    assert response.headers["content-type"] == "application/octet-stream"
    assert response.headers["content-disposition"] == 'attachment; filename="translated.srt"'
    assert download(app, upload(app, "<p>a</p>", "../../A.HTML", source="auto")).text == "<p>A</p>"


def test_columns_of_a_table_are_translated(small_recipe: Callable[..., Recipe]) -> None:
    app = create_app(english_to_german(small_recipe))
    table = "id,text,note\na,one,x\n"
    refused = upload(app, table, "a.csv")
    assert refused.status_code == 400
    assert refused.json()["error"] == (
        "file: name the columns to translate, for example columns=note (the first line has: id, text, note)"
    )
    assert download(app, upload(app, table, "a.csv", columns="text, note")).text == (
        "id,text,note\na,ONE,X\n"
    )
    refused = upload(app, "one", "a.txt", columns="text")
    assert refused.status_code == 400
    assert refused.json()["error"] == "columns=text: only for CSV and TSV files"


TMX = '<tmx version="1.4"><header srclang="en"/><body><tu><tuv xml:lang="en"><seg>one</seg></tuv></tu></body></tmx>'


def test_the_detected_language_is_that_of_the_document(
    small_recipe: Callable[..., Recipe],
) -> None:
    """What a file says about its languages depends on them."""
    app = create_app(english_to_german(small_recipe))
    translated = download(app, upload(app, TMX, "a.tmx", source="auto")).text
    assert '<tuv xml:lang="de"><seg>ONE</seg></tuv>' in translated
    assert download(app, upload(app, "en:\n  a: one\n", "a.yaml", source="auto")).text == (
        "de:\n  a: ONE\n"
    )


def test_a_server_that_stops_finishes_files_that_it_reads(
    small_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(english_to_german(small_recipe))
    pool = app.state.service.models

    async def perform_and_stop(task: DocumentTask, seconds: int) -> Any:
        pool.refuse()
        return await perform(task, seconds)

    monkeypatch.setattr(document_uploads, "perform", perform_and_stop)
    assert upload(app, SUBTITLES).status_code == 200
    assert upload(app, SUBTITLES).status_code == 503


def test_inline_tags_pass_a_pivot(finished_run: Path, small_recipe: Callable[..., Recipe]) -> None:
    model = Translator.load(finished_run, "cpu")
    source, target = model.recipe.data.language_pair
    first = entry(small_recipe, source, target)
    first.load = lambda: model
    first.recipe = model.recipe
    second = entry(small_recipe, target, "xx")
    app = create_app([first, second], Settings(pivots=(target,)))
    html = upload(app, "<p>ein <b>Hund</b></p>", "a.html", source=source, target="xx")
    assert re.sub("[^<>/bp]", "", download(app, html).text).count("<b>") == 1


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.exe", b"x", "the file name must end in one of"),
        ("a.docx", b"x", "file: "),
        ("a.xlf", b'<!DOCTYPE x [<!ENTITY a "b">]><xliff>&a;</xliff>', "entit"),
    ],
)
def test_bad_documents_are_refused(
    small_recipe: Callable[..., Recipe], name: str, content: bytes, reason: str
) -> None:
    response = upload(create_app(english_to_german(small_recipe)), content, name)
    assert response.status_code == 400
    assert reason in response.json()["error"]


def test_sizes_are_limited(small_recipe: Callable[..., Recipe]) -> None:
    model = english_to_german(small_recipe)
    small = create_app(model, Settings(max_file_bytes=1000, max_characters=100))
    assert upload(small, "x" * 2000, "a.txt").status_code == 413
    assert "101 characters" in upload(small, "x" * 101, "a.txt").text
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", b" " * (17 << 20))
    response = upload(create_app(model), bomb.getvalue(), "a.docx")
    assert response.status_code == 400
    assert "larger than 16 MiB when decompressed" in response.text


def nested(depth: int) -> str:
    return '{"a": ' + "[" * depth + "]" * depth + "}"


@pytest.mark.parametrize(
    ("name", "content", "status", "reason"),
    [
        ("a.md", "[" * 2_000_000, 413, "file: reading it takes more than 1 seconds"),
        ("a.yaml", "- a\n" * 500_000, 413, "file: reading it takes more than 1 seconds"),
        ("a.json", nested(50_000), 400, "file: not JSON"),
    ],
)
def test_a_document_that_takes_too_long_to_read_does_not_block_others(
    small_recipe: Callable[..., Recipe], name: str, content: str, status: int, reason: str
) -> None:
    """It is read in a process of its own: this one stays responsive, and ends it after the limit."""
    limit = 1
    app = create_app(english_to_german(small_recipe), Settings(document_seconds=limit))

    async def test(client: httpx.AsyncClient) -> None:
        files = {"file": (name, content.encode())}
        sending = asyncio.create_task(client.post("/translate_file", files=files, data=PAIR))
        longest = 0.0
        while not sending.done():
            start = time.process_time()
            body = {"q": "a", **PAIR}
            assert (await client.post("/translate", json=body)).json() == {"translatedText": "A"}
            longest = max(longest, time.process_time() - start)
            await asyncio.sleep(0.05)
        response = await sending
        assert response.status_code == status
        assert reason in response.json()["error"]
        assert longest < limit  # CPU time of this process between two responses

    run(app, test)


def test_a_client_that_leaves_ends_the_process() -> None:
    task = DocumentTask("a.md", b"[" * 2_000_000, DocumentOptions("en", "de"))

    async def test() -> None:
        before = children()
        working = asyncio.create_task(perform(task, 20))
        await until(lambda: len(children()) > len(before))
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert children() == before

    asyncio.run(test())


def children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


def test_the_process_reads_and_writes_a_document() -> None:
    options = DocumentOptions("en", "de")
    assert perform_here(DocumentTask("a.txt", b"One. Two", options)) == (
        {"sentences": ["One.", "Two"], "has_elements": [False, False]},
        b"",
    )
    translations = [SentenceTranslation("1"), SentenceTranslation("2")]
    task = DocumentTask("a.txt", b"One. Two", options, translations)
    assert perform_here(task) == ({}, b"1 2")
    wrong = DocumentTask("a.txt", b"\xff\x00", options)
    assert "not UTF-8 text" in perform_here(wrong)[0]["error"]
    with pytest.raises(RuntimeError, match="ended with status 1"):
        asyncio.run(perform(DocumentTask("a.exe", b"", options), 20))


def test_an_upload_is_kept_in_memory(
    small_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may have no file system to write to."""

    def write_to_disk(_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", write_to_disk)
    app = create_app(english_to_german(small_recipe))
    assert upload(app, "a" + " " * (2 << 20), "a.txt").status_code == 200


def test_a_form_needs_a_file_and_a_key(small_recipe: Callable[..., Recipe]) -> None:
    app = create_app(english_to_german(small_recipe), Settings(api_keys=("key",)))
    assert upload(app, SUBTITLES).status_code == 403
    assert upload(app, SUBTITLES, api_key="key").status_code == 200
    form = {name: (None, value) for name, value in {**PAIR, "api_key": "key"}.items()}
    assert "file: Field required" in send(app, "POST", "/translate_file", files=form).text
    assert send(app, "POST", "/translate_file", json=PAIR).status_code == 415
    response = send(app, "POST", "/translate_file", files={"file": ("a.srt", SUBTITLES)})
    assert "source: Field required" in response.text


def test_only_translated_files_can_be_fetched(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    store = FileStore(folder, 10, 60)
    first = store.add(b"12345", ".txt")
    assert store.read(first) == b"12345"
    for name in ("../secret.txt", "/etc/passwd", "secret.txt", first + ".partial", "0" * 32 + ".x"):
        with pytest.raises(RequestRefused, match="no such file"):
            store.read(name)
    os.utime(folder / first, (1, 1_900_000_000))
    second = store.add(b"123456", ".txt")
    assert [path.name for path in folder.iterdir()] == [second], "there is room for one of them"
    os.utime(folder / second, (1, 1))
    with pytest.raises(RequestRefused):
        store.read(second)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("multipart/form-data; boundary=y", b"--x"),
        (
            "multipart/form-data; boundary=y",
            b"--y\r\nContent-Disposition: nothing\r\n\r\n\r\n--y--",
        ),
        ("multipart/form-data", b"--x"),
    ],
)
def test_a_broken_form_is_refused(
    small_recipe: Callable[..., Recipe], kind: str, content: bytes
) -> None:
    app = create_app(english_to_german(small_recipe))
    headers = {"content-type": kind}
    response = send(app, "POST", "/translate_file", content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"].startswith("multipart/form-data: ")
