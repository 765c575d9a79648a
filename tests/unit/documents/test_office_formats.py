"""DOCX, PPTX and ODT: the same parts, runs and formats; LibreOffice opens the result."""

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from regard.documents.base import read_archive
from tests.unit.documents import samples
from tests.unit.documents.translators import copy, parse, reverse, translate

FILES = {"a.docx": samples.docx(), "a.pptx": samples.pptx(), "a.odt": samples.odt()}


def part(archive: bytes, name: str) -> str:
    return next(data for info, data in read_archive(archive) if info.filename == name).decode()


@pytest.mark.parametrize("name", FILES)
def test_a_document_that_is_copied_has_the_same_parts(name: str) -> None:
    copied = translate(name, FILES[name], copy)
    before, after = read_archive(FILES[name]), read_archive(copied)
    assert [data for _, data in before] == [data for _, data in after]
    for (old, _), (new, _) in zip(before, after, strict=True):
        assert (old.filename, old.date_time, old.compress_type) == (
            new.filename,
            new.date_time,
            new.compress_type,
        )


RUN_ELEMENTS = re.compile(r"\}(r|t|rPr|b|u|vertAlign|proofErr|s)$")
"""elements whose number may change with the number of runs"""


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", [str.upper, lambda text: "", lambda text: text * 2])
def test_any_translation_is_well_formed_and_loses_no_object(
    name: str, change: Callable[[str], str]
) -> None:
    translated = translate(name, FILES[name], change)
    for (info, old), (_, new) in zip(
        read_archive(FILES[name]), read_archive(translated), strict=True
    ):
        if info.filename.endswith(".xml"):
            before, after = (
                Counter(one.tag for one in ElementTree.fromstring(data).iter())
                for data in (old, new)
            )
            lost = [tag for tag in before - after if not RUN_ELEMENTS.search(tag)]
            assert not lost, info.filename
        else:
            assert old == new


def test_formats_links_and_notes_of_word_follow_their_words() -> None:
    document = part(reverse("a.docx", FILES["a.docx"]), "word/document.xml")
    text = re.sub(r"<w:r>(.*?)</w:r>", r"[\1]", document)
    text = re.sub(r"<w:t[^>]*>|</w:t>|<w:rPr>|</w:rPr>", "", text)
    paragraph = re.findall(r"<w:p>(.*?)</w:p>", text)[1]
    assert paragraph == (
        '[. slept cat][<w:vertAlign w:val="superscript"/><w:footnoteReference w:id="2"/>][ &amp; ]'
        '[<w:b/>dog][ The . ]<w:hyperlink r:id="rId5">[<w:u w:val="single"/>here See]</w:hyperlink>'
    )


def test_text_outside_of_simple_runs_is_translated_in_place() -> None:
    document = part(translate("a.docx", FILES["a.docx"], str.upper), "word/document.xml")
    assert "<w:t>BEFORE</w:t><w:drawing>" in document
    assert ">IN THE BOX</w:t>" in document
    assert '>NAME</w:t><w:tab/><w:t xml:space="preserve">VALUE</w:t>' in document
    assert "<w:delText>gone</w:delText>" in document
    assert "<w:t>3</w:t>" in document, "page numbers are not translated"
    header = part(translate("a.docx", FILES["a.docx"], str.upper), "word/header1.xml")
    assert ">A HEADER</w:t>" in header


def test_a_part_of_a_word_keeps_its_format() -> None:
    document = part(
        translate("a.docx", FILES["a.docx"], lambda text: text.replace("water", "Wasser")),
        "word/document.xml",
    )
    assert (
        '>H</w:t></w:r><w:r><w:rPr><w:vertAlign w:val="subscript"/></w:rPr><w:t xml:space="preserve">2</w:t></w:r>'
        '<w:r><w:t xml:space="preserve">O is Wasser</w:t></w:r>'
    ) in document


def test_runs_of_a_presentation_keep_their_formats() -> None:
    slide = part(reverse("a.pptx", FILES["a.pptx"]), "ppt/slides/slide1.xml")
    assert (
        '<a:pPr lvl="0"/><a:r><a:rPr lang="en-US" dirty="0"/><a:t>dog </a:t></a:r><a:r><a:rPr lang="en-US" b="1"/>'
        '<a:t>big</a:t></a:r><a:r><a:rPr lang="en-US" dirty="0"/><a:t> The</a:t></a:r><a:br/>'
    ) in slide
    assert parse("a.pptx", FILES["a.pptx"]).sentences == ["The big dog", "A new line"]


def test_spans_notes_and_fields_of_an_opendocument_text_stay() -> None:
    content = part(reverse("a.odt", FILES["a.odt"]), "content.xml")
    assert (
        '<text:p text:style-name="P1">. slept cat<text:note text:id="n1" text:note-class="footnote">'
        "<text:note-citation>1</text:note-citation><text:note-body><text:p>. note A</text:p></text:note-body>"
        '</text:note> &amp; <text:span text:style-name="T1">dog</text:span> The . '
        '<text:a xlink:href="http://x">more</text:a> is <text:page-number>3</text:page-number> page On</text:p>'
    ) in content
    assert "<text:p>Deleted text</text:p>" in content
    assert "<text:p>Name<text:tab/>Value</text:p><text:p/>" in content


def test_tracked_changes_of_word_do_not_split_a_sentence() -> None:
    body = samples.DOCX_BODY.partition("<w:body>")[0] + (
        "<w:body><w:p><w:r><w:t>It was </w:t></w:r><w:del w:id='1'><w:r><w:delText>very </w:delText></w:r></w:del>"
        "<w:ins w:id='2'><w:r><w:t>too </w:t></w:r></w:ins><w:r><w:t>tired.</w:t></w:r></w:p></w:body></w:document>"
    )
    file = samples.docx(body)
    assert "It was too tired." in parse("a.docx", file).sentences
    document = part(reverse("a.docx", file), "word/document.xml")
    inserted = "<w:ins w:id='2'><w:r><w:t xml:space=\"preserve\">too</w:t></w:r></w:ins>"
    assert inserted in document
    assert document.count("<w:delText>very </w:delText>") == 1


def word_body(paragraph: str) -> bytes:
    head = samples.DOCX_BODY.partition("<w:body>")[0]
    return samples.docx(f"{head}<w:body><w:p>{paragraph}</w:p></w:body></w:document>")


def word_run(text: str) -> str:
    return f'<w:r><w:t xml:space="preserve">{text}</w:t></w:r>'


def reversed_word_body(paragraph: str) -> str:
    document = part(reverse("a.docx", word_body(paragraph)), "word/document.xml")
    return document.partition("<w:body><w:p>")[2].partition("</w:p>")[0]


def test_a_deletion_of_word_keeps_its_space() -> None:
    """The deleted words have the space before or after them; if the deletion is rejected, it must be there."""
    after = "<w:del w:id='1'><w:r><w:delText>old </w:delText></w:r></w:del>"
    assert reversed_word_body(word_run("the ") + after + word_run("dog")) == (
        after + word_run("dog the")
    )
    before = "<w:del w:id='1'><w:r><w:delText> old</w:delText></w:r></w:del>"
    assert reversed_word_body(word_run("the") + before + word_run(" dog")) == (
        word_run("dog the") + before
    )


@pytest.mark.parametrize("kind", ["bookmark", "commentRange"])
def test_ranges_of_word_begin_before_they_end(kind: str) -> None:
    start, end = f'<w:{kind}Start w:id="3"/>', f'<w:{kind}End w:id="3"/>'
    one = word_run("a ") + start + word_run("big") + end + word_run(" dog")
    assert reversed_word_body(one) == (
        word_run("dog ") + start + word_run("big") + end + word_run(" a")
    )
    two = word_run("a ") + start + word_run("big old") + end + word_run(" dog")
    assert reversed_word_body(two) == (
        word_run("dog ") + start + word_run("old big") + end + word_run(" a")
    )


def test_a_range_of_word_without_text_stays_together() -> None:
    """Word marks the last edit with a bookmark without text."""
    empty = '<w:bookmarkStart w:id="3" w:name="_GoBack"/><w:bookmarkEnd w:id="3"/>'
    body = word_run("a ") + empty + word_run("big dog")
    assert reversed_word_body(body) == word_run("dog ") + empty + word_run("big a")


def test_a_picture_of_word_does_not_split_a_sentence() -> None:
    picture = "<w:r><w:drawing><wp:inline/></w:drawing></w:r>"
    head = samples.DOCX_BODY.partition("<w:body>")[0]
    prefix = "" if "xmlns:wp=" in head else ' xmlns:wp="urn:wp"'
    picture = picture.replace("<wp:inline", f"<wp:inline{prefix}")
    body = word_run("a ") + picture + word_run("big dog")
    assert "a big dog" in parse("a.docx", word_body(body)).sentences
    assert reversed_word_body(body) == word_run("dog ") + picture + word_run("big a")


def test_the_namespace_of_word_may_have_no_prefix() -> None:
    head = samples.DOCX_BODY.partition("<w:body>")[0]
    uri = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    assert uri in head
    document = f'<document xmlns="{uri}"><body><p><r><t>The dog</t></r></p></body></document>'
    file = samples.docx(document)
    assert "The dog" in parse("a.docx", file).sentences
    assert '<r><t xml:space="preserve">dog The</t></r>' in part(
        reverse("a.docx", file), "word/document.xml"
    )


def opendocument(paragraph: str) -> bytes:
    return samples.odt(samples.ODT_CONTENT.replace("<text:p/>", f"<text:p>{paragraph}</text:p>"))


def test_notes_and_comments_of_an_opendocument_text_do_not_split_a_sentence() -> None:
    comment = '<office:annotation office:name="c"><text:p>{}</text:p></office:annotation>'
    note = (
        '<text:note text:id="n2"><text:note-body><text:p>{}</text:p></text:note-body></text:note>'
    )
    end = '<office:annotation-end office:name="c"/>'
    note_in = note.format("A note" + comment.format("In it"))
    file = opendocument(f"The {comment.format('My word')}big old{end} dog{note_in} slept")
    document = parse("a.odt", file)
    assert {"The big old dog slept", "My word", "A note", "In it"} <= {*document.sentences}
    assert part(translate("a.odt", file, copy), "content.xml") == part(file, "content.xml")
    content = part(reverse("a.odt", file), "content.xml")
    note_out = note.format("note A" + comment.format("it In"))
    assert (
        f"<text:p>slept dog{note_out} {comment.format('word My')}old big{end} The</text:p>"
        in content
    )


def test_ranges_of_an_opendocument_text_begin_before_they_end() -> None:
    start, end = '<text:bookmark-start text:name="b"/>', '<text:bookmark-end text:name="b"/>'
    content = part(reverse("a.odt", opendocument(f"a {start}big old{end} dog")), "content.xml")
    assert f"<text:p>dog {start}old big{end} a</text:p>" in content


def test_the_end_of_a_comment_in_opendocument_is_no_word() -> None:
    content = samples.ODT_CONTENT.replace(
        "<text:p/>", '<text:p>The dog<office:annotation-end office:name="c"/>.</text:p>'
    )
    assert "The dog." in parse("a.odt", samples.odt(content)).sentences


# ---------------------------------------------------------------------------------------------
# LibreOffice


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, str], Path]:
    """A function that converts a file to a format with LibreOffice."""
    program = shutil.which("soffice") or shutil.which("libreoffice")
    if program is None:
        pytest.skip("LibreOffice (soffice) is not installed")
    folder = tmp_path_factory.mktemp("office")

    def convert(file: Path, suffix: str) -> Path:
        command = [program, f"-env:UserInstallation={(folder / 'profile').as_uri()}", "--headless"]
        command += ["--convert-to", suffix, "--outdir", str(folder), str(file)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
        result = folder / f"{file.stem}.{suffix.partition(':')[0]}"
        assert result.is_file(), done.stderr
        return result

    return convert


@pytest.mark.parametrize("suffix", ["docx", "odt", "pptx", "odp"])
def test_files_of_libreoffice_survive(
    suffix: str, office: Callable[[Path, str], Path], tmp_path: Path
) -> None:
    """A copied file has the same parts; LibreOffice opens a translated one, with all of its words."""
    is_text = suffix in ("docx", "odt")
    source = tmp_path / ("a.fodt" if is_text else "a.fodp")
    source.write_text(samples.FLAT_TEXT if is_text else samples.FLAT_PRESENTATION, "utf-8")
    original = office(source, suffix).read_bytes()
    copied = translate(f"a.{suffix}", original, copy)
    assert [data for _, data in read_archive(copied)] == [
        data for _, data in read_archive(original)
    ]
    translated = tmp_path / f"b.{suffix}"
    translated.write_bytes(reverse(translated.name, original))
    opened = office(translated, "txt:Text" if is_text else "fodp").read_text(encoding="utf-8-sig")
    text = " ".join(re.sub(r"<[^>]*>", " ", opened).split())
    expected = ["dog big The", "item First", "item Nested", "cell Left", "cell Right"]
    if is_text:
        expected += ["page this See", "cell Merged", "item Deep", "more and", "漢字", "line New"]
    for words in expected:
        assert words in text
