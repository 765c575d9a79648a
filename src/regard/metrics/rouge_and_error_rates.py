"""ROUGE, the overlap of a summary with its reference; word and phoneme error rates of pronunciations (WER, PER).

ROUGE (Lin 2004): texts are lower-cased; a word is a run of letters and digits of any alphabet; there is no stemming.
For each line

    ROUGE-n: precision = matching n-grams / n-grams of the summary,
             recall = matching n-grams / n-grams of the reference;
             an n-gram that occurs k times in one and m times in the other matches min(k, m) times
    ROUGE-L: the same with the length of the longest common subsequence of words, over the numbers of words

and F1 = 2 P R / (P + R), or 0 where nothing matches. The score is the mean of F1 over the lines, times 100. On English
text it equals Google's ``rouge_score`` with ``use_stemmer=False``.

WER and PER are for models that turn a word into its pronunciation. A word may have several correct pronunciations.
Lines with the same source are one word, counted once, and their references are its pronunciations. The hypothesis is
that of its first line.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from regard.metrics.base import CountFunction, CountMetric, Lines, count_each_line, register_metric
from regard.metrics.bootstrap import Counts, percentage

WORD = re.compile(r"[^\W_]+")
ROUGE_SIGNATURE = "case:lc|words:alphanumeric|stem:no|f:1|mean:lines"


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def f1(matches: int, predicted: int, expected: int) -> float:
    """2 P R / (P + R) with P = matches / predicted and R = matches / expected."""
    return 2 * matches / (predicted + expected) if matches else 0.0


def rouge_n(hypothesis: str, reference: str, n: int) -> float:
    ours, theirs = (_ngrams(words(text), n) for text in (hypothesis, reference))
    return f1((ours & theirs).total(), ours.total(), theirs.total())


def rouge_l(hypothesis: str, reference: str) -> float:
    ours, theirs = words(hypothesis), words(reference)
    return f1(common_subsequence(ours, theirs), len(ours), len(theirs))


def common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """The length of the longest sequence of words that occur in both, in the same order."""
    previous = [0] * (len(second) + 1)
    for word in first:
        row = [0]
        for column, other_word in enumerate(second):
            matches = word == other_word
            row.append(previous[column] + 1 if matches else max(previous[column + 1], row[-1]))
        previous = row
    return previous[-1]


def _ngrams(text: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(text[start:] for start in range(n)), strict=False))


def _rouge(name: str, display_name: str, line_score: Callable[[str, str], float]) -> CountMetric:
    def count(hypothesis: str, reference: str) -> tuple[float, int]:
        return line_score(hypothesis, reference), 1

    counts = count_each_line(count)
    return register_metric(CountMetric(name, display_name, counts, percentage, ROUGE_SIGNATURE))


ROUGE_1 = _rouge(
    "rouge1", "ROUGE-1", lambda hypothesis, reference: rouge_n(hypothesis, reference, 1)
)
ROUGE_2 = _rouge(
    "rouge2", "ROUGE-2", lambda hypothesis, reference: rouge_n(hypothesis, reference, 2)
)
ROUGE_L = _rouge("rougeL", "ROUGE-L", rouge_l)


Symbols = list[str]


@dataclass(frozen=True)
class Word:
    hypothesis: Symbols
    references: list[Symbols]


def edit_distance(first: Symbols, second: Symbols) -> int:
    """The number of symbols to insert, delete or replace to turn one sequence into the other (Levenshtein)."""
    previous = list(range(len(second) + 1))
    for row, symbol in enumerate(first, start=1):
        current = [row]
        for column, other_symbol in enumerate(second, start=1):
            replaced = previous[column - 1] + (symbol != other_symbol)
            current.append(min(replaced, previous[column] + 1, current[-1] + 1))
        previous = current
    return previous[-1]


def _word_errors(word: Word) -> tuple[int, int]:
    """1 if the hypothesis equals none of the references, out of 1."""
    return int(word.hypothesis not in word.references), 1


def _phoneme_errors(word: Word) -> tuple[int, int]:
    """The edit distance to the nearest reference, and the length of that reference."""
    # Of equally near references the longest, so that the order of the lines does not matter.
    distance, negative_length = min(
        (edit_distance(word.hypothesis, reference), -len(reference))
        for reference in word.references
    )
    return distance, -negative_length


def _group_by_source(hypotheses: Lines, references: Lines, sources: Lines) -> list[Word]:
    """The distinct sources, each with all its references; symbols are separated by spaces."""
    words: dict[str, Word] = {}
    for hypothesis, reference, source in zip(hypotheses, references, sources, strict=True):
        word = words.setdefault(source, Word(hypothesis.split(), []))
        word.references.append(reference.split())
    return list(words.values())


def _count_each_word(errors: Callable[[Word], tuple[int, int]]) -> CountFunction:
    def count(systems: Sequence[Lines], references: Lines, sources: Lines) -> list[Counts]:
        return [
            np.array(
                [errors(word) for word in _group_by_source(lines, references, sources)],
                dtype=np.float64,
            )
            for lines in systems
        ]

    return count


WORD_ERROR_RATE = register_metric(
    CountMetric(
        "wer",
        "WER",
        _count_each_word(_word_errors),
        percentage,
        signature="case:mixed|refs:any|unit:line",
        higher_is_better=False,
        row_name="words",
    )
)
PHONEME_ERROR_RATE = register_metric(
    CountMetric(
        "per",
        "PER",
        _count_each_word(_phoneme_errors),
        percentage,
        signature="case:mixed|refs:nearest|unit:symbol",
        higher_is_better=False,
        row_name="words",
    )
)
