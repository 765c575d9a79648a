"""Text documents: plain text, HTML, and columns of tables; and what Markdown and subtitles share with them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from regard.documents.base import (
    DOCUMENT_FORMATS,
    SNIFFED,
    ParsedDocument,
    Slot,
    Template,
    TextFormat,
    recognize,
)
from regard.documents.markup import (
    Document,
    Encode,
    Inline,
    InlineKind,
    add_run,
    split_html,
    text_token,
)

LINE_BREAK = re.compile(r"\r\n?|\n")


class Line(NamedTuple):
    """A line of a text without its line break, and where it begins."""

    start: int
    text: str

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def lines_of(text: str) -> list[Line]:
    """The lines of a text; after a last line break there is an empty line."""
    starts = [0, *(match.end() for match in LINE_BREAK.finditer(text))]
    ends = [*(match.start() for match in LINE_BREAK.finditer(text)), len(text)]
    return [Line(start, text[start:end]) for start, end in zip(starts, ends, strict=True)]


def border(raw: str) -> Inline:
    """Markup that is not translated and ends a sentence."""
    return Inline(raw, InlineKind.TEXT, "\n")


def soft_break(raw: str) -> Inline:
    """A line break inside a sentence."""
    return Inline(raw, InlineKind.TEXT, " ")


def spaced_tokens(text: str) -> Iterator[Inline]:
    """Text in which the model reads several spaces as one."""
    for part in re.split(r"([ \t]{2,}|\t)", text):
        if part:
            yield soft_break(part) if part.isspace() else text_token(part)


def run_slot(run: Sequence[Inline], language: str, escape: Encode = str) -> Slot:
    document = Document(escape=escape)
    add_run(document, run, language)
    return Slot(document)


# ---------------------------------------------------------------------------------------------
# Plain text


@DOCUMENT_FORMATS.register("text")
class PlainTextDocument(TextFormat):
    """plain text: paragraphs between blank lines; lines that were broken at a fixed width belong together"""

    suffixes = (".txt", ".text")
    widths = range(50, 101)
    """widths at which programs break lines; longer lines are paragraphs"""

    def parse(self, content: bytes) -> ParsedDocument:
        """Split a file into slots; one with the content of another format, such as subtitles, is read as that."""
        document_format = recognize(content[:SNIFFED])
        if document_format is None:
            return super().parse(content)
        if not document_format.is_text:
            raise ValueError(
                f"{document_format.why_not_lines}; its name must end in {document_format.suffixes[0]}"
            )
        return document_format(self.options).parse(content)

    def split(self, text: str) -> Template:
        lines = lines_of(text)
        width = max(len(line.text.rstrip()) for line in lines)
        template = Template()
        run: list[Inline] = []
        start = 0  # of the text that is not in a run yet
        for line, following in pairwise([*lines, Line(len(text), "")]):
            run += spaced_tokens(text[start : line.end])
            start = following.start
            if width in self.widths and self._is_soft(line.text, following.text, width):
                start += len(following.text) - len(following.text.lstrip())
                run.append(soft_break(text[line.end : start]))
            elif line.text.strip():
                run.append(border(text[line.end : start]))
            else:
                run.append(text_token(text[line.end : start]))
                template.add(run_slot(run, self.options.source))
                run = []
        template.add(run_slot(run, self.options.source))
        return template

    def _is_soft(self, line: str, following: str, width: int) -> bool:
        """Whether the line was wrapped: the first word of the following line did not fit into it."""
        first = following.split(maxsplit=1)[:1]
        if not first or re.match(r"\s*([-*•‣–]|\d+[.)])\s", following):
            return False
        return len(line.rstrip()) + 1 + len(first[0]) > width


# ---------------------------------------------------------------------------------------------
# HTML


@DOCUMENT_FORMATS.register("html")
class HtmlDocument(TextFormat):
    """HTML: text between tags; scripts, styles, code and attributes stay as they are"""

    suffixes = (".html", ".htm", ".xhtml")
    why_not_lines = "its tags would be translated"

    @classmethod
    def recognizes(cls, beginning: str) -> bool:
        return (
            re.match(r"\s*(<!--.*?-->\s*)*<(!doctype html|html)\b", beginning, re.I | re.S)
            is not None
        )

    def split(self, text: str) -> Template:
        return Template([Slot(split_html(text, self.options.source, atoms=True))])


# ---------------------------------------------------------------------------------------------
# Tables


@DOCUMENT_FORMATS.register("table")
class Table(TextFormat):
    """CSV and TSV: the columns that ``--columns`` names; with names, the first line is a header"""

    suffixes = (".csv", ".tsv")
    is_connected = False
    why_not_lines = "its columns would be translated as one text"

    def split(self, text: str) -> Template:
        delimiter = find_delimiter(text)
        records = list(read_records(text, delimiter))
        columns, body = self._columns([field.value for field in records[0]] if records else [])
        template = Template()
        done = 0
        for record in records[body:]:
            for index in columns:
                if index >= len(record) or not any(map(str.isalpha, record[index].value)):
                    continue
                cell = record[index]
                raw = text[cell.start : cell.end]
                encode = partial(quote_field, delimiter, raw.startswith('"'))
                slot = Slot(self.split_plain(cell.value), raw, encode)
                template.add(text[done : cell.start], slot)
                done = cell.end
        template.add(text[done:])
        return template

    def _columns(self, header: Sequence[str]) -> tuple[list[int], int]:
        """The indices of the columns to translate, and the number of header lines."""
        columns = self.options.columns
        names = [name.strip() for name in header]
        if not columns:
            choices = ", ".join(names[:20])
            raise ValueError(
                f"name the columns to translate, for example --columns {names[-1] if names else 1} "
                f"(the first line has: {choices})"
            )
        if all(name in names for name in columns):
            return sorted(names.index(name) for name in columns), 1
        unknown = [
            name for name in columns if not (name.isdecimal() and 1 <= int(name) <= len(names))
        ]
        if unknown:
            raise ValueError(
                f"no column {unknown[0]}; use a name from the first line ({', '.join(names[:20])}) "
                f"or a number from 1 to {len(names)}"
            )
        return sorted(int(name) - 1 for name in columns), 0


class Field(NamedTuple):
    """A field of a table: its value and its span in the text, with quotes."""

    value: str
    start: int
    end: int


def find_delimiter(text: str) -> str:
    """The delimiter of a table: the one that occurs most in its first line."""
    first = re.sub(r'"(?:[^"]|"")*"', "", text[:100_000]).split("\n", 1)[0]
    return max("\t,;|", key=first.count) if any(map(first.count, "\t,;|")) else ","


def read_records(text: str, delimiter: str) -> Iterator[list[Field]]:
    """The records of a table. Raises ValueError for a quoted field that does not end."""
    pattern = re.compile(
        rf'"((?:[^"]|"")*)"(?=[{re.escape(delimiter)}\r\n]|\Z)|([^{re.escape(delimiter)}\r\n]*)'
    )
    record: list[Field] = []
    at = 0
    while at <= len(text):
        match = pattern.match(text, at)
        assert match is not None
        quoted = match[1] is not None
        if not quoted and match[0].startswith('"') and delimiter != "\t":
            line = text.count("\n", 0, at) + 1
            raise ValueError(f"line {line}: a field begins with a quote and does not end with one")
        value = match[1].replace('""', '"') if quoted else match[2]
        record.append(Field(value, *match.span()))
        at = match.end()
        if text[at : at + 1] == delimiter:
            at += 1
            continue
        ending = LINE_BREAK.match(text, at)
        if len(record) > 1 or record[0].value:
            yield record
        record = []
        if ending is None:
            return
        at = ending.end()


def quote_field(delimiter: str, quoted: bool, value: str) -> str:
    """A value as a field, in quotes if the field had them or if the value needs them."""
    if quoted or any(character in value for character in f'{delimiter}"\r\n'):
        doubled = value.replace('"', '""')
        return f'"{doubled}"'
    return value
