"""What an experiment trains, what it refuses, and the pieces of running it that need no training."""

from __future__ import annotations

from pathlib import Path

import pytest

from regard.errors import RegardError
from regard.experiments.experiment import (
    THE_RECIPE,
    Design,
    check_failures,
    demo_changes,
    make_design,
    split_values,
    training_jobs,
)
from regard.recipe import make_recipe
from tests.cli.commands import write_recipe, write_task


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("design")
    write_task(folder, list, 20)
    data = {"root": str(folder)}
    return str(write_recipe(folder, data=data, evaluation={"metrics": ["bleu"]}))


def names(design: Design) -> list[str]:
    return [variant.name for variant in design.variants]


def test_values_are_split_outside_of_brackets_and_quotes() -> None:
    assert split_values("1, 2") == ["1", "2"]
    assert split_values("[a, b],{c: 1, d: 2},'x,y'") == ["[a, b]", "{c: 1, d: 2}", "'x,y'"]


def test_a_grid_has_all_combinations_and_starts_with_the_first_values(recipe: str) -> None:
    vary = ["model.norm_order=post,pre", "model.heads=1,2"]
    design = make_design(recipe, vary, seeds=2)
    assert names(design) == [
        f"model.norm_order={norm}, model.heads={heads}"
        for norm in ("post", "pre")
        for heads in (1, 2)
    ]
    assert design.seeds == (1, 2)
    last = design.recipe(design.variants[-1], 2)
    assert (last.model.norm_order, last.model.heads, last.training.seed) == ("pre", 2, 2)


def test_one_at_a_time_starts_with_the_recipe_and_skips_its_own_values(recipe: str) -> None:
    vary = ["model.norm_order=post,pre", "model.dropout=0.25"]
    design = make_design(recipe, vary, one_at_a_time=True)
    assert names(design) == [THE_RECIPE, "model.norm_order=post", "model.dropout=0.25"]


def test_keys_can_change_together(recipe: str) -> None:
    key = "training.optimizer+training.learning_rate"
    design = make_design(recipe, [f"{key}=adam+0.01,sgd+1.0"])
    trained = [design.recipe(variant, 1).training for variant in design.variants]
    assert [(one.optimizer, one.learning_rate) for one in trained] == [("adam", 0.01), ("sgd", 1.0)]


def test_all_problems_are_in_one_line(recipe: str) -> None:
    vary = ["training.seed=1,2", "heads=3", "model.heads=2,2,", "evaluation.metrics=[bleu]"]
    with pytest.raises(RegardError) as caught:
        make_design(recipe, vary, seeds=0, split="train")
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "--vary heads=3: expected section.key=value,value",
        "model.heads: 2 is given twice",
        "an empty value: expected a value",
        "training.seed: cannot be varied; use --seeds",
        "evaluation.metrics: cannot be varied",
        "--seeds 0: must be 1 or more",
        "--on train: must be valid or test",
    ):
        assert part in message


def test_a_wrong_value_is_reported_once_and_a_wrong_combination_by_name(recipe: str) -> None:
    with pytest.raises(RegardError) as caught:
        make_design(recipe, ["model.norm_order=pst,pre", "model.dropout=0.1,0.2"])
    assert str(caught.value).count("must be 'post' or 'pre'") == 1
    with pytest.raises(RegardError, match=r"^model.heads=8, model.d_model=20: .* does not divide"):
        make_design(recipe, ["model.heads=4,8", "model.d_model=20,32"])


@pytest.mark.parametrize(
    ("vary", "problem"),
    [
        ([], "nothing to vary"),
        (["model.norm_order=pre"], "no variant differs from the recipe"),
        (["model.heads=1,2", "model.heads=4"], "model.heads: given twice"),
        (["model.heads+model.dropout=1+0.1,2"], r"2: expected 2 values joined by \+"),
    ],
)
def test_designs_without_a_comparison_are_refused(
    recipe: str, vary: list[str], problem: str
) -> None:
    with pytest.raises(RegardError, match=problem):
        make_design(recipe, vary, one_at_a_time=vary == ["model.norm_order=pre"])


def test_scores_on_different_data_are_refused(recipe: str) -> None:
    with pytest.raises(RegardError, match="has no data"):
        make_design(recipe, ["model.heads=1,2"], split="test")
    held_out = ["data.valid=null"]
    with pytest.raises(RegardError, match="needs data"):
        make_design(recipe, ["data.clean.max_tokens=5,6"], changes=held_out)


def test_variants_that_differ_in_decoding_share_a_training(recipe: str) -> None:
    design = make_design(recipe, ["decoding.beam=1,3", "model.heads=1,2"], seeds=2)
    jobs = training_jobs(design)
    assert len(jobs) == 4
    assert jobs[0].variants == ("decoding.beam=1, model.heads=1", "decoding.beam=3, model.heads=1")
    assert [one["beam"] for one in jobs[0].decodings] == [1, 3]
    assert [job.seed for job in jobs] == [1, 1, 2, 2]
    assert len({job.name for job in jobs}) == 4


def test_a_training_has_decoding_options_that_its_model_allows(recipe: str) -> None:
    """The baseline's beam would be refused by a non-autoregressive model."""
    vary = ["model.architecture+decoding.beam=transformer+1,non_autoregressive+5"]
    jobs = training_jobs(make_design(recipe, vary, seeds=1))
    assert [job.recipe.decoding.beam for job in jobs] == [1, 5]
    for job in jobs:
        assert make_recipe(job.recipe.model_dump(mode="json"), "job") == job.recipe


def test_other_data_are_other_training_runs(recipe: str) -> None:
    design = make_design(recipe, ["model.heads=1,2"], seeds=1)
    before = [job.name for job in training_jobs(design)]
    assert before == [job.name for job in training_jobs(design)]
    source = next(Path(recipe).parent.glob("train.*"))
    text = source.read_text()
    source.write_text(text.replace(text[0], "z", 1))
    try:
        assert {*before}.isdisjoint(job.name for job in training_jobs(design))
    finally:
        source.write_text(text)


# ---------------------------------------------------------------------------------------------
# Running it; tests/cli/test_experiment.py runs a whole one


def test_the_demo_brings_its_corpus_unless_other_data_are_named(tmp_path: Path) -> None:
    steps = "training.steps=5"
    root = f"data.root={(tmp_path / 'corpus').resolve()}"
    assert demo_changes("demo", [steps], tmp_path) == [steps, root]
    assert demo_changes("demo", ["data.root=/my"], tmp_path) == ["data.root=/my"]
    assert demo_changes("my.yaml", [steps], tmp_path) == [steps]


def test_failures_are_one_error() -> None:
    check_failures({"failures": {}})
    with pytest.raises(RegardError, match=r"^2 training runs failed: a: disk full; b: killed$"):
        check_failures({"failures": {"a": "disk full", "b": "killed"}})
