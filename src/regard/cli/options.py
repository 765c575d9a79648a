"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

if TYPE_CHECKING:
    from regard.recipe import Precision

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Beam = Annotated[int | None, typer.Option(help="Beam size; 1 is greedy (default: the recipe's).")]
Alpha = Annotated[float | None, typer.Option(help="Length penalty (default: the recipe's).")]
Trees = Annotated[
    Path | None, typer.Option(help="CoNLL-U, a tree for each line; for position: tree.")
]
Rounds = Annotated[
    int | None,
    typer.Option(
        help="Of a parallel model: rounds; 1 says all words once (default: the recipe's)."
    ),
]
Candidates = Annotated[
    int | None,
    typer.Option(help="Of a parallel model: lengths to try (default: the recipe's)."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any other key of the recipe's section search, such as coverage=0.2; repeatable.",
    ),
]
To = Annotated[
    str | None, typer.Option(metavar="LANGUAGE", help="Of a model that knows several: which.")
]
PrecisionName = Annotated[
    str,
    typer.Option(help="Numbers to compute in: fp32, bf16, int8, or auto, the fastest there is."),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Batches worked on at a time, on a CPU (default, and most: all available_cores).",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Start anew where another translation was begun.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Given = Annotated[
    list[str] | None, typer.Argument(metavar="[TEXT]...", help="DataFiles; else standard input.")
]
Input = Annotated[Path | None, typer.Option(help="Take the lines of this file.")]
Output = Annotated[
    Path | None, typer.Option(help="Write to this file; one that is there is replaced at the end.")
]


def precision_of(name: str) -> Precision:
    from regard.recipe import Precision, parse_choice

    found: Precision = parse_choice(get_args(Precision), name, "--precision")
    return found
