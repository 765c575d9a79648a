"""The sentences of a plain text, and what stands between them.

A model learned from sentences translates sentences. Whatever else a text has - spaces, line breaks, rows of dashes -
stays where and as it is, so that a text whose sentences are left alone is the same text again, whatever it was.

Everything here takes time in proportion to the text: it runs on texts that strangers send.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

from regard.data.words import Span, unspaced

LONGEST = 600
"""Characters of a sentence. A longer one is cut between two words: models have seen no such sentences."""

_LINE = re.compile(r"[^\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")
# Where a sentence may end. Always matched whole: a pattern that looks at what follows would try
# each of ten thousand dots.
_END = re.compile(
    r"""(?P<wide> [。！？｡]++ ["”’」』）】》]*+ ) | [.!?…؟।]++ ["'”’“‘»«›‹)\]}」』）】]*+""",
    re.VERBOSE,
)
_WORD_BEFORE = re.compile(r"(\w+)\.\Z")
_BREAK = re.compile(r"\s+|(?<=[，、；：])")

_ABBREVIATIONS = {
    "": "dr prof st vs vol fig",
    "en": "mr mrs ms messrs jr sr gen col sgt capt lt rev hon sen rep gov pres inc ltd corp mt "
    "jan feb mar apr jun jul aug sep sept oct nov dec",
    "de": "hr fr frl nr bzw ca evtl ggf inkl str tel abb bd vgl sog geb gest dipl ing mag",
    "fr": "mm mme mmes mlle mgr me av env",
    "es": "sr sra srta dra ud uds av pág núm",
    "it": "sig dott ing avv pag",
    "nl": "dhr mevr mr drs ir nr blz",
    "pt": "sr sra dra av pág",
}
"""Words that end in a dot and stand before a name or a number. Those that stand elsewhere need no
place here: a sentence does not begin with a small letter."""
_ORDINALS = {"cs", "da", "de", "et", "fi", "hr", "hu", "lv", "nb", "nn", "no", "pl", "sk", "sl"}
"""Languages in which ``3.`` is “third”."""


@dataclass
class Sentences:
    """Sentences, and what stands before, between and after them: always one more than sentences."""

    sentences: list[str] = field(default_factory=list)
    between: list[str] = field(default_factory=lambda: [""])

    def join(self, translations: Sequence[str]) -> str:
        """The text with each sentence exchanged for its translation."""
        assert len(translations) == len(self.sentences)
        parts = map(self.part, range(len(translations)), translations)
        return "".join([*parts, self.between[-1]])

    def part(self, index: int, translation: str) -> str:
        """One translation, and what stands before it."""
        return self.between[index] + translation + self.blank(index, translation)

    def blank(self, index: int, translation: str) -> str:
        """What must follow a translation: Chinese sets no blank between sentences, English does."""
        if index == len(self.sentences) - 1 or self.between[index + 1]:
            return ""
        last = next(filter(str.isalnum, reversed(translation)), None)
        alone = translation == self.sentences[index]
        return "" if alone or last is None or unspaced(last) else " "


def split_text(text: str, language: str = "") -> Sentences:
    """The sentences of a plain text. language is a code such as ``en``; it decides on dots only."""
    spans = list(sentence_spans(text, language))
    borders = [0, *chain(*spans), len(text)]
    parts = [text[start:end] for start, end in pairwise(borders)]
    return Sentences(parts[1::2], parts[::2])


def count_sentences(text: str, language: str = "") -> int:
    """How many sentences a text has; a long one is one."""
    return sum(_says_something(text[start:end]) for start, end in _stretches(text, language))


def sentence_spans(text: str, language: str) -> Iterator[Span]:
    """Where each sentence begins and ends, white space left out."""
    for start, end in _stretches(text, language):
        yield from cut(text, start, end)


def _stretches(text: str, language: str) -> Iterator[tuple[int, int]]:
    """From where one sentence ends to where the next one does, line by line."""
    for line in _LINE.finditer(text):
        ends = _ends(text, line.start(), line.end(), language)
        yield from pairwise([line.start(), *ends, line.end()])


def _ends(text: str, start: int, stop: int, language: str) -> Iterator[int]:
    """Where the sentences of a line end, the last one apart."""
    for end in _END.finditer(text, start, stop):
        if end["wide"]:
            yield end.end()
        elif text[end.end() : end.end() + 1].isspace():
            following = text[end.end() : end.end() + 8].lstrip()[:1]
            if not following.islower() and not _is_abbreviated(text, end.start() + 1, language):
                yield end.end()


def _is_abbreviated(text: str, end: int, language: str) -> bool:
    """Whether the word that ends here does so in a dot of its own: ``Dr.``, ``J.``, ``U.S.``, ``3.``"""
    word = _WORD_BEFORE.search(text[max(0, end - 16) : end])
    if word is None:
        return False
    said, language = word[1].casefold(), language.split("-")[0]
    if said.isdigit():
        return len(said) <= 2 and language in _ORDINALS
    known = _ABBREVIATIONS[""] + " " + _ABBREVIATIONS.get(language, "")
    is_initial = len(said) == 1 and (word[1].isupper() or word[1].islower())
    return is_initial or said in known.split()


def cut(text: str, start: int, end: int) -> Iterator[Span]:
    """The sentence without the space around it, in pieces if it is too long, none if it says nothing."""
    while start < end:
        while start < end and text[start].isspace():
            start += 1
        stop = end
        if end - start > LONGEST:
            breaks = [found.start() for found in _BREAK.finditer(text, start + 1, start + LONGEST)]
            stop = breaks[-1] if breaks else start + LONGEST
        piece = text[start:stop].rstrip()
        if _says_something(piece):
            yield Span(start, start + len(piece))
        start = stop


def _says_something(text: str) -> bool:
    return any(map(str.isalnum, text))
