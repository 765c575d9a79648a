"""Statistics, summaries, effects and verdicts of small results that can be checked by hand; the report shows them."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from regard.errors import RegardError
from regard.experiments.experiment import Design, make_design
from regard.experiments.report import figures, html_report, text_report, verdicts
from regard.experiments.results import (
    RESULTS,
    Estimate,
    TrainingResult,
    block_deviation,
    block_difference,
    contrast,
    describe_difference,
    mean_over_seeds,
    pooled_deviation,
    read_results,
    student_t,
    summarize_experiment,
    to_json,
    two_sided_p,
    write_results,
)
from tests.cli.commands import write_recipe

# ---------------------------------------------------------------------------------------------
# Intervals over seeds agree with tables of Student's t and with calculations by hand


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (4, 2.776), (30, 2.042)]
)
def test_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, abs=2e-3)
    assert two_sided_p(quantile, freedom) == pytest.approx(0.05, abs=2e-4)


def test_a_mean_has_an_interval_from_two_seeds_on() -> None:
    assert mean_over_seeds([3.0]).low is None
    found = mean_over_seeds([1.0, 2.0, 3.0])
    margin = 4.3027 / math.sqrt(3)
    assert found.value == 2.0
    assert found.low == pytest.approx(2 - margin, abs=1e-3)
    assert found.high == pytest.approx(2 + margin, abs=1e-3)


def test_a_difference_is_that_of_welch() -> None:
    # s^2 / n is 1/3 for both, so the degrees of freedom are 4 and the error is sqrt(2/3).
    found = contrast([(1.0, [11.0, 12.0, 13.0]), (-1.0, [1.0, 2.0, 3.0])])
    assert found.value == 10
    assert found.high == pytest.approx(10 + 2.776 * math.sqrt(2 / 3), abs=2e-3)
    assert found.significant
    assert found.p_value is not None
    assert found.p_value < 0.001
    same = contrast([(1.0, [1.0, 2.0, 3.0]), (-1.0, [1.0, 2.0, 3.1])])
    assert not same.significant
    assert same.bound == pytest.approx(max(-(same.low or 0), same.high or 0))


def test_equal_seeds_have_no_width() -> None:
    found = contrast([(1.0, [2.0, 2.0]), (-1.0, [1.0, 1.0])])
    assert (found.low, found.high, found.p_value) == (1.0, 1.0, 0.0)


def test_deviation_is_pooled_within_groups() -> None:
    deviation, freedom = pooled_deviation([[1.0, 3.0], [101.0, 103.0]])
    assert deviation == pytest.approx(math.sqrt(2))
    assert freedom == 2
    assert pooled_deviation([[1.0]]) == (0.0, 0)


def test_a_block_design_of_two_groups_is_the_paired_test() -> None:
    ours, theirs = [1.0, 2.5, 2.0, 4.0], [0.5, 1.0, 1.8, 2.0]
    paired = contrast([(1.0, [a - b for a, b in zip(ours, theirs, strict=True)])])
    found = block_difference(ours, theirs, *block_deviation([ours, theirs]))
    assert found.value == pytest.approx(paired.value)
    assert (found.low, found.high) == pytest.approx((paired.low, paired.high))
    assert found.p_value == pytest.approx(paired.p_value, abs=1e-6)


def test_a_block_design_finds_the_noise() -> None:
    """Effects of groups and of seeds are not noise."""
    rng = np.random.default_rng(1)
    values = (
        rng.normal(size=(40, 1)) * 5 + rng.normal(size=30) * 3 + rng.normal(size=(40, 30)) * 0.5
    )
    deviation, freedom = block_deviation(values.tolist())
    assert deviation == pytest.approx(0.5, rel=0.05)
    assert freedom == 39 * 29
    assert block_deviation([[1.0, 2.0], [2.0, 3.0]]) == (0.0, 1)


# ---------------------------------------------------------------------------------------------
# Summaries, effects and verdicts


NAMES: dict[tuple[int, ...], float] = {(0, 0): 10.0, (0, 1): 20.0, (1, 0): 13.0, (1, 1): 27.0}
"""mean scores by the indices of the levels of two factors"""


@pytest.fixture(scope="module")
def design(tmp_path_factory: pytest.TempPathFactory) -> Design:
    recipe = write_recipe(tmp_path_factory.mktemp("results"), evaluation={"metrics": ["bleu"]})
    return make_design(str(recipe), ["model.norm_order=post,pre", "model.heads=1,2"])


def trained(design: Design, seeds: tuple[float, ...] = (-0.2, 0.0, 0.2)) -> list[TrainingResult]:
    """A result for each variant and seed: the mean score plus the deviation of the seed."""
    details = {"loss": 1.0, "seconds": 2.0, "parameters": 5, "hardware": "a <CPU>", "steps": 7}
    return [
        TrainingResult(
            variant.name,
            seed,
            NAMES[variant.levels] + deviation,
            f"{variant.levels}-{seed}",
            {**details, "curve": [[1, 2.0], [2, 1.0]]},
        )
        for variant in design.variants
        for seed, deviation in zip(design.seeds, seeds, strict=False)
    ]


def test_differences_and_effects(design: Design) -> None:
    summary = summarize_experiment(design, trained(design), {})
    last = summary.variants[-1]
    assert last.difference is not None
    assert last.difference.value == pytest.approx(17)
    assert summary.variants[0].difference is None
    assert summary.deviation == pytest.approx(0.2)
    norm, heads = summary.effects
    assert (norm.level, norm.baseline) == ("model.norm_order=pre", "model.norm_order=post")
    assert norm.difference.value == pytest.approx(5)  # the mean of 3 and 7
    assert norm.smallest == pytest.approx(3)
    assert norm.largest == pytest.approx(7)
    assert heads.difference.value == pytest.approx(12)
    assert norm.difference.significant
    assert norm.verdict.startswith("model.norm_order=pre +5.0 BLEU (4.")


def test_variants_that_share_trainings_are_compared_seed_by_seed(design: Design) -> None:
    """The seeds differ by 20, the decoding by exactly 1: independent trainings could not tell that."""
    one, other, *_ = design.variants
    results = [
        TrainingResult(variant.name, seed, 20.0 * seed + gain + 0.01 * seed * gain, f"run-{seed}")
        for variant, gain in ((one, 0.0), (other, 1.0))
        for seed in design.seeds
    ]
    difference = summarize_experiment(design, results, {}).variants[1].difference
    assert difference is not None
    assert difference.significant
    assert difference.value == pytest.approx(1.02)


def test_diverged_trainings_are_counted(design: Design) -> None:
    results = trained(design)
    broken = TrainingResult(design.variants[1].name, 1, None, "run", {"diverged": "not finite"})
    some = [one for one in results if (one.variant, one.seed) != (broken.variant, 1)]
    row = summarize_experiment(design, [*some, broken], {}).variants[1]
    assert (row.seeds, row.diverged) == (3, 1)
    assert row.verdict == "model.norm_order=post, model.heads=2: 1 of 3 training runs diverged"


@pytest.mark.parametrize(
    ("estimate", "paired", "higher", "verdict"),
    [
        (Estimate(1.2, 0.4, 2.0), None, True, "pre +1.2 BLEU (0.4 to 2.0)"),
        (Estimate(-1.2, -2.0, -0.4), None, False, "pre -1.2 BLEU, better (-2.0 to -0.4)"),
        (
            Estimate(0.2, -0.2, 0.6),
            None,
            True,
            "pre: no difference beyond 0.6 BLEU (+0.2, -0.2 to 0.6)",
        ),
        (
            Estimate(-0.0, -0.8, 0.6),
            None,
            True,
            "pre: no difference beyond 0.8 BLEU (+0.0, -0.8 to 0.6)",
        ),
        (
            Estimate(0.3),
            0.4,
            True,
            "pre: no significant difference (+0.3 BLEU, one seed, paired bootstrap p = 0.400)",
        ),
        (
            Estimate(1.0),
            0.01,
            True,
            "pre +1.0 BLEU (one seed, so no interval, paired bootstrap p = 0.010)",
        ),
    ],
)
def test_verdicts_are_words_with_numbers(
    estimate: Estimate, paired: float | None, higher: bool, verdict: str
) -> None:
    assert describe_difference("pre", estimate, "BLEU", higher, paired) == verdict


def test_the_report_has_every_variant_and_the_figures_are_xml(
    design: Design, tmp_path: Path
) -> None:
    results = trained(design)
    summary = summarize_experiment(design, results, {design.variants[1].name: 0.25})
    write_results(tmp_path, to_json(design, results, summary, 12, "regard experiment <x>"))
    content = read_results(tmp_path)
    assert content == json.loads((tmp_path / RESULTS).read_text(encoding="utf-8"))
    text = "\n".join(text_report(content))
    assert "10.00 (9.50 to 10.50)" in text
    assert "0.250" in text
    assert "12 training runs on a <CPU>; BLEU on the validation data, higher is better." in text
    assert verdicts(content)[0].endswith("+3.0 to +7.0 in single combinations")
    plots = figures(content)
    assert [*plots] == ["scores.svg", "differences.svg", "effects.svg", "curves.svg"]
    for plot in plots.values():
        assert ElementTree.fromstring(plot).tag.endswith("svg")
    page = html_report(content, list(plots.values()))
    assert "regard experiment &lt;x&gt;" in page
    assert "a <CPU>" not in page
    assert page.count("<svg") == 4


def test_a_partial_experiment_can_be_shown(design: Design) -> None:
    results = trained(design)[:1]
    summary = summarize_experiment(design, results, {})
    content = json.loads(json.dumps(to_json(design, results, summary, 12, "")))
    assert "1 of 12 training runs are done" in "\n".join(text_report(content))
    assert [*figures(content)] == ["scores.svg", "curves.svg"]


def test_damaged_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match="no experiment"):
        read_results(tmp_path)
    for text in ("{", "[]", '{"variants": []}'):
        (tmp_path / RESULTS).write_text(text)
        with pytest.raises(RegardError, match="damaged"):
            read_results(tmp_path)
