"""Runs that are resumed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from regard.errors import RegardError
from regard.recipe import DataFiles, Recipe, make_recipe
from regard.storage.run_dir import RunDir
from regard.training.autoconfig import AutomaticRecipe, autoconfigure
from regard.training.checkpoint import checkpoint_name
from regard.training.device_speed import DeviceSpeed
from regard.training.run import PLANNED_KEYS, keep_plan, open_run, resumable_recipe, train

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


def test_a_training_that_is_too_slow_for_its_model_starts_again_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{a} {b} {c}" for a in "abcdefg" for b in "hijklmn" for c in "opqrs"]
    (tmp_path / "x.tsv").write_text("".join(f"{line}\t{line}\n" for line in lines))
    overrides = ["training.device=cpu", "training.log_every=1"]
    speed = DeviceSpeed("cpu", 1e6)
    chosen = autoconfigure(FILES, str(tmp_path), overrides, minutes=1, speed=speed)
    tiny = {"preset": "tiny", "d_model": 16, "heads": 2, "d_ff": 16}

    def refit(automatic: AutomaticRecipe, _: float, seconds: float) -> AutomaticRecipe:
        layers = 1 if called else 2
        values = automatic.values | {
            "model": tiny | {"encoder_layers": layers, "decoder_layers": layers},
            "training": {"steps": 40, "warmup": 4, "tokens_per_batch": 500},
        }
        assert 0 < seconds < 60
        return replace(automatic, recipe=make_recipe(values, "test", overrides))

    called: list[int] = []

    def is_too_slow(_: AutomaticRecipe, speed: float, seconds: float, done: int = 0) -> bool:
        assert speed > 0
        assert seconds < 60
        called.append(done)
        return True

    monkeypatch.setattr(AutomaticRecipe, "refit", refit)
    monkeypatch.setattr(AutomaticRecipe, "is_too_slow", is_too_slow)
    monkeypatch.setattr("regard.training.planner.MEASURED_SHARE", 0.0)
    model = train(chosen.recipe, tmp_path / "again", minutes=1, automatic=chosen)
    assert len(called) == 1
    assert called[0] > 0
    assert (model.recipe.model.encoder_layers, model.recipe.model.d_model) == (1, 16)
    assert RunDir(tmp_path / "again").recipe().model == model.recipe.model
    assert capsys.readouterr().err.count("chosen for this speed") == 2
