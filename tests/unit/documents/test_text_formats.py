"""Plain text, Markdown, HTML, subtitles and tables come back unchanged, or with only their text changed."""

import re

import pytest

from regard.documents import DocumentOptions
from tests.unit.documents import samples
from tests.unit.documents.translators import copy, parse, translate

FILES = {
    "a.md": samples.MARKDOWN,
    "a.srt": samples.SRT,
    "a.vtt": samples.VTT,
    "a.csv": samples.CSV,
    "a.txt": samples.TEXT,
    "a.html": "<!doctype html>\n<p class=x>The <b>big</b>\n dog &copy; <code>a &lt; b</code> is here.</p>\n",
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_file_that_is_copied_is_equal_byte_for_byte(
    name: str, newline: str, encoding: str
) -> None:
    content = FILES[name].replace("\n", newline).encode(encoding)
    assert translate(name, content, copy) == content


def test_lines_of_a_paragraph_belong_together_if_they_were_broken_at_a_fixed_width() -> None:
    assert parse("a.txt", samples.TEXT).sentences == [
        "The dog didn't cross the street because it was too tired, and nobody was surprised.",
        "It slept.",
        "A short line ends",
        "a paragraph that was broken at a fixed width, as editors often do it.",
        "* An item",
        "* Another item",
        "Last paragraph",
    ]
    assert parse("a.txt", "Roses are red,\nviolets are blue.\n").sentences == [
        "Roses are red,",
        "violets are blue.",
    ]


NUMBERS: dict[str, str | bytes] = {
    "a.html": "<table><tr><td>42</td><td>3.5 %</td></tr></table>",
    "a.md": "| a | b |\n|---|---|\n| 42 | 3.5 |\n",
    "a.srt": "1\n00:00:01,000 --> 00:00:02,000\n42\n",
    "a.json": '{"a": "42", "b": ["1 / 2"]}',
    "a.yaml": "a: '42'\n",
    "a.properties": "a=42\n",
    "a.csv": "id,text\n1,42\n",
    "a.txt": "42\n\n2024-01-01\n",
    "a.odt": samples.odt(samples.ODT_CONTENT.replace("<text:p/>", "<text:p>42</text:p>")),
}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.srt", samples.SRT),
        ("a.vtt", samples.VTT),
        ("a.po", samples.PO),
        ("a.xlf", samples.XLIFF),
        ("a.html", "<!doctype html><p class='The dog'>The <b>dog</b></p>"),
        ("a.md", "A text.\n\n```\nprint(dog)\n```\n"),
    ],
)
def test_text_with_the_content_of_another_format_is_read_as_that(name: str, content: str) -> None:
    assert translate("a.txt", content, str.upper) == translate(name, content, str.upper)


def test_an_archive_is_no_text() -> None:
    with pytest.raises(ValueError, match=r"it is an archive, not text; its name must end in \.odt"):
        parse("a.txt", samples.odt())


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_alone_are_not_translated(name: str) -> None:
    """A model that has only seen sentences invents one."""
    found = parse(name, NUMBERS[name]).sentences
    assert all(any(map(str.isalpha, text)) for text in found)


def test_columns_of_a_table_are_chosen_by_name_or_number() -> None:
    expected = samples.CSV.replace("The dog", "THE DOG").replace('A ""big"" cat', 'A ""BIG"" CAT')
    expected = expected.replace("CAT, here", "CAT, HERE")
    assert translate("a.csv", samples.CSV, str.upper).decode() == expected
    by_number = DocumentOptions(columns=("2",))
    assert parse("a.csv", samples.CSV, by_number).sentences == [
        "text",
        "The dog",
        'A "big" cat, here',
    ]
    tabs = 'id\ttext\n1\tOne "big" dog\n'
    assert translate("a.tsv", tabs, str.upper).decode() == 'id\ttext\n1\t"ONE ""BIG"" DOG"\n'


@pytest.mark.parametrize(
    ("content", "columns", "problem"),
    [
        (
            "a,b\n",
            (),
            "name the columns to translate, for example --columns b (the first line has: a, b)",
        ),
        (
            "a,b\n",
            ("c",),
            "no column c; use a name from the first line (a, b) or a number from 1 to 2",
        ),
        ("a,b\n", ("3",), "no column 3"),
        ('a,b\nx,"y\n', ("b",), "line 2: a field begins with a quote and does not end with one"),
    ],
)
def test_a_table_without_such_a_column_is_refused(
    content: str, columns: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        parse("a.csv", content, DocumentOptions(columns=columns))


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not UTF-8 text \(byte 3\); convert it with iconv first"):
        parse("a.srt", "caf\xe9".encode("latin-1"))


def test_code_inside_a_sentence_of_html_is_a_placeholder() -> None:
    source = "<p>Use <code>a&lt;b</code> in <b>big</b> files.</p>"
    assert parse("a.html", source).sentences == ["Use {1} in big files."]
    assert translate("a.html", source, lambda text: "Große {1} Dateien.").decode() == (
        "<p>Große <code>a&lt;b</code> <b>Dateien</b>.</p>"
    )
    lost = translate("a.html", source, lambda text: "Große Dateien.").decode()
    assert lost.count("<code>a&lt;b</code>") == 1
    twice = translate("a.html", source, lambda text: "{1} und {1} hier.").decode()
    assert twice.count("<code>a&lt;b</code>") == 1
    assert "{1}" not in twice
