"""Verdicts of claims are computed from the numbers, and every claim can be run or measured."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from regard.errors import RegardError
from regard.experiments.claims import CLAIMS, Expectation, Relation
from regard.experiments.lab import (
    CONFIRMED,
    CONTRADICTED,
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
)
from regard.experiments.statistics import Estimate

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
    assert judge(Expectation("a", relation, "b"), difference) == verdict


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
    assert ElementTree.fromstring(evidence.figure).tag.endswith("svg")
    assert "figure" not in evidence.to_json()


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


def trained(variant: str, scores: list[float | None], run: str) -> list[dict[str, object]]:
    return [
        {"variant": variant, "seed": seed, "score": score, "run": f"{run}-{seed}", "details": {}}
        for seed, score in enumerate(scores, 1)
    ]


def test_an_experiment_is_judged_when_all_seeds_are_there() -> None:
    claim = CLAIMS["scale-by-sqrt-dk"]
    worse = "model.attention.score=dot_product"
    known = {"the recipe", worse}
    base = trained("the recipe", [30.0, 31.0, 32.0], "base")
    trainings = [*base, *trained(worse, [10.0, None], "other")]
    content = {"trainings": trainings}
    assert judge_experiment(claim, content, "cpu", 3, known) is None
    trainings += trained(worse, [0.0, 0.0, 11.0], "other")[2:]
    evidence = judge_experiment(claim, content, "cpu", 3, known)
    assert evidence is not None
    assert evidence.groups == {"scaled": [30.0, 31.0, 32.0], "not scaled": [10.0, 0.0, 11.0]}
    assert evidence.verdict == CONFIRMED
    assert evidence.facts[0].startswith("not scaled -24.0 BLEU (")


def test_decoding_claims_are_judged_seed_by_seed() -> None:
    names = ["the recipe", "decoding.beam=4"]
    trainings = [
        *trained(names[0], [10.0, 30.0, 50.0], "run"),
        *trained(names[1], [11.0, 31.0, 51.1], "run"),
    ]
    content, known = {"trainings": trainings}, {*names}
    evidence = judge_experiment(CLAIMS["beam-or-greedy"], content, "cpu", 3, known)
    assert evidence is not None
    assert evidence.verdict == CONFIRMED


def test_unknown_names_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(
        RegardError, match=r"several-hedas; did you mean several-heads\?.*no claim xyz"
    ):
        find_claims(["several-hedas", "xyz"])
    with pytest.raises(RegardError, match="path-length: measured by a benchmark"):
        run_lab(["path-length"], tmp_path)
    with pytest.raises(RegardError, match="--device tpu: must be cpu or cuda"):
        run_lab(["warm-up"], tmp_path, device="tpu")
