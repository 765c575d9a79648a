"""benchmarks/parts.py: its rows are recipes, no choice is left out, and the table says what was measured."""

import importlib
import json
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

from regard import recipe as recipes

FOLDER = Path(__file__).parents[2] / "benchmarks"
CHOICES: dict[str, Any] = {
    "model.attention.score": recipes.Score,
    "model.attention.weighting": recipes.Weighting,
    "model.attention.encoder": recipes.EncoderPattern,
    "model.attention.decoder": recipes.DecoderPattern,
    "model.attention.cross_attention": recipes.CrossAttentionPattern,
    "model.position": recipes.Position,
    "model.norm": recipes.Norm,
    "model.norm_order": recipes.NormOrder,
    "model.activation": recipes.Activation,
    "training.optimizer": recipes.Optimizer,
    "training.schedule": recipes.Schedule,
    "training.label_smoothing_over": recipes.Smoothing,
}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("parts")


def result(bleu: float, pronouns: int) -> dict[str, Any]:
    spread = {"low": bleu - 1, "high": bleu + 1}
    return {"bleu": bleu, "pronouns": pronouns, "parameters": 850_000, **spread}


def test_every_row_is_a_recipe_and_every_choice_has_a_row(benchmark: ModuleType) -> None:
    """The demo's corpus has no trees; all else is there."""
    made = [benchmark.Job(row, 1).recipe(Path("corpus")) for row in benchmark.rows()]
    assert all(one not in made[:number] for number, one in enumerate(made))
    for key, names in CHOICES.items():
        assert {attrgetter(key)(one) for one in made} == {*get_args(names)} - {"tree"}, key


def test_only_what_is_beyond_the_spread_of_seeds_is_bold(benchmark: ModuleType) -> None:
    results = {f"the recipe/{seed}": result(80 + seed, 150 - seed) for seed in (1, 2, 3)}
    assert benchmark.deviation(results, "bleu") == (1.0, 2)
    # One training against the mean of three, 2 degrees of freedom: 4.303 sqrt(4/3) = 4.97
    results["model.norm=rms/1"] = result(77.1, 150)
    results["model.norm=batch/1"] = result(76.9, 150)
    assert benchmark.apart(results, "model.norm=rms", "bleu") == "-4.9"
    assert benchmark.apart(results, "model.norm=batch", "bleu") == "**-5.1**"
    assert benchmark.apart(results, "", "bleu") == ""
    results["model.norm=none/1"] = {"failed": "step 50: the loss is not a number any more"}
    speeds = {"": {"tokens_per_second": 10_000, "sentences_per_second": 400, "megabytes": 80}}
    found = benchmark.table({"results": results, "speeds": speeds}).split("\n")
    assert found[2].startswith("| the recipe | 3 | 82.0 ± 1.0 |  | 147–149 | 850k | 10,000 (1.00)")
    assert found[5].startswith("| `model.norm=none` | 1 | failed |")


def test_the_table_of_the_page_is_the_one_of_the_results(benchmark: ModuleType) -> None:
    known = json.loads(benchmark.RESULTS.read_text(encoding="utf-8"))
    page = benchmark.PAGE.read_text(encoding="utf-8")
    assert benchmark.with_table(page, known) == page
