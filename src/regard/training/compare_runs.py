"""Comparison of runs: scores with intervals, paired significance tests, and what differs in the recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regard.data.corpus import fingerprint, read_pairs
from regard.data.pairs import Pair
from regard.errors import RegardError
from regard.metrics import MODEL_METRICS, Comparison, MetricResult, compare, score
from regard.recipe import Recipe, as_written
from regard.storage.run_dir import RunDir
from regard.tasks import Model

IGNORED_KEYS = ("data.root",)
"""recipe keys that say nothing about the model"""


@dataclass(frozen=True)
class RunComparison:
    """Several runs, the first of which is the baseline."""

    runs: list[RunDir]
    differences: dict[str, list[str]]
    """the recipe keys that differ, with the value of each run as it is written in a recipe"""
    scores: list[list[MetricResult]]
    """of each run"""
    comparisons: list[list[Comparison]] = field(default_factory=list)
    """of each run but the first with the first, on the same test data; empty if that is not possible"""
    not_compared: str | None = None
    """why there are no significance tests"""

    def to_json(self) -> dict[str, Any]:
        tests = [[one.to_json() for one in some] for some in self.comparisons]
        return {
            "runs": [
                {"run": str(run), "scores": [result.to_json() for result in results]}
                for run, results in zip(self.runs, self.scores, strict=True)
            ],
            "baseline": str(self.runs[0]),
            "comparisons": dict(zip(map(str, self.runs[1:]), tests, strict=False)),
            "not_compared": self.not_compared,
            "differences": self.differences,
        }


def compare_runs(runs: Sequence[RunDir], message: Callable[[str], None]) -> RunComparison:
    """Compare runs with the first one.

    The stored test outputs are used, or the test data are translated if there are none. message: reports progress.
    """
    recipes = [run.recipe() for run in runs]
    differences = recipe_table(recipes)
    stored = [_stored_scores(run) for run in runs]
    reason = _not_comparable(runs, recipes)
    if reason is not None:
        return RunComparison([*runs], differences, stored, not_compared=reason)
    first, data = recipes[0], recipes[0].data
    assert data.test is not None
    pairs = list(read_pairs(data.test, data, "data.test"))
    outputs = [
        _outputs(run, recipe, pairs, message) for run, recipe in zip(runs, recipes, strict=True)
    ]
    metrics, tokenize = first.evaluation.metrics, first.evaluation.tokenize
    both = [pair.target for pair in pairs], [pair.source for pair in pairs]
    return RunComparison(
        [*runs],
        differences,
        scores=[score(metrics, one, *both, tokenize=tokenize) for one in outputs],
        comparisons=[
            compare(metrics, one, outputs[0], *both, tokenize=tokenize) for one in outputs[1:]
        ],
    )


def _stored_scores(run: RunDir) -> list[MetricResult]:
    try:
        return [MetricResult(**result) for result in run.card().get("test") or []]
    except TypeError:
        raise RegardError(f"{run.card_file}: damaged, its test scores are incomplete") from None


def _not_comparable(runs: Sequence[RunDir], recipes: Sequence[Recipe]) -> str | None:
    """Why the outputs of the runs cannot be tested against each other; None if they can."""
    tasks = {recipe.task for recipe in recipes}
    if len(tasks) > 1:
        return f"the runs have different tasks: {', '.join(sorted(tasks))}"
    if wrong := MODEL_METRICS & {*recipes[0].evaluation.metrics}:
        return f"there is no paired significance test for {', '.join(sorted(wrong))}"
    tests = []
    for run, recipe in zip(runs, recipes, strict=True):
        if recipe.data.test is None:
            command = "regard evaluate RUN --against RUN2 --source FILE --reference FILE"
            return f"{run} has no data.test; use  {command}"
        try:
            tests.append(fingerprint(recipe.data.test, recipe.data))
        except RegardError as error:
            return f"the test data of {run} cannot be read: {error}"
    if len({*tests}) > 1:
        return "the runs have different test data; use  regard evaluate RUN --against RUN2"
    return None


def _outputs(
    run: RunDir, recipe: Recipe, pairs: Sequence[Pair], message: Callable[[str], None]
) -> list[str]:
    """The outputs of a run for its test data: the stored ones, or new ones."""
    assert recipe.data.test is not None
    outputs = run.test_outputs(run.card(), fingerprint(recipe.data.test, recipe.data))
    if outputs is not None and len(outputs) == len(pairs):
        return outputs
    message(f"{run} has no stored outputs for its test data; computing them")
    model = Model.load(run.folder)
    model.start_workers()
    return model.predict_pairs(pairs)


# ---------------------------------------------------------------------------------------------
# Recipes


def recipe_table(recipes: Sequence[Recipe]) -> dict[str, list[str]]:
    """The keys in which recipes differ, each with the values of all recipes."""
    values = [dict(_flatten(recipe.model_dump())) for recipe in recipes]
    keys = dict.fromkeys(key for one in values for key in one)
    return {
        key: [as_written(one.get(key)) for one in values]
        for key in keys
        if key not in IGNORED_KEYS and any(one.get(key) != values[0].get(key) for one in values)
    }


def _flatten(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of nested sections, joined by dots."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
