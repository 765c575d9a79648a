"""Output files that can be resumed after a crash without losing or repeating anything.

Lines are appended to ``.NAME.partial``. ``.NAME.journal`` records how many bytes of it are valid, and what the output
depends on (the resume key). A chunk is synced to disk before the journal is replaced atomically, so bytes after the
last journal entry are truncated and the next process continues from there. At the end the files get their final names.

``ResumableRecords`` is for a file that can only be written when all its parts are known, such as an office document:
the parts are collected in the same way first.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from regard import __version__
from regard.errors import RegardError
from regard.storage.atomic_files import PARTIAL, check_writable, write_bytes, write_text

if TYPE_CHECKING:
    from regard.tasks import Translator


def model_resume_key(model: Translator) -> dict[str, Any]:
    """The part of a resume key that identifies the model and how it computes."""
    assert model.runs
    return {
        "model": "+".join(run.fingerprint() for run in model.runs),
        "to": model.language,
        "precision": model.precision,
        "device": model.device.type,
        "version of regard": __version__,
    }


@dataclass(frozen=True)
class Shard:
    """One of several processes or machines that share the work; numbers start at 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse 3/8, the third of eight."""
        number, slash, count = text.partition("/")
        if slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count):
            return cls(int(number), int(count))
        raise RegardError(f"--shard {text}: expected I/N with I from 1 to N, for example 3/8")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def split(self, workers: int) -> list[Shard]:
        """The shards of some processes that share the work of this one."""
        first = self.number - 1
        return [
            Shard(first + self.count * worker + 1, self.count * workers)
            for worker in range(workers)
        ]

    def bounds(self, items: int, chunk: int) -> tuple[int, int]:
        """The first item of the shard, and the one after its last, of consecutive items.

        Both are multiples of ``chunk``, except at the end: the shards then have the same chunks as the whole.
        """
        chunks = -(-items // chunk)
        start, stop = (chunks * share // self.count for share in (self.number - 1, self.number))
        return min(items, start * chunk), min(items, stop * chunk)

    def path(self, path: Path) -> Path:
        """The file of the shard: ``out-00003-of-00008.txt`` for ``out.txt``."""
        if self == WHOLE:
            return path
        return path.with_stem(f"{path.stem}-{self.number:05d}-of-{self.count:05d}")

    def has(self, index: int) -> bool:
        """Whether the item with this index, counted from 0, belongs to the shard."""
        return index % self.count == self.number - 1


WHOLE = Shard(1, 1)


class ResumableOutput:
    """One or several output files that grow together, a few input items at a time.

    Use it as a context manager. On success the files get their names; after an exception they can be resumed.
    """

    items = "lines"
    """the name of the input items in messages"""
    header = 0
    """1 if the first item is the header of the file, which is not counted in messages"""

    def __init__(
        self,
        files: Sequence[Path],
        resume_key: Mapping[str, Any] | None,
        overwrite: bool = False,
        report: Callable[[str], object] = lambda line: None,
    ) -> None:
        """``resume_key``: everything the output depends on, as JSON; None: the output cannot be resumed.

        ``overwrite``: start again, even if an earlier process left something to resume.
        ``report``: is called with a message if Ctrl-C interrupts the work.
        """
        self.report = report
        for path in files:
            check_writable(path)
        self.files = files
        self.resume_key = None if resume_key is None else json.loads(json.dumps(resume_key))
        self.journal_file = files[0].with_name(f".{files[0].name}.journal")
        self.done = 0
        """number of input items whose output is on disk"""
        self.complete = False
        """all output is on disk; only the final renaming is missing"""
        self._open: list[BinaryIO] = []
        entry = None if overwrite else self._read_journal()
        if entry is not None:
            self.done, self.complete = entry["done"], entry["complete"]
        if self.complete:  # some files may have been renamed already
            return
        try:
            self._open = [self._partial(path).open("ab") for path in files]
            self._truncate([0] * len(files) if entry is None else entry["bytes"])
        except OSError as error:
            self.close()
            raise self._write_error(error) from None
        except RegardError:
            self.close()
            raise

    def _partial(self, path: Path) -> Path:
        return path.with_name(f".{path.name}{PARTIAL}")

    def _write_error(self, error: OSError) -> RegardError:
        return RegardError(f"{self.files[0]}: cannot be written: {error.strerror}")

    def _read_journal(self) -> dict[str, Any] | None:
        """The journal entry to resume from, or None."""
        try:
            entry: dict[str, Any] = json.loads(self.journal_file.read_text(encoding="utf-8"))
            key, done = entry["resume_key"], entry["done"]
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RegardError(f"{self.journal_file}: cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise RegardError(
                f"{self.journal_file}: damaged; use --overwrite to start again"
            ) from None
        if done and self.resume_key is None:
            raise RegardError(
                f"{self.files[0]}: an interrupted translation of a file left {done:,} {self.items} here; "
                "use --overwrite to discard them"
            )
        if done and key != self.resume_key:
            current_key = self.resume_key or {}
            changed = [
                name for name in {**key, **current_key} if key.get(name) != current_key.get(name)
            ]
            raise RegardError(
                f"{self.files[0]}: started with different {' and '.join(changed)} ({done:,} {self.items} are "
                "done); use the same ones to resume, or --overwrite to start again"
            )
        return entry if key == self.resume_key else None

    def _truncate(self, sizes: Sequence[int]) -> None:
        """Lock the output, and drop everything after the last journal entry."""
        try:
            fcntl.flock(self._open[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RegardError(f"{self.files[0]}: another process is writing it") from None
        for file, path, size in zip(self._open, self.files, sizes, strict=True):
            if os.fstat(file.fileno()).st_size < size:
                raise RegardError(
                    f"{self._partial(path)}: shorter than its journal says; use --overwrite to start again"
                )
            file.truncate(size)
        self._write_journal()

    def _write_journal(self) -> None:
        if self.resume_key is None:
            return
        sizes = [os.fstat(file.fileno()).st_size for file in self._open]
        entry = {"resume_key": self.resume_key, "done": self.done, "bytes": sizes}
        write_text(self.journal_file, json.dumps({**entry, "complete": self.complete}))

    def add(self, items: int, texts: Sequence[str]) -> None:
        """Append the output of the next ``items`` input items: one text for each file."""
        try:
            for file, text in zip(self._open, texts, strict=True):
                file.write(text.encode("utf-8"))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._write_error(error) from None
        self.done += items
        self._write_journal()

    def finish(self) -> None:
        """Give the complete files their final names."""
        if not self.complete:
            self.complete = True
            self._write_journal()
        try:
            for path in self.files:
                with suppress(FileNotFoundError):  # renamed before a crash
                    self._partial(path).replace(path)
            self.journal_file.unlink(missing_ok=True)
        except OSError as error:
            raise self._write_error(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        if error_type is KeyboardInterrupt:
            self.report(self._what_is_kept())
        try:
            if error_type is None:
                self.finish()
            elif self.resume_key is None or not self.done:  # nothing to resume
                for path in (self.journal_file, *map(self._partial, self.files)):
                    path.unlink(missing_ok=True)
        finally:
            self.close()

    def _what_is_kept(self) -> str:
        """The message for a user who has interrupted the work."""
        (first, *_) = self.files
        if self.resume_key is None:
            return f"Interrupted; nothing of {first} is kept"
        done = self.done - self.header
        if done < 1:
            return f"Interrupted before the first {self.items} of {first} were done; run the same command again"
        kept = f"{done:,} {self.items} of {first} are kept"
        if done == 1:
            kept = f"one of the {self.items} of {first} is kept"
        return f"Interrupted; {kept}. To resume, run the same command again"

    def close(self) -> None:
        for file in self._open:
            with suppress(OSError):  # already reported; unwritten data are not written again
                file.close()


class ResumableRecords(ResumableOutput):
    """One output file that is built at the end, from records that are collected line by line."""

    items = "sentences"

    def __init__(
        self,
        path: Path,
        resume_key: Mapping[str, Any],
        build: Callable[[Iterator[str]], bytes],
        overwrite: bool = False,
        report: Callable[[str], object] = lambda line: None,
    ) -> None:
        """``build``: makes the contents of the file from all lines, which it reads one by one."""
        self.build = build
        super().__init__([path], resume_key, overwrite, report)

    def _partial(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.sentences")

    def finish(self) -> None:
        """Build the file, and remove the records."""
        (path,) = self.files
        if not self.complete:
            self.complete = True
            self._write_journal()
        try:
            if self._partial(path).exists():  # else the file was written before a crash
                with self._partial(path).open(encoding="utf-8", newline="\n") as file:
                    content = self.build(line.removesuffix("\n") for line in file)
                write_bytes(path, content)
                self._partial(path).unlink()
            self.journal_file.unlink(missing_ok=True)
        except OSError as error:
            raise self._write_error(error) from None
