"""Markdown documents."""

import pytest
from hypothesis import example, given, settings, strategies as st
from markdown_it import MarkdownIt

from regard.documents.markdown import escape_markdown
from tests.unit.documents import samples
from tests.unit.documents.translators import copy, parse, reverse, translate


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
