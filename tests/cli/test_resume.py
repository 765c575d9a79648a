"""A training that was stopped, in whatever way, goes on as if nothing had happened: bit for bit."""

import hashlib
import random
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from regard.storage.run_dir import RunDir
from regard.training.checkpoint import checkpoint_files, load_checkpoint, step_of
from tests.cli.commands import (
    Done,
    in_workers,
    inside,
    started,
    write,
    write_recipe,
    write_task,
)

STEPS = 200
EMA = "0", "0.99"  # without a moving average, and with one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with all that could disturb exactness, and a run of it that nothing interrupted."""
    folder = tmp_path_factory.mktemp("resume")
    write_task(folder, sorted, count=1500)
    write_recipe(
        folder,
        model={"d_model": 32, "heads": 2, "d_ff": 32, "dropout": 0.2},
        training={"steps": STEPS, "schedule": "noam", "warmup": 40, "tokens_per_batch": 256}
        | {"accumulate": 2, "validate_every": 50, "checkpoint_every": 10, "keep_checkpoints": 3}
        | {"validate_sentences": 0, "best_checkpoint_metric": "loss", "log_every": 10},
    )
    runs = {f"unbroken-{ema}": partial(train, folder, f"unbroken-{ema}", ema) for ema in EMA}
    halves = {f"halves-{ema}": partial(go_halfway_twice, folder, ema) for ema in EMA}
    for done in in_workers(runs | halves).values():
        assert done.returncode == 0, done.stderr
    return folder


def arguments(out: str, ema: str = "0", steps: int = STEPS) -> list[str]:
    sets = ["--set", f"training.ema={ema}", "--set", f"training.steps={steps}"]
    return ["train", "recipe.yaml", "--out", out, *sets]


def train(folder: Path, out: str, ema: str = "0", steps: int = STEPS) -> Done:
    return inside(*arguments(out, ema, steps), cwd=folder)


def state(run: Path) -> dict[str, object]:
    """All that a run has become: the bytes of every tensor, the progress, and the file of weights."""
    progress, groups = load_checkpoint(checkpoint_files(run / "checkpoints")[-1])
    assert groups["optimizer"]
    tensors = {
        f"{group}.{name}": tensor.numpy().tobytes()
        for group, named in groups.items()
        for name, tensor in named.items()
    }
    progress.seconds = 0.0
    return {**tensors, "progress": progress, "weights": RunDir(run).weights_file.read_bytes()}


def assert_same_run(found: Path, wanted: Path) -> None:
    one, other = state(found), state(wanted)
    assert one.keys() == other.keys()
    assert [name for name in other if one[name] != other[name]] == []


def files(folder: Path) -> dict[str, str]:
    """The files of a folder and what is in them."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def underway(folder: Path, out: str, beyond: int = 0) -> subprocess.Popen[str]:
    """A training process that has just saved a checkpoint of its own."""
    process = started(*arguments(out), cwd=folder)
    deadline = time.monotonic() + 60
    while newest(folder / out) <= beyond:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return process


def newest(run: Path) -> int:
    return max(map(step_of, checkpoint_files(run / "checkpoints")), default=0)


# Going on


def go_halfway_twice(folder: Path, ema: str) -> Done:
    run = folder / f"halves-{ema}"
    half = train(folder, run.name, ema, STEPS // 2)
    if half.returncode or newest(run) != STEPS // 2:
        return half
    return train(folder, run.name, ema)


@pytest.mark.parametrize("ema", EMA)
def test_half_and_half_is_the_whole_with_and_without_a_moving_average(
    ema: str, folder: Path
) -> None:
    assert_same_run(folder / f"halves-{ema}", folder / f"unbroken-{ema}")


def test_a_killed_training_goes_on_exactly(folder: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown when the test fails
    draw, run = random.Random(seed), folder / "killed"
    for _ in range(2):
        process = underway(folder, "killed", newest(run))
        time.sleep(draw.uniform(0, 0.3))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        for path in checkpoint_files(run / "checkpoints"):
            load_checkpoint(path)
    assert newest(run) < STEPS
    assert train(folder, "killed").returncode == 0
    assert_same_run(run, folder / "unbroken-0")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_training_saves_says_so_and_goes_on_exactly(
    number: signal.Signals, folder: Path
) -> None:
    run = folder / number.name
    process = underway(folder, run.name)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    step = newest(run)
    assert process.returncode == 130
    assert f"Stopped at step {step}; everything is saved.\nTo go on, give the same" in said
    assert "Traceback" not in said
    assert step < STEPS
    done = train(folder, run.name)
    assert done.returncode == 0
    assert f"Going on from step {step} of {STEPS}" in done.stderr
    assert_same_run(run, folder / "unbroken-0")


def test_a_finished_run_is_left_as_it_is(folder: Path) -> None:
    before = files(folder / "unbroken-0")
    done = train(folder, "unbroken-0")
    assert done.returncode == 0
    assert done.stderr == f"unbroken-0 was trained before: all {STEPS} steps are done\n"
    assert files(folder / "unbroken-0") == before


# Not going on


def refused(done: Done) -> str:
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    message = done.stderr.splitlines()[-1]
    assert message.startswith("regard: ")
    return message


def test_a_run_of_another_recipe_is_refused_with_the_differences(folder: Path) -> None:
    before = files(folder / "unbroken-0")
    done = inside(*arguments("unbroken-0"), "--set", "model.dropout=0.3", cwd=folder)
    message = refused(done)
    assert "another recipe" in message
    assert "model.dropout is 0.2 there, 0.3 here" in message
    assert "training." not in message
    assert files(folder / "unbroken-0") == before


def test_a_folder_of_other_files_is_refused_and_left_as_it_is(folder: Path) -> None:
    (folder / "letters").mkdir()
    write(folder / "letters" / "mother.txt", ["Dear mother,"])
    before = files(folder / "letters")
    assert "mother.txt" in refused(train(folder, "letters"))
    assert files(folder / "letters") == before


def test_changed_training_data_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "unbroken-0", tmp_path / "run")
    for path in filter(Path.is_file, folder.iterdir()):
        shutil.copy(path, tmp_path)
    with (tmp_path / "train.src").open("a") as source, (tmp_path / "train.tgt").open("a") as target:
        source.write("a b\n")
        target.write("a b\n")
    before = files(tmp_path / "run")
    done = train(tmp_path, "run", steps=STEPS)
    assert "the data have changed" in refused(done)
    assert files(tmp_path / "run") == before


def test_a_second_process_in_one_folder_is_refused(folder: Path) -> None:
    first = underway(folder, "shared")
    first.send_signal(signal.SIGSTOP)
    try:
        assert "another process is training here" in refused(train(folder, "shared"))
    finally:
        first.kill()
        first.communicate()


def test_a_start_that_failed_stands_in_nobodys_way(folder: Path) -> None:
    wrong = inside(*arguments("again"), "--set", "data.train.source=typo.src", cwd=folder)
    assert "typo.src" in refused(wrong)
    done = train(folder, "again", steps=2)
    assert done.returncode == 0, done.stderr
