"""Files that are named by a URL and read through fsspec: s3://bucket/part-*.tsv.gz, hf://datasets/owner/name/train.tsv.

They are streamed: nothing is stored on disk. Some file systems need a package of their own, which fsspec names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader
from typing import Any, TypeVar

from regard.errors import RegardError

Result = TypeVar("Result")


@dataclass(frozen=True, order=True)
class RemoteFile:
    """A file, a folder or a pattern elsewhere, with the methods of a path that readers use."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the URL."""
        url = self.url.partition("?")[0] if self.url.startswith("http") else self.url
        return url.rstrip("/").rpartition("/")[2]

    def exists(self) -> bool:
        return self._info() is not None

    def is_file(self) -> bool:
        return self._type() == "file"

    def is_dir(self) -> bool:
        return self._type() == "directory"

    def size(self) -> int:
        """The number of bytes; 0 if it is not known."""
        return int((self._info() or {}).get("size") or 0)

    def open(self, mode: str) -> BufferedReader:
        """The file, to be read as bytes."""
        return self._call(lambda system, path: system.open(path, mode))

    def files(self) -> list[RemoteFile]:
        """The files of a folder and its subfolders, or those that match a pattern, in order of their names."""
        is_dir = self.is_dir()

        def find(system: Any, path: str) -> list[str]:
            found = system.find(path) if is_dir else system.glob(path)
            return [system.unstrip_protocol(name) for name in found if system.isfile(name)]

        chain = self.url.rpartition("::")[0]
        urls = self._call(find)
        return sorted(RemoteFile(f"{chain}::{url}" if chain else url) for url in urls)

    def _info(self) -> dict[str, Any] | None:
        """What the file system knows of the file; None if it does not exist."""
        try:
            info: dict[str, Any] = self._call(lambda system, path: system.info(path))
        except FileNotFoundError:
            return None
        return info

    def _type(self) -> str | None:
        return (self._info() or {}).get("type")

    def _call(self, method: Callable[[Any, str], Result]) -> Result:
        """Call a method of the file system, with the path of the file in it."""
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise RegardError(f"{self.url}: needs fsspec: pip install 'regard[remote]'") from None
        try:
            return method(*url_to_fs(self.url))
        except FileNotFoundError:
            raise
        except Exception as error:  # each file system has its own
            reason = str(error).split("\n")[0] or type(error).__name__
            raise RegardError(f"{self.url}: cannot be read: {reason}") from None
