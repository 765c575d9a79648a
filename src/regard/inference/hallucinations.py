"""Hallucination-like output: repetition, a copied source, the wrong script or language, far too short or too long.

Such output is easy to recognize without a reference. Lengths, scripts and copies are compared with the references of
the validation set (``OutputStatistics``, in the card), so a model that summarizes or copies its sources is not flagged
for it.
"""

from __future__ import annotations

import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from regard.data.recasing import restore_case
from regard.data.words import word_and_symbol_spans
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.data.pairs import Pair

MAX_RUNS = {1: 4, 2: 3, 3: 3, 4: 3, 5: 3, 6: 3}
"""By n: an n-gram that occurs this many times in a row is a repetition."""
SPREAD_NGRAM = 4
SPREAD_TIMES = 3
SPREAD_SHARE = 0.5
"""An n-gram of this size that occurs at least this many times and makes up this share of the translation is a
repetition as well, unless the source has one."""
MIN_COPIED_WORDS = 4
"""shorter translations may be names, which are not translated"""
COPIED_SHARE = 0.8
"""a translation is a copy if at least this share of its bigrams also occur in its source"""
USUAL_COPIES = 0.02
"""Copies are not flagged for a model if this share of the references are copies."""
MIN_SCRIPT_SHARE = 0.01
"""share of the references that must be in a script, so that it is expected"""
MIN_EXPECTED_LETTERS = 0.2
"""share of the letters of a translation that must be in an expected script"""
MIN_LETTERS = 5
"""the script of a text with fewer letters is not determined"""
MAX_UNKNOWN = 0.5
"""share of the tokens of a source that may be unknown"""
MIN_LANGUAGE_LETTERS = 20
MIN_LANGUAGE_PROBABILITY = 0.95
"""for another language than the target language"""
EXTRA_TOKENS = 5
"""lengths may differ by this number of tokens, whatever their ratio"""


class Problem(NamedTuple):
    kind: str
    """repetition, copied source, wrong script, wrong language, too long, too short, empty, cut off, unknown source"""
    message: str


KINDS_AFTER_COUNTS = {
    "repetition": "with repetition",
    "copied source": "copied from the source",
    "wrong script": "in the wrong script",
    "wrong language": "in the wrong language",
    "unknown source": "of sources with mostly unknown tokens",
}
"""How a kind of problem is written after the number of translations, as in “74 cut off”, if not as it is."""


@dataclass(frozen=True)
class OutputStatistics:
    """What the references of the validation set look like."""

    length_ratio: tuple[float, float] = (0.25, 4.0)
    """1st and 99th percentile of target length over source length, in tokens with EOS"""
    scripts: tuple[str, ...] = ()
    """scripts of the references, for example Latin; empty: not known"""
    copied: float = 0.0
    """share of the references that are copies of their sources"""

    @classmethod
    def of(cls, pairs: Sequence[Pair], lengths: Iterable[tuple[int, int]]) -> Self:
        """The statistics of pairs, and of the lengths of source and target of pairs, without EOS."""
        import numpy as np

        ratios = [(target + 1) / (source + 1) for source, target in lengths]
        low, high = np.percentile(ratios, [1, 99]).tolist()
        scripts = Counter(main_script(pair.target) for pair in pairs)
        del scripts[""]
        min_count = MIN_SCRIPT_SHARE * scripts.total()
        return cls(
            (low, high),
            tuple(sorted(script for script, count in scripts.items() if count >= min_count)),
            sum(is_copied(*pair) for pair in pairs) / max(1, len(pairs)),
        )

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], where: str) -> Self:
        """From a card. ``where`` names the file in an error message."""
        try:
            low, high = map(float, stored["length_ratio"])
            return cls((low, high), tuple(stored["scripts"]), float(stored["copied"]))
        except (KeyError, TypeError, ValueError):
            raise RegardError(f"{where}: damaged, its references section is incomplete") from None


class OutputChecker:
    """Finds hallucination-like translations.

    language: code of the target language, other: those of the languages it could be mistaken for, usually the source
    language; wrong languages are found only if both are known to py3langid, and that is installed.
    """

    def __init__(
        self, statistics: OutputStatistics, language: str | None = None, other: Sequence[str] = ()
    ) -> None:
        self.statistics = statistics
        self.language, *codes = (code.split("-")[0].lower() for code in [language or "", *other])
        self.other = tuple(sorted({*codes} - {self.language})) if language else ()

    def problems(
        self,
        source: str,
        translation: str,
        lengths: tuple[int, int],
        finished: bool = True,
        unknown: tuple[int, int] = (0, 0),
    ) -> list[Problem]:
        """What is wrong with a translation.

        lengths: of source and translation, in tokens without EOS.
        unknown: see ``Translator.count_unknown``.
        """
        problems = [
            _unknown(*unknown),
            self._length(*lengths, finished),
            _repetition(source, translation),
            self._copy(source, translation),
            self._script(source, translation),
        ]
        if not any(problems):  # a copy is in the wrong language anyway
            problems.append(self._language(translation))
        return [problem for problem in problems if problem]

    def _length(self, source: int, target: int, finished: bool) -> Problem | None:
        low, high = self.statistics.length_ratio
        lengths = f"{target:,} tokens for a source of {source:,}"
        if not finished:
            return Problem("cut off", f"cut off after {target:,} tokens")
        if source and not target:
            return Problem("empty", "empty")
        if target > 2 * high * (source + 1) + EXTRA_TOKENS:
            return Problem("too long", f"far too long: {lengths}")
        if target + EXTRA_TOKENS < low / 2 * (source + 1):
            return Problem("too short", f"far too short: {lengths}")
        return None

    def _copy(self, source: str, translation: str) -> Problem | None:
        if self.statistics.copied >= USUAL_COPIES or not is_copied(source, translation):
            return None
        return Problem("copied source", "a copy of the source")

    def _script(self, source: str, translation: str) -> Problem | None:
        expected, counts = self.statistics.scripts, script_counts(translation)
        letters = counts.total()
        fitting = sum(counts[script] for script in expected)
        if not expected or letters < MIN_LETTERS or fitting >= MIN_EXPECTED_LETTERS * letters:
            return None
        script = counts.most_common(1)[0][0]
        if script == main_script(source) and len(words(translation)) < MIN_COPIED_WORDS:
            return None  # a name
        return Problem("wrong script", f"in {script} script, not {' or '.join(expected)}")

    def _language(self, translation: str) -> Problem | None:
        if not self.other or sum(map(str.isalpha, translation)) < MIN_LANGUAGE_LETTERS:
            return None
        from regard.data.language_identification import identify_among

        identifier = identify_among(self.language, *self.other)
        if identifier is None:
            return None
        language, probability = identifier.classify(restore_case(translation))
        if language == self.language or probability < MIN_LANGUAGE_PROBABILITY:
            return None
        return Problem("wrong language", f"in {language}, not {self.language}")


def _unknown(unknown: int, source: int) -> Problem | None:
    if unknown <= MAX_UNKNOWN * source:
        return None
    return Problem(
        "unknown source",
        f"most of the source is not in the vocabulary ({unknown:,} of {source:,} tokens); write it as in the "
        "training data",
    )


def words(text: str) -> list[str]:
    """The words of a text, case-folded; every character of an unspaced script is one."""
    folded = text.casefold()
    spans = (folded[start:end] for start, end in word_and_symbol_spans(folded))
    return [word for word in spans if any(map(str.isalnum, word))]


def _repetition(source: str, translation: str) -> Problem | None:
    target_words = words(translation)
    if len({*target_words}) == len(target_words):
        return None
    source_words = words(source)
    for size, limit in MAX_RUNS.items():
        times, ngram = longest_run(target_words, size)
        if times >= limit and times > longest_run(source_words, size)[0] + 1:
            return Problem("repetition", f"repeats “{' '.join(ngram)}” {times} times in a row")
    times, ngram = most_frequent(target_words, SPREAD_NGRAM)
    repeated = times >= SPREAD_TIMES and times * SPREAD_NGRAM >= SPREAD_SHARE * len(target_words)
    if repeated and most_frequent(source_words, SPREAD_NGRAM)[0] < SPREAD_TIMES:
        return Problem("repetition", f"has “{' '.join(ngram)}” {times} times")
    return None


def longest_run(items: Sequence[str], size: int) -> tuple[int, Sequence[str]]:
    """How often an n-gram of this size, with a letter in it, occurs in a row at most, and the n-gram."""
    result: tuple[int, Sequence[str]] = (0, ())
    matching = 0
    for end in range(size, len(items)):
        matching = matching + 1 if items[end] == items[end - size] else 0
        ngram = items[end - size + 1 : end + 1]
        times = 1 + matching // size
        if times > max(1, result[0]) and any(map(_has_letter, ngram)):
            result = times, ngram
    return result


def most_frequent(items: Sequence[str], size: int) -> tuple[int, Sequence[str]]:
    """How often the most frequent n-gram of this size occurs, and the n-gram."""
    counts = Counter(zip(*(items[start:] for start in range(size)), strict=False))
    ((ngram, times),) = counts.most_common(1) or [((), 0)]
    return times, ngram


def is_copied(source: str, translation: str) -> bool:
    """Whether most of a translation is a copy of its source. In a script without spaces, the script shows it."""
    translation_words = _spaced_words(translation)
    if len(translation_words) < MIN_COPIED_WORDS:
        return False
    source_words = _spaced_words(source)
    bigrams = {*pairwise(source_words)}
    pairs = [*pairwise(translation_words)]
    return sum(pair in bigrams for pair in pairs) >= COPIED_SHARE * len(pairs)


def _spaced_words(text: str) -> list[str]:
    """The words between spaces, without punctuation around them; a URL is one word."""
    return [word.strip(string.punctuation) for word in text.casefold().split() if _has_letter(word)]


def _has_letter(word: str) -> bool:
    return any(map(str.isalpha, word))


def main_script(text: str) -> str:
    """The script of most letters of a text, such as Latin; empty if there are too few letters."""
    scripts = script_counts(text)
    return scripts.most_common(1)[0][0] if scripts.total() >= MIN_LETTERS else ""


def script_counts(text: str) -> Counter[str]:
    """How many letters of a text are in each script."""
    return Counter(map(_script, filter(str.isalpha, text)))


@lru_cache(maxsize=4096)
def _script(letter: str) -> str:
    """The first word of the letter's name in Unicode, which is its script; Chinese and Japanese are one."""
    name = unicodedata.name(letter, "").split(" ")[0].split("-")[0].capitalize()
    return "Chinese" if name in ("Cjk", "Hiragana", "Katakana", "Ideographic") else name
