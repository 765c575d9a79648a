"""The commands import and export: convert models from and to the formats of other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.options import RunFolder
from regard.errors import RegardError


def import_(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER | FILE", help="The model to import, as its library saved it."
        ),
    ],
    format_: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="FORMAT",
            help="Format of the model: huggingface (MarianMT, OPUS-MT) or torch.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Run folder to write.")],
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="For torch: the run folder that provides the recipe and the tokenizer.",
        ),
    ] = None,
) -> None:
    """Convert a model from another library to a run folder, and verify that both compute the same outputs."""
    from regard.interop.convert import import_model

    for line in import_model(model, format_, out, like):
        print(line)


def export(
    run: RunFolder,
    format_: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="Format to write: huggingface, ctranslate2, ctranslate2-int8, onnx, torch, html (one file that "
            "translates in a browser), or bundle (only the files needed to use the model).",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER | FILE",
            help="Folder to write; for html a file, RUN.html by default.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Convert a model to the format of another library, and verify that both compute the same outputs."""
    from regard.interop.convert import EXPORTS, export_model

    if out is None:
        if format_ != "html" and format_ in EXPORTS:
            raise RegardError(f"--to {format_} needs --out FOLDER")
        out = Path(f"{run.resolve().name}.html")
    for line in export_model(run, format_, out):
        print(line)
