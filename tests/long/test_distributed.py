"""Training in two processes gives the same weights as in one."""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from regard.data.batching import plan_batches
from regard.data.token_dataset import TokenDataset
from regard.storage.run_dir import RunDir
from regard.training.checkpoint import checkpoint_files, load_checkpoint
from tests.cli.commands import (
    PYTHON,
    REGARD,
    Done,
    environment,
    regard,
    sequences,
    succeeds_inside,
    write,
    write_recipe,
)

# Without -W error: torchrun itself warns.
TORCHRUN = [PYTHON[0], "-m", "torch.distributed.run", "--nproc-per-node", "2"]
TORCHRUN += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "regard"]
STEPS, TOKENS = 20, 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    texts = [" ".join(one) for one in sequences(60, "abcdefgh", range(2, 7))]
    texts.append(
        " ".join("abcdefgh" * 20)
    )  # a batch of one row: none is left for the second process
    for name, lines in (("train", texts), ("valid", texts[:5])):
        write(folder / f"{name}.src", lines)
        write(folder / f"{name}.tgt", lines)
    write_recipe(
        folder,
        training={
            "steps": STEPS,
            "tokens_per_batch": TOKENS,
            "log_every": 1,
            "learning_rate": 0.001,
        }
        | {"validate_every": STEPS, "validate_sentences": 2, "schedule": "constant", "warmup": 5},
    )
    for accumulate in ("1", "2"):
        succeeds_inside(*arguments(f"one-{accumulate}", accumulate), cwd=folder)
    return folder


def arguments(out: str, accumulate: str) -> list[str]:
    return ["train", "recipe.yaml", "--out", out, "--set", f"training.accumulate={accumulate}"]


@pytest.mark.parametrize(
    ("accumulate", "start", "option"),
    [("1", TORCHRUN, ()), ("2", REGARD, ("--processes", "2"))],
    ids=["torchrun", "--processes"],
)
def test_two_processes_give_the_same_weights_as_one(
    accumulate: str, start: list[str], option: tuple[str, ...], folder: Path
) -> None:
    one, two = folder / f"one-{accumulate}", folder / f"two-{accumulate}"
    done = regard(*arguments(two.name, accumulate), *option, cwd=folder, start=start)
    assert done.returncode == 0, done.stderr
    assert_odd_batches(one)
    assert_close_weights(one, two)
    assert_only_main_process_reports(two, done)


def test_processes_report_a_mistake_once(folder: Path) -> None:
    done = regard(
        "train", "recipe.yaml", "--set", "training.steps=x", "--processes", "2", cwd=folder
    )
    assert done.returncode == 2
    assert done.stderr.count("training.steps") == done.stderr.count("\n") == 1


def test_batch_norm_uses_the_statistics_of_all_processes(tmp_path: Path) -> None:
    texts = [" ".join(one) for one in sequences(50, "abcdefgh", range(2, 7))]
    for name, lines in (("train", texts), ("valid", texts[:5])):
        write(tmp_path / f"{name}.src", lines)
        write(tmp_path / f"{name}.tgt", lines)
    training = {"steps": STEPS, "tokens_per_batch": TOKENS, "log_every": 1, "learning_rate": 0.1}
    training |= {"validate_every": STEPS, "validate_sentences": 2, "warmup": 5}
    # Not Adam: batch norm cancels some biases, and Adam amplifies the rounding errors of their zero gradients.
    write_recipe(
        tmp_path,
        data={"clean": {"max_tokens": 40}},
        model={"norm": "batch"},
        training={**training, "schedule": "constant", "optimizer": "momentum"},
    )
    succeeds_inside(*arguments("one", "1"), cwd=tmp_path)
    done = regard(*arguments("two", "1"), "--processes", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_odd_batches(tmp_path / "one")  # one batch has a single row: the second process is idle
    losses = [
        [event["loss"] for event in RunDir(tmp_path / run).log() if event["event"] == "step"]
        for run in ("one", "two")
    ]
    assert len(losses[0]) == STEPS
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert_close_weights(tmp_path / "one", tmp_path / "two")


def assert_odd_batches(run: Path) -> None:
    """Some batches cannot be divided evenly: they have an odd number of rows, or a single one."""
    dataset = TokenDataset(run / "data" / "train.arrow")
    plan = plan_batches(dataset.source_lengths, dataset.target_lengths, TOKENS, seed=1, epoch=0)
    rows = [len(batch) for batch in plan]
    assert 1 in rows
    assert any(count % 2 and count > 1 for count in rows)
    assert len(rows) <= STEPS


def assert_close_weights(one: Path, two: Path) -> None:
    ours, theirs = (
        load_checkpoint(checkpoint_files(run / "checkpoints")[-1]) for run in (one, two)
    )
    assert ours[0].tokens == theirs[0].tokens
    assert ours[1]["model"].keys() == theirs[1]["model"].keys()
    for name, weight in ours[1]["model"].items():
        torch.testing.assert_close(theirs[1]["model"][name], weight, rtol=0, atol=1e-5)


def assert_only_main_process_reports(run: Path, done: Done) -> None:
    """Only the main process writes and prints."""
    events = RunDir(run).log()
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == list(range(1, STEPS + 1))
    assert [event["event"] for event in events].count("start") == 1
    assert len(list((run / "events").iterdir())) == 1
    assert done.stderr.count("Training stopped") == 1


LAUNCHER = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a signal for it")
def test_a_process_dies_with_its_torchrun(finished_run: Path) -> None:
    """A command that waits for its standard input, and a launcher that is killed."""
    variables = {**environment(), "TORCHELASTIC_RUN_ID": "none", "PYTHONUNBUFFERED": "1"}
    read, write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *REGARD, "translate", str(finished_run)],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=write,
        start_new_session=True,
    ) as launcher:
        os.close(write)
        started = os.read(read, 100)
        assert started.startswith(b"Computing in"), "the model is loaded"
        launcher.kill()
        launcher.wait()
        while ended := bool(select.select([read], [], [], 20)[0]):
            if not os.read(read, 4096):  # no process is left that could write to it
                break
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        os.close(read)
        assert ended
