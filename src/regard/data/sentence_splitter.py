"""Sentence splitter: splits plain text into sentences, and puts it together again from their translations.

A model that was trained on sentences translates sentences. Everything between them (spaces, line breaks, rows of
dashes) stays as it is: a text whose sentences are not changed comes back unchanged.

All functions take linear time, because servers run them on untrusted input.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

from regard.data.words import Span, is_unspaced_script

MAX_SENTENCE_LENGTH = 600
"""Characters. A longer sentence is split between words, because models have not been trained on such sentences."""

_LINE = re.compile(r"[^\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")
# Where a sentence may end. Matched possessively: a pattern with a lookahead would try each of ten thousand dots.
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
"""Abbreviations that occur before a name or a number. Others need no entry: they are followed by lower case, with which
no sentence begins."""
_ORDINALS = {"cs", "da", "de", "et", "fi", "hr", "hu", "lv", "nb", "nn", "no", "pl", "sk", "sl"}
"""languages in which ``3.`` means “third”"""


@dataclass
class Sentences:
    """The sentences of a text, and the separators before, between and after them: always one more than sentences."""

    sentences: list[str] = field(default_factory=list)
    separators: list[str] = field(default_factory=lambda: [""])

    def join(self, translations: Sequence[str]) -> str:
        """The text with each sentence replaced by its translation."""
        assert len(translations) == len(self.sentences)
        parts = map(self.join_one, range(len(translations)), translations)
        return "".join([*parts, self.separators[-1]])

    def join_one(self, index: int, translation: str) -> str:
        """The separator before sentence ``index``, its translation, and a space if one is needed."""
        return self.separators[index] + translation + self.space_after(index, translation)

    def space_after(self, index: int, translation: str) -> str:
        """A space if the translation needs one that the source does not have: English after Chinese, for example."""
        if index == len(self.sentences) - 1 or self.separators[index + 1]:
            return ""
        last_character = next(filter(str.isalnum, reversed(translation)), None)
        unchanged = translation == self.sentences[index]
        return (
            "" if unchanged or last_character is None or is_unspaced_script(last_character) else " "
        )


def split_text(text: str, language: str = "") -> Sentences:
    """The sentences of a plain text. ``language`` is a code such as ``en``; it decides which dots end a sentence."""
    spans = list(sentence_spans(text, language))
    bounds = [0, *chain(*spans), len(text)]
    segments = [text[start:end] for start, end in pairwise(bounds)]
    return Sentences(segments[1::2], segments[::2])


def count_sentences(text: str, language: str = "") -> int:
    """The number of sentences; a sentence that ``split_text`` would split because of its length counts once."""
    return sum(_has_content(text[start:end]) for start, end in _segments(text, language))


def sentence_spans(text: str, language: str) -> Iterator[Span]:
    """The spans of the sentences, without surrounding whitespace."""
    for start, end in _segments(text, language):
        yield from split_long_sentence(text, start, end)


def split_long_sentence(text: str, start: int, end: int) -> Iterator[Span]:
    """The sentence in text[start:end] without surrounding whitespace.

    Several spans if it is longer than MAX_SENTENCE_LENGTH, none if it has no letters or digits.
    """
    while start < end:
        while start < end and text[start].isspace():
            start += 1
        stop = end
        if end - start > MAX_SENTENCE_LENGTH:
            matches = _BREAK.finditer(text, start + 1, start + MAX_SENTENCE_LENGTH)
            breaks = [match.start() for match in matches]
            stop = breaks[-1] if breaks else start + MAX_SENTENCE_LENGTH
        sentence = text[start:stop].rstrip()
        if _has_content(sentence):
            yield Span(start, start + len(sentence))
        start = stop


def _segments(text: str, language: str) -> Iterator[tuple[int, int]]:
    """The spans from the end of one sentence to the end of the next, line by line."""
    for line in _LINE.finditer(text):
        ends = _sentence_ends(text, line.start(), line.end(), language)
        yield from pairwise([line.start(), *ends, line.end()])


def _sentence_ends(text: str, start: int, stop: int, language: str) -> Iterator[int]:
    """Where the sentences of a line end, without the last one."""
    for end in _END.finditer(text, start, stop):
        if end["wide"]:
            yield end.end()
        elif text[end.end() : end.end() + 1].isspace():
            following = text[end.end() : end.end() + 8].lstrip()[:1]
            if not following.islower() and not _is_abbreviated(text, end.start() + 1, language):
                yield end.end()


def _is_abbreviated(text: str, end: int, language: str) -> bool:
    """Whether the dot before ``end`` belongs to an abbreviation or ordinal: ``Dr.``, ``J.``, ``U.S.``, ``3.``"""
    match = _WORD_BEFORE.search(text[max(0, end - 16) : end])
    if match is None:
        return False
    word, language = match[1].casefold(), language.split("-")[0]
    if word.isdigit():
        return len(word) <= 2 and language in _ORDINALS
    abbreviations = _ABBREVIATIONS[""] + " " + _ABBREVIATIONS.get(language, "")
    is_initial = len(word) == 1 and (match[1].isupper() or match[1].islower())
    return is_initial or word in abbreviations.split()


def _has_content(text: str) -> bool:
    return any(map(str.isalnum, text))
