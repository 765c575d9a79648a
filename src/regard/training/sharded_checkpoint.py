"""Checkpoints in parts: a folder to which each process of a sharded run writes what it holds; nothing is gathered.

    step-000000100/
        part-00001.safetensors    of the first process
        part-00002.safetensors    of the second one
        state.json                the training state, and the hash of each other file

torch.distributed.checkpoint (DCP) writes them while training continues, and reads them back for any number of
processes. Its format for Hugging Face is used, because its own one is a pickle. The folder appears when all parts are
complete: they are written to a temporary folder, which the main process renames.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult

from regard.errors import RegardError
from regard.storage.atomic_files import (
    CHECKSUM,
    save_tensors,
    sync,
    temporary_folder,
    tensors_checksum,
    write_text,
)
from regard.storage.run_dir import CHECKPOINT_STATE, sha256
from regard.training.distributed import ProcessGroup
from regard.training.sharding import is_sharded

STATE, FILES = "state", "files"
"""The keys of state.json, besides its checksum."""


# ---------------------------------------------------------------------------------------------
# Writing


class PendingParts(NamedTuple):
    """A checkpoint in parts that is being written."""

    path: Path
    partial: Path
    group: ProcessGroup
    saving: Future[Any]

    def result(self) -> None:
        """Wait until the checkpoint of all processes is complete; raises what went wrong in one of them.

        Only the first process of each machine prints the message, as with ``ProcessGroup.in_each``.
        """
        try:
            self.saving.result()
        except CheckpointException as failed:  # no process writes any more
            if self.group.is_main:
                shutil.rmtree(self.partial, ignore_errors=True)
            error = next(error for error, _ in failed.failures.values())
            if isinstance(error, OSError):
                problem = error.strerror or str(error)
                error = RegardError(f"{self.path}: cannot be written: {problem}")
            if isinstance(error, RegardError) and self.group.local_rank:
                error = SystemExit(2)
            raise error from None


def save_parts(
    path: Path,
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    group: ProcessGroup,
    check_owner: Callable[[], None],
) -> PendingParts | None:
    """Begin to save a checkpoint in parts; all processes must call this. The tensors are copied before it returns.

    A checkpoint of the same step has the same tensors. So if there is one, only its training state is replaced, and
    None is returned.
    check_owner: raises if the folder belongs to another process by now; called before the checkpoint appears.
    """
    if group.broadcast((path / CHECKPOINT_STATE).is_file()):
        group.on_main(lambda: _write_state(path, state, _read_state(path)[FILES]))
        return None
    # The name is new in each session: a process of an earlier one, on a machine that was cut off, may still write.
    partial = group.broadcast(temporary_folder(path))
    writer = PartWriter(partial, path, state, check_owner)
    saving = async_save(
        {name: tensor.detach() for name, tensor in tensors.items()},
        storage_writer=writer,
        process_group=group.background(),
    )
    assert isinstance(saving, Future)
    return PendingParts(path, partial, group, saving)


class PartWriter(HuggingFaceStorageWriter):
    """Writes the part of this process into a temporary folder; the main process completes the checkpoint."""

    def __init__(
        self, partial: Path, path: Path, state: Mapping[str, Any], check_owner: Callable[[], None]
    ) -> None:
        super().__init__(str(partial), save_distributed=True)
        self.partial, self.complete = partial, path
        self.state, self.check_owner = state, check_owner

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        """Write the part of this process; the result has the name and the hash of its file.

        In the format of HuggingFaceStorageWriter, whose own method has all tensors in memory twice more.
        """
        resolved = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        tensors = {name: one for name, one in resolved.items() if isinstance(one, Tensor)}
        offsets = {
            item.index.fqn: {"saved_offsets": list(item.tensor_data.chunk.offsets)}
            for item in plan.items
            if item.tensor_data is not None
        }
        header = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
        file = self.partial / f"part-{plan.storage_data['shard_index']:05d}.safetensors"
        save_tensors(file, tensors, header)
        sync(file)
        result = WriteResult(MetadataIndex(file.name), file.stat().st_size, sha256(file))
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result([result])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called in the main process when all processes have written their parts."""
        hashes = {one.index.fqn: one.storage_data for part in results for one in part}
        _write_state(self.partial, self.state, hashes)
        sync(self.partial)
        self.check_owner()
        self.partial.replace(self.complete)
        # A run that was not sharded until now may have saved the same step, without its validation.
        self.complete.with_suffix(".safetensors").unlink(missing_ok=True)
        sync(self.complete.parent)


def _write_state(folder: Path, state: Mapping[str, Any], hashes: Mapping[str, str]) -> None:
    contents = {STATE: dict(state), FILES: dict(hashes)}
    full = {**contents, CHECKSUM: tensors_checksum({}, contents)}
    write_text(folder / CHECKPOINT_STATE, json.dumps(full, indent=1, sort_keys=True) + "\n")


# ---------------------------------------------------------------------------------------------
# Reading


def read_state(path: Path) -> dict[str, Any]:
    """The training state of a checkpoint in parts."""
    state: dict[str, Any] = _read_state(path)[STATE]
    return state


def _read_state(path: Path) -> dict[str, Any]:
    file = path / CHECKPOINT_STATE
    try:
        contents: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if contents.pop(CHECKSUM) != tensors_checksum({}, contents):
            raise ValueError("its contents do not match its checksum")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RegardError(f"{file}: not a complete checkpoint: {error}") from None
    return contents


def load_parts(
    path: Path,
    tensor_groups: Collection[str],
    like: Mapping[str, Tensor] | None = None,
    group: ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """The tensors of a checkpoint in parts whose names begin with one of ``tensor_groups``, whole.

    like: weights by name. What belongs to a sharded weight is read as it is sharded, so that each process reads only
    its own part. All processes of ``group`` must call this then; they share the work of checking the files.
    """
    _check_parts(path, group)

    def read() -> dict[str, Tensor]:
        return _read_tensors(path, tensor_groups, like or {})

    return read() if group is None else group.in_each(read)


def _read_tensors(
    path: Path, tensor_groups: Collection[str], like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    reader = HuggingFaceStorageReader(str(path))
    try:
        saved = reader.read_metadata().state_dict_metadata
        tensors = {
            name: _allocate(entry, like.get(_weight_name(name)))
            for name, entry in saved.items()
            if name.partition(".")[0] in tensor_groups and isinstance(entry, TensorStorageMetadata)
        }
        # DCP warns of what is intended: each process reads on its own.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            load(dict[str, Any](tensors), storage_reader=reader, no_dist=True)
    except (CheckpointException, SafetensorError, OSError) as error:
        problem = str(error).strip().rpartition("\n")[2]
        raise RegardError(f"{path}: not a complete checkpoint: {problem}") from None
    return tensors


def _check_parts(path: Path, group: ProcessGroup | None) -> None:
    """Raise if a file is missing or has changed. The processes of a group check different files."""
    hashes = _read_state(path)[FILES]
    if group is None:
        _check_files(path, hashes, sorted(hashes))
    else:
        own = sorted(hashes)[group.rank :: group.size]
        group.in_each(lambda: _check_files(path, hashes, own))


def _check_files(path: Path, hashes: Mapping[str, str], names: Iterable[str]) -> None:
    present = {file.name for file in path.glob("*.safetensors")}
    for name in sorted(present ^ hashes.keys()):
        problem = "it is missing" if name in hashes else f"{CHECKPOINT_STATE} does not name it"
        raise RegardError(f"{path / name}: not a complete checkpoint: {problem}")
    for name in names:
        if sha256(path / name) != hashes[name]:
            raise RegardError(
                f"{path / name}: not a complete checkpoint: its contents do not match the hash in {CHECKPOINT_STATE}"
            )


def _allocate(entry: TensorStorageMetadata, weight: Tensor | None) -> Tensor:
    """An empty tensor to read into, which is sharded like a weight if that has its shape."""
    dtype = entry.properties.dtype
    if weight is not None and is_sharded(weight) and weight.shape == entry.size:
        return torch.empty_like(weight, dtype=dtype, requires_grad=False)
    return torch.empty(entry.size, dtype=dtype)


def _weight_name(name: str) -> str:
    """The weight that a tensor of a checkpoint belongs to, such as ``w`` for ``optimizer.w/exp_avg``."""
    return name.partition(".")[2].partition("/")[0]
