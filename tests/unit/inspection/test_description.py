"""What users see about a model."""

from collections.abc import Callable
from pathlib import Path

from regard.data.examples import EXAMPLES, example_sources
from regard.inspection.description import examples_of, test_scores as scores
from regard.recipe import Recipe
from regard.storage.run_dir import RunDir


def test_scores_come_from_the_card(tmp_path: Path) -> None:
    assert scores(None) == []
    assert scores(RunDir(tmp_path)) == []
    run = RunDir(tmp_path)
    run.recipe_file.write_text("{}")
    run.card_file.write_text(
        '{"test": [{"name": "BLEU", "value": 42.71}, {"name": "x", "value": 1}]}'
    )
    assert scores(run) == ["BLEU 42.7"]


def test_examples_are_distinct_sentences_of_medium_length(
    tmp_path: Path, small_recipe: Callable[..., Recipe]
) -> None:
    lines = [f"This is sentence number {number}.\tx" for number in (1, 1, 2, 3, 4, 5)]
    (tmp_path / "test.tsv").write_text("\n".join(["short\tx", *lines]) + "\n")
    data = {"root": str(tmp_path), "train": {"pairs": "none.tsv"}, "languages": ["en", "de"]}
    assert example_sources(small_recipe(data=data)) == []
    recipe = small_recipe(data={**data, "test": {"pairs": "test.tsv"}})
    found = [f"This is sentence number {n}." for n in range(1, EXAMPLES + 1)]
    assert example_sources(recipe) == examples_of(None, recipe) == found
    run = RunDir(tmp_path)
    assert examples_of(run, recipe) == found
    run.recipe_file.write_text("{}")
    run.card_file.write_text('{"examples": ["A sentence of the card."]}')
    assert examples_of(run, recipe) == ["A sentence of the card."]
    run.card_file.write_text('{"examples": []}')
    assert examples_of(run, recipe) == found
