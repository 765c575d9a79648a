"""Tags inside a sentence travel with their words.

A model translates ``The big dog``; the tags of ``The <b>big</b> dog`` are put back where the word they stood around has
gone, as far as its attention tells. Whatever the attention, each tag comes back once and elements stay nested as they
were: an element gets one stretch of its parent's stretch, and those of its brothers do not overlap.
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

from regard.data.sentence_splitter import Sentences, cut, sentence_spans, split_text
from regard.data.words import Span, units

Floats = npt.NDArray[np.float32]


@dataclass
class Element:
    """An element by its two tags, what it holds of a text, in characters, and the elements inside it."""

    opening: str
    closing: str
    start: int
    end: int
    children: list[Element] = field(default_factory=list)


def diagonal(sentence: str, translation: str) -> Floats:
    """What is known without attention: what stands at the same place of both."""
    rows, columns = (
        np.array([(span.start + span.end) / 2 / len(text) for span in units(text)])
        for text in (translation, sentence)
    )
    return np.asarray(1 - abs(rows[:, None] - columns[None]), dtype=np.float32)


def mark(
    sentence: str,
    translation: str,
    elements: Sequence[Element],
    alignment: Floats | None,
    write: Callable[[str], str],
) -> str:
    """The translation with the elements of the sentence, as HTML.

    alignment is [unit of the translation, unit of the sentence]: how much the one comes from the other.
    """
    if translation != sentence:
        aligned = diagonal(sentence, translation) if alignment is None else alignment
        elements = _Mover(units(sentence), units(translation), aligned).move(elements)
    return _written(translation, elements, Span(0, len(translation)), write)


class _Mover:
    def __init__(self, before: list[Span], after: list[Span], alignment: Floats) -> None:
        assert alignment.shape == (len(after), len(before))
        self.before, self.after, self.alignment = before, after, alignment

    def move(self, elements: Sequence[Element]) -> list[Element]:
        """The elements in the translation, in characters."""
        whole = Span(0, len(self.after))
        return self._place(elements, list(range(len(self.before))), whole)

    def _place(self, elements: Sequence[Element], own: list[int], room: Span) -> list[Element]:
        """Each gets its stretch of the room, those with most to gain first; then those inside it."""
        sources = [self._units_of(element) for element in elements]
        gains = [self._gains(inside, own) for inside in sources]
        free, placed = [room], []
        for index in sorted(range(len(elements)), key=lambda i: -gains[i].max(initial=-1.0)):
            element = elements[index]
            stretch, gap = _best(gains[index], free)
            if element.start == element.end:
                stretch = Span(stretch.start, stretch.start)
            free.remove(gap)
            free += [Span(gap.start, stretch.start), Span(stretch.end, gap.end)]
            children = self._place(element.children, sources[index], stretch)
            placed.append((stretch, index, self._in_characters(element, stretch, children)))
        return [element for *_, element in sorted(placed, key=lambda one: one[:2])]

    def _units_of(self, element: Element) -> list[int]:
        """The units it holds; of one that holds nothing, the unit before which it stands."""
        inside = range(len(self.before))
        if element.start == element.end:
            return [i for i in inside if self.before[i].end > element.start][:1]
        start, end = element.start, element.end
        return [i for i in inside if self.before[i].start < end and self.before[i].end > start]

    def _gains(self, inside: list[int], own: list[int]) -> Floats:
        """For each unit of the translation: how much more it looks into the element than beside it."""
        beside = sorted(set(own) - set(inside))
        most = self.alignment[:, inside].max(1, initial=0.0)
        return np.asarray(most - self.alignment[:, beside].max(1, initial=0.0), dtype=np.float32)

    def _in_characters(self, element: Element, stretch: Span, children: list[Element]) -> Element:
        after, (first, last) = self.after, stretch
        start = after[first].start if first < len(after) else after[-1].end if after else 0
        end = after[last - 1].end if last > first else start
        return Element(element.opening, element.closing, start, end, children)


def _best(gains: Floats, free: Sequence[Span]) -> tuple[Span, Span]:
    """The free stretch with the greatest sum of gains, and the gap it is in; a unit at least, where one is free."""
    found = [(-np.inf, Span(gap.start, gap.start), gap) for gap in free]
    for gap in free:
        start, total = gap.start, 0.0
        for unit in range(gap.start, gap.end):
            if total <= 0:
                start, total = unit, 0.0
            total += float(gains[unit])
            found.append((total, Span(start, unit + 1), gap))
    _, stretch, gap = max(found, key=lambda one: one[0])
    return stretch, gap


def _written(
    text: str, elements: Sequence[Element], room: Span, write: Callable[[str], str]
) -> str:
    """The text of the room with its elements. A place outside the room is moved to its edge."""
    parts, done = [], room.start
    for element in elements:
        start = min(max(element.start, done), room.end)
        end = min(max(element.end, start), room.end)
        inner = _written(text, element.children, Span(start, end), write)
        parts += [write(text[done:start]), element.opening, inner, element.closing]
        done = end
    return "".join([*parts, write(text[done : room.end])])


# ---------------------------------------------------------------------------------------------
# A text or an HTML document: its sentences, what stands inside them, and what stands between them.
#
# Where sentences end is for ``regard.data.sentence_splitter`` to say. Here are the tags: those inside a sentence travel with its
# words, all others stay where and as they are.
#
# Everything here takes time in proportion to the text: it runs on texts that strangers send. This is also why tags
# are found by a pattern and not by ``html.parser``, which needs time in proportion to the square of some texts.


@dataclass
class Document(Sentences):
    """Sentences with the elements inside them, and what stands between."""

    elements: dict[int, list[Element]] = field(default_factory=dict)
    """by sentence, of those that have some"""
    write: Callable[[str], str] = str
    """how a sentence is written in this kind of document"""

    def join(
        self, translations: Sequence[str], alignments: Sequence[Floats | None] | None = None
    ) -> str:
        """The document with each sentence exchanged for its translation."""
        known = alignments or [None] * len(translations)
        assert len(translations) == len(known) == len(self.sentences)
        parts = map(self.part, range(len(translations)), translations, known)
        return "".join([*parts, self.between[-1]])

    def part(self, index: int, translation: str, alignment: Floats | None = None) -> str:
        """One translation with its elements, and what stands before it. alignment: see inline.mark"""
        marked = self.write(translation)
        if elements := self.elements.get(index):
            marked = mark(self.sentences[index], translation, elements, alignment, self.write)
        return self.between[index] + marked + self.blank(index, translation)

    def add(self, sentence: str, elements: Sequence[Element]) -> None:
        if elements:
            self.elements[len(self.sentences)] = list(elements)
        self.sentences.append(sentence)
        self.between.append("")

    def keep(self, text: str) -> None:
        self.between[-1] += text


def split_plain(text: str, language: str = "") -> Document:
    """The sentences of a text without elements."""
    plain = split_text(text, language)
    return Document(plain.sentences, plain.between)


# ---------------------------------------------------------------------------------------------
# HTML

_MARKUP = re.compile(
    r"""
    <!-- (?: -?> | .*? --> | .* )                       # a comment; one left open goes on to the end
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
RAW = {"script", "style", "textarea", "xmp", "iframe", "noembed", "noframes", "plaintext"}
"""Inside these, ``<`` begins no tag; their text is no prose."""
UNTOUCHED = {"code", "kbd", "samp", "var"}
"""What these hold is not to be translated; nor is what an element with ``translate="no"`` holds."""
_VOID = {
    "area",
    "base",
    "br",
    "col",
    "embed",
    "hr",
    "img",
    "input",
    "link",
    "meta",
    "source",
    "wbr",
}


_INLINE = """
a abbr acronym b bdi bdo big cite data del dfn em font i ins mark q s small span strike strong sub sup time tt u
"""
INLINE = frozenset(_INLINE.split())
"""These stand inside a sentence and travel with their words; all others end it."""
MOST_ELEMENTS = 64
"""in one sentence; where there are more, each of their tags ends it"""


def split_html(source: str, language: str = "") -> Document:
    """The sentences of an HTML document or of a piece of one.

    Inline elements that begin and end in one sentence belong to it, and travel with its words (inline.py). All other
    tags end a sentence and stay where they are. All tags, comments and attributes stay letter by letter. In text that
    is translated, entities are decoded, and ``& < >`` and the unbreakable space are written as entities again.
    """
    document = Document(write=_write_html)
    run: list[Stretch] = []  # text and inline tags, so far
    # The element entered that is not translated, and how often it holds itself:
    inside, depth = "", 0
    for stretch in parts_of(source):
        text, tag, is_prose = stretch
        name = tag["name"].lower() if tag else ""
        closed = tag is not None and tag["attributes"].endswith("/")
        untouched = tag is not None and _is_untouched(name, tag["attributes"])
        inline = name in INLINE and not closed and not untouched
        if not depth and (inline or (is_prose and _is_decodable(text))):
            run.append(stretch)
            continue
        _add_run(document, run, language)
        run = []
        document.keep(text)
        if tag is None or closed:
            continue
        if depth:
            depth += (-1 if tag["close"] else 1) * (name == inside)
        elif not tag["close"] and name not in _VOID and untouched:
            inside, depth = name, 1
    _add_run(document, run, language)
    return document


class Tag(NamedTuple):
    """An inline tag, and where it stands in the text of its run."""

    text: str
    name: str
    closes: bool
    place: int


def _add_run(document: Document, run: Sequence[Stretch], language: str) -> None:
    """Text with inline tags: its sentences with the elements inside them, and what stands between."""
    tags: list[Tag] = []
    texts: list[str] = []
    length = 0
    for text, tag, _ in run:
        if tag:
            tags.append(Tag(text, tag["name"].lower(), bool(tag["close"]), length))
        else:
            texts.append(html.unescape(text))
            length += len(texts[-1])
    plain = "".join(texts)
    if not any(map(str.isalnum, plain)):
        document.keep("".join(stretch.text for stretch in run))
        return
    sentences = list(sentence_spans(plain, language))
    found = _elements(plain, tags, sentences)
    travelling = {index for *_, indices in found for index in indices}
    staying = deque(tag for index, tag in enumerate(tags) if index not in travelling)
    done = 0

    def keep_until(end: int) -> None:
        nonlocal done
        while staying and staying[0].place <= end:
            tag = staying.popleft()
            document.keep(document.write(plain[done : tag.place]) + tag.text)
            done = tag.place
        document.keep(document.write(plain[done:end]))

    for (start, end), elements, _ in found:
        keep_until(start)
        document.add(plain[start:end], elements)
        done = end
    keep_until(len(plain))


Found = tuple[Span, list[Element], list[int]]
"""A sentence, the elements inside it, and which tags are theirs."""


def _elements(plain: str, tags: Sequence[Tag], sentences: Sequence[Span]) -> list[Found]:
    """The sentences, cut where a tag stands inside that has no partner in the same one."""
    pairs = _pairs(tags, sentences)
    paired = {index for group in pairs.values() for pair in group for index in pair}
    loose = [tag.place for index, tag in enumerate(tags) if index not in paired]
    found = []
    for index, (start, end) in enumerate(sentences):
        cuts = loose[bisect_right(loose, start) : bisect_left(loose, end)]
        waiting = pairs.get(index, [])
        for border in pairwise([start, *dict.fromkeys(cuts), end]):
            for piece in cut(plain, *border):
                elements, indices = _inside(piece, tags, waiting)
                found.append((piece, elements, indices))
                waiting = [pair for pair in waiting if pair[0] not in indices]
    return found


Pair = tuple[int, int]
"""The indices of two tags that make an element."""


def _pairs(tags: Sequence[Tag], sentences: Sequence[Span]) -> dict[int, list[Pair]]:
    """By sentence: its elements, in the order in which they begin.

    Where a closing tag is not that of the element begun last, all that are open are given up. So no element holds
    a tag without a partner.
    """
    starts = [sentence.start for sentence in sentences]

    def home(tag: Tag) -> int | None:
        last = bisect_right(starts, tag.place) - 1
        for index in (last - 1, last) if tag.closes else (last, last - 1):
            if index >= 0 and sentences[index].start <= tag.place <= sentences[index].end:
                return index
        return None

    pairs: dict[int, list[Pair]] = {}
    begun: list[int] = []
    for index, tag in enumerate(tags):
        if not tag.closes:
            begun.append(index)
        elif begun and tags[begun[-1]].name == tag.name:
            first = begun.pop()
            sentence = home(tags[first])
            if sentence is not None and sentence == home(tag):
                pairs.setdefault(sentence, []).append((first, index))
        else:
            begun.clear()
    return {index: sorted(found) for index, found in pairs.items() if len(found) <= MOST_ELEMENTS}


def _inside(
    piece: Span, tags: Sequence[Tag], pairs: Sequence[Pair]
) -> tuple[list[Element], list[int]]:
    """The elements of a sentence as a tree, and the indices of their tags. One around all of it stays outside."""
    roots: list[Element] = []
    indices: list[int] = []
    # Those that hold the present one, by the index of their end:
    around: list[tuple[int, Element]] = []
    for first, last in pairs:
        while around and around[-1][0] < first:
            around.pop()
        start, end = tags[first].place, tags[last].place
        touches = start < piece.end and end > piece.start
        covers = start <= piece.start and end >= piece.end
        if not around and (covers or not touches):
            continue
        start, end = (
            min(max(place, piece.start), piece.end) - piece.start for place in (start, end)
        )
        element = Element(tags[first].text, tags[last].text, start, end)
        (around[-1][1].children if around else roots).append(element)
        around.append((last, element))
        indices += [first, last]
    return roots, indices


class Stretch(NamedTuple):
    """A part of a document: a tag, or text that may be translated, or neither."""

    text: str
    tag: re.Match[str] | None = None
    is_prose: bool = False


def parts_of(source: str) -> Iterator[Stretch]:
    done = 0
    while found := _MARKUP.search(source, done):
        yield Stretch(source[done : found.start()], is_prose=True)
        yield Stretch(found[0], tag=found if found["name"] else None)
        done = found.end()
        name = (found["name"] or "").lower()
        if name in RAW and not found["close"]:
            close = re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE).search(source, done)
            end = close.start() if close else len(source)
            yield Stretch(source[done:end])
            done = end
    yield Stretch(source[done:], is_prose=True)


def _is_untouched(name: str, attributes: str) -> bool:
    return name in UNTOUCHED or _TRANSLATE_NO.search(attributes) is not None


def _is_decodable(text: str) -> bool:
    try:
        html.unescape(text)
    except ValueError:  # a number of thousands of digits
        return False
    return True


def _write_html(text: str) -> str:
    return html.escape(text, quote=False).replace("\xa0", "&nbsp;")
