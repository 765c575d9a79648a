"""ROUGE (Lin 2004): how much of a reference is in a summary, and how much of the summary in the reference.

DataFiles are lower-cased; a word is a run of letters and digits of any alphabet; nothing is stemmed. For each line

    ROUGE-n: precision = matching n-grams / n-grams of the summary, recall = the same / n-grams of the reference,
             an n-gram that stands k times in one and m times in the other matches min(k, m) times
    ROUGE-L: the same with the length of the longest common subsequence of words, over the numbers of words

and F1 = 2 P R / (P + R), 0 where nothing matches. The score is the mean of F1 over the lines, times 100. On English
text this is what ``rouge_score`` of Google gives with ``use_stemmer=False``.
"""

import re
from collections import Counter
from collections.abc import Sequence

from regard.metrics.base import CountMetric, each_line
from regard.metrics.bootstrap import percentage

WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def f1(matches: int, said: int, wanted: int) -> float:
    """2 P R / (P + R) with P = matches / said and R = matches / wanted."""
    return 2 * matches / (said + wanted) if matches else 0.0


def rouge_n(hypothesis: str, reference: str, n: int) -> float:
    said, wanted = (_ngrams(words(text), n) for text in (hypothesis, reference))
    return f1((said & wanted).total(), said.total(), wanted.total())


def rouge_l(hypothesis: str, reference: str) -> float:
    said, wanted = words(hypothesis), words(reference)
    return f1(common_subsequence(said, wanted), len(said), len(wanted))


def common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest sequence of words that stand, in this order, in both."""
    before = [0] * (len(other) + 1)
    for word in one:
        row = [0]
        for column, opposite in enumerate(other):
            row.append(before[column] + 1 if word == opposite else max(before[column + 1], row[-1]))
        before = row
    return before[-1]


def _ngrams(text: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(text[start:] for start in range(n)), strict=False))


SIGNATURE = "case:lc|words:alphanumeric|stem:no|f:1|mean:lines"

ROUGE = (
    CountMetric(
        "rouge1", "ROUGE-1", each_line(lambda h, r: (rouge_n(h, r, 1), 1)), percentage, SIGNATURE
    ),
    CountMetric(
        "rouge2", "ROUGE-2", each_line(lambda h, r: (rouge_n(h, r, 2), 1)), percentage, SIGNATURE
    ),
    CountMetric(
        "rougeL", "ROUGE-L", each_line(lambda h, r: (rouge_l(h, r), 1)), percentage, SIGNATURE
    ),
)
