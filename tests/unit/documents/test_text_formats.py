"""Plain text, Markdown, HTML, subtitles and tables come back unchanged, or with only their text changed."""

import re

import pytest
from hypothesis import example, given, settings, strategies as st
from markdown_it import MarkdownIt

from regard.documents import DocumentOptions
from regard.documents.text_formats import break_lines, escape_markdown
from tests.unit.documents import samples
from tests.unit.documents.translators import copy, parse, reverse, translate

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


@settings(max_examples=60)
@given(
    st.lists(
        st.sampled_from(
            [
                *(
                    "# ",
                    "> ",
                    "- ",
                    "1. ",
                    "    ",
                    "\n",
                    "\n\n",
                    "\r\n",
                    "```\n",
                    "| a | b |\n|---|---|\n",
                    "---\n",
                ),
                *(
                    "*",
                    "**",
                    "_",
                    "`",
                    "[",
                    "](x)",
                    "![",
                    "\\",
                    "<b>",
                    "</b>",
                    "<!-- ",
                    "{{",
                    "$",
                    "  \n",
                    "~~",
                ),
                *(
                    "word",
                    "The dog. ",
                    " ",
                    "[^1]",
                    "[^1]: ",
                    "\n\n    ",
                    "\n\n\t",
                    "[x] ",
                    "::: note\n",
                    "&amp;",
                    "https://a.b/c_d",
                ),
            ]
        )
    ).map("".join)
    | st.text()
)
def test_any_markdown_that_is_copied_is_unchanged(text: str) -> None:
    content = text.encode(errors="ignore")
    if b"\0" not in content:
        assert translate("a.md", content, copy) == content


FOOTNOTES = """A dog.[^1] A cat.[^long] A bird.[^3]

[^1]: The first note.
[^long]: A note of several paragraphs.
    It goes on
    here.

    The *second* paragraph.

    - A list.

      Its second paragraph.

    > A quote

        code of the note

    ```
    more code
    ```

[^3]: Word

Not a note.

    code
"""


def test_a_footnote_has_several_paragraphs() -> None:
    assert parse("a.md", FOOTNOTES).sentences == [
        "A dog.",
        "A cat.",
        "A bird.",
        "The first note.",
        "A note of several paragraphs.",
        "It goes on here.",
        "The second paragraph.",
        "A list.",
        "Its second paragraph.",
        "A quote",
        "Word",
        "Not a note.",
    ]
    for newline in ("\n", "\r\n"):
        content = FOOTNOTES.replace("\n", newline)
        assert translate("a.md", content, copy) == content.encode()
    quoted = "".join(f"> {line}\n" for line in FOOTNOTES.splitlines())
    tabs = FOOTNOTES.replace("    ", "\t")
    for content in (quoted, tabs):
        assert translate("a.md", content, copy) == content.encode()
        assert "The second paragraph." in parse("a.md", content).sentences
    translated = translate("a.md", FOOTNOTES, str.upper).decode()
    for part in (
        "A DOG.[^1] A CAT.[^long] A BIRD.[^3]\n\n[^1]: THE FIRST NOTE.\n[^long]: A NOTE OF SEVERAL PARAGRAPHS.\n",
        "IT GOES ON HERE.\n\n    THE *SECOND* PARAGRAPH.\n\n    - A LIST.\n\n      ITS SECOND PARAGRAPH.\n\n",
        "    > A QUOTE\n\n        code of the note\n\n    ```\n    more code\n    ```\n\n[^3]: WORD\n\n",
        "NOT A NOTE.\n\n    code\n",
    ):
        assert part in translated


def test_markdown_keeps_its_structure() -> None:
    translated = translate("a.md", samples.MARKDOWN, str.upper).decode()
    for part in (
        "---\ntitle: My page\ntags: [a, b]\n---\n# THE `big` DOG {#dog}\n",
        'THE *DOG* DIDN\'T CROSS THE **WIDE STREET** BECAUSE IT WAS [TOO `tired`](http://x.y/z "A title").\n',
        "SEE <https://example.com> OR https://example.com/a_b. MATH $x^2$ AND COSTS OF $5 AND $6.\n",
        "> A QUOTE THAT RUNS ON. AND *MORE* TEXT.\n",
        "- [x] DONE ITEM\n- SECOND ITEM WITH `code` CONTINUED HERE.\n",
        "| NAME | WHAT IT *IS* |\n|------|:-----:|\n| DOG  | AN ANIMAL \\| PET |\n| `x`  | A [LINK](a.md) |\n",
        '```python\nprint("Hello world")\n```\n\n    indented code\n\n![The logo](logo.png)\n',
        "A [REF LINK][r] AND [shortcut] AND A FOOTNOTE[^1]. LINE ONE\\\nLINE TWO\n",
        "[^1]: THE NOTE.\n[r]: http://ref\n[shortcut]: http://s\n",
        '<div align="center"><h1>TITLE HERE</h1></div>\n\n::: warning\nBE CAREFUL HERE.\n:::\n',
        "SETEXT HEADING\n==============\n",
        "HELLO {{ name }}, USE SNAKE_CASE AND 2 * 3. <!-- note --> BYE<br>NOW.\n",
    ):
        assert part in translated


@pytest.mark.parametrize(
    ("source", "translated"),
    [
        ("* item\n\ttext after a tab\n", "* ITEM TEXT AFTER A TAB\n"),
        ("Term\n: Its definition.\n", "TERM\n: ITS DEFINITION.\n"),
        ("A ***both** one* here.\n", "A ***BOTH** ONE* HERE.\n"),
        ("A word^[A note.] here.\n", "A WORD^[A NOTE.] HERE.\n"),
        ("````\n```\nx\n```\n````\ny\n", "````\n```\nx\n```\n````\nY\n"),
    ],
)
def test_rare_constructs_of_markdown_survive(source: str, translated: str) -> None:
    assert translate("a.md", source, copy).decode() == source
    assert translate("a.md", source, str.upper).decode() == translated


def test_inline_formats_of_markdown_follow_their_words() -> None:
    source = "The **big** `x` dog [sees *us*](u).\n"
    assert reverse("a.md", source).decode() == ". [*us* sees](u) dog `x` **big** The\n"


@settings(max_examples=50)
@given(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]))
    | st.text("ab1.)#>+-*_`[]()<&;!\\ ~", min_size=1)
)
@example("__0__")
def test_escaped_text_is_no_markdown(text: str) -> None:
    text = " ".join(text.split())
    if not text:
        return
    parser = MarkdownIt("commonmark")
    opening, inline, _ = parser.parse(escape_markdown(text))
    assert opening.type == "paragraph_open", text
    assert "".join(child.content for child in inline.children or []) == text


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


def test_subtitles_keep_times_and_tags() -> None:
    assert translate("a.srt", samples.SRT, str.upper).decode() == (
        "1\n00:00:01,000 --> 00:00:02,500\n<i>THE DOG WAS TOO TIRED TO CROSS THE STREET.</i>\n\n"
        "2\n00:00:03,000 --> 00:00:04,000 X1:10 X2:20\n- WHERE IS IT?\n- IT IS {\\an8}HERE.\n\n"
        "3\n00:00:05,000 --> 00:00:06,000\n♪ ♪\n"
    )
    translated = translate("a.vtt", samples.VTT, str.upper).decode()
    assert translated.startswith(samples.VTT[: samples.VTT.index("<v Roger>")])
    assert "<v Roger>NEVER DRINK <b>LIQUID</b> &amp; COLD NITROGEN.\n" in translated
    assert "IT WILL <00:06.000>PERFORATE YOUR STOMACH.\n" in translated


def test_the_dash_of_a_speaker_may_follow_a_style() -> None:
    cue = "1\n00:00:01,000 --> 00:00:02,000\n{\\an8}<i>- One dog.</i>\n<i>- Two</i>\n"
    assert parse("a.srt", cue).sentences == ["One dog.", "Two"]
    assert translate("a.srt", cue, lambda text: "x") == (
        cue.replace("One dog.", "x").replace("Two", "x").encode()
    )


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


def test_long_subtitles_are_broken_into_equal_lines() -> None:
    text = "<i>one two three four five six seven eight nine ten eleven twelve</i>"
    broken = break_lines(42, "\n", text)
    assert broken == "<i>one two three four five six seven\neight nine ten eleven twelve</i>"
    assert break_lines(42, "\r\n", "short\nshort") == "short\r\nshort"


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
