"""The command look: inspect the translation of one sentence on an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.options import (
    DECODING,
    FLAG,
    INPUT_OUTPUT,
    RunFolder,
    TargetLanguage,
    with_decoding_options,
)
from regard.errors import RegardError


@with_decoding_options
def look(
    run: RunFolder,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The sentence to translate.")],
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="HTML file to write.", rich_help_panel=INPUT_OUTPUT),
    ] = Path("look.html"),
    parses: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="CoNLL-U file with the dependency tree of the sentence, for models with position: tree.",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = None,
    to: TargetLanguage = None,
    checkpoints: Annotated[
        bool,
        typer.Option(
            "--checkpoints",
            metavar=FLAG,
            help="Also show the alignment at each training checkpoint.",
        ),
    ] = False,
    prefix: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="Text that the translation must begin with (default: none).",
            show_default=False,
            rich_help_panel=DECODING,
        ),
    ] = "",
    *,
    decoding: dict[str, Any],
) -> None:
    """Show how a model translates one sentence: attention, candidates and beam search, as an HTML page.

    The page is one file that works offline.
    """
    from regard.data.formats import read_parses
    from regard.inspection.html import page
    from regard.storage.atomic_files import check_writable, write_text
    from regard.tasks import Translator

    if not text.strip():
        raise RegardError("the text is blank: there is nothing to inspect")
    check_writable(out)
    model = Translator.load(run).with_target_language(to)
    (parse,) = read_parses([text], parses, "the sentence") if parses else [None]
    trace = model.trace(text, **decoding, prefix=prefix, parse=parse, checkpoints=checkpoints)
    write_text(out, page(trace))
    print(f"{out}: open it in a browser")
