"""Which runs can be compared; tests/cli/test_runs.py compares trained ones."""

from pathlib import Path
from typing import Any

import pytest

from regard.recipe import make_recipe
from regard.storage.run_dir import RunDir
from regard.training.compare_runs import _not_comparable

SAME, OTHER = ("a\tb\n", "a\tc\n")


def recipe_for(folder: Path, test: str | None, **sections: Any) -> Any:
    """A recipe in a folder of its own, with test data that have this content."""
    folder.mkdir()
    data: dict[str, Any] = {"root": str(folder), "train": {"pairs": "train.tsv"}}
    if test is not None:
        (folder / "test.tsv").write_text(test)
        data["test"] = {"pairs": "test.tsv"}
    return make_recipe({"data": data, **sections}, "test")


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (SAME, None),
        (OTHER, "the runs have different test data"),
        (
            None,
            "two has no data.test; use  regard evaluate RUN --against RUN2 --source FILE --reference FILE",
        ),
    ],
)
def test_runs_need_the_same_test_data(
    tmp_path: Path, second: str | None, problem: str | None
) -> None:
    recipes = [recipe_for(tmp_path / "1", SAME), recipe_for(tmp_path / "2", second)]
    found = _not_comparable([RunDir(Path("one")), RunDir(Path("two"))], recipes)
    assert (found is None) if problem is None else (found or "").startswith(problem)


def test_test_data_that_are_gone_are_named(tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path / "1", SAME)
    (tmp_path / "1" / "test.tsv").unlink()
    found = _not_comparable([RunDir(Path("one"))], [recipe])
    assert found is not None
    assert found.startswith("the test data of one cannot be read: ")


def test_runs_of_different_tasks_are_not_compared(tmp_path: Path) -> None:
    recipes = [
        recipe_for(tmp_path / "1", SAME),
        recipe_for(tmp_path / "2", SAME, task="classification"),
    ]
    found = _not_comparable([RunDir(Path("one")), RunDir(Path("two"))], recipes)
    assert found == "the runs have different tasks: classification, translation"
