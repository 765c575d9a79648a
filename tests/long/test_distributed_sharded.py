"""Sharded training (FSDP): each process holds a part, the losses are those of one process, and any other resumes it."""

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from regard.data.batching import collate
from regard.storage.run_dir import RunDir
from regard.training.distributed import process_group
from regard.training.optimizers_and_schedules import OPTIMIZERS
from regard.training.sharding import gather_tensors, gathered, local_part, shard, shard_like
from regard.training.train_step import StepScalars, TrainStep
from tests.cli.commands import Done, inside
from tests.cli.test_distributed_packed import (
    STEPS,
    assert_same_training,
    folder as folder,
    in_processes,
    pool as pool,
)
from tests.unit.training.test_packed_batches import dataset_of, loss_fn_of, recipe_of

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
        optimizer = OPTIMIZERS["adam"](list(parameters.values()), recipe.training)
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


def train(rank: int, out: str, cwd: Path, sharding: str, steps: int = STEPS) -> Done:
    # Padded: packed batches of one process use native kernels, which round differently.
    settings = (
        f"training.sharding={sharding}",
        f"training.steps={steps}",
        "training.batching=padded",
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


def test_resume_between_sharded_and_not_and_any_number_of_processes(
    pool: ProcessPoolExecutor, folder: Path
) -> None:
    """2 sharded, 1, 3 sharded, 2 other processes: the same training as in one process."""
    sessions = [(2, "full_shard"), (1, "auto"), (3, "full_shard"), (2, "no_shard")]
    for number, (size, sharding) in enumerate(sessions, 1):
        job = partial(train, out="resumed", cwd=folder, sharding=sharding, steps=4 + 2 * number)
        done = in_processes(pool, size, job)
        assert [one.returncode for one in done] == [0] * size, done
        assert ("sharded over" in done[0].stderr) == (sharding == "full_shard")
        job = partial(train, out="whole", cwd=folder, sharding="auto", steps=4 + 2 * number)
        (one,) = in_processes(pool, 1, job)
        assert one.returncode == 0, one.stderr
    assert_same_training(folder / "whole", folder / "resumed")
