"""The commands that convert models from and to other formats: import, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.options import RunFolder


def import_(
    what: Annotated[Path, typer.Argument(metavar="FOLDER | FILE", help="A model from elsewhere.")],
    kind: Annotated[str, typer.Option("--from", help="huggingface (MarianMT, OPUS-MT) or torch.")],
    out: Annotated[Path, typer.Option(help="RunDir folder to write.")],
    like: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="For torch: where recipe and tokenizer are taken from."),
    ] = None,
) -> None:
    """Make a run folder of a model from elsewhere, after proving that it is the same function."""
    from regard.interop.convert import import_model

    for line in import_model(what, kind, out, like):
        print(line)


def export(
    run: RunFolder,
    kind: Annotated[
        str,
        typer.Option(
            "--to", help="huggingface, ctranslate2, ctranslate2-int8, onnx, torch or bundle."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
) -> None:
    """Write a model for others to open, after proving that it is the same function there."""
    from regard.interop.convert import export_model

    for line in export_model(run, kind, out):
        print(line)
