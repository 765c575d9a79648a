"""The command ``regard info`` and the commands of ``regard runs``: describe, list, compare and prune runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.options import AsJson, RunFolder, default_group
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.storage.run_listing import Prunable

DEFAULT_FOLDER = Path("runs")
"""where ``regard train`` writes runs"""


app = typer.Typer(
    cls=default_group("list"),
    help="List runs, compare them, or delete files that are no longer needed. "
    "`regard runs FOLDER` is short for `regard runs list FOLDER`.",
)


def info(run: RunFolder, as_json: AsJson = False) -> None:
    """Describe a run: its model, its training data, and its scores."""
    from regard.storage.run_dir import RunDir

    folder = RunDir(run)
    recipe, card = folder.recipe(), folder.card()
    if as_json:
        print(json.dumps({"recipe": recipe.model_dump(mode="json"), "card": card}, indent=2))
        return
    for line in folder.describe(recipe, card):
        print(line)


@app.command("list")
def list_runs(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder with runs; subfolders are searched.")
    ] = DEFAULT_FOLDER,
    verify: Annotated[
        bool, typer.Option("--verify", help="Also compare the weights with the hash in the card.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder with their task, languages, size, score, state and disk space."""
    from regard.storage.run_listing import find_runs, summarize

    runs = find_runs(folder)
    if not runs and not as_json:
        typer.echo(f"{folder}: no runs; regard train creates one", err=True)
    summaries = [summarize(run, verify) for run in runs]
    if as_json:
        print(
            json.dumps([summary.to_json() for summary in summaries], indent=2, ensure_ascii=False)
        )
        return
    rows = [
        [
            str(summary.run),
            summary.task or "-",
            summary.languages or "-",
            "-" if summary.parameters is None else f"{summary.parameters / 1e6:.1f} M",
            summary.score or "-",
            summary.state,
            _bytes(summary.disk),
        ]
        for summary in summaries
    ]
    header = ["run", "task", "languages", "size", "score", "state", "disk"]
    for line in _table([header, *rows] if rows else []):
        print(line)
    for summary in summaries:
        if summary.problem is not None:
            typer.echo(summary.problem, err=True)


@app.command("compare")
def compare_command(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders; the first is the baseline.")
    ],
    as_json: AsJson = False,
) -> None:
    """Compare runs: scores with 95% confidence intervals, paired significance tests, and recipe differences.

    Significance tests need runs with the same test data. Test outputs that training did not store are computed.
    """
    from regard.storage.run_dir import RunDir
    from regard.training.compare_runs import compare_runs

    if len(runs) < 2:
        raise RegardError("expected at least two runs to compare")
    report = compare_runs([RunDir(run) for run in runs], lambda text: typer.echo(text, err=True))
    if as_json:
        print(json.dumps(report.to_json(), indent=2, ensure_ascii=False))
        return
    for run, results in zip(report.runs, report.scores, strict=True):
        print(run)
        for result in results:
            print(f"  {result}")
        if not results:
            print("  no test scores")
    print()
    for run, comparisons in zip(report.runs[1:], report.comparisons, strict=False):
        print(f"{run} against {report.runs[0]}")
        for comparison in comparisons:
            print(f"  {comparison}")
        print()
    if report.not_compared is not None:
        print(f"No significance tests: {report.not_compared}\n")
    if report.differences:
        names = [run.folder.name for run in report.runs]
        rows = [[key, *values] for key, values in report.differences.items()]
        for line in _table([["recipe", *names], *rows]):
            print(line)
    else:
        print("The recipes are identical.")


@app.command()
def prune(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FOLDER...", help="Runs, or folders with runs (default: runs)."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete the files instead of listing them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List, or with --yes delete, the checkpoints, prepared data and temporary files of finished runs.

    The model, its recipe, tokenizer and card are never deleted. A pruned run can be used but not resumed. For an
    interrupted run, only temporary files are deleted. Runs that are training or damaged are skipped.
    """
    from regard.storage.run_listing import find_runs, prunable, prune as delete, summarize

    runs = [run for folder in folders or [DEFAULT_FOLDER] for run in find_runs(folder)]
    candidates = [candidate for run in runs if (candidate := prunable(summarize(run))).bytes]
    freed = sum(map(delete, candidates)) if yes else 0
    total = freed if yes else sum(candidate.bytes for candidate in candidates)
    if as_json:
        answer = {
            "deleted": yes,
            "bytes": total,
            "runs": [candidate.to_json() for candidate in candidates],
        }
        print(json.dumps(answer, indent=2, ensure_ascii=False))
        return
    for candidate in candidates:
        print(_describe(candidate))
    if not candidates:
        print("nothing to delete")
    elif yes:
        print(f"{_bytes(total)} deleted")
    else:
        print(f"{_bytes(total)} in total; nothing was deleted (--yes deletes these files)")


def _describe(candidate: Prunable) -> str:
    """One line: the files of a run that can be deleted."""
    listed = [
        f"{len(files)} checkpoint{'s' * (len(files) != 1)} {_bytes(candidate.bytes_of(category))}"
        if category == "checkpoints"
        else f"{category} {_bytes(candidate.bytes_of(category))}"
        for category, files in candidate.files.items()
        if files
    ]
    return f"{candidate.run}: {', '.join(listed)}"


def _bytes(count: int) -> str:
    """A number of bytes in a unit that fits: 3.4 MB."""
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in padded]
