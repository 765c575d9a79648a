"""The runs in a folder: what each run is, its state, its size, and which of its files can be deleted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from regard.errors import RegardError
from regard.metrics.base import MetricResult
from regard.recipe import Recipe
from regard.storage.run_dir import RunDir, sha256

MAX_DEPTH = 4
"""levels of subfolders that are searched for runs"""

State = Literal["training", "finished", "interrupted", "damaged"]


def find_runs(folder: Path) -> list[RunDir]:
    """The runs in a folder and its subfolders, in the order of their names; the folder itself may be a run."""
    if not folder.exists():
        raise RegardError(f"{folder}: no such folder")
    if not folder.is_dir():
        raise RegardError(f"{folder}: a file, not a folder")
    return [RunDir(path) for path in sorted(_run_folders(folder, MAX_DEPTH))]


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if _is_run(folder):
        yield folder
        return
    if depth == 0:
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            yield from _run_folders(Path(entry.path), depth - 1)


def _is_run(folder: Path) -> bool:
    """Whether a folder is a run: a recipe alone may be one that the user wrote."""
    run = RunDir(folder)
    started = (run.lock_file, run.metadata_file, run.weights_file, run.card_file)
    return run.recipe_file.is_file() and any(path.exists() for path in started)


# ---------------------------------------------------------------------------------------------
# What a run is


@dataclass(frozen=True)
class RunSummary:
    """One line of ``regard runs``."""

    run: RunDir
    state: State
    problem: str | None
    """why the state is damaged"""
    task: str
    languages: str
    """en-de; empty if they are not known"""
    parameters: int | None
    score: str
    """the first test score, or the validation score after training, or the best one so far"""
    disk: int
    """bytes of all files in the folder"""

    def to_json(self) -> dict[str, Any]:
        return {
            "run": str(self.run),
            "state": self.state,
            "problem": self.problem,
            "task": self.task,
            "languages": self.languages or None,
            "parameters": self.parameters,
            "score": self.score or None,
            "disk": self.disk,
        }


def summarize(run: RunDir, verify: bool = False) -> RunSummary:
    """Describe a run. Nothing in the folder can make this fail.

    verify: compare the hashes of all files with the card; otherwise only those of the small ones.
    """
    recipe: Recipe | None = None
    card: dict[str, Any] = {}
    problem: str | None = None
    try:
        recipe = run.recipe()
        card = run.card()
        problem = _changed_file(run, card, verify)
    except (RegardError, OSError, ValueError) as error:
        problem = str(error).split("\n")[0].rstrip(":")
    events = _events(run)
    return RunSummary(
        run=run,
        state=_state(run, card, problem),
        problem=problem,
        task=recipe.task if recipe else "",
        languages=_languages(recipe) if recipe else "",
        parameters=_parameters(run, card, events),
        score=_best_score(card, events, recipe),
        disk=sum(size for _, size in _files(run.folder)),
    )


def _changed_file(run: RunDir, card: Mapping[str, Any], verify: bool) -> str | None:
    """The first file that is missing or that the card was not written for."""
    for name, expected in card.get("files", {}).items():
        path = run.folder / Path(name).name
        if not path.is_file():
            return f"{path}: missing"
        if (verify or path != run.weights_file) and sha256(path) != expected:
            return f"{path}: changed or replaced since the card was written"
    return None


def _state(run: RunDir, card: Mapping[str, Any], problem: str | None) -> State:
    if run.is_locked():
        return "training"
    if problem is not None:
        return "damaged"
    return "finished" if card else "interrupted"


def _languages(recipe: Recipe) -> str:
    if not recipe.is_seq2seq or not recipe.data.named:
        return ""
    pairs = recipe.data.language_pairs
    sources, targets = (dict.fromkeys(codes) for codes in zip(*pairs, strict=True))
    return f"{','.join(sources)}-{','.join(targets)}"


def _events(run: RunDir) -> list[dict[str, Any]]:
    try:
        return run.log()
    except (OSError, ValueError):
        return []


def _parameters(run: RunDir, card: Mapping[str, Any], events: list[dict[str, Any]]) -> int | None:
    """The number of parameters: from the card, the log, or the weights of an imported model."""
    logged = [event.get("parameters") for event in events if event.get("event") == "start"]
    counts = [card.get("parameters"), *reversed(logged)]
    for count in counts:
        if isinstance(count, int):
            return count
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(run.weights_file, framework="numpy") as file:
            names = list(file.keys())
            shapes = [file.get_slice(name).get_shape() for name in names]
    except (OSError, SafetensorError):
        return None
    return sum(map(prod, shapes))


def _best_score(
    card: Mapping[str, Any], events: list[dict[str, Any]], recipe: Recipe | None
) -> str:
    """The first test score; else the validation score after training, or that of the best validation, or its loss."""
    try:
        for split, scores in (("", card.get("test")), ("validation ", card.get("valid_scores"))):
            if scores:
                result = MetricResult(**scores[0])
                interval = "" if result.low is None else f" ({result.low:.1f}-{result.high:.1f})"
                return f"{split}{result.name} {result.value:.1f}{interval}"
        metric = recipe.evaluation.metrics[0] if recipe else ""
        best_events = [
            event for event in events if event.get("event") == "valid" and event.get("best")
        ]
        values = card.get("valid") or (best_events[-1] if best_events else {})
        for key in (metric, "loss"):
            if isinstance(values.get(key), int | float):
                return f"validation {key} {values[key]:.{1 if key == metric else 2}f}"
    except (AttributeError, KeyError, TypeError, ValueError):
        pass  # an incomplete card
    return ""


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    """The files in a folder, with their sizes; links are not followed."""
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            try:
                yield path, path.lstat().st_size
            except OSError:
                continue  # deleted in the meantime


# ---------------------------------------------------------------------------------------------
# What can be deleted


@dataclass(frozen=True)
class Prunable:
    """The files of a run that are not needed to use its model."""

    run: RunDir
    files: dict[str, list[tuple[Path, int]]]
    """checkpoints, prepared data and temporary files, with their sizes in bytes"""

    @property
    def bytes(self) -> int:
        return sum(self.bytes_of(category) for category in self.files)

    def bytes_of(self, category: str) -> int:
        return sum(size for _, size in self.files[category])

    def to_json(self) -> dict[str, Any]:
        categories = {
            category.replace(" ", "_"): {"files": len(files), "bytes": self.bytes_of(category)}
            for category, files in self.files.items()
        }
        return {"run": str(self.run), "bytes": self.bytes, **categories}


def prunable(summary: RunSummary) -> Prunable:
    """The files of a run that can be deleted.

    Of a finished run: checkpoints, prepared data and temporary files. Of an interrupted run: only temporary files,
    because it needs its checkpoints and data to be resumed. Of a run that is training or damaged: nothing. Other files,
    links, and files in linked folders are never listed.
    """
    run = summary.run
    categories: dict[str, list[Path]] = {
        "checkpoints": [],
        "prepared data": [],
        "temporary files": [],
    }
    if summary.state == "finished":
        categories["checkpoints"] = run.all_checkpoint_files()
        metadata_files = (run.metadata_file, run.train_sources_file)
        categories["prepared data"] = sorted(
            [*run.data.glob("*.arrow"), *(path for path in metadata_files if path.exists())]
        )
    if summary.state in ("finished", "interrupted"):
        categories["temporary files"] = run.temporary_files()
    return Prunable(
        run,
        {
            category: [(path, path.lstat().st_size) for path in paths if _is_own_file(path, run)]
            for category, paths in categories.items()
        },
    )


def _is_own_file(path: Path, run: RunDir) -> bool:
    """Whether a path is a regular file in the run folder, not reached through a link."""
    folders = [path.parent, *path.parent.parents]
    inside = folders[: folders.index(run.folder)]
    return path.is_file() and not any(entry.is_symlink() for entry in (path, *inside))


def prune(to_delete: Prunable) -> int:
    """Delete the files, unless a process has started to train there. Returns the number of bytes freed."""
    with _locked(to_delete.run):
        # The metadata of prepared data first: without them, incomplete data are never used.
        paths = [path for files in to_delete.files.values() for path, _ in files]
        to_delete.run.delete_files(
            sorted(paths, key=lambda path: path != to_delete.run.metadata_file)
        )
    if to_delete.run.data.is_dir() and not any(to_delete.run.data.iterdir()):
        to_delete.run.data.rmdir()
    return to_delete.bytes


@contextmanager
def _locked(run: RunDir) -> Iterator[None]:
    """Hold the lock of a run, if it has one."""
    if not run.lock_file.is_file():
        yield
        return
    with run.lock() as locked:
        if not locked:
            raise RegardError(f"{run}: another process is training here")
        yield
