"""The commands that make models: demo, train, recipes, distill, average; and info, which describes one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import (
    FLAG,
    INPUT_OUTPUT,
    AsJson,
    Overwrite,
    RunFolder,
    TargetLanguage,
    with_decoding_options,
)
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.recipe import DataFiles, Recipe

INTERRUPTED = 130
"""exit status, as of a process that SIGINT ended"""


def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Run folder to write.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train and evaluate a small English-German translator in about three minutes.

    The corpus is built in, so nothing is downloaded.
    """
    from regard.demo.demo import demo as run_demo
    from regard.training.run import Interrupted

    try:
        run_demo(out)
    except Interrupted:
        raise typer.Exit(INTERRUPTED) from None


def train(
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE | SOURCE TARGET | PAIRS",
            help="A recipe (a YAML file or a name from  regard recipes), two parallel text files, or "
            "one .tsv or .jsonl file of pairs.",
        ),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a value of the recipe, for example training.steps=500; repeatable.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Run folder to write (default: runs/NAME)."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            metavar="MINUTES",
            min=0.1,
            help="Stop in time to finish within this many minutes (default: no limit).",
        ),
    ] = None,
) -> None:
    """Train a model, or resume an interrupted run.

    Without a recipe, Regard chooses one from the data. To resume, run the same command again.
    """
    from regard.training.run import Interrupted, train as run_training

    recipe, name = _recipe(data, changes or [])
    try:
        run_training(recipe, out or Path("runs") / name, minutes)
    except Interrupted:
        raise typer.Exit(INTERRUPTED) from None


def _recipe(data: list[str], changes: list[str]) -> tuple[Recipe, str]:
    """The recipe for the arguments of ``train``, and a name for its run."""
    from regard.data.formats import pair_suffixes
    from regard.data.text_files import uncompressed_name
    from regard.recipe import load_recipe
    from regard.training.autoconfig import autoconfigure

    name = Path(data[0]).name.split(".")[0]
    if len(data) > 2:
        raise RegardError(
            f"{len(data)} files given: train takes a recipe, two parallel text files, or one file of pairs"
        )
    if len(data) == 1 and not uncompressed_name(data[0]).endswith((*pair_suffixes(), ".txt")):
        path = Path(data[0])
        if path.is_file() and path.suffix not in (".yaml", ".yml"):
            raise RegardError(
                f"{path}: neither a recipe (.yaml) nor a file of pairs ({', '.join(pair_suffixes())}); "
                "if it is one of two parallel text files, give both"
            )
        return load_recipe(data[0], changes), name
    recipe, reasons = autoconfigure(_data_files(data), str(Path.cwd()), changes)
    typer.echo("No recipe was given. This one was chosen from the data:", err=True)
    for reason in reasons:
        typer.echo(f"  {reason}", err=True)
    return recipe, name


def _data_files(data: list[str]) -> DataFiles:
    """One file of pairs, or two parallel files."""
    from regard.data.formats import pair_suffixes
    from regard.data.text_files import uncompressed_name
    from regard.recipe import DataFiles
    from regard.storage.atomic_files import check_distinct_files

    if len(data) == 1:
        return DataFiles(pairs=(data[0],))
    source, target = data
    check_distinct_files({"source": Path(source), "target": Path(target)})
    if all(uncompressed_name(file).endswith(pair_suffixes()) for file in data):
        raise RegardError(
            f"{source}, {target}: both are files of pairs; give only one, or list both in "
            "data.train.pairs of a recipe"
        )
    return DataFiles(source=(source,), target=(target,))


def recipes() -> None:
    """List the recipes that come with Regard."""
    from regard.recipe import bundled_recipes

    for name, path in bundled_recipes().items():
        first_line = path.read_text(encoding="utf-8").split("\n", 1)[0]
        print(f"{name:26} {first_line.removeprefix('#').strip()}")


@with_decoding_options
def distill(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of the teacher.")],
    input: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Sources to translate, one per line (default: the sources of the run's training data).",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="File of pairs to write; its name must end in .tsv or .jsonl.",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = Path("distilled.tsv"),
    to: TargetLanguage = None,
    back_translation: Annotated[
        bool,
        typer.Option(
            "--back-translation",
            metavar=FLAG,
            help="Swap the sides: the translation becomes the source, and the text becomes the target.",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = False,
    overwrite: Overwrite = False,
    *,
    decoding: dict[str, Any],
) -> None:
    """Translate the training sources, or other texts, and write pairs that another model can learn from.

    To resume after an interruption, run the same command again.
    """
    from functools import partial

    from regard.tasks import Translator
    from regard.training.distillation import distill as write_pairs

    model = Translator.load(run)
    model.start_workers()
    count = write_pairs(
        model.with_target_language(to),
        output,
        input,
        partial(typer.echo, err=True),
        back_translation,
        overwrite,
        **decoding,
    )
    print(f"{output}: {count:,} pairs; train a student on them with  regard train {output}")


def average(
    run: RunFolder,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Run folder to write.")],
    last: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Average only the last N checkpoints (default: all of them)."
        ),
    ] = None,
) -> None:
    """Average the weights of a run's checkpoints into a new model."""
    from regard.training.checkpoint import average_run

    steps = average_run(run, out, last)
    plural = "s" * (len(steps) > 1)
    listing = ", ".join(map(str, steps))
    print(f"{out}: the average of {len(steps)} checkpoint{plural} (step{plural} {listing})")


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
