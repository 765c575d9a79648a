"""Markdown documents: blocks by markdown-it, inline markup by a scanner that keeps every character."""

from __future__ import annotations

import html
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from regard.documents.base import (
    DOCUMENT_FORMATS,
    Slot,
    Template,
    TextFormat,
)
from regard.documents.markup import (
    INLINE_ELEMENTS,
    UNTRANSLATED_ELEMENTS,
    Inline,
    InlineKind,
    split_html,
    text_token,
)
from regard.documents.text_formats import (
    Line,
    border,
    lines_of,
    run_slot,
    soft_break,
)
from regard.errors import RegardError

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock
    from markdown_it.token import Token


@DOCUMENT_FORMATS.register("markdown")
class Markdown(TextFormat):
    """Markdown: paragraphs, headings, lists and tables; code, front matter, links and formulas stay as they are"""

    suffixes = (".md", ".markdown", ".mdown", ".mkd")
    why_not_lines = "its code blocks and links would be translated"

    @classmethod
    def recognizes(cls, beginning: str) -> bool:
        return len(re.findall(r"^ {0,3}(?:```|~~~)", beginning, re.M)) >= 2

    def split(self, text: str) -> Template:
        front = _FRONT_MATTER.match(text)
        body = text[front.end() :] if front else text
        template = Template([text[: front.end()]] if front else [])
        done = 0
        for block in MarkdownBlocks(body, self.options.source).blocks():
            template.add(body[done : block.start], block.slot)
            done = block.end
        template.add(body[done:])
        return template


_FRONT_MATTER = re.compile(
    r"(---|\+\+\+)[ \t]*\r?\n.*?^(?:\1|\.\.\.)[ \t]*(?:\r?\n|\Z)", re.S | re.M
)
_DIRECTIVE = re.compile(
    r":{3,}.*|(?:!!!|\?\?\?).*|\[![\w-]+\].*|\{%.*%\}|<!--.*-->|\[TOC\]"
    r"""|\[(?!\^)[^\[\]]+\]:\s*\S+(?:\s+["'(].*)?"""
)
"""lines of a paragraph that are instructions to a program, or the address of a link"""
_LINK_LABEL = re.compile(r"^[ >]*\[(?!\^)([^\[\]]+)\]:", re.M)
_CHECKBOX = re.compile(r"\[[ xX]\][ \t]+")


@cache
def _markdown_parser() -> MarkdownIt:
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        raise RegardError(
            "Markdown files need markdown-it-py: pip install 'regard[documents]'"
        ) from None
    parser = MarkdownIt("commonmark").enable("table")
    parser.core.ruler.enableOnly(["normalize", "block"])  # the content of blocks is split here
    parser.block.ruler.before(
        "reference", "footnote", _footnote, {"alt": ["paragraph", "reference", "blockquote"]}
    )
    return parser


_FOOTNOTE = re.compile(r"\[\^[^\]\s]+\]:[ \t]*")
FOOTNOTE_INDENT = 4
"""columns by which the lines of a footnote after the first are indented"""


def _footnote(state: StateBlock, first: int, end: int, silent: bool) -> bool:
    """A block rule for footnotes of several paragraphs: the first line begins after the label, the others are indented.

    CommonMark has no footnotes, and its parser would take the second paragraph for code.
    """
    start = state.bMarks[first] + state.tShift[first]
    label = _FOOTNOTE.match(state.src, start, state.eMarks[first])
    if label is None or state.is_code_block(first):
        return False
    if silent:
        return True
    line = state.bMarks[first], state.tShift[first], state.sCount[first]
    state.blkIndent += FOOTNOTE_INDENT
    state.bMarks[first], state.tShift[first] = label.end(), 0
    state.sCount[first] = state.blkIndent
    state.push("footnote_open", "", 1)
    state.md.block.tokenize(state, first, end)
    state.push("footnote_close", "", -1)
    state.blkIndent -= FOOTNOTE_INDENT
    state.bMarks[first], state.tShift[first], state.sCount[first] = line
    return True


def normalized_label(label: str) -> str:
    """The label of a link as it is compared."""
    return " ".join(label.split()).casefold()


class MarkdownBlock(NamedTuple):
    """A part of a Markdown file that is translated."""

    start: int
    end: int
    slot: Slot


@dataclass
class MarkdownBlocks:
    """The translated parts of a Markdown text, in order."""

    text: str
    language: str

    def __post_init__(self) -> None:
        self.lines = lines_of(self.text)
        self.tokens = _markdown_parser().parse(self.text)
        self.references = set(map(normalized_label, _LINK_LABEL.findall(self.text)))
        """labels of link definitions, normalised"""

    def blocks(self) -> Iterator[MarkdownBlock]:
        table_end = 0
        for token, previous in zip(self.tokens, [None, *self.tokens], strict=False):
            if token.map is None or token.map[0] < table_end:
                continue
            if token.type == "table_open":
                table_end = token.map[1]
                yield from self._table(*token.map)
            elif token.type == "html_block" and token.level == 0:
                start, end = self.lines[token.map[0]].start, self.lines[token.map[1] - 1].end
                document = split_html(self.text[start:end], self.language, atoms=True)
                yield MarkdownBlock(start, end, Slot(document))
            elif token.type == "inline" and token.content:
                heading = previous is not None and previous.type == "heading_open"
                yield from self._paragraph(token, heading)

    def _paragraph(self, token: Token, heading: bool) -> Iterator[MarkdownBlock]:
        assert token.map is not None
        lines = []
        for number, content in enumerate(token.content.split("\n"), token.map[0]):
            line = self.lines[number]
            if not line.text.rstrip().endswith(content.rstrip()):
                content = content.lstrip()  # the parser has replaced a tab by spaces
            lines.append(Line(self._find(line, content, heading), content))
        breaks = [self.text[line.end : after.start] for line, after in pairwise(lines)]
        content = "\n".join(line.text for line in lines)
        tokens = MarkdownInline(content, breaks, self.references).tokens()
        slot = run_slot(tokens, self.language, escape_markdown)
        yield MarkdownBlock(lines[0].start, lines[-1].end, slot)

    def _find(self, line: Line, content: str, heading: bool) -> int:
        """Where the content of a line begins."""
        if heading and "#" in line.text:
            marks = re.match(r".*?#{1,6}(?=[ \t])", line.text)
            if marks and (at := line.text.find(content, marks.end())) >= 0:
                return line.start + at
        stripped = line.text.rstrip()
        assert stripped.endswith(content.rstrip()), (line, content)
        return line.start + len(stripped) - len(content.rstrip())

    def _table(self, first: int, last: int) -> Iterator[MarkdownBlock]:
        for number in [first, *range(first + 2, last)]:
            line = self.lines[number]
            for cell in re.finditer(r"(?:\\.|[^|\\])+", line.text):
                content = cell[0].strip()
                if not cell.start():  # of a table in a quotation
                    content = content.lstrip("> \t")
                start = line.start + cell.start() + cell[0].rfind(content)
                tokens = MarkdownInline(content, [], self.references).tokens()
                slot = run_slot(tokens, self.language, _escape_cell)
                yield MarkdownBlock(start, start + len(content), slot)


_MARKDOWN = re.compile(
    r"""
    (?P<escape> \\[!-/:-@\[-`{-~] )
    | (?P<definition> [ \t]*\n[ \t]*:[ \t]+ )
    | (?P<hard_break> (?:[ ]{2,}|\\)\n )
    | (?P<space> [ \t]*\n[ \t]* | [ \t]{2,} )
    | (?P<code> (?<!`)(?P<ticks>`+)(?!`) (?:.*?[^`])?? (?P=ticks)(?!`) )
    | (?P<math> \$\$.{1,2000}?\$\$ | \$(?=[^\s$])[^$\n]*?[^\s$\\]\$(?!\d) )
    | (?P<template> \{\{.{0,2000}?\}\} | \{%.{0,2000}?%\} )
    | (?P<attributes> \{[#.:][^{}\n]*\} )
    | (?P<url> <(?:[a-zA-Z][\w+.-]{1,31}:[^\s<>]* | [\w.+-]+@[\w.-]+)> | \bhttps?://[^\s<>*]*[^\s<>*.,;:!?'"_)\]] )
    | (?P<comment> <!--.*?--> )
    | <(?P<slash>/?)(?P<tag>[a-zA-Z][\w-]*)(?:\s[^<>]*)?/?>
    | (?P<note> (?:\A|(?<=\n)) \[\^[^\]\s]+\]:[ \t]* )
    | (?P<footnote> \[\^[^\]\s]+\] )
    | (?P<entity> &(?:\#\d{1,7}|\#[xX][0-9a-fA-F]{1,6}|[a-zA-Z]\w{1,31}); )
    | (?P<bracket> [!^]?\[ )
    | (?P<delimiter> \*{1,3} | _{1,3} | ~~ )
    """,
    re.VERBOSE | re.DOTALL,
)
_DESTINATION = re.compile(
    r"""\(\s*(?:<[^<>\n]*>|(?:\\.|[^\s()\\]|\((?:\\.|[^()\\])*\))*)"""
    r"""(?:\s+(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\((?:\\.|[^()\\])*\)))?\s*\)|\[[^\[\]]+\]""",
    re.DOTALL,
)
"""what follows the text of a link: (address "title") or [label]"""


@dataclass
class MarkdownInline:
    """Splits the content of a block into inline tokens.

    breaks: the original text of each line break, including the prefix of the next line, such as ``> ``.
    """

    content: str
    breaks: Sequence[str]
    references: set[str]

    def __post_init__(self) -> None:
        self.line_ends = [match.start() for match in re.finditer("\n", self.content)]

    def raw(self, start: int, end: int) -> str:
        """A part of the content as it is written in the file."""
        part = self.content[start:end]
        if "\n" not in part:
            return part
        first = bisect_left(self.line_ends, start)
        pieces = part.split("\n")
        joined = pieces[0]
        for number, piece in enumerate(pieces[1:], first):
            joined += self.breaks[number] + piece
        return joined

    def tokens(self) -> list[Inline]:
        tokens: list[Inline | Delimiter] = []
        start = 0
        if box := _CHECKBOX.match(self.content):
            tokens.append(border(box[0]))
            start = box.end()
        end = len(self.content)
        for first, last in [*self._directives(start), (end, end)]:
            tokens += self._scan(start, first)
            if first < last:
                tokens.append(border(self.raw(first, last)))
            start = last
        return match_delimiters(tokens)

    def _directives(self, start: int) -> Iterator[tuple[int, int]]:
        """Spans of lines that are instructions to a program, with the line breaks around them."""
        at = done = start
        for line in self.content[start:].split("\n"):
            end = at + len(line)
            if _DIRECTIVE.fullmatch(line.strip()):
                first, done = max(done, at - 1), min(end + 1, len(self.content))
                yield first, done
            at = end + 1

    def _scan(self, start: int, stop: int) -> Iterator[Inline | Delimiter]:
        """The tokens of a part of the content."""
        done = start
        while match := _MARKDOWN.search(self.content, start, stop):
            construct = self._construct(match, stop)
            if construct is None:
                start = match.end()
                continue
            if done < match.start():
                yield text_token(self.content[done : match.start()])
            yield from construct.tokens
            start = done = construct.end
        if done < stop:
            yield text_token(self.content[done:stop])

    def _construct(self, match: re.Match[str], stop: int) -> Construct | None:
        """What begins at a match; None if it is plain text."""
        start, end = match.span()
        if match["tag"]:
            return self._html_tag(match, match["tag"].lower(), stop)
        if match["bracket"]:
            return self._link(start, end, stop)
        raw = self.raw(start, end)
        token: Inline | Delimiter
        match match.lastgroup:
            case "escape":
                token = Inline(raw, InlineKind.TEXT, raw[1])
            case "hard_break" | "note" | "definition":
                token = border(raw)
            case "space":
                token = soft_break(raw)
            case "entity":
                token = Inline(raw, InlineKind.TEXT, html.unescape(raw))
            case "footnote" | "attributes":
                token = Inline(raw, InlineKind.MARK)
            case "comment":
                token = Inline(raw, InlineKind.ANCHOR)
            case "delimiter":
                before = self.content[start - 1 : start] if start else " "
                token = Delimiter.at(raw, before, self.content[end : end + 1] or " ")
            case _:
                token = Inline(raw, InlineKind.ATOM)
        return Construct([token], end)

    def _html_tag(self, match: re.Match[str], name: str, stop: int) -> Construct:
        start, end = match.span()
        if name in UNTRANSLATED_ELEMENTS and not match["slash"]:
            close = self.content.find(f"</{name}>", end, stop)
            end = end if close < 0 else close + len(name) + 3
            token = Inline(self.raw(start, end), InlineKind.ATOM)
        elif name in INLINE_ELEMENTS and not match[0].endswith("/>"):
            kind = InlineKind.CLOSE if match["slash"] else InlineKind.OPEN
            token = Inline(self.raw(start, end), kind, name)
        else:
            token = border(self.raw(start, end))
        return Construct([token], end)

    def _link(self, start: int, inner: int, stop: int) -> Construct | None:
        """A link, an image or a note that begins with ``[``, ``![`` or ``^[``."""
        close = self._closing_bracket(inner, stop)
        if close is None:
            return None
        if self.content[start] == "^":
            return Construct([border("^["), *self._scan(inner, close), border("]")], close + 1)
        destination = _DESTINATION.match(self.content, close + 1, stop)
        is_label = destination is not None and destination[0].startswith("[")
        label = destination[0][1:-1] if is_label and destination else self.content[inner:close]
        is_reference = normalized_label(label) in self.references
        if destination and (is_reference or not is_label):
            end = destination.end()
            if inner - start == 2:
                return Construct([Inline(self.raw(start, end), InlineKind.ATOM)], end)
            name = f"link {start}"
            opening = Inline("[", InlineKind.OPEN, name)
            closing = Inline(self.raw(close, end), InlineKind.CLOSE, name)
            return Construct([opening, *self._scan(inner, close), closing], end)
        if is_reference:  # its text is its label, which must stay as it is
            end = close + (3 if self.content.startswith("[]", close + 1) else 1)
            return Construct([Inline(self.raw(start, end), InlineKind.ATOM)], end)
        return None

    def _closing_bracket(self, start: int, stop: int) -> int | None:
        depth = 1
        for match in _BRACKETS.finditer(self.content, start, min(stop, start + MAX_LINK_LENGTH)):
            depth += {"[": 1, "]": -1}.get(match[0], 0)
            if not depth:
                return match.start()
        return None


MAX_LINK_LENGTH = 2000
"""characters of the text of a link"""
_BRACKETS = re.compile(r"\\.|(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)|[\[\]]", re.DOTALL)


class Construct(NamedTuple):
    """A part of the content that is not plain text: its tokens and where it ends."""

    tokens: list[Inline | Delimiter]
    end: int


class Delimiter(NamedTuple):
    """A run of ``*``, ``_`` or ``~`` that may begin or end emphasis."""

    raw: str
    can_open: bool
    can_close: bool

    @classmethod
    def at(cls, raw: str, before: str, after: str) -> Delimiter:
        """By the rules of CommonMark for the characters around it."""

        def is_symbol(character: str) -> bool:
            return not character.isalnum() and not character.isspace()

        left = not after.isspace() and (
            not is_symbol(after) or before.isspace() or is_symbol(before)
        )
        right = not before.isspace() and (
            not is_symbol(before) or after.isspace() or is_symbol(after)
        )
        if raw[0] != "_":
            return cls(raw, left, right)
        return cls(
            raw, left and (not right or is_symbol(before)), right and (not left or is_symbol(after))
        )


def match_delimiters(tokens: Sequence[Inline | Delimiter]) -> list[Inline]:
    """Pair the delimiters of emphasis as tags; those without a partner are text. Pairs do not cross links."""
    result: list[Inline] = []
    openers: list[list[int]] = [[]]  # indices of the result, for each enclosing link
    for token in tokens:
        if isinstance(token, Inline):
            if token.kind is InlineKind.OPEN:
                openers.append([])
            elif token.kind is InlineKind.CLOSE and len(openers) > 1:
                openers.pop()
            result.append(token)
            continue
        waiting, raw = openers[-1], token.raw
        while token.can_close and raw:
            rows = [row for row in waiting if raw.startswith(result[row].raw)]
            exact = [row for row in rows if result[row].raw == raw]
            longer = [row for row in waiting if result[row].raw.startswith(raw)]
            if not rows and longer and not token.can_open:  # ***both** one*
                row = max(longer)
                del waiting[waiting.index(row) + 1 :]
                result[row] = text_token(result[row].raw[len(raw) :])
                result.insert(row + 1, Inline(raw, InlineKind.OPEN, raw))
                result.append(Inline(raw, InlineKind.CLOSE, raw))
                raw = ""
                break
            if not rows:
                break
            row = max(exact or rows)
            del waiting[waiting.index(row) :]
            mark = result[row].raw
            result[row] = Inline(mark, InlineKind.OPEN, mark)
            result.append(Inline(mark, InlineKind.CLOSE, mark))
            raw = raw[len(mark) :]
        if raw:
            if token.can_open:
                waiting.append(len(result))
            result.append(text_token(raw))
    return result


_SPECIAL = re.compile(
    r"[\\`\[\]]|<(?=[a-zA-Z/!?])|(?<![^\W_])_|_(?![^\W_])|(?<!\s)\*|\*(?!\s)|~~|&(?=#?\w+;)"
    r"|(?:(?<=^\d)|(?<=^\d\d)|(?<=^\d{3})|(?<=^\d{4}))[.)](?=\s|$)"  # 1. is a list
    r"|^(?:>|[+-](?=\s|$)|-(?=[- ]+$)|#{1,6}(?=\s|$))"
)


def escape_markdown(text: str) -> str:
    """Escape all characters with a meaning in Markdown."""
    return _SPECIAL.sub(r"\\\g<0>", text)


def _escape_cell(text: str) -> str:
    return escape_markdown(text).replace("|", "\\|")
