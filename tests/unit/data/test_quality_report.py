"""The report of regard data check."""

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any, cast

import pytest

from regard.data.misalignment import Stretch
from regard.data.pairs import Pair
from regard.data.quality import Misaligned, RuleSet, make_rules, survey
from regard.data.quality_report import (
    Finding,
    HeldOutSplit,
    Histogram,
    NoiseExample,
    QualityReport,
    _merged,
    html_report,
    jensen_shannon,
    make_report,
    next_steps,
)

CLEAN = [
    Pair(f"The dog number {number} sleeps.", f"Der Hund Nummer {number} schläft.")
    for number in range(20)
]
NOISE = (
    [Pair("x", "")] * 2
    + [Pair("a <br> c", "a c d")]
    + CLEAN[:1]
    + [Pair("ALL THE CAPITALS", "Die Großen")]
)


@pytest.fixture(scope="module")
def report() -> QualityReport:
    pairs = [*CLEAN, *NOISE]
    test = [Pair("the DOG number 3 sleeps", "x"), Pair("Unknown words here", "y")]
    rules = RuleSet(make_rules(), survey(pairs, None, {"test": test}))
    return make_report(pairs, rules, ["my.tsv"], None, {"test": test})


def test_counts_shares_and_examples(report: QualityReport) -> None:
    findings = {finding.rule: finding for finding in report.findings}
    assert (report.pairs, report.rejected) == (25, 5)
    assert (findings["empty"].count, findings["empty"].share) == (2, 2 / 25)
    assert [example.number for example in findings["empty"].examples] == [21, 22]
    assert findings["duplicate"].count == 1
    assert findings["overlap"].examples[0].source == "The dog number 3 sleeps."
    assert not findings["all_caps"].rejects


def test_examples_are_pairs_that_no_earlier_rule_found() -> None:
    tags = [Pair("a <br> c", ""), *CLEAN, Pair("a <br> c", "a d"), Pair("<i>b</i> c", "")]
    report = make_report(tags, RuleSet(make_rules(), survey(tags)), ["my.tsv"], None)
    (html,) = (finding for finding in report.findings if finding.rule == "html")
    assert (html.count, [example.number for example in html.examples]) == (3, [22, 1, 23])


def test_the_worst_comes_first(report: QualityReport) -> None:
    keys = [(not finding.rejects, -finding.count) for finding in report.findings]
    assert keys == sorted(keys)


def test_held_out_data_are_compared(report: QualityReport) -> None:
    (split,) = report.held_out
    assert (split.name, split.sources, split.overlap) == ("test", 2, 1)
    assert split.unknown_words == pytest.approx(3 / 7)
    assert 0 < split.distance < 1


def test_histograms_count_every_pair(report: QualityReport) -> None:
    source, target, ratio = report.histograms
    assert sum(source.counts) == sum(target.counts) == 25
    assert sum(ratio.counts) == 23


def test_it_ends_with_commands(report: QualityReport) -> None:
    steps = next_steps(report, "my.tsv --columns 1,2", "--skip language")
    assert steps[0].startswith(
        "regard data clean my.tsv --columns 1,2 --skip language --output clean.tsv --report "
    )
    assert steps[1] == "regard train clean.tsv  trains on the remaining pairs"
    assert steps[-1].startswith("regard data score my.tsv --columns 1,2 --output scored.tsv")
    known = next_steps(replace(report, languages=("en", "de")), "my.tsv")
    assert known[1].startswith("regard train clean.tsv --languages en,de  ")
    assert "drops 1 pair (4.0%)" in next_steps(replace(report, rejected=1), "my.tsv")[0]
    perfect = next_steps(replace(report, rejected=0), "my.tsv --columns 1,2", "--skip language")
    assert perfect[0].startswith("regard train my.tsv --columns 1,2  can use")
    assert any("1 of 2 sources of test are in the training data" in step for step in steps)
    assert json.loads(json.dumps(report.to_dict()))["pairs"] == 25


def test_the_distance_of_words() -> None:
    one, two = Counter({1: 3, 2: 1}), Counter({3: 5})
    assert jensen_shannon(one, one) == pytest.approx(0)
    assert jensen_shannon(one, Counter()) == jensen_shannon(Counter(), one) == 1
    assert jensen_shannon(one, two) == pytest.approx(1)
    assert jensen_shannon(one, Counter()) == 1


# The report as HTML

VOID = {"meta", "br"}


class Checker(HTMLParser):
    """Checks that elements are nested properly, and collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "img", "link")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_complete_and_safe() -> None:
    example = NoiseExample(7, "<script>alert(1)</script>", "a\x07b", "why & how")
    report = QualityReport(
        ["a<b.tsv"],
        ("en", "de"),
        1000,
        10,
        [Finding("html", "tags & such", True, "drop them", 10, 0.01, [example])],
        {"language": "needs <py3langid>"},
        ["bad lines skipped: 3"],
        [],
        [HeldOutSplit("test", 5, 2, 0.1, 0.5)],
        [Histogram("length", [0.0, 20.0], [3, 4])],
        ["regard data clean a.tsv  drops 10 pairs", "look at <this>  first", "regard is a word"],
    )
    html = html_report(report)
    checker = Checker()
    checker.feed(html)
    assert checker.open == []
    for text in (
        "<script>alert(1)</script>",
        "a\\x07b",
        "why & how",
        "2 of 5",
        "1,000",
        "10 (1.00%)",
    ):
        assert text in checker.text
    steps = ["<code>regard data clean a.tsv</code> drops 10 pairs", "look at &lt;this&gt;  first"]
    for step in (*steps, "regard is a word"):  # what is no command is not shown as one
        assert f"<li>{step}</li>" in html
    assert 'style="width:0.30rem"' in html  # a bar can be seen, even if the share is small
    assert "http" not in html.replace("http-equiv", "")
    assert "prefers-color-scheme: dark" in html
    assert '<text x="299" y="107" text-anchor="end">20</text>' in html  # not cut off at the right
    assert "width=device-width" in html


def test_a_report_without_findings() -> None:
    assert "Nothing." in html_report(QualityReport(["a.tsv"], None))


def test_the_bars_of_findings_are_as_long_as_their_shares() -> None:
    findings = [Finding("html", "tags", True, "drop them", 10, share) for share in (0.25, 0.5)]
    html = html_report(QualityReport(["a.tsv"], None, findings=findings))
    assert re.findall(r"width:([\d.]+)rem", html) == ["3.00", "6.00"]
    assert html.count("<details") == 2
    assert html.count('class="rejects" open>') == 1  # the worst, so that examples are seen


@pytest.mark.parametrize(("unknown", "warned"), [(0.09, False), (0.11, True)])
def test_many_unknown_words_are_a_warning(unknown: float, warned: bool) -> None:
    report = QualityReport(["a.tsv"], None, held_out=[HeldOutSplit("test", 5, 0, unknown, 0.5)])
    steps = next_steps(report, "a.tsv", "")
    assert (
        any("of the words of test are not in the training data" in step for step in steps) == warned
    )


def test_a_stretch_that_continues_in_the_next_batch_is_one() -> None:
    rule = Misaligned()
    parts = [(0, 9, 1), (17, 99, 1), (150, 199, 2), (205, 300, 2), (309, 310, 2), (311, 312, 1)]
    rule.stretches = [Stretch(*part) for part in parts]
    found = _merged(cast(Any, SimpleNamespace(rules={"misaligned": rule})))
    assert found == [(0, 99, 1), (150, 300, 2), (309, 310, 2), (311, 312, 1)]
    assert _merged(cast(Any, SimpleNamespace(rules={}))) == []


@pytest.mark.parametrize(
    ("rule", "share", "offered"),
    [("ratio", 0.6, True), ("copy", 0.6, True), ("html", 0.6, False), ("ratio", 0.5, False)],
)
def test_other_tasks_than_translation_skip_the_rules_of_translations(
    rule: str, share: float, offered: bool
) -> None:
    findings = [Finding(rule, "", True, "", 60, share), Finding("numbers", "", True, "", 5, 0.05)]
    findings += [
        Finding("encoding", "", True, "", 1, 0.01),
        Finding("all_caps", "", False, "", 9, 0.9),
    ]
    report = QualityReport(["a.tsv"], None, pairs=100, rejected=100, findings=findings)
    steps = next_steps(report, "a.tsv")
    skips = (
        f"regard data clean a.tsv --skip {rule} --skip numbers --output clean.tsv  if these are not"
    )
    assert any(step.startswith(skips) for step in steps) is offered
    assert not any(step.startswith("regard train") for step in steps)  # no pair is left
