"""ROUGE (Lin 2004): the overlap of a summary with its reference.

Texts are lower-cased; a word is a run of letters and digits of any alphabet; there is no stemming. For each line

    ROUGE-n: precision = matching n-grams / n-grams of the summary,
             recall = matching n-grams / n-grams of the reference;
             an n-gram that occurs k times in one and m times in the other matches min(k, m) times
    ROUGE-L: the same with the length of the longest common subsequence of words, over the numbers of words

and F1 = 2 P R / (P + R), or 0 where nothing matches. The score is the mean of F1 over the lines, times 100. On English
text it equals Google's ``rouge_score`` with ``use_stemmer=False``.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence

from regard.metrics.base import CountMetric, count_each_line, register_metric
from regard.metrics.bootstrap import percentage

WORD = re.compile(r"[^\W_]+")
SIGNATURE = "case:lc|words:alphanumeric|stem:no|f:1|mean:lines"


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


def common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest sequence of words that occur in both, in the same order."""
    previous = [0] * (len(other) + 1)
    for word in one:
        row = [0]
        for column, other_word in enumerate(other):
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
    return register_metric(CountMetric(name, display_name, counts, percentage, SIGNATURE))


ROUGE_1 = _rouge(
    "rouge1", "ROUGE-1", lambda hypothesis, reference: rouge_n(hypothesis, reference, 1)
)
ROUGE_2 = _rouge(
    "rouge2", "ROUGE-2", lambda hypothesis, reference: rouge_n(hypothesis, reference, 2)
)
ROUGE_L = _rouge("rougeL", "ROUGE-L", rouge_l)
