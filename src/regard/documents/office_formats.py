"""Office documents: DOCX, PPTX and ODT. Formatting follows its words; everything else is preserved.

An archive is written with the same parts. In parts with text, only paragraphs whose translation differs are changed.
No office library is used: a library writes only what it can parse, whereas this module preserves all other bytes.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from regard.data.sentence_splitter import Sentences, split_text
from regard.data.words import Span, word_and_symbol_spans
from regard.documents.base import (
    DOCUMENT_FORMATS,
    ArchiveFormat,
    Slot,
    Template,
    XmlToken,
    end_of_element,
    escape_xml,
    xml_attribute,
    xml_tokens,
)
from regard.documents.markup import (
    Document,
    Element,
    Encode,
    Floats,
    Inline,
    InlineKind,
    add_run,
    project_elements,
    split_plain,
    unescaped_tokens,
    write_elements,
)

# ---------------------------------------------------------------------------------------------
# Text with character formats: all text is inside runs


@dataclass
class StyledText(Sentences):
    """Text in which every character belongs to a run with a format; it is also written as runs."""

    elements: dict[int, list[Element]] = field(default_factory=dict)
    """formats that differ from the base format, links and bookmarks, by number of the sentence"""
    between: dict[int, list[Element]] = field(default_factory=dict)
    """the same for separators"""
    base: Encode = str
    """writes text in the most frequent format"""

    @classmethod
    def of(cls, text: str, elements: Sequence[Element], base: Encode, language: str) -> StyledText:
        """elements: with their spans in the text. An element that covers several sentences is split."""
        plain = split_text(text, language)
        styled = cls(plain.sentences, plain.separators, base=base)
        at = 0
        for index, separator in enumerate(plain.separators):
            end = at + len(separator)
            if clipped := list(clip(elements, Span(at, end), edges=True)):
                styled.between[index] = clipped
            if index == len(plain.sentences):
                break
            at, end = end, end + len(plain.sentences[index])
            if clipped := list(clip(elements, Span(at, end), edges=False)):
                styled.elements[index] = clipped
            at = end
        return styled

    def join(
        self, translations: Sequence[str], alignments: Sequence[Floats | None] | None = None
    ) -> str:
        text = ""
        elements: list[Element] = []
        sentence_alignments = alignments or [None] * len(translations)
        for index, separator in enumerate(self.separators):
            elements += shift(self.between.get(index, []), len(text))
            text += separator
            if index == len(self.sentences):
                break
            sentence, translation = self.sentences[index], translations[index]
            inside = self.elements.get(index, [])
            if inside:
                alignment = sentence_alignments[index]
                placed = project_elements(sentence, translation, inside, alignment)
                elements += shift(placed, len(text))
            text += translation + self.space_after(index, translation)
        return write_elements(text, merge(elements), self.base)


def clip(elements: Sequence[Element], span: Span, edges: bool) -> Iterator[Element]:
    """The parts of elements inside a span, relative to it.

    edges: whether elements without text at the edges of the span belong to it. Formats of spaces are omitted.
    """
    for element in elements:
        start, end = max(element.start, span.start), min(element.end, span.end)
        if element.start == element.end:
            at = element.start
            overlaps = span.start <= at <= span.end if edges else span.start < at < span.end
        else:
            overlaps = start < end
        if overlaps:
            children = list(clip(element.children, span, edges))
            yield replace(
                element, start=start - span.start, end=end - span.start, children=children
            )


def shift(elements: Sequence[Element], offset: int) -> list[Element]:
    return [
        replace(
            element,
            start=element.start + offset,
            end=element.end + offset,
            children=shift(element.children, offset),
        )
        for element in elements
    ]


def merge(elements: Sequence[Element]) -> list[Element]:
    """Join adjacent parts of an element that was split."""
    merged: list[Element] = []
    for element in elements:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.end == element.start
            and last.start < last.end
            and element.start < element.end
            and (last.opening, last.closing) == (element.opening, element.closing)
            and last.encode is element.encode
        ):
            merged[-1] = replace(
                last, end=element.end, children=merge([*last.children, *element.children])
            )
        else:
            merged.append(element)
    return merged


# ---------------------------------------------------------------------------------------------
# Office Open XML

TAB, BREAK = "\x1c", "\x0b"
"""in the text of runs; both end a sentence"""


@dataclass
class Run:
    """A run of text, or something between runs."""

    raw: str
    text: str = ""
    properties: str = ""
    """the element rPr"""
    marker: InlineKind | None = None
    """of something without a text that moves with a word"""
    range_name: str = ""
    """of a marker at the beginning or the end of a range"""
    children: list[Run] | None = None
    """of a link, and its tags"""
    opening: str = ""
    closing: str = ""


class RunReader:
    """Splits an XML part into sequences of runs and the skeleton between them.

    prefix: of the names in the part. attributes: of elements with text.
    """

    def __init__(
        self, tokens: Sequence[XmlToken], prefix: str, attributes: str, language: str
    ) -> None:
        self.tokens, self.prefix, self.language = tokens, prefix, language
        self.attributes = attributes
        self.encoders: dict[str, Encode] = {}
        self.template = Template()

    def is_element(self, token: XmlToken, *names: str) -> bool:
        return token.name.startswith(self.prefix) and token.name[len(self.prefix) :] in names

    def read(self) -> Template:
        """Read the whole part: sequences of simple runs inside paragraphs become slots."""
        at = 0
        stretch: list[Run] = []
        while at < len(self.tokens):
            if run_and_end := self._movable(at):
                at, run = run_and_end
                stretch.append(run)
                continue
            self._add_stretch(stretch)
            stretch = []
            at = self._add_skeleton(at)
        self._add_stretch(stretch)
        return self.template

    def raw(self, start: int, end: int) -> str:
        return "".join(token.raw for token in self.tokens[start:end])

    def _add_skeleton(self, at: int) -> int:
        """Add one token that is preserved, or the text of a run that cannot be moved. Returns the next index."""
        token = self.tokens[at]
        self.template.add(token.raw)
        if self.is_element(token, "t") and token.opens and not token.closes:
            end = end_of_element(self.tokens, at)
            raw, text = self.raw(at + 1, end - 1), _text(self.tokens[at + 1 : end - 1])
            if any(map(str.isalpha, text)):
                self.template.add(Slot(split_plain(text, self.language), raw, escape_xml))
                return end - 1
        return at + 1

    # -----------------------------------------------------------------------------------------
    # Stretches

    def _movable(self, at: int) -> tuple[int, Run] | None:
        """A run with text only, a link or a tracked insertion around such runs, or a marker; and the index after it.

        A tracked deletion is a marker too.
        """
        token = self.tokens[at]
        if not token.opens:
            is_space = token.is_text and token.raw.isspace()
            return (at + 1, Run(token.raw)) if is_space else None
        if self.is_element(token, "r"):
            return self._run(at)
        if self.is_element(token, *RANGES) and token.closes:
            marker = InlineKind.MARK if token.name.endswith("End") else InlineKind.ANCHOR
            range_type = token.name.removesuffix("End").removesuffix("Start")
            name = f"{range_type} {xml_attribute(token.attributes, f'{self.prefix}id')}"
            return at + 1, Run(token.raw, marker=marker, range_name=name)
        if self.is_element(token, "proofErr") and token.closes:
            return at + 1, Run(token.raw)
        if self.is_element(token, "hyperlink", "smartTag", "ins", "moveTo") and not token.closes:
            return self._container(at)
        if self.is_element(token, "del", "moveFrom") and not token.closes:
            end = end_of_element(self.tokens, at)
            # Deleted words that begin with a space belong to the word before them.
            follows = _text(self.tokens[at:end])[:1].isspace()
            marker = InlineKind.MARK if follows else InlineKind.ANCHOR
            return end, Run(self.raw(at, end), marker=marker)
        return None

    def _container(self, at: int) -> tuple[int, Run] | None:
        end = end_of_element(self.tokens, at)
        children: list[Run] = []
        inner = at + 1
        while inner < end - 1:
            run_and_end = self._movable(inner)
            if not run_and_end:
                return None
            inner, run = run_and_end
            children.append(run)
        opening, closing = self.tokens[at].raw, self.tokens[end - 1].raw
        return end, Run(self.raw(at, end), children=children, opening=opening, closing=closing)

    def _run(self, at: int) -> tuple[int, Run] | None:
        end = end_of_element(self.tokens, at)
        raw = self.raw(at, end)
        inner = at + 1
        properties, text, marker = "", "", None
        while inner < end - 1:
            token, stop = self.tokens[inner], end_of_element(self.tokens, inner)
            if self.is_element(token, "rPr"):
                properties = self.raw(inner, stop)
            elif self.is_element(token, "t"):
                text += _text(self.tokens[inner + 1 : stop - 1]) if stop - inner > 1 else ""
            elif self.is_element(token, *CHARACTERS) and not token.attributes.strip(" /"):
                text += CHARACTERS[token.name[len(self.prefix) :]]
            elif self.is_element(token, *REFERENCES):
                marker = InlineKind.MARK
            elif self.is_element(token, *PICTURES) and not self._has_text(inner, stop):
                marker = InlineKind.ANCHOR
            elif token.name or not token.raw.isspace():
                return None
            inner = stop
        if marker and text:
            return None
        return end, Run(raw, text, properties, marker)

    def _has_text(self, start: int, end: int) -> bool:
        """Whether there are paragraphs between these tokens, as in a text box."""
        return any(self.is_element(token, "p") for token in self.tokens[start:end])

    def _add_stretch(self, runs: Sequence[Run]) -> None:
        raw = "".join(run.raw for run in runs)
        if not any(map(str.isalpha, _plain(runs))):
            self.template.add(raw)
            return
        elements, base = self._level(runs, 0)
        text = StyledText.of(_plain(runs), elements, base, self.language)
        self.template.add(Slot(text, raw))

    def _level(self, runs: Sequence[Run], offset: int) -> tuple[list[Element], Encode]:
        """The elements of runs side by side, and the encoder of their most frequent format."""
        sizes: Counter[str] = Counter()
        for run in runs:
            if run.children is None and not run.marker:
                sizes[_format(run)] += len(run.text.strip())
        if not any(sizes.values()):  # there are only links
            inner = [child for run in runs for child in run.children or ()]
            sizes.update({_format(run): len(run.text) for run in inner if not run.marker})
        base = max(sizes, key=sizes.__getitem__, default="")
        elements: list[Element] = []
        for run in runs:
            start, offset = offset, offset + len(_plain([run]))
            if run.children is not None:
                children, encode = self._level(run.children, start)
                elements.append(
                    Element(run.opening, run.closing, start, offset, children, encode=encode)
                )
            elif run.marker:
                follows = run.marker is InlineKind.MARK
                elements.append(
                    Element(run.raw, "", start, start, follows=follows, range_name=run.range_name)
                )
            elif _format(run) != base and word_and_symbol_spans(run.text):
                encode = self._encoder(run.properties, _format(run))
                elements.append(Element("", "", start, offset, encode=encode))
        properties = next((run.properties for run in _flat(runs) if _format(run) == base), "")
        return merge(elements), self._encoder(properties, base)

    def _encoder(self, properties: str, key: str) -> Encode:
        """Writes text as a run with these properties; the same object for the same format."""
        return self.encoders.setdefault(key, partial(self._write_run, properties))

    def _write_run(self, properties: str, text: str) -> str:
        p = self.prefix
        parts = [f"<{p}r>", properties]
        for part in re.split(f"([{TAB}{BREAK}])", text):
            if part == TAB:
                parts.append(f"<{p}tab/>")
            elif part == BREAK:
                parts.append(f"<{p}br/>")
            elif part:
                parts.append(f"<{p}t{self.attributes}>{escape_xml(part)}</{p}t>")
        return "".join([*parts, f"</{p}r>"])


RANGES = {
    "bookmarkStart", "bookmarkEnd", "commentRangeStart", "commentRangeEnd", "permStart", "permEnd",
}  # fmt: skip
CHARACTERS = {
    "tab": TAB, "br": BREAK, "noBreakHyphen": "\u2011", "softHyphen": "\xad", "lastRenderedPageBreak": "",
}  # fmt: skip
"""children of a run that stand for characters"""
REFERENCES = {
    "footnoteReference", "endnoteReference", "commentReference", "footnoteRef", "endnoteRef", "annotationRef",
}  # fmt: skip

PICTURES = {"drawing", "pict", "object"}


def _text(tokens: Sequence[XmlToken]) -> str:
    """The text of the tokens inside an element."""
    parts = []
    for token in tokens:
        if token.raw.startswith("<![CDATA["):
            parts.append(token.raw[9:-3])
        elif token.is_text:
            parts.append(html.unescape(token.raw))
    return "".join(parts)


def _plain(runs: Sequence[Run]) -> str:
    return "".join(run.text if run.children is None else _plain(run.children) for run in runs)


def _flat(runs: Sequence[Run]) -> Iterator[Run]:
    for run in runs:
        if run.children is None:
            yield run
        else:
            yield from _flat(run.children)


def _format(run: Run) -> str:
    """The format of a run as it is compared: without language, revision and proofing marks."""
    return re.sub(
        r"""<\w+:(?:lang|noProof)\b[^>]*>|\s(?:lang|dirty|err|smtClean)="[^"]*\"""",
        "",
        run.properties,
    )


def namespace_prefix(text: str, names: str, default: str) -> str:
    """The prefix of a namespace in an XML part. names: a pattern of its URI."""
    match = re.search(rf"""xmlns(?::([\w.-]+))?\s*=\s*["'](?:{names})["']""", text)
    if match is None:
        return default
    return f"{match[1]}:" if match[1] else ""


class OfficeOpenXml(ArchiveFormat):
    """A format with paragraphs of runs."""

    namespace: ClassVar[str]
    """a pattern of its URI"""
    prefix: ClassVar[str]
    """the usual prefix of the namespace"""
    text_attributes: ClassVar[str] = ""

    def split(self, text: str) -> Template:
        prefix = namespace_prefix(text, self.namespace, self.prefix)
        tokens = xml_tokens(text)
        return RunReader(tokens, prefix, self.text_attributes, self.options.source).read()

    @classmethod
    def recognizes(cls, beginning: str) -> bool:
        return beginning.startswith("PK") and f"{cls.required.partition('/')[0]}/" in beginning


@DOCUMENT_FORMATS.register("docx")
class Docx(OfficeOpenXml):
    """Word documents: body, headers, footers, notes and comments; formats, links and fields stay"""

    suffixes = (".docx", ".docm", ".dotx")
    required = "word/document.xml"
    translated = re.compile(
        r"word/(?:document|header\d*|footer\d*|footnotes|endnotes|comments)\.xml"
    )
    namespace = (
        r"http://schemas\.openxmlformats\.org/wordprocessingml/2006/main"
        r"|http://purl\.oclc\.org/ooxml/wordprocessingml/main"
    )
    prefix = "w:"
    text_attributes = ' xml:space="preserve"'


@DOCUMENT_FORMATS.register("pptx")
class Pptx(OfficeOpenXml):
    """PowerPoint presentations: slides, speaker notes, charts and diagrams"""

    suffixes = (".pptx", ".pptm", ".potx")
    required = "ppt/presentation.xml"
    translated = re.compile(
        r"ppt/(?:slides/slide\d+|notesSlides/notesSlide\d+|charts/chart\d+|diagrams/(?:data|drawing)\d+)\.xml"
    )
    namespace = (
        r"http://schemas\.openxmlformats\.org/drawingml/2006/main"
        r"|http://purl\.oclc\.org/ooxml/drawingml/main"
    )
    prefix = "a:"


# ---------------------------------------------------------------------------------------------
# OpenDocument


PARAGRAPHS = {"text:p", "text:h"}
INLINE = {"text:span", "text:a"}
SPACES = {"text:s"}
BORDERS = {"text:tab", "text:line-break"}
RANGES_BY_NAME = re.compile(
    "text:(bookmark|reference-mark|change|toc-mark|alphabetical-index-mark)-(start|end)|office:annotation-(end)"
)
ANCHORS = {"text:bookmark", "text:reference-mark", "text:soft-page-break", "text:change"}
NESTED = {
    "text:note": InlineKind.MARK,
    "office:annotation": InlineKind.ANCHOR,
    "draw:frame": InlineKind.ANCHOR,
    "draw:custom-shape": InlineKind.ANCHOR,
    "draw:g": InlineKind.ANCHOR,
}
"""elements inside a sentence that may have paragraphs of their own, and how they move with their word"""
DELETED = {"text:tracked-changes"}


@DOCUMENT_FORMATS.register("odt")
class OpenDocument(ArchiveFormat):
    """OpenDocument texts and presentations of LibreOffice: paragraphs, headings, tables, headers, footers, notes"""

    suffixes = (".odt", ".ott", ".odp")
    required = "content.xml"
    translated = re.compile(r"content\.xml|styles\.xml")

    @classmethod
    def recognizes(cls, beginning: str) -> bool:
        return (
            beginning.startswith("PK")
            and "mimetypeapplication/vnd.oasis.opendocument." in beginning
        )

    def split(self, text: str) -> Template:
        return self._split(xml_tokens(text))

    def _split(self, tokens: Sequence[XmlToken]) -> Template:
        template = Template()
        run: list[Inline] = []
        open_paragraphs = 0
        at = 0
        while at < len(tokens):
            token = tokens[at]
            if open_paragraphs and token.name in NESTED and token.opens:
                end = end_of_element(tokens, at)
                nested = Template([token.raw])
                if not token.closes:
                    nested = self._split(tokens[at + 1 : end])
                    nested.parts.insert(0, token.raw)
                raw = template.nest(nested)
                run.append(Inline(raw, NESTED[token.name], range_name(token)))
                at = end
                continue
            end = _end_of_inline(tokens, at) if open_paragraphs else at
            if end > at:
                run += _inline_tokens(tokens[at:end])
                at = end
                continue
            is_deleted = token.name in DELETED and not token.closes
            end = end_of_element(tokens, at) if is_deleted else at + 1
            template.add(self._slot(run), "".join(part.raw for part in tokens[at:end]))
            run = []
            if token.name in PARAGRAPHS:
                open_paragraphs += token.opens - token.closes
            at = end
        template.add(self._slot(run))
        return template

    def _slot(self, run: Sequence[Inline]) -> Slot:
        document = Document(escape=escape_xml)
        add_run(document, run, self.options.source)
        return Slot(document)


def _end_of_inline(tokens: Sequence[XmlToken], at: int) -> int:
    """The index after the inline token at ``at``; ``at`` itself if there is none."""
    token = tokens[at]
    if token.name in PARAGRAPHS:
        return at
    if token.is_text or token.name in INLINE or not token.name:
        return at + 1
    if not token.opens or token.name == "text:ruby":  # of an element with paragraphs, or with text
        return at
    end = end_of_element(tokens, at)
    return at if any(part.name in PARAGRAPHS for part in tokens[at:end]) else end


def range_name(token: XmlToken) -> str:
    """What the beginning and the end of a range have in common; empty for a single marker."""
    names = ("text:name", "office:name", "text:change-id", "text:id")
    values = [value for name in names if (value := xml_attribute(token.attributes, name))]
    range_type = token.name.removesuffix("-start").removesuffix("-end")
    return f"{range_type} {values[0]}" if values else ""


def _inline_tokens(tokens: Sequence[XmlToken]) -> Iterator[Inline]:
    """The inline token of these XML tokens; several for a text with entities."""
    raw, token = "".join(part.raw for part in tokens), tokens[0]
    if token.is_text and not raw.startswith("<"):
        yield from unescaped_tokens(raw, soft_breaks=True)
    elif token.is_text:
        yield Inline(raw, InlineKind.TEXT, raw[9:-3])
    elif token.name in INLINE and not (token.opens and token.closes):
        yield Inline(raw, InlineKind.OPEN if token.opens else InlineKind.CLOSE, token.name)
    elif token.name in SPACES:
        yield Inline(raw, InlineKind.TEXT, " ")
    elif token.name in BORDERS:
        yield Inline(raw, InlineKind.TEXT, "\n")
    elif match := RANGES_BY_NAME.fullmatch(token.name):
        kind = InlineKind.ANCHOR if match[2] == "start" else InlineKind.MARK
        yield Inline(raw, kind, range_name(token))
    elif token.name in ANCHORS or token.name in INLINE or not token.name:
        yield Inline(raw, InlineKind.ANCHOR)
    else:  # a field, such as the number of the page
        yield Inline(raw, InlineKind.ATOM)
