"""ROUGE, accuracy, F1 and perplexity against values computed by hand."""

import math

import numpy as np
import pytest

from regard.errors import RegardError
from regard.metrics import compare, score
from regard.metrics.accuracy_and_perplexity import TOKEN_PERPLEXITY
from regard.metrics.rouge_and_error_rates import common_subsequence, rouge_l, rouge_n, words


def value(metric: str, hypotheses: list[str], references: list[str]) -> float:
    (result,) = score([metric], hypotheses, references, references, intervals=False)
    assert result.low is None
    return result.value


def test_rouge_by_hand() -> None:
    hypothesis, reference = "the cat sat on the mat", "The cat was on a mat!"
    # the, cat, on, mat match: 4 of 6 and 4 of 6.
    assert rouge_n(hypothesis, reference, 1) == pytest.approx(2 / 3)
    # of five bigrams each only "the cat" matches
    assert rouge_n(hypothesis, reference, 2) == pytest.approx(1 / 5)
    # the cat … on … mat
    assert rouge_l(hypothesis, reference) == pytest.approx(2 / 3)


def test_rouge_is_f1_of_precision_and_recall() -> None:
    # Precision 2/4, recall 2/2: F1 is 2/3; the order differs, so the common subsequence has one word.
    assert rouge_n("b c d a", "a b", 1) == pytest.approx(2 / 3)
    assert rouge_l("b c d a", "a b") == pytest.approx(2 * 1 / (4 + 2))
    # A repeated word matches no more often than it occurs in the reference.
    assert rouge_n("a a a", "a b", 1) == pytest.approx(2 * 1 / (3 + 2))


def test_rouge_of_empty_texts_and_without_matches() -> None:
    assert (
        rouge_n("", "a", 1) == rouge_n("a", "", 1) == rouge_l("", "") == rouge_n("a", "a", 2) == 0
    )


def test_words_of_rouge() -> None:
    assert words("Don't re-send_it: 2 Öle, 日本") == [
        "don",
        "t",
        "re",
        "send",
        "it",
        "2",
        "öle",
        "日本",
    ]


def test_the_longest_common_subsequence_equals_brute_force() -> None:
    def brute_force(one: str, other: str) -> int:
        if not one or not other:
            return 0
        if one[0] == other[0]:
            return 1 + brute_force(one[1:], other[1:])
        return max(brute_force(one[1:], other), brute_force(one, other[1:]))

    draw = np.random.default_rng(1)
    for _ in range(200):
        one, other = ("".join(draw.choice(list("abc"), draw.integers(7))) for _ in range(2))
        assert common_subsequence(one, other) == brute_force(one, other)


def test_rouge_is_the_mean_over_lines() -> None:
    assert value("rouge1", ["a b", "x"], ["a b", "y"]) == 50
    assert value("rouge2", ["a b", "x y"], ["a b", "x z"]) == 50
    assert value("rougeL", ["a b"], ["b a"]) == 50


def test_accuracy_is_over_labels_not_lines() -> None:
    assert value("accuracy", ["A B C", "A"], ["A B B", "B"]) == 50


def test_macro_f1_by_hand() -> None:
    # A: correct 2, predicted 3, expected 2. B: correct 1, predicted 1, expected 3. C is predicted but never expected.
    predicted, expected = ["A", "A", "A", "B", "C"], ["A", "A", "B", "B", "B"]
    f1_of_a, f1_of_b = 2 * 2 / (3 + 2), 2 * 1 / (1 + 3)
    assert value("f1", predicted, expected) == pytest.approx(100 * (f1_of_a + f1_of_b) / 2)
    assert value("f1", [" ".join(predicted)], [" ".join(expected)]) == value(
        "f1", predicted, expected
    )


def test_a_wrong_number_of_labels_is_refused() -> None:
    for metric in ("accuracy", "f1"):
        with pytest.raises(
            RegardError, match="1 labels, but the reference has 2: 'A' against 'A B'"
        ):
            score([metric], ["A"], ["A B"], ["x"])


def test_intervals_contain_the_value_and_narrow_with_more_lines() -> None:
    widths = []
    for count in (40, 4000):
        expected = ["A", "B"] * count
        predicted = ["A", "B", "A", "A"] * (count // 2)
        for result in score(["accuracy", "f1", "rouge1"], predicted, expected, expected):
            assert result.low is not None
            assert result.high is not None
            assert result.low < result.value < result.high
            width = result.high - result.low
        widths.append(width)
    # Ten times narrower for a hundred times as many lines; 75% of them are correct.
    assert widths[0] / widths[1] == pytest.approx(10, rel=0.2)
    assert widths[1] == pytest.approx(2 * 1.96 * 100 * math.sqrt(0.75 * 0.25 / 8000), rel=0.1)


def test_two_systems_are_compared() -> None:
    expected = ["A", "B"] * 100
    worse = ["A", "A"] * 100
    (better,) = compare(["accuracy"], expected, worse, expected, expected)
    assert (better.system, better.baseline) == (100, 50)
    assert better.significant
    assert better.better
    (same,) = compare(["f1"], worse, worse, expected, expected)
    assert same.p_value == 1


def test_perplexity_is_exp_of_the_mean() -> None:
    counts = np.array([[3 * math.log(2), 3.0], [1 * math.log(32), 1.0]])
    result = TOKEN_PERPLEXITY.score_counts(counts)
    assert result.value == pytest.approx(2 ** ((3 + 5) / 4))
    assert result.low == pytest.approx(2)
    assert result.high == pytest.approx(32)
    assert not result.higher_is_better
    with pytest.raises(RegardError, match="perplexity cannot be computed from texts"):
        score(["perplexity"], ["a"], ["a"], ["a"])
