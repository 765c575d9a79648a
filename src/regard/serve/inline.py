"""Tags inside a sentence travel with their words.

A model translates ``The big dog``; the tags of ``The <b>big</b> dog`` are put back where the word they stood around has
gone, as far as its attention tells. Whatever the attention, each tag comes back once and elements stay nested as they
were: an element gets one stretch of its parent's stretch, and those of its brothers do not overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from regard.text.words import Span, units

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
