"""Folders, patterns and zip archives: many files, each of which is read in its own format."""

from __future__ import annotations

import re
import zipfile
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

from regard.data.formats.base import (
    INPUT_FORMATS,
    InputFormat,
    Layout,
    NamePair,
    format_name,
    how_to_choose_languages,
    language_names,
    suffix_format,
)
from regard.data.language_identification import is_language, language_code
from regard.data.pairs import Pair
from regard.data.text_files import DataFile, RemoteFile, read_error, uncompressed_name
from regard.errors import RegardError

SPLITS = {"train": "train", "training": "train"} | dict.fromkeys(
    ("test", "valid", "validation", "dev", "val", "heldout", "eval"), "held out"
)


class FileGroup(NamedTuple):
    """Files that are read together."""

    format: InputFormat
    files: tuple[DataFile, ...]
    languages: NamePair | None = None
    """as the names of the files say"""


class FileCollection(InputFormat):
    """Several files in one place."""

    @abstractmethod
    def open(self, path: DataFile) -> AbstractContextManager[list[DataFile]]:
        """The files, in order."""

    def read(self, *paths: DataFile) -> Iterator[Pair]:
        (path,) = paths
        with self.open(path) as files:
            groups, _ = self.groups(path, files)
            self.languages(path, groups)
            for group in groups:
                yield from group.format.read(*group.files)

    def layout(self, *paths: DataFile) -> Layout:
        (path,) = paths
        with self.open(path) as files:
            groups, ignored = self.groups(path, files)
            languages = self.languages(path, groups)
            details = []
            keys = []
            for group in groups:
                layout = group.format.layout(*group.files)
                names = " and ".join(_inner_name(path, file) for file in group.files)
                details.append(
                    "; ".join([f"{names} ({format_name(group.format)})", *layout.details])
                )
                keys.append(layout.key)
            if ignored:
                names = ", ".join(_inner_name(path, file) for file in ignored[:8])
                details.append(f"ignored: {names}{', …' * (len(ignored) > 8)}")
        return Layout(tuple(details), languages, repr((languages, keys)))

    def languages(self, path: DataFile, groups: Sequence[FileGroup]) -> NamePair | None:
        """The languages that all files have in common; raises if they differ."""
        if self.options.requested_languages:
            return self.options.languages or self.options.columns
        first_files: dict[NamePair, DataFile] = {}
        for group in groups:
            languages = group.languages or group.format.layout(*group.files).languages
            if languages:
                first_files.setdefault(languages, group.files[0])
        if len(first_files) > 1:
            names = ", ".join(
                f"{language_names(languages)} ({_inner_name(path, file)})"
                for languages, file in list(first_files.items())[:6]
            )
            raise RegardError(
                f"{path}: several pairs of languages: {names}; {how_to_choose_languages(*min(first_files))}"
            )
        return next(iter(first_files), None)

    def groups(
        self, path: DataFile, files: Sequence[DataFile]
    ) -> tuple[list[FileGroup], list[DataFile]]:
        """The files that belong together, and those that contain no pairs."""
        _refuse_splits(path, files)
        groups: list[FileGroup] = []
        ignored: list[DataFile] = []
        texts: dict[str, dict[str, DataFile]] = {}
        for file in files:
            format_class = suffix_format(file)
            stem, _, suffix = uncompressed_name(file).rpartition(".")
            nested = format_class is not None and issubclass(format_class, FileCollection)
            if format_class is not None and not (nested and isinstance(file, zipfile.Path)):
                groups.append(FileGroup(format_class(self.options), (file,)))
            elif stem and (code := language_code(suffix)):
                folder = str(file).removesuffix(file.name)
                texts.setdefault(folder + stem, {})[code] = file
            else:
                ignored.append(file)
        for stem, by_language in texts.items():
            if len(by_language) == 1:
                ignored += by_language.values()
                continue
            languages = self._direction(path, stem, list(by_language))
            if languages is None:
                ignored += by_language.values()
                continue
            format_class = INPUT_FORMATS["parallel"]
            parallel_files = tuple(by_language[code] for code in languages)
            groups.append(FileGroup(format_class(self.options), parallel_files, languages))
        if not groups:
            raise RegardError(
                f"{path}: no files of pairs, and no two text files such as train.en and train.de"
            )
        return sorted(groups, key=lambda group: str(group.files[0])), ignored

    def _direction(self, path: DataFile, stem: str, codes: list[str]) -> NamePair | None:
        """Which of the languages of parallel texts are source and target; None if the requested ones are missing."""
        if requested := self.options.requested_languages:
            matching = [
                [code for code in codes if is_language(code, language)] for language in requested
            ]
            if any(len(matches) > 1 for matches in matching):
                raise RegardError(
                    f"{path}: {Path(stem).name} has several variants: {', '.join(codes)}; "
                    + how_to_choose_languages(codes[0], codes[1])
                )
            return (matching[0][0], matching[1][0]) if all(matching) else None
        # OPUS names files Books.de-en.de and Books.de-en.en.
        for source in codes:
            for target in codes:
                if source != target and re.search(
                    rf"(?:^|[._/-]){re.escape(source)}[-_]{re.escape(target)}$", stem
                ):
                    return source, target
        names = ", ".join(codes[:12])
        question = "which is the source?" if len(codes) == 2 else "which are source and target?"
        raise RegardError(
            f"{path}: {Path(stem).name} in the languages {names}: {question} "
            + how_to_choose_languages(codes[0], codes[1])
        )


@INPUT_FORMATS.register("folder")
class Folder(FileCollection):
    """a folder of files in these formats, or a pattern such as data/*.tmx; also text files such as x.en and x.de"""

    def open(self, path: DataFile) -> AbstractContextManager[list[DataFile]]:
        assert not isinstance(path, zipfile.Path)
        return nullcontext(list(folder_files(path)))


def folder_files(path: Path | RemoteFile) -> Sequence[Path | RemoteFile]:
    """The files of a folder and its subfolders, or those that match a pattern, in order of their names.

    Run folders in it are left out: ``regard train .`` writes one.
    """
    if isinstance(path, RemoteFile):
        return [file for file in path.files() if not file.name.startswith(".")]
    root = path if path.is_dir() else Path(path.anchor or ".")
    pattern = "**/*" if path.is_dir() else str(path.relative_to(path.anchor))
    try:
        files = [file for file in root.glob(pattern) if file.is_file()]
    except OSError as error:
        raise read_error(Path(error.filename) if error.filename else path, error) from None
    except ValueError as error:  # a pattern such as a**b
        raise RegardError(f"{path}: cannot be read: {error}") from None
    runs = {file.parent for file in files if file.name == "recipe.yaml"} if path.is_dir() else set()
    return sorted(
        file
        for file in files
        if not _is_hidden(file.relative_to(root)) and runs.isdisjoint(file.parents)
    )


def _is_hidden(file: Path) -> bool:
    return any(part.startswith(".") and part != ".." for part in file.parts)


@INPUT_FORMATS.register("zip")
class Zip(FileCollection):
    """a zip archive of files in these formats, such as OPUS's in the Moses format (Books.de-en.de, Books.de-en.en)"""

    suffixes = (".zip",)

    @contextmanager
    def open(self, path: DataFile) -> Iterator[list[DataFile]]:
        try:
            with path.open("rb") as file, zipfile.ZipFile(file) as archive:
                # Members are named after the archive in error messages.
                archive.filename = str(path)
                names = sorted(archive.namelist())
                yield [
                    zipfile.Path(archive, name)
                    for name in names
                    if not name.endswith("/")
                    and not any(part.startswith((".", "__MACOSX")) for part in name.split("/"))
                ]
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError) as error:
            # An encrypted member is a RuntimeError; RegardError is none of these.
            raise RegardError(f"{path}: damaged zip archive, or not readable: {error}") from None
        except OSError as error:
            raise read_error(path, error) from None


def _refuse_splits(path: DataFile, files: Sequence[DataFile]) -> None:
    """Training data must not contain test data by accident."""
    first_files: dict[str, DataFile] = {}
    for file in files:
        for word in re.split(r"[._-]", file.name.lower()):
            if split := SPLITS.get(word):
                first_files.setdefault(split, file)
    if len(first_files) > 1:
        train, held_out = (_inner_name(path, first_files[split]) for split in ("train", "held out"))
        raise RegardError(
            f"{path}: contains {train} and {held_out}: pass only the training files, "
            "or write a recipe with data.train, data.valid and data.test"
        )


def _inner_name(path: DataFile, file: DataFile) -> str:
    """The name of a file in a folder or archive."""
    return str(file).removeprefix(f"{path}/")
