"""Training resumes bit for bit, however it was stopped."""

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
from regard.training.checkpoint import checkpoint_files, checkpoint_step, load_checkpoint
from regard.training.train_step import num_threads
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
EMA = "0", "0.99"  # without and with a moving average


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with everything that could break exact resuming, and uninterrupted runs of it."""
    folder = tmp_path_factory.mktemp("resume")
    write_task(folder, sorted, count=1500)
    write_recipe(
        folder,
        model={"d_model": 32, "heads": 2, "d_ff": 32, "dropout": 0.2},
        training={"steps": STEPS, "schedule": "noam", "warmup": 40, "tokens_per_batch": 256}
        | {"accumulate": 2, "validate_every": 50, "checkpoint_every": 10, "keep_checkpoints": 3}
        | {"validate_sentences": 0, "best_checkpoint_metric": "loss", "log_every": 10},
    )
    runs = {
        f"uninterrupted-{ema}": partial(train, folder, f"uninterrupted-{ema}", ema) for ema in EMA
    }
    halves = {f"halves-{ema}": partial(train_in_two_halves, folder, ema) for ema in EMA}
    for done in in_workers(runs | halves).values():
        assert done.returncode == 0, done.stderr
    return folder


def arguments(out: str, ema: str = "0", steps: int = STEPS) -> list[str]:
    sets = ["--set", f"training.ema={ema}", "--set", f"training.steps={steps}"]
    return ["train", "recipe.yaml", "--out", out, *sets]


def train(folder: Path, out: str, ema: str = "0", steps: int = STEPS) -> Done:
    return inside(*arguments(out, ema, steps), cwd=folder)


def state(run: Path) -> dict[str, object]:
    """The complete state of a run: the bytes of every tensor, the training state, and the weights file."""
    training_state, groups = load_checkpoint(checkpoint_files(run / "checkpoints")[-1])
    assert groups["optimizer"]
    tensors = {
        f"{group}.{name}": tensor.numpy().tobytes()
        for group, named in groups.items()
        for name, tensor in named.items()
    }
    training_state.seconds = 0.0
    return {**tensors, "state": training_state, "weights": RunDir(run).weights_file.read_bytes()}


def assert_same_run(actual: Path, expected: Path) -> None:
    one, other = state(actual), state(expected)
    assert one.keys() == other.keys()
    assert [name for name in other if one[name] != other[name]] == []


def files(folder: Path) -> dict[str, str]:
    """The files of a folder and their hashes. The lock names the last process that opened the run."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def start_training(folder: Path, out: str, after: int = 0) -> subprocess.Popen[str]:
    """A training process that has just saved a checkpoint later than step ``after``."""
    process = started(*arguments(out), cwd=folder)
    deadline = time.monotonic() + 60
    while newest_step(folder / out) <= after:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return process


def newest_step(run: Path) -> int:
    return max(map(checkpoint_step, checkpoint_files(run / "checkpoints")), default=0)


# Resuming


def train_in_two_halves(folder: Path, ema: str) -> Done:
    run = folder / f"halves-{ema}"
    half = train(folder, run.name, ema, STEPS // 2)
    if half.returncode or newest_step(run) != STEPS // 2:
        return half
    return train(folder, run.name, ema)


@pytest.mark.parametrize("ema", EMA)
def test_two_halves_equal_one_uninterrupted_run(ema: str, folder: Path) -> None:
    assert_same_run(folder / f"halves-{ema}", folder / f"uninterrupted-{ema}")


@pytest.mark.parametrize(("precision", "threads"), [("fp32", 1), ("bf16", 1), ("fp32", 3)])
def test_two_halves_of_packed_training_equal_one_run(
    precision: str, threads: int, folder: Path
) -> None:
    """With native kernels, if this machine has them: the dropout masks follow from the step.

    With several threads, packed rows are computed at the same time.
    """
    sets = ["--set", "training.batching=packed", "--set", f"training.precision={precision}"]
    sets += ["--set", "training.warmup=10", "--set", "training.validate_every=20"]
    whole, halves = (f"packed-{part}-{precision}-{threads}" for part in ("whole", "halves"))
    for out, steps in ((whole, 40), (halves, 20), (halves, 40)):
        with num_threads(threads):
            done = inside(*arguments(out, steps=steps), *sets, cwd=folder)
        assert done.returncode == 0, done.stderr
    assert_same_run(folder / halves, folder / whole)


def test_a_killed_training_resumes_exactly(folder: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown when the test fails
    draw, run = random.Random(seed), folder / "killed"
    for _ in range(2):
        process = start_training(folder, "killed", newest_step(run))
        time.sleep(draw.uniform(0, 0.3))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        for path in checkpoint_files(run / "checkpoints"):
            load_checkpoint(path)
    assert newest_step(run) < STEPS
    assert train(folder, "killed").returncode == 0
    assert_same_run(run, folder / "uninterrupted-0")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_training_saves_and_resumes_exactly(
    number: signal.Signals, folder: Path
) -> None:
    run = folder / number.name
    process = start_training(folder, run.name)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    step = newest_step(run)
    assert process.returncode == 130
    assert (
        f"Stopped at step {step}; everything is saved.\nTo resume, run the same command" in stderr
    )
    assert "Traceback" not in stderr
    assert step < STEPS
    done = train(folder, run.name)
    assert done.returncode == 0
    assert f"Resuming from step {step} of {STEPS}" in done.stderr
    assert_same_run(run, folder / "uninterrupted-0")


def test_a_finished_run_is_left_unchanged(folder: Path) -> None:
    before = files(folder / "uninterrupted-0")
    done = train(folder, "uninterrupted-0")
    assert done.returncode == 0
    assert done.stderr == (
        f"uninterrupted-0 is already trained: all {STEPS} steps are done; to train longer, choose another --out, "
        "and add --from uninterrupted-0 to start from this model\n"
    )
    assert files(folder / "uninterrupted-0") == before


# Refusing to resume


def refused(done: Done) -> str:
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    message = done.stderr.splitlines()[-1]
    assert message.startswith("regard: ")
    return message


def test_a_run_of_another_recipe_is_refused_with_the_differences(folder: Path) -> None:
    before = files(folder / "uninterrupted-0")
    done = inside(*arguments("uninterrupted-0"), "--set", "model.dropout=0.3", cwd=folder)
    message = refused(done)
    assert "a different recipe" in message
    assert "model.dropout is 0.2 there, 0.3 here" in message
    assert "training." not in message
    assert files(folder / "uninterrupted-0") == before


def test_a_folder_of_other_files_is_refused_and_left_unchanged(folder: Path) -> None:
    (folder / "letters").mkdir()
    write(folder / "letters" / "mother.txt", ["Dear mother,"])
    before = files(folder / "letters")
    assert "mother.txt" in refused(train(folder, "letters"))
    assert files(folder / "letters") == before


def test_changed_training_data_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "uninterrupted-0", tmp_path / "run")
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
    first = start_training(folder, "shared")
    first.send_signal(signal.SIGSTOP)
    try:
        assert "another process is training here" in refused(train(folder, "shared"))
    finally:
        first.kill()
        first.communicate()


def test_a_failed_start_does_not_block_the_next_one(folder: Path) -> None:
    wrong = inside(*arguments("again"), "--set", "data.train.source=typo.src", cwd=folder)
    assert "typo.src" in refused(wrong)
    done = inside(*arguments("again", steps=2), "--set", "training.warmup=2", cwd=folder)
    assert done.returncode == 0, done.stderr
