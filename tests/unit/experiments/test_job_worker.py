"""One training in this process: data are prepared once and shared, scores and outputs are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from regard.experiments import job_worker
from regard.experiments.experiment_design import make_design, training_jobs
from regard.experiments.job_worker import SCORES, provide_data, train_and_score
from regard.storage.run_dir import RunDir
from regard.training.prepare_data import prepare
from tests.cli.commands import write_recipe, write_task


def test_data_are_shared_and_scores_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(tmp_path, list, 30)
    training: dict[str, Any] = {"steps": 2, "warmup": 1, "validate_every": 1, "checkpoint_every": 2}
    training |= {"validate_sentences": 0, "best_checkpoint_metric": "loss"}
    model = {"d_model": 16, "d_ff": 16, "heads": 2}
    data = {"root": str(tmp_path)}
    path = write_recipe(
        tmp_path,
        data=data,
        model=model,
        training=training,
        decoding={"extra_length": 1},  # an untrained model does not stop
        evaluation={"metrics": ["bleu"]},
    )
    vary = ["decoding.beam=1,2", "model.norm_order=pre,post"]
    first, second = training_jobs(make_design(str(path), vary, seeds=1))
    prepared: list[Path] = []

    def counted(run: RunDir, *more: Any) -> None:
        prepared.append(run.folder)
        prepare(run, *more)

    monkeypatch.setattr(job_worker, "prepare", counted)
    job: dict[str, Any] = {
        "run": str(tmp_path / "runs" / first.name),
        "prepared": str(tmp_path / "prepared"),
        "split": "valid",
        "recipe": first.recipe.model_dump(mode="json"),
        "variants": dict(zip(first.variants, first.decodings, strict=True)),
    }
    train_and_score(job)
    folder = Path(job["run"])
    found = json.loads((folder / SCORES).read_text())
    assert {*found["scores"]} == {*first.variants}
    outputs = {one["outputs"] for one in found["scores"].values()}
    assert outputs == {"outputs-0.jsonl", "outputs-1.jsonl"}
    assert all(len((folder / name).read_text().splitlines()) == 50 for name in outputs)
    assert found["steps"] == 2
    assert [step for step, _ in found["curve"]] == [1, 2]

    other = RunDir(tmp_path / "runs" / second.name)
    provide_data(second.recipe, other, tmp_path / "prepared")
    assert len(prepared) == 1, "the second training shares the data of the first"
    assert other.metadata_file.samefile(RunDir(folder).metadata_file)

    before = (folder / "model.safetensors").read_bytes()
    (folder / SCORES).unlink()
    train_and_score(job)  # killed before the scores were written
    assert json.loads((folder / SCORES).read_text())["scores"].keys() == found["scores"].keys()
    assert (folder / "model.safetensors").read_bytes() == before
