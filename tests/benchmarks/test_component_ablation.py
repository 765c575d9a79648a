"""benchmarks/component_ablation.py: rows are valid recipes, every choice has a row, the table matches the results."""

import json
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from regard.recipe.registry import allowed_names
from tests.scripts import load_script

KEYS = [
    *("model.attention.score", "model.attention.weighting", "model.attention.encoder"),
    *("model.attention.decoder", "model.attention.cross_attention", "model.position"),
    *("model.norm", "model.norm_order", "model.activation", "training.optimizer"),
    *("training.schedule", "training.label_smoothing_over"),
]


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_script("benchmarks/component_ablation.py")


def result(bleu: float, pronouns: int) -> dict[str, Any]:
    spread = {"low": bleu - 1, "high": bleu + 1}
    return {"bleu": bleu, "pronouns": pronouns, "parameters": 850_000, **spread}


def test_every_row_is_a_recipe_and_every_choice_has_a_row(benchmark: ModuleType) -> None:
    """All but ``position: tree``, since the demo's corpus has no parses."""
    made = [benchmark.Job(row, 1).recipe(Path("corpus")) for row in benchmark.rows()]
    assert all(one not in made[:number] for number, one in enumerate(made))
    for key in KEYS:
        assert {attrgetter(key)(one) for one in made} == {*allowed_names(key)} - {"tree"}, key


def test_only_significant_differences_are_bold(benchmark: ModuleType) -> None:
    results = {f"the recipe/{seed}": result(80 + seed, 150 - seed) for seed in (1, 2, 3)}
    assert benchmark.deviation(results, "bleu") == (1.0, 2)
    # One training against the mean of three, 2 degrees of freedom: 4.303 sqrt(4/3) = 4.97
    results["model.norm=rms/1"] = result(77.1, 150)
    results["model.norm=batch/1"] = result(76.9, 150)
    assert benchmark.difference_from_recipe(results, "model.norm=rms", "bleu") == "-4.9"
    assert benchmark.difference_from_recipe(results, "model.norm=batch", "bleu") == "**-5.1**"
    assert benchmark.difference_from_recipe(results, "", "bleu") == ""
    results["model.norm=none model.norm_order=post/1"] = {
        "failed": "step 50: the loss is not finite"
    }
    speeds = {"": {"tokens_per_second": 10_000, "sentences_per_second": 400, "megabytes": 80}}
    found = benchmark.table({"results": results, "speeds": speeds}).split("\n")
    assert found[2].startswith("| the recipe | 3 | 82.0 ± 1.0 |  | 147–149 | 850k | 10,000 (1.00)")
    assert found[5].startswith("| `model.norm=none`<br>`model.norm_order=post` | 1 | failed |")


def test_the_table_of_the_page_matches_the_results(benchmark: ModuleType) -> None:
    known = json.loads(benchmark.RESULTS.read_text(encoding="utf-8"))
    page = benchmark.PAGE.read_text(encoding="utf-8")
    assert benchmark.with_table(page, known) == page
