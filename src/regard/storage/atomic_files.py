"""Files and folders that appear complete or not at all.

Everything is written to a temporary name in the same folder, synced to disk, and renamed. A reader never sees half a
file, and a crash leaves the previous version in place.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from regard.errors import RegardError

if TYPE_CHECKING:
    from torch import Tensor

PARTIAL = ".partial"
"""suffix of files and folders that are still being written"""

METADATA_KEY = "regard"
"""The one entry of a safetensors header that holds our metadata, as JSON. A single entry, because safetensors writes
several in arbitrary order, and equal contents should be equal byte for byte."""


# ---------------------------------------------------------------------------------------------
# Checks before the work begins


def check_distinct_files(files: Mapping[str, Path | None]) -> None:
    """Refuse a file that has two roles: an output that is also an input, or one file given twice.

    ``files`` maps a role such as ``--output`` to its path, or to None if it was not given.
    """
    roles: dict[Path, str] = {}
    for role, path in files.items():
        if path and (first_role := roles.setdefault(path.resolve(), role)) != role:
            raise RegardError(f"{role} {path}: same file as {first_role}; use two different files")


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before any work is done for it."""
    if path.is_dir():
        raise RegardError(f"{path}: a folder, not a file")
    if path.exists() and not path.is_file():
        raise RegardError(f"{path}: not a regular file, so it cannot be replaced")
    if not path.parent.is_dir():
        raise RegardError(f"{path}: cannot be written: {path.parent} is not a folder")


# ---------------------------------------------------------------------------------------------
# Files


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Call ``write`` with a temporary path, sync the file to disk, and rename it to ``path``."""
    check_writable(path)
    temporary = path.with_name(f".{path.name}{PARTIAL}")
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise RegardError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        with suppress(OSError):
            temporary.unlink()
    sync(path.parent)


def sync(path: Path) -> None:
    """Write a file to disk, or the names of the files of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_files(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Temporary files to write. They are renamed to ``paths`` at the end, and removed on any error."""
    for path in paths:
        check_writable(path)
    partial = [path.with_name(f".{path.name}{PARTIAL}") for path in paths]
    try:
        yield partial
        for temporary in partial:
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
        for temporary, path in zip(partial, paths, strict=True):
            temporary.replace(path)
    except OSError as error:
        raise RegardError(f"{paths[0]}: cannot be written: {error.strerror or error}") from None
    finally:
        for temporary in partial:
            with suppress(OSError):
                temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_atomic(path, write)


CHECKSUM = "sha256"
"""The key of the checksum in our metadata."""


class NoChecksum(ValueError):  # noqa: N818
    """A safetensors file that this version did not write."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write a safetensors file atomically; ``metadata`` is stored as JSON in its header, with a checksum."""
    on_cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    stored_metadata = {**metadata, CHECKSUM: tensors_checksum(on_cpu, metadata)}

    header = {METADATA_KEY: json.dumps(stored_metadata, sort_keys=True)}
    write_atomic(path, lambda temporary: save_tensors(temporary, on_cpu, header))


def save_tensors(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Write a safetensors file without copying the tensors. All errors are raised as OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        path.touch()  # with the user's umask; safetensors would set a mode of its own
        mode = path.stat().st_mode
        save_file(tensors, path, header)
        path.chmod(mode)
    except SafetensorError as error:  # raised for a full disk, for example
        raise OSError(errno.EIO, str(error)) from None


def tensors_checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> str:
    """SHA-256 over the metadata and over the names, types, shapes and bytes of tensors on a CPU."""
    import torch

    return _checksum(
        metadata,
        (
            (
                name,
                str(tensor.dtype),
                list(tensor.shape),
                tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data,
            )
            for name, tensor in sorted(tensors.items())
        ),
    )


def _checksum(
    metadata: Mapping[str, Any], tensors: Iterable[tuple[str, str, list[int], memoryview]]
) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, dtype, shape, content in tensors:
        digest.update(f"\0{name}\0{dtype}\0{shape}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the metadata of a file that ``write_tensors`` wrote; refused if a single bit has changed.

    The tensors are mapped from the file. Damage is a SafetensorError, OSError or ValueError.
    """
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = read_metadata(file)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    checksum = metadata.pop(CHECKSUM, None)
    if checksum is None:
        raise NoChecksum(
            "no checksum in its header, so it was not written by this version of regard"
        )
    if tensors_checksum(tensors, metadata) != checksum:
        raise ValueError("its contents do not match the checksum in its header")
    return tensors, metadata


DTYPES = {"F32": "torch.float32", "I8": "torch.int8"}
"""the data types that ``map_tensors`` reads: the names of safetensors and of torch"""


Shape = tuple[int, ...]


def map_tensors(path: Path) -> tuple[dict[str, tuple[Shape, int]], dict[str, Any], object]:
    """What ``read_tensors`` returns, without torch: shape and address of each tensor, the metadata, the mapped file.

    The addresses are valid as long as the last value is alive. Damage is an OSError, ValueError, KeyError or TypeError.
    """
    import ctypes
    import mmap

    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    view = memoryview(mapped)
    begin = 8 + int.from_bytes(view[:8], "little")
    header = json.loads(bytes(view[8:begin]))
    metadata = json.loads(header.pop("__metadata__")[METADATA_KEY])
    contents = []
    for name, entry in sorted(header.items()):
        start, stop = entry["data_offsets"]
        content = view[begin + start : begin + stop]
        if len(content) != stop - start:
            raise ValueError("it is truncated")
        contents.append((name, DTYPES[entry["dtype"]], list(entry["shape"]), content))
    if metadata.pop(CHECKSUM) != _checksum(metadata, contents):
        raise ValueError("its contents do not match the checksum in its header")
    base = ctypes.addressof(ctypes.c_char.from_buffer(mapped)) + begin
    tensors = {
        name: (tuple(entry["shape"]), base + entry["data_offsets"][0])
        for name, entry in header.items()
    }
    return tensors, metadata, mapped


def read_metadata(file: Any) -> dict[str, Any]:
    """The metadata of an open safetensors file; empty if ``write_tensors`` did not write it."""
    try:
        metadata = json.loads((file.metadata() or {}).get(METADATA_KEY, "{}"))
    except RecursionError:
        metadata = None
    if not isinstance(metadata, dict):
        raise ValueError("its header has no metadata of regard")
    return metadata


# ---------------------------------------------------------------------------------------------
# Folders


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """A temporary folder to write into. It is renamed to ``out`` at the end, and removed on any error."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise RegardError(f"{out}: already exists; choose another --out, or remove it")
    partial = out.with_name(f".{out.name}{PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        if out.exists():
            out.rmdir()
        partial.replace(out)
    except OSError as error:
        raise RegardError(f"{out}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def temporary_folder(path: Path) -> Path:
    """A new hidden name next to a path, for a folder that is incomplete or about to be deleted."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")


@contextmanager
def shared_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder that processes share, in memory where that is possible."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else None
    with TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
