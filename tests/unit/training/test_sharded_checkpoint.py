"""Checkpoints in parts: each process writes its own, any reads them all, and what is incomplete is never used."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from regard.errors import RegardError
from regard.storage.run_dir import CHECKPOINT_STATE, RunDir
from regard.storage.run_listing import Prunable, prune
from regard.training import sharded_checkpoint
from regard.training.checkpoint import (
    CheckpointWriter,
    TrainingState,
    average_checkpoints,
    checkpoint_files,
    checkpoint_name,
    delete_checkpoints,
    load_checkpoint,
    load_training_state,
    save_checkpoint,
)
from regard.training.distributed import is_connection_lost, process_group
from regard.training.sharded_checkpoint import PartWriter
from regard.training.sharding import local_part, shard
from tests.long.test_distributed_packed import in_processes, process_pool

SHAPE = (7, 5)
"""of the weight: its rows cannot be divided evenly"""


def weight_at(step: int) -> Tensor:
    return torch.arange(35.0).view(SHAPE) + 100 * step


def tensors_at(step: int) -> dict[str, dict[str, Tensor]]:
    """What the checkpoint of a step has."""
    weight = weight_at(step)
    state = {"weight/exp_avg": weight / 2, "weight/step": torch.tensor(float(step))}
    return {"model": {"weight": weight}, "ema": {"weight": -weight}, "optimizer": state}


def sharded_weight(group: Any, step: int) -> Tensor:
    layer = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight_at(step))
    shard(layer, group)
    return layer.weight.detach()


def save(
    rank: int,
    folder: Path,
    steps: tuple[int, ...],
    tokens: int = 0,
    prepare: Callable[[int], None] = lambda rank: None,
) -> str:
    """Save checkpoints in one of several processes; returns the error."""
    prepare(rank)
    with process_group("cpu") as group:
        writer = CheckpointWriter(RunDir(folder), group)
        for step in steps:
            weight = sharded_weight(group, step)
            moments = {"weight/exp_avg": weight / 2, "weight/step": torch.tensor(float(step))}
            state = TrainingState(step, tokens=tokens)
            writer.start(state, {"weight": weight}, {"weight": -weight}, moments)
            state.step += 1  # training goes on
            local_part(weight).zero_()
        try:
            writer.wait()
        except (RegardError, SystemExit) as error:
            return repr(error)
    return ""


@pytest.fixture
def pool() -> Iterator[ProcessPoolExecutor]:
    """New processes for each test: DTensor caches shapes, which are wrong if a process gets another rank later."""
    with process_pool() as pool:
        yield pool


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder to which two processes have saved the steps 1 and 2. Tests must not change it."""
    run = RunDir(tmp_path_factory.mktemp("parts") / "run")
    run.checkpoints.mkdir(parents=True)
    with process_pool() as pool:
        job = partial(save, folder=run.folder, steps=(1, 2), prepare=without_gathering)
        assert in_processes(pool, 2, job) == ["", ""]
    return run.folder


@pytest.fixture
def run(two_saved: Path, tmp_path: Path) -> RunDir:
    return RunDir(shutil.copytree(two_saved, tmp_path / "run"))


def without_gathering(rank: int) -> None:
    from torch.distributed.tensor import DTensor

    def full_tensor(*_: object, **__: object) -> Tensor:
        raise AssertionError("a whole tensor was gathered")

    DTensor.full_tensor = full_tensor  # type: ignore[method-assign]


def assert_same(actual: dict[str, dict[str, Tensor]], step: int) -> None:
    for group, tensors in tensors_at(step).items():
        assert actual[group].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(actual[group][name], tensor), (group, name)


# Round trip


def test_each_process_writes_its_part_and_one_process_reads_all(run: RunDir) -> None:
    files = checkpoint_files(run.checkpoints)
    assert [path.name for path in files] == ["step-000000001", "step-000000002"]
    for step, path in enumerate(files, 1):
        state, tensors = load_checkpoint(path)
        assert state == load_training_state(path) == TrainingState(step)
        assert_same(tensors, step)
        rows = []
        for rank in (1, 2):
            with safe_open(path / f"part-0000{rank}.safetensors", "pt") as part:
                rows.append(part.get_slice("optimizer.weight/exp_avg").get_shape())
        assert rows == [[4, 5], [3, 5]]
    assert not [path for path in run.checkpoints.iterdir() if path.name.startswith(".")]


def load_part(rank: int, path: Path) -> list[tuple[int, ...]]:
    """Read a checkpoint as a sharded run does: the shapes of the parts of this process, which must be right."""
    with process_group("cpu") as group:
        weight = sharded_weight(group, 2)
        state, tensors = load_checkpoint(path, like={"weight": weight}, group=group)
        assert state.step == 2
        parts = [tensors["model"]["weight"], tensors["optimizer"]["weight/exp_avg"]]
        assert local_part(parts[0]).equal(local_part(weight))
        assert local_part(parts[1]).equal(local_part(weight) / 2)
        assert tensors["optimizer"]["weight/step"] == 2
        return [tuple(local_part(part).shape) for part in parts]


def test_three_processes_read_their_parts_of_what_two_have_written(
    pool: ProcessPoolExecutor, run: RunDir
) -> None:
    path = run.checkpoints / checkpoint_name(2, in_parts=True)
    assert in_processes(pool, 3, partial(load_part, path=path)) == [
        [(3, 5)] * 2,
        [(3, 5)] * 2,
        [(1, 5)] * 2,
    ]


def test_saving_a_step_again_replaces_only_its_training_state(
    pool: ProcessPoolExecutor, run: RunDir
) -> None:
    (_, path) = checkpoint_files(run.checkpoints)
    before = {file.name: file.stat().st_mtime_ns for file in path.glob("part-*")}
    job = partial(save, folder=run.folder, steps=(2,), tokens=99)
    assert in_processes(pool, 2, job) == ["", ""]
    state, tensors = load_checkpoint(path)
    assert state == TrainingState(2, tokens=99)
    assert_same(tensors, 2)
    assert {file.name: file.stat().st_mtime_ns for file in path.glob("part-*")} == before


def test_checkpoints_in_parts_and_in_files_are_averaged(run: RunDir) -> None:
    whole = run.checkpoints / checkpoint_name(6)
    save_checkpoint(whole, TrainingState(6), *tensors_at(6).values())
    files = checkpoint_files(run.checkpoints)
    assert files[-1] == whole
    mean = average_checkpoints(files)
    assert torch.equal(mean["weight"], -weight_at(3))  # of the moving averages of steps 1, 2 and 6


# Incomplete and damaged checkpoints


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "flipped": ("part-00002*", flip, "do not match the hash"),
    "truncated": ("part-00001*", lambda file: os.truncate(file, 50), "do not match the hash"),
    "missing": ("part-00002*", lambda file: file.unlink(), "missing"),
    "extra": (
        "part-00001*",
        lambda file: shutil.copy(file, file.with_name("part-00009.safetensors")),
        "does not name it",
    ),
    "state": (CHECKPOINT_STATE, flip, "not a complete checkpoint"),
    "other JSON": (CHECKPOINT_STATE, lambda file: file.write_text("[1]"), "complete checkpoint"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_part_is_refused_by_name(run: RunDir, kind: str) -> None:
    pattern, damage, problem = DAMAGE[kind]
    path = checkpoint_files(run.checkpoints)[-1]
    file = min(path.glob(pattern))
    damage(file)
    with pytest.raises(RegardError, match=problem) as caught:
        load_checkpoint(path)
    name = "part-00009.safetensors" if kind == "extra" else file.name
    assert str(caught.value).startswith(f"{path / name}: not a complete checkpoint: ")
    assert "\n" not in str(caught.value)


def test_a_changed_training_state_is_noticed(run: RunDir) -> None:
    path = checkpoint_files(run.checkpoints)[-1]
    contents = json.loads((path / CHECKPOINT_STATE).read_text())
    contents["state"]["tokens"] += 1
    (path / CHECKPOINT_STATE).write_text(json.dumps(contents))
    with pytest.raises(
        RegardError, match=r"state\.json: .*: its contents do not match its checksum"
    ):
        load_training_state(path)


def killed_while_writing(rank: int) -> None:
    """The second process is killed when it has written a part of step 3, and the first one waits for it."""

    def write_data(writer: PartWriter, *arguments: Any) -> Any:
        result = original(writer, *arguments)
        if rank == 1 and writer.complete.name == "step-000000003":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    original = PartWriter.write_data
    vars(sharded_checkpoint)["PartWriter"].write_data = write_data


def test_a_kill_during_an_asynchronous_save_leaves_the_previous_checkpoint(run: RunDir) -> None:
    job = partial(save, folder=run.folder, steps=(3,), prepare=killed_while_writing)
    with pytest.raises(RuntimeError) as caught, process_pool() as pool:
        in_processes(pool, 2, job)
    # The pool notices it, or before that the first process.
    assert isinstance(caught.value, BrokenProcessPool) or is_connection_lost(caught.value)
    files = checkpoint_files(run.checkpoints)
    assert [path.name for path in files] == ["step-000000001", "step-000000002"]
    assert_same(load_checkpoint(files[-1])[1], 2)
    (partial_folder,) = run.checkpoints.glob(".*")
    assert set(run.temporary_files()) == set(partial_folder.iterdir())
    assert run.temporary_files(), "it was killed too early"
    run.delete_files(run.temporary_files())
    assert sorted(run.checkpoints.iterdir()) == files


def full_disk(rank: int) -> None:
    def sha256(path: Path) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank == 1:
        vars(sharded_checkpoint)["sha256"] = sha256


def test_what_goes_wrong_in_one_process_is_reported_once(
    pool: ProcessPoolExecutor, run: RunDir
) -> None:
    job = partial(save, folder=run.folder, steps=(3,), prepare=full_disk)
    path = run.checkpoints / checkpoint_name(3, in_parts=True)
    message = f"{path}: cannot be written: No space left on device"
    assert in_processes(pool, 2, job) == [repr(RegardError(message)), repr(SystemExit(2))]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        "step-000000001",
        "step-000000002",
    ]


# Files


def test_checkpoints_in_parts_are_deleted_as_a_whole(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = checkpoint_files(run.checkpoints)
    with monkeypatch.context() as patch:  # killed before anything is deleted
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        delete_checkpoints(run.checkpoints, files[1:])
    assert checkpoint_files(run.checkpoints) == files[1:]
    run.delete_files(run.temporary_files())
    assert [*run.checkpoints.iterdir()] == files[1:]
    delete_checkpoints(run.checkpoints, [])
    assert not [*run.checkpoints.iterdir()]


def test_a_folder_without_a_training_state_is_no_checkpoint(run: RunDir) -> None:
    files = checkpoint_files(run.checkpoints)
    (files[-1] / CHECKPOINT_STATE).unlink()
    assert checkpoint_files(run.checkpoints) == files[:1]


def test_a_file_of_the_same_step_takes_the_place_of_the_parts(run: RunDir) -> None:
    whole = run.checkpoints / checkpoint_name(2)
    save_checkpoint(whole, TrainingState(2), *tensors_at(2).values())
    files = checkpoint_files(run.checkpoints)
    assert [path.name for path in files] == ["step-000000001", whole.name]
    delete_checkpoints(run.checkpoints, files)
    assert sorted(run.checkpoints.iterdir()) == files


def test_parts_replace_a_file_of_the_same_step(pool: ProcessPoolExecutor, run: RunDir) -> None:
    save_checkpoint(run.checkpoints / checkpoint_name(3), TrainingState(3), *tensors_at(3).values())
    assert in_processes(pool, 2, partial(save, folder=run.folder, steps=(3,), tokens=5)) == ["", ""]
    newest = checkpoint_files(run.checkpoints)[-1]
    assert newest.is_dir()
    assert load_training_state(newest).tokens == 5
    assert not (run.checkpoints / checkpoint_name(3)).exists()


def test_pruning_deletes_the_parts_and_nothing_else(run: RunDir) -> None:
    notes = checkpoint_files(run.checkpoints)[0] / "notes.txt"
    notes.write_text("mine")
    files = [(path, path.stat().st_size) for path in run.all_checkpoint_files()]
    assert prune(Prunable(run, {"checkpoints": files})) == sum(size for _, size in files)
    assert [path for path in run.checkpoints.rglob("*") if path.is_file()] == [notes]
    assert checkpoint_files(run.checkpoints) == []
    assert [*run.checkpoints.iterdir()] == [notes.parent]
