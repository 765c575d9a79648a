"""Copies of a run folder on machines that do not share it: each machine keeps the whole run.

The main process writes the run, and sends each new file to the first process of every machine without the folder: the
prepared data, each checkpoint, the model. Sharded weights are gathered for that, because each machine must have a whole
checkpoint. So any machine may end: those that are left, whichever process is then the main one, resume from the newest
checkpoint that one of them has.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import distributed

from regard.errors import RegardError
from regard.storage.atomic_files import PARTIAL
from regard.storage.run_dir import CHECKPOINT_STATE, RunDir
from regard.training.checkpoint import checkpoint_files, checkpoint_step
from regard.training.distributed import SHARED_FOLDER_SECONDS, ProcessGroup

CHUNK_BYTES = 16 * 2**20
"""A file is sent in chunks of this size."""

Manifest = dict[str, tuple[int, int]]
"""Size and modification time in nanoseconds of each file, by its path in the run folder."""


class Holder(NamedTuple):
    """What a process that keeps a run folder has of the run."""

    rank: int
    host: str
    step: int
    """of its newest checkpoint; 0: none"""
    data: Any
    """identifies the data that the checkpoints were trained on"""


class RunMirror:
    """The copies of a run folder. Every process has this object, and all of them call its methods together."""

    def __init__(self, run: RunDir, group: ProcessGroup, holds: bool) -> None:
        """holds: whether this process keeps a run folder: the main one, and the first one of each other machine."""
        self.run, self.group, self.holds = run, group, holds

    @classmethod
    def find(cls, run: RunDir, group: ProcessGroup, lock: Callable[[], object]) -> RunMirror | None:
        """The copies of the run folder, each with the newest state of the run; None if all machines share one folder.

        lock: locks the folder of this process, which is done already in the main process.
        """
        if group.size == 1 or all(group.gather(_sees_folder(run, group))):
            return None
        holds = group.is_main or (group.local_rank == 0 and not run.is_locked())
        mirror = cls(run, group, holds)
        group.in_each(lambda: lock() if holds and not group.is_main else None)
        mirror._elect()
        return mirror

    @property
    def machines(self) -> int:
        """The number of machines that keep the run."""
        return sum(self.group.gather(self.holds))

    def _elect(self) -> None:
        """Send the run of the holder with the newest checkpoint to all others."""
        files = checkpoint_files(self.run.checkpoints) if self.holds else []
        step = checkpoint_step(files[-1]) if files else 0
        data = self.run.metadata().get("identity") if files else None
        holder = Holder(self.group.rank, socket.gethostname(), step, data)
        holders = [one for one in self.group.gather(holder) if one.step]
        if not holders:
            return
        newest = max(holders, key=lambda one: (one.step, -one.rank))
        for one in holders:
            if one.data != newest.data:
                raise RegardError(
                    f"{self.run}: the copies on {one.host} and {newest.host} were trained on different data; "
                    "remove one of them"
                )
        self._send(newest.rank)

    def update(self) -> None:
        """Send what has changed in the folder of the main process."""
        self._send(0)

    # -----------------------------------------------------------------------------------------
    # Files

    def _send(self, source: int) -> None:
        """Make all copies equal to the folder of the process ``source``."""
        group, folder = self.group, self.run.folder
        manifest = group.broadcast(read_manifest(self.run) if group.rank == source else {}, source)
        own = read_manifest(self.run) if self.holds else manifest
        missing = [path for path in manifest if own.get(path) != manifest[path]]
        for path in sorted({path for paths in group.gather(missing) for path in paths}, key=_order):
            size, modified = manifest[path]
            receives = path in missing
            group.in_each(partial(self._prepare, folder / path) if receives else _nothing)
            if group.rank == source:
                with (folder / path).open("rb") as file:
                    self._stream(size, source, file, None)
            elif receives:
                temporary = _temporary(folder / path)
                with temporary.open("wb") as file:
                    self._stream(size, source, None, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.utime(temporary, ns=(modified, modified))
                temporary.replace(folder / path)
            else:
                self._stream(size, source, None, None)
        if self.holds and group.rank != source:
            obsolete = sorted(own.keys() - manifest.keys(), key=_order, reverse=True)
            self.run.delete_files(folder / path for path in obsolete)

    def _prepare(self, path: Path) -> None:
        """Raise if a file cannot be written, before the others send it."""
        self.run.check_owner()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _temporary(path).touch()
        except OSError as error:
            raise RegardError(f"{path}: cannot be written: {error.strerror}") from None

    def _stream(
        self, size: int, source: int, read: BinaryIO | None, write: BinaryIO | None
    ) -> None:
        """Broadcast the contents of a file; the source reads it, those that lack it write it."""
        for first in range(0, size, CHUNK_BYTES):
            count = min(CHUNK_BYTES, size - first)
            chunk = torch.empty(count, dtype=torch.uint8)
            if read is not None:
                content = read.read(count).ljust(count, b"\0")  # the log may be cut meanwhile
                chunk = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            chunk = chunk.to(self.group.device)
            distributed.broadcast(chunk, source)
            if write is not None:
                write.write(chunk.cpu().numpy().tobytes())


def _sees_folder(run: RunDir, group: ProcessGroup) -> bool:
    """Whether this process sees a file that the main process writes into the run folder."""
    name = group.broadcast(f".seen-{secrets.token_hex(8)}")
    path = run.checkpoints / name
    if group.is_main:
        path.touch()
    group.barrier()
    deadline = time.monotonic() + SHARED_FOLDER_SECONDS
    while not (found := path.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    group.barrier()
    if group.is_main:
        path.unlink()
    return found


def read_manifest(run: RunDir) -> Manifest:
    """The files of a run folder, without hidden files and the files of TensorBoard."""
    found = {}
    for path in sorted(run.folder.rglob("*")):
        parts = path.relative_to(run.folder).parts
        hidden = any(part.startswith(".") for part in parts)
        if path.is_file() and not hidden and parts[0] != run.events.name:
            status = path.stat()
            found["/".join(parts)] = status.st_size, status.st_mtime_ns
    return found


def _nothing() -> None:
    """What a process does that keeps no copy of a file."""


def _order(path: str) -> tuple[bool, bool, str]:
    """Checkpoints last: a folder with a checkpoint has everything else. The same holds for its training state."""
    return path.startswith("checkpoints/"), path.endswith(f"/{CHECKPOINT_STATE}"), path


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}{PARTIAL}")
