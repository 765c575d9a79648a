"""Formats are recognised by name and content; XML and archives are read safely; errors are one line."""

import io
import re
import zipfile
from pathlib import Path

import pytest

from regard.documents import (
    DOCUMENT_FORMATS,
    DocumentOptions,
    base,
    format_of_content,
    format_of_name,
    read_document,
    text_formats,
)
from regard.errors import RegardError
from tests.unit.documents import samples
from tests.unit.documents.translators import copy, parse, translate

CONTENTS: dict[str, bytes] = {
    "markdown": samples.MARKDOWN.encode(),
    "srt": samples.SRT.encode("utf-16"),
    "vtt": samples.VTT.encode(),
    "po": samples.PO.encode(),
    "xliff": samples.XLIFF.encode(),
    "tmx": samples.TMX.encode(),
    "html": b"\n<!DOCTYPE HTML>\n<p>a",
    "docx": samples.docx(),
    "pptx": samples.pptx(),
    "odt": samples.odt(),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_format_is_recognised_by_its_content(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENTS[name])
    assert format_of_content(tmp_path / "file") is DOCUMENT_FORMATS[name]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A dog.\nA cat.\n",
        "1\n2\n",
        "a < b",
        "msgid\n",
        "PK",
        "{a}",
        'Like this:\nmsgid "a"\nmsgstr ""\n',
    ],
)
def test_lines_of_text_are_no_document(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    assert format_of_content(tmp_path / "file") is None


def test_suffixes_are_unique() -> None:
    suffixes = [suffix for kind in DOCUMENT_FORMATS.values() for suffix in kind.suffixes]
    assert len(suffixes) == len(set(suffixes))
    assert format_of_name("A/REPORT.DOCX") is DOCUMENT_FORMATS["docx"]
    assert format_of_name("corpus.en") is None


BOMB = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]>'
EXTERNAL = '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]>'


@pytest.mark.parametrize("declaration", [BOMB, EXTERNAL])
def test_entities_are_refused(declaration: str) -> None:
    for name, content in (
        ("a.xlf", f"{declaration}<xliff>&a;</xliff>"),
        ("a.docx", samples.docx(f"{declaration}<w:p>&a;</w:p>")),
        ("a.odt", samples.odt(f"{declaration}<text:p>&a;</text:p>")),
    ):
        with pytest.raises(
            ValueError, match="declares the entity 'a'; XML with entity declarations"
        ):
            parse(name, content)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 500 nested elements"):
        parse("a.xlf", "<xliff>" + "<a>" * 600 + "</a>" * 600 + "</xliff>")


def test_the_size_of_an_archive_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MAX_FILE_SIZE", 1 << 20)
    bomb = samples.docx(others={"word/media/zeros": bytes(2 << 20)})
    assert len(bomb) < 1 << 20
    with pytest.raises(ValueError, match="larger than 1 MiB when decompressed"):
        parse("a.docx", bomb)
    monkeypatch.setattr(base, "MAX_PARTS", 3)
    with pytest.raises(ValueError, match="6 files in the archive; at most 3"):
        parse("a.docx", samples.docx())


def test_a_damaged_or_wrong_archive_is_refused() -> None:
    with pytest.raises(ValueError, match="a damaged archive: File is not a zip file"):
        parse("a.docx", b"PK\x03\x04 no archive")
    with pytest.raises(
        ValueError, match=r"contains no word/document\.xml, so it is not a \.docx file"
    ):
        parse("a.docx", samples.odt())
    damaged = bytearray(samples.docx())
    at = damaged.index(b"document.xml") + 20
    damaged[at : at + 20] = bytes(20)
    with pytest.raises(ValueError, match="a damaged archive"):
        parse("a.docx", bytes(damaged))


def test_an_encrypted_archive_is_refused() -> None:
    content = bytearray(samples.docx())
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        at = archive.start_dir
    content[at + 8] |= 1  # the flag in the first header of the directory
    with pytest.raises(ValueError, match="encrypted; remove its password first"):
        parse("a.docx", bytes(content))


def test_an_xml_file_keeps_its_encoding() -> None:
    text = '<?xml version="1.0" encoding="iso-8859-1"?>\n<xliff version="1.2"><file source-language="en" '
    text += (
        'target-language="de"><trans-unit id="é"><source>A dog</source></trans-unit></file></xliff>'
    )
    filled = translate("a.xlf", text.encode("latin-1"), copy).decode("latin-1")
    assert filled == text.replace("</source>", "</source><target>A dog</target>")


def test_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(RegardError, match=r"a\.json: not JSON: Expecting property name"):
        read_document(tmp_path / "a.json", DocumentOptions())
    with pytest.raises(RegardError, match=r"b\.json: no such file"):
        read_document(tmp_path / "b.json", DocumentOptions())


def test_the_example_of_the_documentation_works(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs/documents.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    monkeypatch.setattr(DOCUMENT_FORMATS, "choices", dict(DOCUMENT_FORMATS.choices))
    exec(code, dict(vars(text_formats)))
    assert translate("a.ini", "[x]\nkey = A dog.\n", str.upper) == b"[x]\nkey = A DOG.\n"
