"""Files that grow a portion at a time and lose or repeat nothing, whenever the one who writes them is killed.

What is written goes to ``.NAME.partial``; ``.NAME.journal`` says how much of it counts, and for what it was written.
A portion is first on the disk and then in the journal, which is replaced in one move. So what a killed writer left
behind its last entry is cut off, and the next writer goes on there. At the end the files get their names.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from regard import __version__
from regard.errors import RegardError
from regard.storage.run_dir import PARTIAL, check_writable, write_text

if TYPE_CHECKING:
    from regard.tasks import Translator


def asked_of(model: Translator) -> dict[str, Any]:
    """What a translation depends on, whatever the texts and the search."""
    assert model.run is not None
    return {
        "model": model.run.fingerprint(),
        "to": model.language,
        "precision": model.precision,
        "device": model.device.type,
        "version of regard": __version__,
    }


class ResumableOutput:
    """Of one or several files, in which each item of the input has its lines."""

    def __init__(
        self, files: Sequence[Path], asked: Mapping[str, Any] | None, overwrite: bool = False
    ) -> None:
        """asked is all that the content depends on, as JSON; None: nobody can go on with these files."""
        for path in files:
            check_writable(path)
        self.files = files
        self.asked = None if asked is None else json.loads(json.dumps(asked))
        self.path = files[0].with_name(f".{files[0].name}.journal")
        self.done = 0
        """items of the input"""
        self.whole = False
        """nothing is missing but the names"""
        self._open: list[BinaryIO] = []
        before = None if overwrite else self._read()
        if before is not None:
            self.done, self.whole = before["done"], before["whole"]
        if self.whole:  # some may have their names already
            return
        try:
            self._open = [self._partial(path).open("ab") for path in files]
            self._begin([0] * len(files) if before is None else before["bytes"])
        except OSError as error:
            self.close()
            raise self._unwritable(error) from None
        except RegardError:
            self.close()
            raise

    def _partial(self, path: Path) -> Path:
        return path.with_name(f".{path.name}{PARTIAL}")

    def _unwritable(self, error: OSError) -> RegardError:
        return RegardError(f"{self.files[0]}: cannot be written: {error.strerror}")

    def _read(self) -> dict[str, Any] | None:
        """The entry to go on from, if there is one."""
        try:
            entry = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RegardError(f"{self.path}: cannot be read: {error.strerror}") from None
        except ValueError:
            raise RegardError(f"{self.path}: damaged; --overwrite starts anew") from None
        if entry["done"] and self.asked is None:
            raise RegardError(
                f"{self.files[0]}: a translation of a file to it was interrupted after {entry['done']:,} "
                "lines; --overwrite gives it up"
            )
        if entry["done"] and entry["asked"] != self.asked:
            keys = {**entry["asked"], **(self.asked or {})}
            other = [key for key in keys if entry["asked"].get(key) != (self.asked or {}).get(key)]
            raise RegardError(
                f"{self.files[0]}: begun with other {' and '.join(other)} ({entry['done']:,} lines are "
                "done); give the same again to go on, or --overwrite to start anew"
            )
        return dict(entry) if entry["asked"] == self.asked else None

    def _begin(self, sizes: Sequence[int]) -> None:
        """Cut off what is behind the last entry."""
        try:
            fcntl.flock(self._open[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RegardError(f"{self.files[0]}: another process is writing it") from None
        for file, path, size in zip(self._open, self.files, sizes, strict=True):
            if os.fstat(file.fileno()).st_size < size:
                raise RegardError(
                    f"{self._partial(path)}: shorter than it was; --overwrite starts anew"
                )
            file.truncate(size)
        self._note()

    def _note(self) -> None:
        if self.asked is None:
            return
        sizes = [os.fstat(file.fileno()).st_size for file in self._open]
        entry = {"asked": self.asked, "done": self.done, "bytes": sizes, "whole": self.whole}
        write_text(self.path, json.dumps(entry))

    def add(self, items: int, texts: Sequence[str]) -> None:
        """So many items more are done; for each file what comes of them."""
        try:
            for file, text in zip(self._open, texts, strict=True):
                file.write(text.encode("utf-8"))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._unwritable(error) from None
        self.done += items
        self._note()

    def finish(self) -> None:
        """The files get their names; whoever finds them finds them whole."""
        if not self.whole:
            self.whole = True
            self._note()
        try:
            for path in self.files:
                with suppress(FileNotFoundError):  # it was renamed before a kill
                    self._partial(path).replace(path)
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise self._unwritable(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
            elif self.asked is None or not self.done:  # nothing to go on with
                for path in (self.path, *map(self._partial, self.files)):
                    path.unlink(missing_ok=True)
        finally:
            self.close()

    def close(self) -> None:
        for file in self._open:
            file.close()
