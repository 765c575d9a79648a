"""Runs that are resumed."""

import json
from pathlib import Path

import pytest

from regard.errors import RegardError
from regard.recipe import DataFiles, Recipe, make_recipe
from regard.storage.run_dir import RunDir
from regard.training.checkpoint import checkpoint_name
from regard.training.resume import PLANNED_KEYS, keep_plan, open_run, resumable_recipe

FILES = DataFiles(pairs=("x.tsv",))
COMMAND = ["training.warmup=500", "training.validate_every=100"]


@pytest.fixture
def planned(tmp_path: Path) -> RunDir:
    """A run that was begun with ``COMMAND``; its plan has other values."""
    run = RunDir(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    run.write_recipe(recipe_of(tmp_path, steps=300, warmup=30, validate_every=15))
    (run.checkpoints / checkpoint_name(15)).touch()
    return run


def recipe_of(root: Path, **training: object) -> Recipe:
    return make_recipe(
        {
            "data": {"root": str(root), "train": FILES.model_dump(), "languages": ("en", "de")},
            "training": {"schedule": "cosine", **training},
        },
        "test",
    )


def test_the_same_command_resumes_a_run_whose_plan_differs_from_it(
    planned: RunDir, tmp_path: Path
) -> None:
    recipe = resumable_recipe(planned.folder, FILES, str(tmp_path), COMMAND)
    assert recipe is not None
    assert recipe == planned.recipe()
    open_run(planned, recipe)


def test_other_steps_are_not_ignored(planned: RunDir, tmp_path: Path) -> None:
    recipe = resumable_recipe(planned.folder, FILES, str(tmp_path), ["training.steps=900"])
    assert recipe is not None
    with pytest.raises(RegardError, match=r"training\.steps is 300 there, 900 here"):
        open_run(planned, recipe)


def test_a_run_with_a_recipe_keeps_its_plan_with_and_without_a_time_limit(
    planned: RunDir, tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, steps=5_000, warmup=500)
    assert keep_plan(planned, recipe) is recipe  # it was not planned
    requested = {key: getattr(recipe.training, key) for key in PLANNED_KEYS}
    planned.plan_file.write_text(json.dumps(requested))
    assert keep_plan(planned, recipe) == planned.recipe()
    longer = recipe_of(tmp_path, steps=6_000, warmup=500)
    assert keep_plan(planned, longer) is longer  # the user asks for more
    planned.plan_file.write_text("{")
    with pytest.raises(RegardError, match=r"plan\.json: not JSON"):
        keep_plan(planned, recipe)


def test_other_languages_are_refused(planned: RunDir, tmp_path: Path) -> None:
    arguments = planned.folder, FILES, str(tmp_path), COMMAND
    assert resumable_recipe(*arguments, ("en", "de")) is not None
    with pytest.raises(RegardError, match="languages other than de,en"):
        resumable_recipe(*arguments, ("de", "en"))
