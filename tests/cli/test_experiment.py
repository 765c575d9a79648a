"""``regard experiment`` and ``regard lab`` through the command line: killed, resumed, shown; one-line refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

from regard.experiments.claims import CLAIMS
from tests.cli.commands import REGARD, environment, inside, write_recipe, write_task

STEPS = 120


def processes_with(text: str) -> list[str]:
    """The command lines of running processes that contain a text."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended
            continue
    return [line for line in lines if text in line and "experiments.worker" in line]


def wait_for(condition: object, seconds: float = 60.0) -> None:
    assert callable(condition)
    latest = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < latest
        time.sleep(0.05)


def test_a_killed_experiment_is_resumed(tmp_path: Path) -> None:
    write_task(tmp_path, list, 60)
    training: dict[str, object] = {
        "steps": STEPS,
        "validate_every": STEPS,
        "checkpoint_every": 10,
        "log_every": 5,
    }
    training |= {"validate_sentences": 0, "best_checkpoint_metric": "loss"}
    model = {"d_model": 16, "d_ff": 16, "heads": 2}
    write_recipe(
        tmp_path,
        data={"root": str(tmp_path)},
        model=model,
        training=training,
        decoding={"extra_length": 2},
        evaluation={"metrics": ["bleu"]},
    )
    arguments = ["experiment", "recipe.yaml", "--vary", "decoding.beam=1,2"]
    arguments += ["--seeds", "1", "--out", "exp"]
    killed = subprocess.Popen([*REGARD, *arguments], cwd=tmp_path, env=environment(), stderr=-3)
    runs = tmp_path / "exp" / "runs"
    wait_for(lambda: [*runs.glob("*/checkpoints/step-*")])
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    wait_for(lambda: not processes_with(str(tmp_path)) and not processes_with("exp/runs"))
    assert not [*runs.glob("*/scores.json")], "too fast to be killed: increase STEPS"

    done = inside(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 of 1" in done.stderr
    assert "decoding.beam=2" in done.stdout
    logs = [file.read_text() for file in runs.glob("*.log")]
    assert any("Resuming from step" in log for log in logs)
    assert len([*(tmp_path / "exp" / "prepared").glob("*/data")]) == 1
    results = json.loads((tmp_path / "exp" / "results.json").read_text())
    assert [one["details"]["steps"] for one in results["trainings"]] == [STEPS, STEPS]
    assert results["summary"]["variants"][1]["paired_p"] is not None
    page = (tmp_path / "exp" / "report.html").read_text()
    assert page.count("<svg") == 2  # one validation makes no curve

    again = inside(*arguments, "--json", cwd=tmp_path)
    assert "1 of 1 training runs are already done" in again.stderr
    assert json.loads(again.stdout)["trainings"] == results["trainings"]
    shown = inside("experiment", "show", "exp", cwd=tmp_path)
    assert shown.stdout == done.stdout


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    for arguments, problem in (
        (["recipe.yaml"], "nothing to vary"),
        (
            ["nothing", "--vary", "model.heads=1,2"],
            "nothing: no bundled recipe and no file of that name",
        ),
        (["recipe.yaml", "--vary", "model.heads=3,5"], "2 problems: model.heads=3: "),
        (["recipe.yaml", "--vary", "model.heads=1,2"], "train.src"),
        (["show", "missing"], "missing: no experiment"),
    ):
        done = inside("experiment", *arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("regard: ")
        assert problem in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    write_task(tmp_path, list, 5)
    write_recipe(tmp_path, data={"root": str(tmp_path)})
    done = inside(
        "experiment", "recipe.yaml", "--vary", "model.heads=1,2", "--out", ".", cwd=tmp_path
    )
    assert done.returncode == 2
    assert "contains other files" in done.stderr


def test_the_lab_lists_claims_and_verdicts(tmp_path: Path) -> None:
    text = inside("lab", cwd=tmp_path).stdout
    assert all(f"{name} " in text for name in CLAIMS)
    assert "confirmed (benchmark)" in text
    found = json.loads(inside("lab", "list", "--json", cwd=tmp_path).stdout)
    assert [one["name"] for one in found] == [*CLAIMS]
    wrong = inside("lab", "run", "several-hedas", cwd=tmp_path)
    assert wrong.stderr == "regard: no claim several-hedas; did you mean several-heads?\n"
    assert "expected names of claims, or --all" in inside("lab", "run", cwd=tmp_path).stderr
