"""Documents: the sentences of a plain text or of HTML, and how their translations are put back.

Plain text is split by ``regard.data.segmentation``. In HTML, inline elements that begin and end inside one
sentence belong to that sentence: ``The <b>big</b> dog`` is translated as ``The big dog``, and the tags are put back
around the translation of ``big``, as given by the alignment of the model. All other tags end a sentence and stay where
they are. Whatever the alignment, each tag comes back exactly once and elements stay nested as they were: an element
gets one span inside the span of its parent, and the spans of siblings do not overlap.

Splitting takes time linear in the length of the text, because texts come from untrusted clients. This is why tags are
found with a regular expression: ``html.parser`` takes quadratic time on some inputs.
"""

from __future__ import annotations

import html
import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from regard.data.segmentation import (
    Sentences,
    Span,
    sentence_spans,
    split_long_sentence,
    split_text,
    word_and_symbol_spans,
)

Floats = npt.NDArray[np.float32]

RAW_TEXT_ELEMENTS = {
    "script", "style", "textarea", "xmp", "iframe", "noembed", "noframes", "plaintext",
}  # fmt: skip
"""Inside these elements ``<`` begins no tag, and the text is not translated."""
UNTRANSLATED_ELEMENTS = {"code", "kbd", "samp", "var"}
"""The text of these elements is not translated; nor is that of an element with ``translate="no"``."""
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


@dataclass
class Element:
    """An element inside a sentence: its tags, its span in characters, and the elements inside it."""

    opening: str
    closing: str
    start: int
    end: int
    children: list[Element] = field(default_factory=list)


@dataclass
class Document(Sentences):
    """Sentences, the elements inside them, and the text and markup between them."""

    elements: dict[int, list[Element]] = field(default_factory=dict)
    """elements by number of the sentence, for sentences that have some"""
    escape: Callable[[str], str] = str
    """writes text in the format of the document"""

    def join(
        self, translations: Sequence[str], alignments: Sequence[Floats | None] | None = None
    ) -> str:
        """The document with each sentence replaced by its translation; see ``insert_elements`` for alignments."""
        given = alignments or [None] * len(translations)
        assert len(translations) == len(given) == len(self.sentences)
        parts = map(self.join_one, range(len(translations)), translations, given)
        return "".join([*parts, self.separators[-1]])

    def join_one(self, index: int, translation: str, alignment: Floats | None = None) -> str:
        """One translation with its elements, preceded by the text and markup before it."""
        text = self.escape(translation)
        if elements := self.elements.get(index):
            text = insert_elements(
                self.sentences[index], translation, elements, alignment, self.escape
            )
        return self.separators[index] + text + self.space_after(index, translation)

    def add_sentence(self, sentence: str, elements: Sequence[Element]) -> None:
        if elements:
            self.elements[len(self.sentences)] = list(elements)
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
_TRANSLATE_NO = re.compile(r"""(?<![\w-])translate\s*=\s*["']?no\b""", re.IGNORECASE)


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


def split_html(source: str, language: str = "") -> Document:
    """The sentences of an HTML document or fragment, with their inline elements.

    Tags, comments and attributes are kept unchanged. In translated text, entities are decoded, and ``& < >`` and the
    no-break space are encoded again.
    """
    document = Document(escape=_escape_html)
    run: list[HtmlToken] = []  # consecutive text and inline tags
    # The name of the open element that is not translated, and how deep it is nested in itself:
    skipped, depth = "", 0
    for token in tokenize_html(source):
        text, tag, is_text = token
        name = tag["name"].lower() if tag else ""
        self_closing = tag is not None and tag["attributes"].endswith("/")
        untranslated = tag is not None and _is_untranslated(name, tag["attributes"])
        inline = name in INLINE_ELEMENTS and not self_closing and not untranslated
        if not depth and (inline or (is_text and _can_unescape(text))):
            run.append(token)
            continue
        _add_run(document, run, language)
        run = []
        document.add_markup(text)
        if tag is None or self_closing:
            continue
        if depth:
            depth += (-1 if tag["close"] else 1) * (name == skipped)
        elif not tag["close"] and name not in VOID_ELEMENTS and untranslated:
            skipped, depth = name, 1
    _add_run(document, run, language)
    return document


def _is_untranslated(name: str, attributes: str) -> bool:
    return name in UNTRANSLATED_ELEMENTS or _TRANSLATE_NO.search(attributes) is not None


def _can_unescape(text: str) -> bool:
    try:
        html.unescape(text)
    except ValueError:  # a numeric entity of thousands of digits
        return False
    return True


def _escape_html(text: str) -> str:
    return html.escape(text, quote=False).replace("\xa0", "&nbsp;")


class InlineTag(NamedTuple):
    """An inline tag and its offset in the text of its run."""

    text: str
    name: str
    closes: bool
    offset: int


def _add_run(document: Document, run: Sequence[HtmlToken], language: str) -> None:
    """Add a run of text and inline tags: its sentences with their elements, and what is between them."""
    tags: list[InlineTag] = []
    texts: list[str] = []
    length = 0
    for text, tag, _ in run:
        if tag:
            tags.append(InlineTag(text, tag["name"].lower(), bool(tag["close"]), length))
        else:
            texts.append(html.unescape(text))
            length += len(texts[-1])
    plain = "".join(texts)
    if not any(map(str.isalnum, plain)):
        document.add_markup("".join(token.text for token in run))
        return
    sentences = _tagged_sentences(plain, tags, list(sentence_spans(plain, language)))
    in_sentences = {index for sentence in sentences for index in sentence.tags}
    outside = deque(tag for index, tag in enumerate(tags) if index not in in_sentences)
    done = 0

    def add_markup_until(end: int) -> None:
        nonlocal done
        while outside and outside[0].offset <= end:
            tag = outside.popleft()
            document.add_markup(document.escape(plain[done : tag.offset]) + tag.text)
            done = tag.offset
        document.add_markup(document.escape(plain[done:end]))

    for (start, end), elements, _ in sentences:
        add_markup_until(start)
        document.add_sentence(plain[start:end], elements)
        done = end
    add_markup_until(len(plain))


class TaggedSentence(NamedTuple):
    """A sentence of a run, the elements inside it, and the indices of their tags."""

    span: Span
    elements: list[Element]
    tags: list[int]


def _tagged_sentences(
    plain: str, tags: Sequence[InlineTag], sentences: Sequence[Span]
) -> list[TaggedSentence]:
    """The sentences with their elements. A sentence is split at a tag that has no partner inside it."""
    pairs = _tag_pairs(tags, sentences)
    paired = {index for group in pairs.values() for pair in group for index in pair}
    unpaired = [tag.offset for index, tag in enumerate(tags) if index not in paired]
    found = []
    for index, (start, end) in enumerate(sentences):
        cuts = unpaired[bisect_right(unpaired, start) : bisect_left(unpaired, end)]
        remaining = pairs.get(index, [])
        for border in pairwise([start, *dict.fromkeys(cuts), end]):
            for span in split_long_sentence(plain, *border):
                elements, indices = _element_tree(span, tags, remaining)
                found.append(TaggedSentence(span, elements, indices))
                remaining = [pair for pair in remaining if pair[0] not in indices]
    return found


TagPair = tuple[int, int]
"""The indices of the opening and closing tag of an element."""


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
        if not tag.closes:
            open_tags.append(index)
        elif open_tags and tags[open_tags[-1]].name == tag.name:
            first = open_tags.pop()
            sentence = sentence_of(tags[first])
            if sentence is not None and sentence == sentence_of(tag):
                pairs.setdefault(sentence, []).append((first, index))
        else:
            open_tags.clear()
    return {index: sorted(some) for index, some in pairs.items() if len(some) <= MAX_ELEMENTS}


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
        start, end = tags[first].offset, tags[last].offset
        touches = start < span.end and end > span.start
        covers = start <= span.start and end >= span.end
        if not ancestors and (covers or not touches):
            continue
        start, end = (
            min(max(offset, span.start), span.end) - span.start for offset in (start, end)
        )
        element = Element(tags[first].text, tags[last].text, start, end)
        (ancestors[-1][1].children if ancestors else roots).append(element)
        ancestors.append((last, element))
        indices += [first, last]
    return roots, indices


# ---------------------------------------------------------------------------------------------
# Inserting elements into a translation


def insert_elements(
    sentence: str,
    translation: str,
    elements: Sequence[Element],
    alignment: Floats | None,
    escape: Callable[[str], str],
) -> str:
    """The translation with the elements of the sentence, as HTML.

    alignment: [unit of the translation, unit of the sentence], how much the one comes from the other; None aligns by
    relative position. Units are words, or characters in scripts without spaces (``regard.data.segmentation``).
    """
    if translation != sentence:
        weights = diagonal_alignment(sentence, translation) if alignment is None else alignment
        elements = _ElementProjector(
            word_and_symbol_spans(sentence), word_and_symbol_spans(translation), weights
        ).project(elements)
    return _write(translation, elements, Span(0, len(translation)), escape)


def diagonal_alignment(sentence: str, translation: str) -> Floats:
    """An alignment by relative position, for models without attention."""
    rows, columns = (
        np.array([(span.start + span.end) / 2 / len(text) for span in word_and_symbol_spans(text)])
        for text in (translation, sentence)
    )
    return np.asarray(1 - abs(rows[:, None] - columns[None]), dtype=np.float32)


class _ElementProjector:
    """Moves elements from the units of a sentence to the units of its translation."""

    def __init__(self, source: list[Span], target: list[Span], alignment: Floats) -> None:
        assert alignment.shape == (len(target), len(source))
        self.source, self.target, self.alignment = source, target, alignment

    def project(self, elements: Sequence[Element]) -> list[Element]:
        """The elements with their spans in the translation, in characters."""
        whole = Span(0, len(self.target))
        return self._place(elements, list(range(len(self.source))), whole)

    def _place(
        self, elements: Sequence[Element], parent: list[int], available: Span
    ) -> list[Element]:
        """Give each element its best span of the available units, the clearest alignment first; then its children.

        parent: the source units of the enclosing element.
        """
        inside = [self._source_units(element) for element in elements]
        gains = [self._gains(units, parent) for units in inside]
        gaps, placed = [available], []
        for index in sorted(range(len(elements)), key=lambda i: -gains[i].max(initial=-1.0)):
            element = elements[index]
            span, gap = _best_span(gains[index], gaps)
            if element.start == element.end:
                span = Span(span.start, span.start)
            gaps.remove(gap)
            gaps += [Span(gap.start, span.start), Span(span.end, gap.end)]
            children = self._place(element.children, inside[index], span)
            placed.append((span, index, self._in_characters(element, span, children)))
        return [element for *_, element in sorted(placed, key=lambda one: one[:2])]

    def _source_units(self, element: Element) -> list[int]:
        """The units inside an element; for an empty element, the unit after it."""
        every = range(len(self.source))
        if element.start == element.end:
            return [i for i in every if self.source[i].end > element.start][:1]
        start, end = element.start, element.end
        return [i for i in every if self.source[i].start < end and self.source[i].end > start]

    def _gains(self, inside: list[int], parent: list[int]) -> Floats:
        """For each unit of the translation: its weight inside the element minus its weight outside of it."""
        outside = sorted(set(parent) - set(inside))
        weight = self.alignment[:, inside].max(1, initial=0.0)
        other = self.alignment[:, outside].max(1, initial=0.0)
        return np.asarray(weight - other, dtype=np.float32)

    def _in_characters(self, element: Element, span: Span, children: list[Element]) -> Element:
        target, (first, last) = self.target, span
        start = target[first].start if first < len(target) else target[-1].end if target else 0
        end = target[last - 1].end if last > first else start
        return Element(element.opening, element.closing, start, end, children)


def _best_span(gains: Floats, gaps: Sequence[Span]) -> tuple[Span, Span]:
    """The span with the largest sum of gains and the gap it lies in; at least one unit if any gap has one."""
    found = [(-np.inf, Span(gap.start, gap.start), gap) for gap in gaps]
    for gap in gaps:
        start, total = gap.start, 0.0
        for unit in range(gap.start, gap.end):
            if total <= 0:
                start, total = unit, 0.0
            total += float(gains[unit])
            found.append((total, Span(start, unit + 1), gap))
    _, span, gap = max(found, key=lambda one: one[0])
    return span, gap


def _write(text: str, elements: Sequence[Element], span: Span, escape: Callable[[str], str]) -> str:
    """The text of a span with its elements; parts of an element outside the span are cut off."""
    parts, done = [], span.start
    for element in elements:
        start = min(max(element.start, done), span.end)
        end = min(max(element.end, start), span.end)
        inner = _write(text, element.children, Span(start, end), escape)
        parts += [escape(text[done:start]), element.opening, inner, element.closing]
        done = end
    return "".join([*parts, escape(text[done : span.end])])
