"""The command that writes a trace of one sentence as a page: look."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import (
    Alpha,
    Beam,
    Candidates,
    Rounds,
    RunFolder,
    To,
)
from regard.errors import RegardError

if TYPE_CHECKING:
    pass


def look(
    run: RunFolder,
    text: Annotated[str, typer.Argument(help="One sentence.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("look.html"),
    beam: Beam = None,
    alpha: Alpha = None,
    rounds: Rounds = None,
    candidates: Candidates = None,
    checkpoints: Annotated[
        bool,
        typer.Option("--checkpoints", help="Show also how the alignment formed while it learned."),
    ] = False,
    parses: Annotated[
        Path | None, typer.Option(help="CoNLL-U, the tree of the sentence; for position: tree.")
    ] = None,
    to: To = None,
) -> None:
    """See one sentence pass: every head, every candidate, the beam; one HTML file that needs nothing else."""
    from regard.data.corpus import read_parses
    from regard.inspection.html import page
    from regard.storage.run_dir import write_text
    from regard.tasks import Translator

    if not text.strip():
        raise RegardError("the text is blank: there is nothing to look at")
    model = Translator.load(run).into(to)
    ways = {"beam": beam, "length_penalty": alpha, "iterations": rounds, "candidates": candidates}
    asked: dict[str, Any] = {name: value for name, value in ways.items() if value is not None}
    (parse,) = read_parses([text], parses, "the sentence") if parses else [None]
    found = model.trace(text, **asked, parse=parse, checkpoints=checkpoints)
    write_text(out, page(found))
    print(f"{out}: open it in a browser")
