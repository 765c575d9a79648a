"""Text with inline markup: its sentences, and how the markup is inserted into their translations.

Inline elements that begin and end inside one sentence belong to that sentence: ``The <b>big</b> dog`` is translated as
``The big dog``, and the tags are inserted around the translation of ``big``, as given by the alignment of the model.
All other tags end a sentence and stay where they are. Whatever the alignment, each tag is inserted exactly once and the
nesting of elements is preserved: an element gets one span inside the span of its parent, and the spans of siblings do
not overlap. A sentence that does not change is preserved byte for byte.

A reader cuts its format into inline tokens (``Inline``); ``split_html`` is the reader of HTML. Splitting takes time
linear in the length of the text, because texts come from untrusted clients. This is why tags are found with a regular
expression: ``html.parser`` takes quadratic time on some inputs.
"""

from __future__ import annotations

import html
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from regard.data.sentence_splitter import (
    Sentences,
    sentence_spans,
    split_long_sentence,
    split_text,
)
from regard.data.words import Span, word_and_symbol_spans

Floats = npt.NDArray[np.float32]

RAW_TEXT_ELEMENTS = {
    "script", "style", "textarea", "xmp", "iframe", "noembed", "noframes", "plaintext",
}  # fmt: skip
"""Inside these elements ``<`` begins no tag, and the text is not translated."""
UNTRANSLATED_ELEMENTS = {"code", "kbd", "samp", "var"}
"""The text of these elements is not translated; nor is that of an element with ``translate="no"``
or ``class="notranslate"``."""
VOID_ELEMENTS = {
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr",
}  # fmt: skip
"""Elements without a closing tag."""
INLINE_ELEMENTS = {
    "a", "abbr", "acronym", "b", "bdi", "bdo", "big", "cite", "data", "del", "dfn", "em", "font", "i", "ins", "mark",
    "q", "s", "small", "span", "strike", "strong", "sub", "sup", "time", "tt", "u",
}  # fmt: skip
"""Elements that can be part of a sentence; all others end it."""
MAX_ELEMENTS = 64
"""inline elements in one sentence; if there are more, each of their tags ends a sentence"""


class InlineKind(Enum):
    """What an inline token is."""

    TEXT = "text"
    OPEN = "opening tag"
    CLOSE = "closing tag"
    ATOM = "atom"
    """untranslated content that acts as a noun, such as code"""
    ANCHOR = "anchor"
    """markup without text that belongs to the word after it, such as a bookmark"""
    MARK = "mark"
    """markup without text that belongs to the word before it, such as a footnote"""


class Inline(NamedTuple):
    """A token of a text with markup: text, a tag, or a thing that is not translated."""

    raw: str
    """as it is written in the file"""
    kind: InlineKind = InlineKind.TEXT
    text: str = ""
    """the text as the model gets it, or the name by which an opening and a closing tag match, or two ends of a range"""


def text_token(raw: str) -> Inline:
    """Text that is written as it is."""
    return Inline(raw, InlineKind.TEXT, raw)


Encode = Callable[[str], str]
"""Writes text in the format of a document."""


@dataclass
class Element:
    """An element inside a sentence: its tags, its span in characters, and the elements inside it."""

    opening: str
    closing: str
    start: int
    end: int
    children: list[Element] = field(default_factory=list)
    placeholder: str = ""
    """of an atom: the text in the sentence that stands for it"""
    follows: bool = False
    """of an element without text: whether it belongs to the word before it"""
    encode: Encode | None = None
    """writes the text directly inside this element; None: as outside of it"""
    range_name: str = ""
    """of a marker at the beginning or the end of a range, such as a bookmark: both have the same"""


@dataclass
class Document(Sentences):
    """Sentences, the elements inside them, and the text and markup between them."""

    elements: dict[int, list[Element]] = field(default_factory=dict)
    """elements by number of the sentence, for sentences that have some"""
    escape: Encode = str
    raw: dict[int, str] = field(default_factory=dict)
    """the original markup of each sentence, which is kept if the sentence does not change"""

    def join(
        self, translations: Sequence[str], alignments: Sequence[Floats | None] | None = None
    ) -> str:
        """The document with each sentence replaced by its translation; see ``insert_elements`` for alignments."""
        sentence_alignments = alignments or [None] * len(translations)
        assert len(translations) == len(sentence_alignments) == len(self.sentences)
        parts = map(self.join_one, range(len(translations)), translations, sentence_alignments)
        return "".join([*parts, self.separators[-1]])

    def join_one(self, index: int, translation: str, alignment: Floats | None = None) -> str:
        """One translation with its elements, preceded by the text and markup before it."""
        sentence = self.sentences[index]
        if translation == sentence and index in self.raw:
            return self.separators[index] + self.raw[index]
        text = self.escape(translation)
        if elements := self.elements.get(index):
            text = insert_elements(sentence, translation, elements, alignment, self.escape)
        return self.separators[index] + text + self.space_after(index, translation)

    def add_sentence(self, sentence: str, elements: Sequence[Element], raw: str) -> None:
        index = len(self.sentences)
        if elements:
            self.elements[index] = list(elements)
        self.raw[index] = raw
        self.sentences.append(sentence)
        self.separators.append("")

    def add_markup(self, text: str) -> None:
        """Append text that is not translated."""
        self.separators[-1] += text


def split_plain(text: str, language: str = "") -> Document:
    """The sentences of a plain text. language: its code, for example ``en``."""
    plain = split_text(text, language)
    return Document(plain.sentences, plain.separators)


# ---------------------------------------------------------------------------------------------
# Splitting HTML

_MARKUP = re.compile(
    r"""
    <!-- (?: -?> | .*? --> | .* )                       # a comment; an open one extends to the end
    | < [!?] (?: [^>]* > | .* )                         # a declaration
    | < (?P<close>/)? (?P<name>[a-zA-Z][^\s/>]*+)       # a tag
      (?P<attributes>
        (?: =\s*"[^"]*" | =\s*'[^']*' | =(?!\s*["']) | [^>=]++ )*+
      ) (?: > | .* )
    | </ (?: [^>]* > | .* )
    """,
    re.VERBOSE | re.DOTALL,
)
_TRANSLATE_NO = re.compile(
    r"""(?<![\w-])(?:translate\s*=\s*["']?no\b
    | class\s*=\s*(?:"[^"]*|'[^']*)?(?<![\w-])notranslate(?![\w-]))""",
    re.IGNORECASE | re.VERBOSE,
)


class HtmlToken(NamedTuple):
    """A piece of an HTML document: a tag, text, or other markup."""

    text: str
    tag: re.Match[str] | None = None
    is_text: bool = False


def tokenize_html(source: str) -> Iterator[HtmlToken]:
    """The tokens of a document; concatenated, they are the document."""
    done = 0
    while match := _MARKUP.search(source, done):
        yield HtmlToken(source[done : match.start()], is_text=True)
        yield HtmlToken(match[0], tag=match if match["name"] else None)
        done = match.end()
        name = (match["name"] or "").lower()
        if name in RAW_TEXT_ELEMENTS and not match["close"]:
            close = re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE).search(source, done)
            end = close.start() if close else len(source)
            yield HtmlToken(source[done:end])
            done = end
    yield HtmlToken(source[done:], is_text=True)


def split_html(source: str, language: str = "", *, atoms: bool = False) -> Document:
    """The sentences of an HTML document or fragment, with their inline elements.

    Tags, comments and attributes are kept unchanged. In text that changes, entities are decoded, and ``& < >`` and the
    no-break space are encoded again. atoms: code inside a sentence does not end it, and becomes a placeholder.
    """
    document = Document(escape=escape_html)
    run: list[Inline] = []  # consecutive text and inline tags
    # The name of the open element that is not translated, how deep it is nested in itself, and its atom:
    skipped, depth, atom = "", 0, ""
    preformatted = False
    for token in tokenize_html(source):
        text, tag, is_text = token
        name = tag["name"].lower() if tag else ""
        self_closing = tag is not None and tag["attributes"].endswith("/")
        untranslated = tag is not None and _is_untranslated(name, tag["attributes"])
        inline = name in INLINE_ELEMENTS and not self_closing and not untranslated
        if not depth and inline:
            assert tag is not None
            run.append(Inline(text, InlineKind.CLOSE if tag["close"] else InlineKind.OPEN, name))
            continue
        if not depth and is_text and _can_unescape(text):
            run += unescaped_tokens(text, soft_breaks=not preformatted)
            continue
        opens = tag is not None and not tag["close"] and not self_closing
        if depth and opens:
            depth += name == skipped
        elif depth and tag is not None and tag["close"]:
            depth -= name == skipped
            if atom and not depth:
                run.append(Inline(atom + text, InlineKind.ATOM))
                atom = ""
                continue
        elif not depth and opens and name not in VOID_ELEMENTS and untranslated:
            skipped, depth = name, 1
            if atoms and name in INLINE_ELEMENTS | UNTRANSLATED_ELEMENTS:
                atom = text
                continue
        if atom:
            atom += text
            continue
        preformatted = opens if name == "pre" else preformatted
        add_run(document, run, language)
        run = []
        document.add_markup(text)
    add_run(document, run, language)
    document.add_markup(atom)
    return document


def _is_untranslated(name: str, attributes: str) -> bool:
    return name in UNTRANSLATED_ELEMENTS or _TRANSLATE_NO.search(attributes) is not None


def _can_unescape(text: str) -> bool:
    try:
        html.unescape(text)
    except ValueError:  # a numeric entity of thousands of digits
        return False
    return True


_ENTITY_OR_BREAK = re.compile(
    r"(?P<entity>&(?:\#[0-9]++|\#[xX][0-9a-fA-F]++|\w{1,32});?)|(?P<space>[ \t\r\n\f]{2,}+|[\t\r\n\f])"
)


def unescaped_tokens(text: str, soft_breaks: bool) -> Iterator[Inline]:
    """Text of HTML or XML with decoded entities. soft_breaks: line breaks and several spaces are one space."""
    done = 0
    for match in _ENTITY_OR_BREAK.finditer(text):
        if match["space"] and not soft_breaks:
            continue
        if match.start() > done:
            yield text_token(text[done : match.start()])
        decoded = " " if match["space"] else html.unescape(match[0])
        yield Inline(match[0], InlineKind.TEXT, decoded)
        done = match.end()
    if done < len(text):
        yield text_token(text[done:])


def escape_html(text: str) -> str:
    return html.escape(text, quote=False).replace("\xa0", "&nbsp;")


# ---------------------------------------------------------------------------------------------
# Splitting a run of inline tokens


class InlineTag(NamedTuple):
    """A token that is not text, and its span in the text of its run; a tag has an empty span."""

    raw: str
    kind: InlineKind
    name: str
    """the name of a tag, the placeholder of an atom, or the name of the range that an anchor or a mark delimits"""
    offset: int
    end: int

    @property
    def closes(self) -> bool:
        return self.kind is InlineKind.CLOSE


def add_run(document: Document, run: Sequence[Inline], language: str) -> None:
    """Add a run of text and inline tags: its sentences with their elements, and what is between them."""
    plain = PlainRun.of(run)
    text, tags = plain.text, plain.tags
    atoms = [Span(tag.offset, tag.end) for tag in tags if tag.kind is InlineKind.ATOM]
    if not _has_text(text, Span(0, len(text)), atoms):
        document.add_markup("".join(token.raw for token in run))
        return
    tagged = _tagged_sentences(text, tags, list(sentence_spans(text, language)))
    sentences = [sentence for sentence in tagged if _has_text(text, sentence.span, atoms)]
    owner = {index: number for number, sentence in enumerate(sentences) for index in sentence.tags}
    raws, separators = _raw_parts(
        run, plain.spans, [sentence.span for sentence in sentences], owner
    )
    for (span, elements, _), raw, separator in zip(sentences, raws, separators, strict=False):
        document.add_markup(separator)
        document.add_sentence(text[span.start : span.end], elements, raw)
    document.add_markup(separators[-1])


_PLACEHOLDER = re.compile(r"\{[0-9]+\}")


class PlainRun(NamedTuple):
    """The text of a run as the model gets it, with placeholders for atoms."""

    text: str
    spans: list[Span]
    """the span of each token in the text; empty for tags"""
    tags: list[InlineTag]
    """the tokens that are not text"""

    @classmethod
    def of(cls, run: Sequence[Inline]) -> PlainRun:
        literal = "".join(token.text for token in run if token.kind is InlineKind.TEXT)
        literal_placeholders = set(_PLACEHOLDER.findall(literal))
        placeholders = (
            name for name in map("{{{}}}".format, count(1)) if name not in literal_placeholders
        )
        texts: list[str] = []
        spans: list[Span] = []
        tags: list[InlineTag] = []
        length = 0
        for raw, kind, name in run:
            text = name if kind is InlineKind.TEXT else ""
            if kind is InlineKind.ATOM:
                text = name = next(placeholders)
            texts.append(text)
            spans.append(Span(length, length + len(text)))
            length += len(text)
            if kind is not InlineKind.TEXT:
                tags.append(InlineTag(raw, kind, name, *spans[-1]))
        return cls("".join(texts), spans, tags)


def _has_text(text: str, span: Span, atoms: Sequence[Span]) -> bool:
    """Whether a span has letters outside of atoms. Numbers alone are no text: a model would invent one."""
    first, last = (
        bisect_left(atoms, offset, key=lambda atom: atom.start) for offset in (span.start, span.end)
    )
    done = span.start
    for atom in atoms[first:last]:
        if any(map(str.isalpha, text[done : atom.start])):
            return True
        done = atom.end
    return any(map(str.isalpha, text[done : span.end]))


def _raw_parts(
    run: Sequence[Inline],
    spans: Sequence[Span],
    sentences: Sequence[Span],
    owner: Mapping[int, int],
) -> tuple[list[str], list[str]]:
    """How each sentence of a run is written, and what is written before, between and after them.

    spans: of the tokens. owner: the number of the sentence of each tag that is inside one.
    """
    raws: list[list[str]] = [[] for _ in sentences]
    separators: list[list[str]] = [[] for _ in range(len(sentences) + 1)]
    tag = number = 0  # number: of sentences that have ended
    for (raw, kind, _), (start, end) in zip(run, spans, strict=True):
        while number < len(sentences) and sentences[number].end <= start:
            number += 1
        if kind is not InlineKind.TEXT:
            (raws[owner[tag]] if tag in owner else separators[number]).append(raw)
            tag += 1
            continue
        literal = len(raw) == end - start  # otherwise it is one entity, or a line break
        done = start
        while done < end:
            while number < len(sentences) and sentences[number].end <= done:
                number += 1
            in_sentence = number < len(sentences) and sentences[number].start <= done
            stop = end
            if number < len(sentences) and literal:
                stop = min(end, sentences[number].end if in_sentence else sentences[number].start)
            part = raw[done - start : stop - start] if literal else raw
            (raws if in_sentence else separators)[number].append(part)
            done = stop
    return ["".join(part) for part in raws], ["".join(part) for part in separators]


class TaggedSentence(NamedTuple):
    """A sentence of a run, the elements inside it, and the indices of their tags."""

    span: Span
    elements: list[Element]
    tags: list[int]


def _tagged_sentences(
    text: str, tags: Sequence[InlineTag], sentences: Sequence[Span]
) -> list[TaggedSentence]:
    """The sentences with their elements. A sentence is split at a tag that has no partner inside it."""
    pairs = _tag_pairs(tags, sentences)
    paired = {index for group in pairs.values() for pair in group for index in pair}
    unpaired = sorted(
        {
            offset
            for index, tag in enumerate(tags)
            if index not in paired
            for offset in (tag.offset, tag.end)
        }
    )
    tagged = []
    for index, (start, end) in enumerate(sentences):
        cuts = set(unpaired[bisect_right(unpaired, start) : bisect_left(unpaired, end)])
        open_pairs = pairs.get(index, [])
        while True:
            borders = pairwise([start, *sorted(cuts), end])
            pieces = [span for border in borders for span in split_long_sentence(text, *border)]
            crossing = {pair for pair in open_pairs if _crosses(tags, pair, pieces)}
            if not crossing:
                break
            open_pairs = [pair for pair in open_pairs if pair not in crossing]
            offsets = {tags[tag].offset for pair in crossing for tag in pair}
            cuts |= {offset for offset in offsets if start < offset < end}
        for span in pieces:
            elements, indices = _element_tree(span, tags, open_pairs)
            tagged.append(TaggedSentence(span, elements, indices))
            open_pairs = [pair for pair in open_pairs if pair[0] not in indices]
    return tagged


def _crosses(tags: Sequence[InlineTag], pair: TagPair, pieces: Sequence[Span]) -> bool:
    """Whether an element is partly inside and partly outside of a piece."""
    start, end = tags[pair[0]].offset, tags[pair[1]].end
    return any(
        start < piece.end
        and end > piece.start
        and not (start <= piece.start and end >= piece.end)
        and not (start >= piece.start and end <= piece.end)
        for piece in pieces
    )


TagPair = tuple[int, int]
"""The indices of the opening and closing tag of an element; twice the same for an atom or an anchor."""


def _tag_pairs(tags: Sequence[InlineTag], sentences: Sequence[Span]) -> dict[int, list[TagPair]]:
    """The elements of each sentence, in the order in which they begin.

    If a closing tag does not match the innermost open element, all open elements are given up, so that no element
    contains an unpaired tag.
    """
    starts = [sentence.start for sentence in sentences]

    def sentence_of(tag: InlineTag) -> int | None:
        last = bisect_right(starts, tag.offset) - 1
        for index in (last - 1, last) if tag.closes else (last, last - 1):
            if index >= 0 and sentences[index].start <= tag.offset <= sentences[index].end:
                return index
        return None

    pairs: dict[int, list[TagPair]] = {}
    open_tags: list[int] = []
    for index, tag in enumerate(tags):
        if tag.kind is InlineKind.OPEN:
            open_tags.append(index)
        elif not tag.closes:
            if (sentence := sentence_of(tag)) is not None:
                pairs.setdefault(sentence, []).append((index, index))
        elif open_tags and tags[open_tags[-1]].name == tag.name:
            first = open_tags.pop()
            sentence = sentence_of(tags[first])
            if sentence is not None and sentence == sentence_of(tag):
                pairs.setdefault(sentence, []).append((first, index))
        else:
            open_tags.clear()
    return {
        index: sorted(tag_pairs)
        for index, tag_pairs in pairs.items()
        if len(tag_pairs) <= MAX_ELEMENTS
    }


def _element_tree(
    span: Span, tags: Sequence[InlineTag], pairs: Sequence[TagPair]
) -> tuple[list[Element], list[int]]:
    """The elements of a sentence as a tree, and the indices of their tags; one around all of it is left outside."""
    roots: list[Element] = []
    indices: list[int] = []
    ancestors: list[tuple[int, Element]] = []  # with the index of their closing tag
    for first, last in pairs:
        while ancestors and ancestors[-1][0] < first:
            ancestors.pop()
        start, end = tags[first].offset, tags[last].end
        touches = start < span.end and end > span.start
        covers = start <= span.start and end >= span.end
        if not ancestors and (covers or not touches):
            continue
        start, end = (
            min(max(offset, span.start), span.end) - span.start for offset in (start, end)
        )
        element = _new_element(tags[first], tags[last], start, end)
        (ancestors[-1][1].children if ancestors else roots).append(element)
        ancestors.append((last, element))
        indices += [first, last]
    return roots, indices


def _new_element(first: InlineTag, last: InlineTag, start: int, end: int) -> Element:
    if first is not last:
        return Element(first.raw, last.raw, start, end)
    return Element(
        *(first.raw, "", start, end),
        placeholder=first.name if first.kind is InlineKind.ATOM else "",
        follows=first.kind is InlineKind.MARK,
        range_name="" if first.kind is InlineKind.ATOM else first.name,
    )


# ---------------------------------------------------------------------------------------------
# Inserting elements into a translation


def insert_elements(
    sentence: str,
    translation: str,
    elements: Sequence[Element],
    alignment: Floats | None,
    encode: Encode,
) -> str:
    """The translation with the elements of the sentence, in the format of the document.

    alignment: [unit of the translation, unit of the sentence], how much the one comes from the other; None aligns by
    relative position. Units are words, or characters in scripts without spaces (``regard.data.words``).
    """
    placed = project_elements(sentence, translation, elements, alignment)
    return write_elements(translation, placed, encode)


def project_elements(
    sentence: str, translation: str, elements: Sequence[Element], alignment: Floats | None
) -> list[Element]:
    """The elements of a sentence with their spans in its translation; see ``insert_elements``."""
    if translation == sentence:
        return list(elements)
    weights = diagonal_alignment(sentence, translation) if alignment is None else alignment
    source, target = word_and_symbol_spans(sentence), word_and_symbol_spans(translation)
    projector = _ElementProjector(sentence, translation, source, target, weights)
    return _order_ranges(projector.project(_empty_ranges_together(elements)), target)


def _empty_ranges_together(elements: Sequence[Element]) -> list[Element]:
    """Elements of which the end of a range without text belongs to the same word as its beginning."""
    begins = {
        element.range_name: element.start
        for element in elements
        if element.range_name and not element.follows
    }
    return [
        replace(element, follows=False)
        if begins.get(element.range_name) == element.start
        else element
        for element in elements
    ]


def _order_ranges(elements: Sequence[Element], words: Sequence[Span]) -> list[Element]:
    """Elements whose ranges begin before they end: one that was turned around covers the words of both ends."""
    ordered = list(elements)
    begins = {
        element.range_name: index
        for index, element in enumerate(elements)
        if element.range_name and not element.follows
    }
    for end, element in enumerate(elements):
        begin = begins.get(element.range_name, end)
        first, last = element.start, elements[begin].start
        if element.follows and first < last:
            start = max((word.start for word in words if word.end <= first), default=first)
            stop = min((word.end for word in words if word.start >= last), default=last)
            ordered[begin] = replace(elements[begin], start=start, end=start)
            ordered[end] = replace(element, start=stop, end=stop)
    return ordered if ordered == elements else sorted(ordered, key=lambda element: element.start)


def write_elements(text: str, elements: Sequence[Element], encode: Encode) -> str:
    """A text with its elements. Placeholders that are left over in the text are removed."""
    placeholders = [name for name in _placeholders(elements) if name in text]

    def encode_rest(text: str, encode: Encode) -> str:
        for name in placeholders:
            text = text.replace(name, "")
        return encode(text) if text else ""

    return _write(text, elements, Span(0, len(text)), encode, encode_rest)


def _placeholders(elements: Sequence[Element]) -> Iterator[str]:
    for element in elements:
        if element.placeholder:
            yield element.placeholder
        yield from _placeholders(element.children)


def diagonal_alignment(sentence: str, translation: str) -> Floats:
    """An alignment by relative position, for models without attention."""
    rows, columns = (
        np.array([(span.start + span.end) / 2 / len(text) for span in word_and_symbol_spans(text)])
        for text in (translation, sentence)
    )
    return np.asarray(1 - abs(rows[:, None] - columns[None]), dtype=np.float32)


class _ElementProjector:
    """Moves elements from the units of a sentence to the units of its translation."""

    def __init__(
        self,
        sentence: str,
        translation: str,
        source: list[Span],
        target: list[Span],
        alignment: Floats,
    ) -> None:
        assert alignment.shape == (len(target), len(source))
        self.sentence, self.translation = sentence, translation
        self.source, self.target, self.alignment = source, target, alignment.copy()

    def project(self, elements: Sequence[Element]) -> list[Element]:
        """The elements with their spans in the translation, in characters."""
        for name in _placeholders(elements):  # the alignment of a placeholder is known
            at = self.sentence.find(name)
            units = _units_inside(self.source, Span(at, at + len(name)))
            copied = self._copied(name)
            self.alignment[copied.start : copied.end] = 0.0
            self.alignment[copied.start : copied.end, units] = 1.0
        all_units = Span(0, len(self.target))
        return self._place(elements, list(range(len(self.source))), all_units)

    def _copied(self, placeholder: str) -> Span:
        """The units of a placeholder in the translation; empty if the translation does not have it."""
        at = self.translation.find(placeholder)
        units = _units_inside(self.target, Span(at, at + len(placeholder))) if at >= 0 else []
        return Span(units[0], units[-1] + 1) if units else Span(0, 0)

    def _place(
        self, elements: Sequence[Element], parent: list[int], available: Span
    ) -> list[Element]:
        """Give each element its best span of the available units, the clearest alignment first; then its children.

        parent: the source units of the enclosing element.
        """
        source_units = [self._source_units(element) for element in elements]
        gains = [self._gains(units, parent) for units in source_units]
        gaps, placed = [available], []
        for index in sorted(range(len(elements)), key=lambda i: -gains[i].max(initial=-1.0)):
            element = elements[index]
            span, gap = self._span_of(element, gains[index], gaps)
            gaps.remove(gap)
            gaps += [Span(gap.start, span.start), Span(span.end, gap.end)]
            children = self._place(element.children, source_units[index], span)
            placed.append((span, index, self._in_characters(element, span, children)))
        return [element for *_, element in sorted(placed, key=lambda placement: placement[:2])]

    def _span_of(self, element: Element, gains: Floats, gaps: Sequence[Span]) -> tuple[Span, Span]:
        """The span of an element and the gap it lies in."""
        if element.placeholder:
            copied = self._copied(element.placeholder)
            for gap in gaps:
                if copied.start < copied.end and gap.start <= copied.start <= copied.end <= gap.end:
                    return copied, gap
        span, gap = _best_span(gains, gaps)
        if element.start == element.end or element.placeholder:  # no text may be lost
            edge = span.end if element.follows else span.start
            span = Span(edge, edge)
        return span, gap

    def _source_units(self, element: Element) -> list[int]:
        """The units inside an element; for an empty element, the unit that it belongs to."""
        if element.start < element.end:
            return _units_inside(self.source, Span(element.start, element.end))
        units = range(len(self.source))
        if element.follows:
            return [i for i in units if self.source[i].start < element.start][-1:]
        return [i for i in units if self.source[i].end > element.start][:1]

    def _gains(self, units: list[int], parent: list[int]) -> Floats:
        """For each unit of the translation: its weight inside the element minus its weight outside of it."""
        outside = sorted(set(parent) - set(units))
        weight = self.alignment[:, units].max(1, initial=0.0)
        other = self.alignment[:, outside].max(1, initial=0.0)
        return np.asarray(weight - other, dtype=np.float32)

    def _in_characters(self, element: Element, span: Span, children: list[Element]) -> Element:
        target, (first, last) = self.target, span
        if first == last and element.follows and first:
            start = target[first - 1].end
        else:
            start = target[first].start if first < len(target) else target[-1].end if target else 0
        end = target[last - 1].end if last > first else start
        source_units = self._source_units(element)
        if last - first == len(source_units) == 1:
            source = self.source[source_units[0]]
            if self._text(source, self.sentence) == self._text(target[first], self.translation):
                # A part of a word that is copied, such as the 2 of H2O.
                start += max(0, element.start - source.start)
                end -= max(0, source.end - element.end)
        return replace(element, start=start, end=end, children=children)

    def _text(self, span: Span, text: str) -> str:
        return text[span.start : span.end]


def _units_inside(units: Sequence[Span], span: Span) -> list[int]:
    """The indices of the units that overlap a span."""
    return [i for i, unit in enumerate(units) if unit.start < span.end and unit.end > span.start]


def _best_span(gains: Floats, gaps: Sequence[Span]) -> tuple[Span, Span]:
    """The span with the largest sum of gains and the gap it lies in; at least one unit if any gap has one."""
    candidates = [(-np.inf, Span(gap.start, gap.start), gap) for gap in gaps]
    for gap in gaps:
        start, total = gap.start, 0.0
        for unit in range(gap.start, gap.end):
            if total <= 0:
                start, total = unit, 0.0
            total += float(gains[unit])
            candidates.append((total, Span(start, unit + 1), gap))
    _, span, gap = max(candidates, key=lambda candidate: candidate[0])
    return span, gap


def _write(
    text: str,
    elements: Sequence[Element],
    span: Span,
    encode: Encode,
    encode_rest: Callable[[str, Encode], str],
) -> str:
    """The text of a span with its elements; parts of an element outside the span are cut off."""
    parts, done = [], span.start
    for element in elements:
        start = min(max(element.start, done), span.end)
        end = min(max(element.end, start), span.end)
        inner = ""
        if not element.placeholder:
            element_encode = element.encode or encode
            inner = _write(text, element.children, Span(start, end), element_encode, encode_rest)
        parts += [encode_rest(text[done:start], encode), element.opening, inner, element.closing]
        done = end
    return "".join([*parts, encode_rest(text[done : span.end], encode)])
