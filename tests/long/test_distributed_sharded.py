"""Sharded training (FSDP): each process holds a part, the losses are those of one process, and any other resumes it."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from regard.data.batching import collate
from regard.storage.run_dir import RunDir
from regard.training import run_mirror
from regard.training.checkpoint import checkpoint_files, checkpoint_name
from regard.training.distributed import process_group
from regard.training.optimizers import OPTIMIZERS
from regard.training.sharding import gather_tensors, gathered, local_part, shard, shard_like
from regard.training.train_step import StepScalars, TrainStep
from tests.cli.commands import Done, inside
from tests.long.test_distributed_packed import (
    STEPS,
    assert_same_files,
    assert_same_training,
    copy_to_machines,
    folder as folder,
    in_processes,
    process_pool,
)
from tests.unit.training.test_packed_batches import dataset_of, loss_fn_of, recipe_of


@pytest.fixture
def pool() -> Iterator[ProcessPoolExecutor]:
    """New processes for each test: DTensor caches shapes, which are wrong if a process gets another rank later."""
    with process_pool() as pool:
        yield pool


# ---------------------------------------------------------------------------------------------
# The parts


def held_bytes(rank: int) -> tuple[float, float, bool]:
    """Train for one step: the shares of weights and optimizer state of this process, and whether gathering works."""
    recipe = recipe_of(encoder_layers=2, decoder_layers=2)
    dataset = dataset_of([(3, 4), (7, 5), (2, 2), (6, 9)])
    rows = torch.arange(4).numpy()
    with process_group("cpu") as group:
        torch.manual_seed(1)
        loss_fn = loss_fn_of(recipe)
        before = {name: one.detach().clone() for name, one in loss_fn.named_parameters()}
        shard(loss_fn, group)
        parameters = dict(loss_fn.named_parameters())
        whole = gather_tensors(parameters, keep=True)
        same = all(bool(whole[name].equal(before[name])) for name in before)
        for name, parameter in parameters.items():
            part = local_part(shard_like(before[name], parameter))
            same = same and part.equal(local_part(parameter))
        with gathered(loss_fn):
            now = dict(loss_fn.named_parameters())
            same = same and all(now[name].equal(before[name]) for name in before)
        optimizer = OPTIMIZERS["adam"](loss_fn, recipe.training)
        step = TrainStep(loss_fn, optimizer, recipe.training, group.device)
        step([collate(dataset, rows, group.rank, group.size)], StepScalars(group.size / 24, 1e-3))
        total = sum(one.numel() for one in before.values())
        held = sum(local_part(one).numel() for one in loss_fn.parameters())
        moments = sum(local_part(one["exp_avg"]).numel() for one in optimizer.state.values())
    return held / total, moments / total, same


def test_each_process_holds_its_part_of_weights_and_moments(pool: ProcessPoolExecutor) -> None:
    for size in (2, 3):
        results = in_processes(pool, size, held_bytes)
        assert sum(weights for weights, *_ in results) == pytest.approx(1)
        for weights, moments, same in results:
            # Rows are divided, and those of small weights not evenly by 3.
            assert weights == pytest.approx(1 / size, abs=0.0 if size == 2 else 0.02)
            assert moments == weights
            assert same


# ---------------------------------------------------------------------------------------------
# The command


def train(
    rank: int, out: str, cwd: Path, sharding: str, steps: int = STEPS, batching: str = "padded"
) -> Done:
    settings = (
        f"training.sharding={sharding}",
        f"training.steps={steps}",
        f"training.batching={batching}",
    )
    options = [part for setting in settings for part in ("--set", setting)]
    return inside("train", "recipe.yaml", "--out", out, *options, cwd=cwd)


def test_sharded_training_is_that_of_one_process(pool: ProcessPoolExecutor, folder: Path) -> None:
    for size in (1, 2):
        job = partial(train, out=f"sharded-{size}", cwd=folder, sharding="full_shard")
        done = in_processes(pool, size, job)
        assert [process.returncode for process in done] == [0] * size, done
    assert "sharded over 2 processes" in done[0].stderr
    runs = folder / "sharded-1", folder / "sharded-2"
    assert_same_training(*runs)
    ours, theirs = map(RunDir, runs)
    assert ours.test_outputs_file.read_text() == theirs.test_outputs_file.read_text()
    weights, others = ours.weights(), theirs.weights()
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("batching", "tolerance"),
    # Packed batches of processes that are not sharded use native kernels, which round differently. Adam divides a
    # gradient by its size, so a weight whose gradient is nearly zero differs by up to a part of the learning rate.
    [("padded", 1e-6), ("packed", 2e-5)],
)
def test_resume_between_sharded_and_not_and_any_number_of_processes(
    batching: str, tolerance: float, pool: ProcessPoolExecutor, folder: Path
) -> None:
    """2 and 3 sharded, 1, 3 sharded, 2 other, 2 sharded processes: the same training as in one process."""
    sharded = "full_shard"
    sessions = [
        (2, sharded),
        (3, sharded),
        (1, "auto"),
        (3, sharded),
        (2, "no_shard"),
        (2, sharded),
    ]
    resumed, whole = f"resumed-{batching}", f"whole-{batching}"
    for number, (size, sharding) in enumerate(sessions, 1):
        job = partial(train, cwd=folder, steps=4 + 2 * number, batching=batching)
        with process_pool() as others:  # DTensor caches shapes, as above
            done = in_processes(others, size, partial(job, out=resumed, sharding=sharding))
        assert [one.returncode for one in done] == [0] * size, done
        assert ("sharded over" in done[0].stderr) == (sharding == "full_shard")
        newest = checkpoint_files(folder / resumed / "checkpoints")[-1]
        assert newest.name == checkpoint_name(4 + 2 * number, in_parts=sharding == "full_shard")
        (one,) = in_processes(pool, 1, partial(job, out=whole, sharding="auto"))
        assert one.returncode == 0, one.stderr
    assert_same_training(folder / whole, folder / resumed, tolerance)


def train_on_machine(rank: int, folder: Path) -> Done:
    os.environ["LOCAL_RANK"] = "0"
    vars(run_mirror)["SHARED_FOLDER_SECONDS"] = 0.3
    return train(rank, "run", folder / f"machine-{rank}", "full_shard")


def test_machines_without_a_shared_folder_have_whole_checkpoints(
    pool: ProcessPoolExecutor, folder: Path, tmp_path: Path
) -> None:
    copy_to_machines(folder, tmp_path)
    done = in_processes(pool, 2, partial(train_on_machine, folder=tmp_path))
    assert [one.returncode for one in done] == [0, 0], done
    assert "sharded over 2 processes" in done[0].stderr
    assert "each of the 2 keeps a copy of the run" in done[0].stderr
    runs = [tmp_path / f"machine-{rank}" / "run" for rank in range(2)]
    assert_same_files(*runs)
    files = checkpoint_files(runs[1] / "checkpoints")
    assert files[-1].name == checkpoint_name(STEPS)
    assert all(path.is_file() for path in files)
