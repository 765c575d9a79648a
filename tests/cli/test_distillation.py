"""Distillation through the command line."""

from pathlib import Path

from tests.cli.commands import Done, succeeds_inside


def distilled(folder: Path, output: Path, *options: object) -> tuple[Done, list[str]]:
    done = succeeds_inside("distill", "run", "--output", output, *options, cwd=folder)
    return done, output.read_text(encoding="utf-8").splitlines()


def test_a_teacher_translates_its_own_sources_for_a_student(workshop: Path, tmp_path: Path) -> None:
    done, pairs = distilled(workshop, tmp_path / "distilled.tsv", "--beam", 2)
    sources = (workshop / "train.src").read_text().splitlines()
    assert [line.split("\t")[0] for line in pairs] == sources
    assert sum(len(set(line.split("\t"))) == 1 for line in pairs) > 0.9 * len(pairs)
    assert f"{len(sources):,} of {len(sources):,}" in done.stderr
    assert f"{len(sources):,} pairs" in done.stdout
    small = [
        "training.steps=3",
        "model.preset=tiny",
        "training.validate_sentences=0",
        "training.best_checkpoint_metric=loss",
    ]
    sets = [word for change in small for word in ("--set", change)]
    trained = succeeds_inside("train", "distilled.tsv", *sets, "--out", "student", cwd=tmp_path)
    assert "all 3 steps are done" in trained.stderr
