"""Packed training in 1, 2 and 3 processes gives the same losses and weights, also if it is resumed in another number.

They start without torchrun, which takes seconds: its variables are set here, in processes that have imported torch.
"""

import json
import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from regard.data.batching import pack, packed_size, plan_packed, row_owners
from regard.storage.run_dir import RunDir
from regard.training import distributed, run_mirror
from regard.training.checkpoint import checkpoint_files, load_checkpoint
from regard.training.distributed import FlatGradients, backward_order, process_group, share_size
from regard.training.optimizers import OPTIMIZERS
from regard.training.train_step import StepScalars, TrainStep
from tests.cli.commands import Done, environment, inside, sequences, write, write_recipe
from tests.unit.training.test_packed_batches import dataset_of, loss_fn_of, recipe_of

T = TypeVar("T")
STEPS, TOKENS = 12, 160


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with process_pool() as pool:
        yield pool


@contextmanager
def process_pool() -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # so that torch is imported once
    with ProcessPoolExecutor(3, context, _initialize) as pool:
        yield pool


def _initialize() -> None:
    os.environ.clear()
    os.environ.update(environment())
    torch.set_num_threads(1)
    distributed.BUCKET_BYTES = 4096  # several for a small network


def in_processes(pool: ProcessPoolExecutor, size: int, job: Callable[[int], T]) -> list[T]:
    """The results of a job in this many processes, which can form a process group; the job gets the rank."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    running = [
        pool.submit(_with_rank, partial(job, rank), rank, size, port) for rank in range(size)
    ]
    return [one.result(timeout=100) for one in running]


def _with_rank(job: Callable[[], T], rank: int, size: int, port: int) -> T:
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()}, MASTER_ADDR="localhost")
    try:
        return job()
    finally:
        for name in (*values, "MASTER_ADDR"):
            del os.environ[name]


# ---------------------------------------------------------------------------------------------
# Packed rows


def packed_losses(rank: int) -> tuple[list[float], list[torch.Tensor]]:
    """Train on packed rows, as the trainer does on GPUs: the mean losses of this process, and the weights.

    The gradients are exchanged in several buckets while the backward pass runs.
    """
    dataset = dataset_of([(3, 4), (7, 5), (2, 2), (6, 9), (4, 4), (8, 8), (90, 100)] * 3)
    source, target = dataset.source_lengths, dataset.target_lengths
    recipe, losses = recipe_of(encoder_layers=1, decoder_layers=1), []
    with process_group("cpu") as group:
        plan = plan_packed(source, target, packed_size(source, target, 160), 1, 0)
        size = share_size(plan, source, target, group.size)
        loss_fn = loss_fn_of(recipe)
        parameters = backward_order(loss_fn.network)
        optimizer = OPTIMIZERS["adam"](loss_fn.network, recipe.training)
        gradients = FlatGradients(parameters, group) if group.size > 1 else None
        assert gradients is None or len(gradients.buckets) > 10
        step = TrainStep(loss_fn, optimizer, recipe.training, group.device, gradients)
        for rows in plan * 7:
            own = rows[row_owners(source[rows], target[rows], group.size) == group.rank]
            parts = plan_packed(source[own], target[own], size, 1, 0)
            batches = [pack(dataset, own[part], size) for part in parts]
            tokens = int(target[rows].sum()) + len(rows)
            losses.append(group.mean(step(batches, StepScalars(group.size / tokens, 1e-3))))
    return losses, [parameter.detach() for parameter in parameters]


def test_packed_rows_give_the_same_losses_in_any_number_of_processes(
    pool: ProcessPoolExecutor,
) -> None:
    ((losses, weights),) = in_processes(pool, 1, packed_losses)
    assert losses[-1] < 0.9 * losses[0]
    for size in (2, 3):
        for others, their_weights in in_processes(pool, size, packed_losses):
            assert others == pytest.approx(losses, abs=1e-6)
            for ours, theirs in zip(weights, their_weights, strict=True):
                torch.testing.assert_close(theirs, ours, rtol=0, atol=2e-6)


def gloo_threads_after_a_step(rank: int) -> int:
    """The threads of gloo after the end of a process group in which an optimizer was used."""
    with process_group("cpu"):
        weight = torch.ones(3, requires_grad=True)
        torch.autograd.backward(weight.sum())
        torch.optim.Adam([weight]).step()  # imports much of torch
        torch.distributed.all_reduce(weight.detach())
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs the names of threads")
def test_no_thread_of_a_process_group_is_left() -> None:
    """A thread that frees a tensor while Python ends would abort a process that has done its work."""
    with process_pool() as pool:  # in which nothing was imported while there was a process group
        assert in_processes(pool, 2, gloo_threads_after_a_step) == [0, 0]


# ---------------------------------------------------------------------------------------------
# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    texts = [" ".join(one) for one in sequences(60, "abcdefgh", range(2, 7))]
    texts.append(" ".join("abcdefgh" * 20))  # a batch of one row: none is left for other processes
    for name, lines in (("train", texts), ("valid", texts[:25])):
        write(folder / f"{name}.src", lines)
        write(folder / f"{name}.tgt", lines)
    files = {
        name: {"source": f"{side}.src", "target": f"{side}.tgt"}
        for name, side in (("train", "train"), ("valid", "valid"), ("test", "valid"))
    }
    training = {"batching": "packed", "tokens_per_batch": TOKENS, "log_every": 1, "ema": 0.9}
    training |= {
        "schedule": "constant",
        "learning_rate": 0.0001,
        "warmup": 5,
        "keep_checkpoints": 2,
    }
    training |= {"steps": STEPS, "validate_every": 4, "validate_sentences": 7}
    write_recipe(folder, data=files, training=training, evaluation={"metrics": ["bleu"]})
    return folder


def train(rank: int, out: str, cwd: Path, steps: int = STEPS, interrupt: bool = False) -> Done:
    """Train in one of several processes; with ``interrupt``, process 1 gets SIGTERM after a few steps."""
    distributed.SHARED_FOLDER_SECONDS = 0.3
    if interrupt and rank == 1:
        threading.Thread(target=_terminate, args=[cwd / out / "log.jsonl"], daemon=True).start()
    return inside("train", "recipe.yaml", "--out", out, "--set", f"training.steps={steps}", cwd=cwd)


def _terminate(log: Path) -> None:
    while not log.exists() or '"step": 3,' not in log.read_text():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in RunDir(run).log() if event["event"] == name]


def assert_same_training(ours: Path, theirs: Path, tolerance: float = 1e-6) -> None:
    """Two runs have the same losses, to a relative 1e-6, and the same weights, to ``tolerance``."""
    for name in ("step", "valid"):
        losses = [{one["step"]: one["loss"] for one in events(run, name)} for run in (ours, theirs)]
        assert losses[0].keys() == losses[1].keys()
        assert list(losses[1].values()) == pytest.approx(list(losses[0].values()), rel=1e-6, abs=0)
    states = [load_checkpoint(checkpoint_files(run / "checkpoints")[-1]) for run in (ours, theirs)]
    assert states[0][0].tokens == states[1][0].tokens
    for group in ("model", "ema"):
        for name, weight in states[0][1][group].items():
            other = states[1][1][group][name]
            torch.testing.assert_close(other, weight, rtol=0, atol=tolerance)


def test_training_validation_and_scores_are_those_of_one_process(
    pool: ProcessPoolExecutor, folder: Path
) -> None:
    (one,) = in_processes(pool, 1, partial(train, out="one", cwd=folder))
    assert one.returncode == 0, one.stderr
    done = in_processes(pool, 3, partial(train, out="three", cwd=folder))
    assert [process.returncode for process in done] == [0, 0, 0], done
    assert all(not process.stderr for process in done[1:]), "only the main process prints"
    runs = folder / "one", folder / "three"
    assert_same_training(*runs)
    ours, theirs = (json.loads((run / "card.json").read_text()) for run in runs)
    assert theirs["processes"] == 3
    assert theirs["test"] == ours["test"]
    assert theirs["valid_scores"] == ours["valid_scores"]
    outputs = [(run / "test_outputs.jsonl").read_text() for run in runs]
    assert outputs[1] == outputs[0]
    assert len(outputs[0].splitlines()) == 25


def test_resuming_in_the_same_number_of_processes_is_exact(
    pool: ProcessPoolExecutor, folder: Path
) -> None:
    """Three processes, because the sum of two gradients does not depend on their order."""
    tensors = []
    for out, parts in (("parts", (5, STEPS)), ("at-once", (STEPS,))):
        for steps in parts:
            done = in_processes(pool, 3, partial(train, out=out, cwd=folder, steps=steps))
            assert [one.returncode for one in done] == [0, 0, 0], done
        tensors.append(load_checkpoint(checkpoint_files(folder / out / "checkpoints")[-1])[1])
    assert tensors[0].keys() == tensors[1].keys()
    for group, ours in tensors[0].items():
        assert ours.keys() == tensors[1][group].keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, tensors[1][group][name]), (group, name)


def test_sigterm_saves_and_any_number_of_processes_resumes(
    pool: ProcessPoolExecutor, folder: Path
) -> None:
    """Two processes, of which one gets SIGTERM, then one, then three: the same training as in one process."""
    interrupted = partial(train, out="resumed", cwd=folder, steps=10**5, interrupt=True)
    done = in_processes(pool, 2, interrupted)
    assert [one.returncode for one in done] == [130, 130], done
    step = load_checkpoint(checkpoint_files(folder / "resumed" / "checkpoints")[-1])[0].step
    assert f"Stopped at step {step:,}; everything is saved." in done[0].stderr
    for size, steps in ((1, step + 3), (3, step + 6)):
        done = in_processes(pool, size, partial(train, out="resumed", cwd=folder, steps=steps))
        assert [one.returncode for one in done] == [0] * size, done
        assert "Trained so far with" in done[0].stderr
    (one,) = in_processes(pool, 1, partial(train, out="whole", cwd=folder, steps=step + 3))
    (one,) = in_processes(pool, 1, partial(train, out="whole", cwd=folder, steps=step + 6))
    assert one.returncode == 0, one.stderr
    assert_same_training(folder / "whole", folder / "resumed")


# ---------------------------------------------------------------------------------------------
# Machines that share no folder, and mistakes


def train_on_machine(rank: int, folder: Path, local_rank: str, steps: int = STEPS) -> Done:
    os.environ["LOCAL_RANK"] = local_rank
    vars(run_mirror)["SHARED_FOLDER_SECONDS"] = 0.3
    return train(rank, "run", folder / f"machine-{rank}", steps)


def copy_to_machines(folder: Path, machines: Path) -> None:
    for rank in range(2):
        machine = machines / f"machine-{rank}"
        machine.mkdir()
        for path in folder.glob("*.*"):
            (machine / path.name).write_bytes(path.read_bytes())


def test_processes_of_one_machine_that_do_not_see_the_folder_end_with_one_line(
    pool: ProcessPoolExecutor, folder: Path, tmp_path: Path
) -> None:
    copy_to_machines(folder, tmp_path)
    job = partial(train_on_machine, folder=tmp_path, local_rank="1")
    done = in_processes(pool, 2, job)
    assert [one.returncode for one in done] == [2, 2], done
    assert "Traceback" not in done[0].stderr + done[1].stderr


def test_machines_without_a_shared_folder_keep_a_copy_each(
    pool: ProcessPoolExecutor, folder: Path, tmp_path: Path
) -> None:
    """A machine that has lost everything gets the run from the other one."""
    copy_to_machines(folder, tmp_path)
    runs = [tmp_path / f"machine-{rank}" / "run" for rank in range(2)]
    job = partial(train_on_machine, folder=tmp_path, local_rank="0")
    done = in_processes(pool, 2, job)
    assert [one.returncode for one in done] == [0, 0], done
    assert "The machines do not share run: each of the 2 keeps a copy of the run" in done[0].stderr
    assert not done[1].stderr
    assert_same_files(*runs)
    shutil.rmtree(runs[0])
    done = in_processes(pool, 2, partial(job, steps=STEPS + 3))
    assert [one.returncode for one in done] == [0, 0], done
    assert f"Resuming from step {STEPS}" in done[0].stderr
    assert_same_files(*runs)
    whole = partial(train, out="whole-run", cwd=folder)
    for steps in (STEPS, STEPS + 3):
        (one,) = in_processes(pool, 1, partial(whole, steps=steps))
        assert one.returncode == 0, one.stderr
    assert_same_training(folder / "whole-run", runs[1])


def test_copies_of_different_data_are_refused(
    pool: ProcessPoolExecutor, folder: Path, tmp_path: Path
) -> None:
    copy_to_machines(folder, tmp_path)
    for rank, steps in ((0, 5), (1, 6)):
        machine = tmp_path / f"machine-{rank}"
        write(
            machine / "valid.tgt",
            [*(machine / "valid.src").read_text().splitlines()[:-1], str(rank)],
        )
        (one,) = in_processes(pool, 1, partial(train, out="run", cwd=machine, steps=steps))
        assert one.returncode == 0, one.stderr
    before = [(tmp_path / f"machine-{rank}" / "run/card.json").read_text() for rank in range(2)]
    done = in_processes(
        pool, 2, partial(train_on_machine, folder=tmp_path, local_rank="0", steps=9)
    )
    assert [one.returncode for one in done] == [2, 2], done
    assert "regard: run: the copies on " in done[0].stderr
    assert before == [
        (tmp_path / f"machine-{rank}" / "run/card.json").read_text() for rank in range(2)
    ]


def assert_same_files(one: Path, other: Path) -> None:
    """Two run folders have the same files; TensorBoard's are the main process's."""
    contents = [
        {
            str(path.relative_to(run)): path.read_bytes()
            for path in run.rglob("*")
            if path.is_file() and path.name != ".lock" and "events" not in path.parts
        }
        for run in (one, other)
    ]
    assert contents[0].keys() == contents[1].keys()
    assert [name for name in contents[0] if contents[0][name] != contents[1][name]] == []
    assert "model.safetensors" in contents[0]
    assert "card.json" in contents[0]


def test_an_error_of_one_process_ends_all(
    pool: ProcessPoolExecutor, folder: Path, tmp_path: Path
) -> None:
    """A data file is missing on the second machine: the first one must not wait for it."""
    copy_to_machines(folder, tmp_path)
    (tmp_path / "machine-1" / "train.tgt").unlink()
    job = partial(train_on_machine, folder=tmp_path, local_rank="0")
    done = in_processes(pool, 2, job)
    assert [one.returncode for one in done] == [2, 2], done
    assert done[0].stderr == done[1].stderr
    assert "train.tgt" in done[0].stderr
    assert len(done[0].stderr.splitlines()) == 1
