"""Metrics against values computed by hand, by brute force, and by sacreBLEU called directly."""

import json
import logging
import subprocess
import sys
from functools import cache

import pytest
import sacrebleu
from hypothesis import given, settings, strategies as st

from regard.errors import RegardError
from regard.metrics import Comparison, MetricResult, compare, score
from regard.metrics.rouge_and_error_rates import edit_distance

REFERENCES = [
    "The cat sat on the mat .",
    "It was raining in the old town yesterday .",
    "Nobody knows where the ship is going .",
    "She reads a letter from her brother .",
] * 5
HYPOTHESES = [
    "The cat sat on a mat .",
    "It was raining in the town yesterday .",
    "Nobody knows where the ship is going .",
    "She is reading the letter of her brother .",
] * 5
WORSE = [" ".join(line.split()[::-1]) for line in HYPOTHESES]
SOURCES = [f"source {number}" for number in range(len(REFERENCES))]


def test_values_and_signatures_equal_sacrebleus() -> None:
    bleu, chrf, ter = score(["bleu", "chrf", "ter"], HYPOTHESES, REFERENCES, SOURCES)
    assert bleu.value == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], force=True).score
    assert chrf.value == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert ter.value == sacrebleu.corpus_ter(HYPOTHESES, [REFERENCES]).score
    assert [one.name for one in (bleu, chrf, ter)] == ["BLEU", "chrF2", "TER"]
    assert [one.higher_is_better for one in (bleu, chrf, ter)] == [True, True, False]
    assert bleu.signature == (
        "nrefs:1|bs:1000|seed:12345|case:mixed|eff:no|tok:13a|smooth:exp"
        f"|version:{sacrebleu.__version__}"
    )
    for one in (bleu, chrf, ter):
        assert one.low is not None
        assert one.high is not None
        assert 0 < one.low < one.value < one.high < 100
    assert score(["bleu"], HYPOTHESES, REFERENCES, SOURCES) == [bleu], "intervals are deterministic"


def test_settings_reach_sacrebleu() -> None:
    [one] = score(["bleu_lc"], ["the cat sat here"], ["THE CAT SAT HERE"], [""], intervals=False)
    assert one.value == pytest.approx(100)
    assert (one.low, one.high) == (None, None)
    assert "case:lc" in one.signature
    bleu, ter = score(
        ["bleu", "ter"],
        ["我们明天去学校"],
        ["我们今天去学校"],
        [""],
        tokenize="zh",
        intervals=False,
    )
    assert "tok:zh" in bleu.signature
    assert bleu.value > 30
    assert ter.value == pytest.approx(100 / 7), "a character is a word"


def test_results_as_text_and_json() -> None:
    one = MetricResult("bleu", "BLEU", 39.211, 38.1, 40.333, "nrefs:1|version:2.6.0", True)
    assert str(one) == "BLEU 39.21 [38.10, 40.33]  nrefs:1|version:2.6.0"
    quick = MetricResult("wer", "WER", 5.0, None, None, "words:2", False)
    assert str(quick) == "WER 5.00  words:2"
    assert json.loads(json.dumps(one.to_json()))["low"] == 38.1
    other = Comparison("ter", "TER", 40.0, 45.5, 0.002, "nrefs:1", False)
    assert str(other) == (
        "TER 40.00 against 45.50 (-5.50, p = 0.0020: significantly better)  nrefs:1"
    )
    assert json.loads(json.dumps(other.to_json()))["difference"] == -5.5


# Three words: lead (two pronunciations, of which the second is predicted), read (one symbol of three wrong),
# and tomato, whose nearest reference is the second: one insertion, four symbols.
PREDICTED = ["L EH D", "L EH D", "R IY T", "T AH M EY T", "T AH M EY T"]
EXPECTED = ["L IY D", "L EH D", "R IY D", "T AH M AA T OW", "T M EY T"]
WORDS = ["lead", "lead", "read", "tomato", "tomato"]


def test_word_and_phoneme_error_rate_by_hand() -> None:
    wer, per = score(["wer", "per"], PREDICTED, EXPECTED, WORDS)
    assert wer.value == pytest.approx(100 * 2 / 3)
    assert per.value == pytest.approx(100 * (0 + 1 + 1) / (3 + 3 + 4))
    assert not wer.higher_is_better
    assert not per.higher_is_better
    assert wer.signature.startswith("words:3|bs:1000|seed:12345|case:mixed|refs:any|unit:line|")
    assert "|refs:nearest|unit:symbol|regard:" in per.signature
    assert (wer.low, wer.high) == (0.0, 100.0)
    backwards = score(["wer", "per"], PREDICTED[::-1], EXPECTED[::-1], WORDS[::-1], intervals=False)
    assert [one.value for one in backwards] == [wer.value, per.value]


def test_intervals_of_error_rates_shrink_with_the_number_of_words() -> None:
    def width(words: int) -> float:
        predicted = ["A B" if number % 4 else "A C" for number in range(words)]
        sources = [str(number) for number in range(words)]
        [one] = score(["wer"], predicted, ["A B"] * words, sources)
        assert one.value == 25
        assert one.low is not None
        assert one.high is not None
        assert one.low < 25 < one.high
        return one.high - one.low

    # 95% of the fractions p of n words lie within 1.96 sqrt(p (1 - p) / n).
    assert width(400) == pytest.approx(200 * 1.96 * (0.25 * 0.75 / 400) ** 0.5, rel=0.15)
    assert width(1600) == pytest.approx(width(400) / 2, rel=0.2)


def brute_force(one: str, other: str) -> int:
    """The definition: the minimum over all sequences of edits."""

    @cache
    def rest(i: int, j: int) -> int:
        if i == len(one) or j == len(other):
            return len(one) - i + len(other) - j
        if one[i] == other[j]:
            return rest(i + 1, j + 1)
        return 1 + min(rest(i + 1, j), rest(i, j + 1), rest(i + 1, j + 1))

    return rest(0, 0)


@settings(max_examples=100, deadline=None)
@given(st.text("ab c", max_size=8), st.text("ab c", max_size=8))
def test_edit_distance_equals_brute_force(one: str, other: str) -> None:
    assert edit_distance(list(one), list(other)) == brute_force(one, other)


def test_empty_lines_can_be_scored() -> None:
    for one in score(["bleu", "chrf", "ter", "wer", "per"], ["", "a"], ["", ""], ["x", "y"]):
        assert 0 <= one.value <= 100
    [per] = score(["per"], [""], ["A B"], ["x"], intervals=False)
    assert per.value == 100


def test_a_better_system_is_significantly_better() -> None:
    for one in compare(["bleu", "chrf", "ter"], HYPOTHESES, WORSE, REFERENCES, SOURCES):
        [system, baseline] = [
            score([one.metric], lines, REFERENCES, SOURCES, intervals=False)[0].value
            for lines in (HYPOTHESES, WORSE)
        ]
        assert (one.system, one.baseline) == (system, baseline)
        assert one.difference == system - baseline
        assert one.better
        assert "bs:1000|seed:12345" in one.signature
    [bleu] = compare(["bleu"], HYPOTHESES, WORSE, REFERENCES, SOURCES)
    assert bleu.significant
    assert "significantly better" in str(bleu)
    for same in compare(["bleu", "per"], HYPOTHESES, HYPOTHESES, REFERENCES, SOURCES):
        assert same.difference == 0
        assert same.p_value == 1


def test_error_rates_are_compared_by_paired_bootstrap() -> None:
    sources, right = [str(number) for number in range(200)], ["A B C"] * 200
    good = ["A B C" if number % 10 else "A B" for number in range(200)]
    bad = ["A B C" if number % 2 else "A" for number in range(200)]
    almost = ["A B", "A B", *good[2:]]
    wer, per = compare(["wer", "per"], good, bad, right, sources)
    assert (wer.system, wer.baseline) == (10, 50)
    assert wer.better
    assert wer.significant
    assert per.significant
    [unclear] = compare(["wer"], almost, good, right, sources)
    assert unclear.difference == pytest.approx(0.5)
    assert not unclear.better
    assert not unclear.significant
    assert "no significant difference" in str(unclear)
    assert compare(["wer"], almost, good, right, sources) == [unclear]


def test_a_p_value_is_never_0() -> None:
    """Of a thousand resamples none is as extreme, which is evidence for at most 1 in 1001."""
    right = ["A B C"] * 200
    [wer] = compare(["wer"], right, ["D E F"] * 200, right, right)
    assert wer.p_value == pytest.approx(1 / 1001)


def test_errors_name_the_problem() -> None:
    with pytest.raises(RegardError, match="1 hypotheses, 2 references, 1 sources"):
        score(["bleu"], ["a"], ["a", "b"], ["x"])
    with pytest.raises(RegardError, match="nothing to score"):
        score(["bleu"], [], [], [])
    with pytest.raises(RegardError, match="did you mean intl"):
        score(["bleu"], ["a"], ["a"], ["x"], tokenize="int")
    with pytest.raises(RegardError, match=r"no tokenizer 你好; allowed: none, zh, 13a"):
        score(["bleu"], ["a"], ["a"], ["x"], tokenize="你好")
    with pytest.raises(RegardError, match="unknown metric blue; did you mean bleu"):
        score(["blue"], ["a"], ["a"], ["x"])
    with pytest.raises(RegardError, match="1 system, 2 baseline"):
        compare(["bleu"], ["a"], ["a", "b"], ["x"], ["x"])


def test_sacrebleu_does_not_warn(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    tokenized = ["This looks tokenized ."] * 120
    with caplog.at_level(logging.WARNING):
        score(["bleu", "chrf", "ter"], tokenized, tokenized, tokenized, intervals=False)
    assert caplog.text == ""
    assert capfd.readouterr() == ("", "")


def test_importing_metrics_does_not_import_sacrebleu_or_torch() -> None:
    heavy = "[name for name in ('sacrebleu', 'torch') if name in sys.modules]"
    code = f"import sys, regard.metrics; assert not {heavy}, {heavy}"
    subprocess.run([sys.executable, "-c", code], check=True)
