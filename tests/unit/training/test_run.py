"""A whole training."""

from dataclasses import replace
from pathlib import Path

import pytest

from regard.recipe import DataFiles, make_recipe
from regard.storage.run_dir import RunDir
from regard.training.autoconfig import AutomaticRecipe, autoconfigure
from regard.training.cost_model import DeviceSpeed
from regard.training.run import train

FILES = DataFiles(pairs=("x.tsv",))


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
