"""Verdicts of claims are computed from the numbers, and every claim can be run or measured."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from regard.errors import RegardError
from regard.experiments.claim_verdicts import (
    CONFIRMED,
    CONTRADICTED,
    DIVERGED,
    FEW,
    MEASUREMENTS,
    NOT_AT_THIS_SIZE,
    SIZES,
    benchmark_evidence,
    find_claims,
    judge,
    judge_experiment,
    lab_design,
    overall,
    run_lab,
    stored_results,
    variant_name,
    write_lab_corpus,
)
from regard.experiments.claims import CLAIMS, Expectation, Relation
from regard.experiments.results import Estimate

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("relation", "low", "high", "verdict"),
    [
        ("better than", 0.1, 2.0, CONFIRMED),
        ("better than", -0.1, 2.0, NOT_AT_THIS_SIZE),
        ("better than", -2.0, -0.1, CONTRADICTED),
        ("worse than", -2.0, -0.1, CONFIRMED),
        ("worse than", 0.1, 2.0, CONTRADICTED),
        ("equal to", -0.5, 0.9, CONFIRMED),
        ("equal to", -0.5, 1.1, NOT_AT_THIS_SIZE),
        ("equal to", 1.1, 3.0, CONTRADICTED),
        ("no worse than", -0.9, 5.0, CONFIRMED),
        ("no worse than", -1.1, 5.0, NOT_AT_THIS_SIZE),
        ("no worse than", -3.0, -1.1, CONTRADICTED),
    ],
)
def test_a_verdict_follows_from_the_interval(
    relation: Relation, low: float, high: float, verdict: str
) -> None:
    difference = Estimate((low + high) / 2, low, high)
    assert judge(Expectation("a", relation, "b", "BLEU"), difference) == verdict
    # A low loss is better; its margin is smaller.
    loss = Estimate(*(one * -math.log(1.1) for one in (difference.value, high, low)))
    assert judge(Expectation("a", relation, "b", "loss"), loss) == verdict


def test_one_seed_gives_no_verdict() -> None:
    assert judge(Expectation("a", "better than", "b"), Estimate(50.0)) == NOT_AT_THIS_SIZE


def test_all_expectations_must_hold() -> None:
    assert overall([CONFIRMED, CONFIRMED]) == CONFIRMED
    assert overall([CONFIRMED, NOT_AT_THIS_SIZE]) == NOT_AT_THIS_SIZE
    assert overall([CONFIRMED, CONTRADICTED]) == CONTRADICTED


def test_every_claim_can_be_checked() -> None:
    assert len(CLAIMS) >= 15
    for claim in CLAIMS.values():
        assert claim.variants or claim.ablation or claim.measurement
        labels = {label for one in claim.expectations for label in (one.system, one.baseline)}
        assert labels == {*claim.variants}, claim.name
    used = {claim.measurement for claim in CLAIMS.values()} - {None}
    assert used == {*MEASUREMENTS}


@pytest.mark.parametrize("device", SIZES)
def test_every_variant_is_a_valid_recipe(device: str, tmp_path: Path) -> None:
    """``check_variants`` refuses all others."""
    design = lab_design(list(CLAIMS.values()), tmp_path, device, seeds=3)
    known = {one.name for one in design.variants}
    for claim in CLAIMS.values():
        names = {variant_name(changes) for changes in claim.variants.values()}
        assert not claim.variants or names & known


@pytest.mark.parametrize("name", [one.name for one in CLAIMS.values() if not one.variants])
def test_benchmarks_are_judged(name: str) -> None:
    evidence = benchmark_evidence(CLAIMS[name], ROOT / "benchmarks")
    assert evidence is not None
    assert evidence.verdict in (CONFIRMED, NOT_AT_THIS_SIZE, CONTRADICTED)
    assert evidence.facts
    (figure,) = evidence.figures.values()
    assert ElementTree.fromstring(figure).tag.endswith("svg")
    assert "figures" not in evidence.to_json()


def test_the_committed_numbers_give_the_verdicts_of_the_benchmarks() -> None:
    verdicts = {
        name: evidence.verdict
        for name, claim in CLAIMS.items()
        if (evidence := benchmark_evidence(claim, ROOT / "benchmarks")) is not None
    }
    assert verdicts["path-length"] == CONFIRMED
    assert verdicts["quadratic-time"] == CONFIRMED
    assert verdicts["quadratic-memory"] == CONTRADICTED
    assert verdicts["label-smoothing"] == CONFIRMED
    stored = {
        name: one["benchmark"] for name, one in stored_results().items() if "benchmark" in one
    }
    assert {name: one["verdict"] for name, one in stored.items()} == verdicts


def trained(variant: str, losses: list[float | None], run: str) -> list[dict[str, object]]:
    """Trainings with a loss, and BLEU of 100 times the loss."""
    return [
        {
            "variant": variant,
            "seed": seed,
            "score": None if loss is None else 100 * loss,
            "run": f"{run}-{seed}",
            "details": {} if loss is None else {"loss": loss, "curve": [[1, 5.0], [2, loss]]},
        }
        for seed, loss in enumerate(losses, 1)
    ]


def test_an_experiment_is_judged_when_all_seeds_are_there() -> None:
    claim = CLAIMS["scale-by-sqrt-dk"]
    worse = "model.attention.score=dot_product"
    known = {"the recipe", worse}
    base = trained("the recipe", [0.30, 0.35, 0.40], "base")
    trainings = [*base, *trained(worse, [0.5, 0.56], "other")]
    content = {"trainings": trainings}
    assert judge_experiment(claim, content, "cpu", 3, known) is None
    trainings += trained(worse, [0.0, 0.0, 0.6], "other")[2:]
    evidence = judge_experiment(claim, content, "cpu", 3, known)
    assert evidence is not None
    assert evidence.groups["loss"] == {"scaled": [0.3, 0.35, 0.4], "not scaled": [0.5, 0.56, 0.6]}
    assert evidence.verdict == CONFIRMED
    # Two variants: the paired t-test of the logarithms.
    assert evidence.facts == ["not scaled: loss × 1.59, worse (1.39 to 1.81), against scaled"]
    assert {*evidence.figures} == {"loss", "curves"}
    assert evidence.curves["scaled"] == [(1, 5.0), (2, pytest.approx(0.35))]


def test_a_training_that_diverged_knows_nothing() -> None:
    claim = CLAIMS["scale-by-sqrt-dk"]
    worse = "model.attention.score=dot_product"
    trainings = [
        *trained("the recipe", [0.3, 0.3, 0.31], "base"),
        *trained(worse, [None, None, None], "other"),
    ]
    evidence = judge_experiment(claim, {"trainings": trainings}, "cpu", 3, {"the recipe", worse})
    assert evidence is not None
    assert evidence.groups["loss"]["not scaled"] == [DIVERGED["loss"]] * 3
    assert evidence.groups["BLEU"]["not scaled"] == [0.0] * 3
    assert evidence.verdict == CONFIRMED


def test_more_variants_tell_more_about_the_noise() -> None:
    claim = CLAIMS["scale-by-sqrt-dk"]
    worse = "model.attention.score=dot_product"
    trainings = [
        *trained("the recipe", [0.30, 0.35, 0.40], "base"),
        *trained(worse, [0.5, 0.56, 0.6], "other"),
    ]
    few, many = (
        judge_experiment(claim, {"trainings": some}, "cpu", 3, {"the recipe", worse})
        for some in (trainings, [*trainings, *trained("third", [0.31, 0.36, 0.39], "third")])
    )
    assert few is not None
    assert many is not None
    assert few.checked[0].difference.value == many.checked[0].difference.value
    low, lower = (one.checked[0].difference.low or 0.0 for one in (many, few))
    assert low > lower > 0


def test_a_claim_can_be_about_loss_and_bleu() -> None:
    names = ["the recipe", "training.label_smoothing=0"]
    trainings = [
        *trained(names[0], [0.5, 0.6, 0.7], "smoothed"),
        *trained(names[1], [0.4, 0.5, 0.601], "not"),
    ]
    evidence = judge_experiment(
        CLAIMS["label-smoothing"], {"trainings": trainings}, "cpu", 3, {*names}
    )
    assert evidence is not None
    assert [one.verdict for one in evidence.checked] == [CONFIRMED, CONFIRMED]
    assert {*evidence.figures} == {"loss", "BLEU", "curves"}


def test_decoding_claims_are_judged_by_bleu() -> None:
    names = ["the recipe", "decoding.beam=4"]
    trainings = [
        *trained(names[0], [0.10, 0.30, 0.50], "run"),
        *trained(names[1], [0.11, 0.31, 0.511], "run"),
    ]
    content, known = {"trainings": trainings}, {*names}
    evidence = judge_experiment(CLAIMS["beam-or-greedy"], content, "cpu", 3, known)
    assert evidence is not None
    assert evidence.verdict == CONFIRMED


def test_the_corpus_of_the_lab_has_few_words(tmp_path: Path) -> None:
    size = replace(SIZES["cpu"], pairs={"train": 600, "valid": 20, "test": 20})
    write_lab_corpus(tmp_path, size)
    lines = (tmp_path / "train.en").read_text(encoding="utf-8").splitlines()
    assert len({*lines}) == 600
    words = {word for line in lines for word in re.findall(r"[\w']+|[^\w\s]", line.lower())}
    assert len(words) <= size.words
    assert max(len(line.split()) for line in lines) <= size.longest
    assert (tmp_path / "few.en").read_text(encoding="utf-8").splitlines() == lines[:FEW]
    assert (tmp_path / "test.de").exists()


def test_unknown_names_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(
        RegardError, match=r"several-hedas; did you mean several-heads\?.*no claim xyz"
    ):
        find_claims(["several-hedas", "xyz"])
    with pytest.raises(RegardError, match="path-length: measured by a benchmark"):
        run_lab(["path-length"], tmp_path)
    with pytest.raises(RegardError, match="--device tpu: must be cpu or cuda"):
        run_lab(["warm-up"], tmp_path, device="tpu")
