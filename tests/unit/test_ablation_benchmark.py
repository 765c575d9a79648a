"""benchmarks/ablation.py: slices that go on where they stopped, and a table that can be checked by hand."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from regard.recipe import load_recipe

FILE = Path(__file__).parents[2] / "benchmarks" / "ablation.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("ablation_benchmark", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_every_variant_is_a_recipe_that_can_be_read(benchmark: ModuleType) -> None:
    plain = load_recipe(benchmark.RECIPE)
    recipes = {
        name: load_recipe(benchmark.RECIPE, changes) for name, changes in benchmark.VARIANTS.items()
    }
    assert recipes.pop("the recipe") == plain
    assert all(recipe != plain for recipe in recipes.values())


def test_the_spread_is_that_of_all_variants_together(benchmark: ModuleType) -> None:
    results = {
        f"{name}/{seed}": {"valid": value, "bleu": value + 1}
        for name, values in (("the recipe", (40, 42, 41)), ("R-Drop 1", (39, 38, 40)))
        for seed, value in enumerate(values, 1)
    }
    table = benchmark.table(results, ["the recipe", "R-Drop 1"]).split("\n")
    # Both deviate by 1, with 2 + 2 degrees of freedom, and t is 2.776: 2.776 / sqrt 3 = 1.60, times sqrt 2 = 2.27.
    assert table[2] == "| the recipe | 3 | 41.00 ± 1.60 | 42.00 ± 1.60 |  |  |"
    assert table[3] == "| R-Drop 1 | 3 | 39.00 ± 1.60 | 40.00 ± 1.60 |  | -2.00 ± 2.27 |"
    assert "between seeds: 1.00 valid BLEU (4 degrees" in table[-2]
    assert benchmark.student(4) == pytest.approx(2.776, rel=0.005)
    assert benchmark.student(50) == pytest.approx(2.0086, rel=1e-4)


TRAIN = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
if "R-Drop" in folder.name and not (folder / "began").exists():
    (folder / "began").touch()
    time.sleep(60)
card = {"valid": {"best_bleu": 40.0}, "seconds": 1.0, "test": [{"measure": "bleu", "value": 41.0}]}
(folder / "card.json").write_text(json.dumps(card))
"""


def test_a_slice_ends_in_time_and_the_next_goes_on(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        benchmark,
        "command",
        lambda job, runs, changes: [sys.executable, "-c", TRAIN, str(job.folder(runs))],
    )
    monkeypatch.setattr(benchmark, "ENDING", 0.0)
    out, runs = tmp_path / "ablation.json", tmp_path / "runs"
    slice_ = ["--out", str(out), "--runs", str(runs), "--seeds", "1", "--jobs", "2"]
    slice_ += ["--only", "the recipe", "R-Drop 1"]
    benchmark.main([*slice_, "--minutes", "0.03"])
    first = json.loads(out.read_text())["results"]
    assert first == {"the recipe/1": {"valid": 40.0, "seconds": 1.0, "bleu": 41.0}}
    assert not (runs / "the-recipe-1" / "checkpoints").exists()
    (runs / "the-recipe-1" / "card.json").unlink()  # what is in the table is not done again
    benchmark.main([*slice_, "--minutes", "1"])
    assert set(json.loads(out.read_text())["results"]) == {"the recipe/1", "R-Drop 1/1"}
    assert "| R-Drop 1 | 1 | 40.00 |" in out.with_suffix(".md").read_text()
    with pytest.raises(SystemExit):
        benchmark.main([*slice_, "--set", "training.steps=3"])
