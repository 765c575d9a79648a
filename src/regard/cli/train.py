"""To make a model: train, distill, average, and what there is to start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.options import Alpha, AsJson, Beam, Overwrite, RunFolder, To
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.recipe import Recipe


def demo(
    out: Annotated[Path, typer.Option(help="RunDir folder.")] = Path("runs/demo"),
) -> None:
    """Train, score and try a small English-German translator in about three minutes."""
    from regard.demo.demo import demo as show
    from regard.training.run import Interrupted

    try:
        show(out)
    except Interrupted:
        raise typer.Exit(130) from None


def train(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE | SOURCE TARGET | PAIRS",
            help="A recipe (file or name), or two parallel text files, or one TSV or JSONL file.",
        ),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="Change a value of the recipe; repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="RunDir folder (default: runs/NAME).")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="End, cleanly, within this time.")
    ] = None,
) -> None:
    """Train a model, or go on with one that was interrupted."""
    from regard.training.run import Interrupted, train as learn

    recipe, name = _recipe(what, changes or [])
    try:
        learn(recipe, out or Path("runs") / name, minutes)
    except Interrupted:
        raise typer.Exit(130) from None


def _recipe(what: list[str], changes: list[str]) -> tuple[Recipe, str]:
    """The recipe that the arguments of ``train`` mean, and a name for its run."""
    from regard.recipe import DataFiles, load_recipe
    from regard.storage.run_dir import check_distinct_files
    from regard.training.autoconfig import choose

    name = Path(what[0]).name.split(".")[0]
    if len(what) > 2:
        raise RegardError(
            f"{len(what)} files given: train takes a recipe, two parallel files, or one"
        )
    plain = [file.removesuffix(".gz").removesuffix(".zst") for file in what]
    if len(what) == 1 and not plain[0].endswith((".tsv", ".jsonl", ".txt")):
        path = Path(what[0])
        if path.is_file() and path.suffix not in (".yaml", ".yml"):
            raise RegardError(
                f"{path}: a recipe ends in .yaml, a file of pairs in .tsv or .jsonl; "
                "for two parallel files give both"
            )
        return load_recipe(what[0], changes), name
    if len(what) == 2:
        check_distinct_files({"source": Path(what[0]), "target": Path(what[1])})
        if all(file.endswith((".tsv", ".jsonl")) for file in plain):
            raise RegardError(
                f"{what[0]}, {what[1]}: two files of pairs; give one, or a recipe with "
                "data.train.pairs: [both]"
            )
    texts = (
        DataFiles(pairs=(what[0],))
        if len(what) == 1
        else DataFiles(source=(what[0],), target=(what[1],))
    )
    recipe, reasons = choose(texts, str(Path.cwd()), changes)
    typer.echo("No recipe given, so this was chosen from the data:", err=True)
    for reason in reasons:
        typer.echo(f"  {reason}", err=True)
    return recipe, name


def distill(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The teacher: a run folder.")],
    input: Annotated[
        Path | None,
        typer.Option(help="DataFiles, one a line (default: the sources the run was trained on)."),
    ] = None,
    output: Annotated[
        Path, typer.Option(help="The pairs to write; the name ends in .tsv or .jsonl.")
    ] = Path("distilled.tsv"),
    beam: Beam = None,
    alpha: Alpha = None,
    to: To = None,
    turned: Annotated[
        bool,
        typer.Option("--turned", help="Write each pair turned round: a back-translation."),
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Let a model translate its training sources, or other texts: pairs to learn from.

    Killed, it goes on where it was, by the same command.
    """
    from functools import partial

    from regard.tasks import Translator
    from regard.training.distillation import distill as write

    model = Translator.load(run)
    model.start_workers()
    model = model.into(to)
    tell = partial(typer.echo, err=True)
    count = write(model, output, input, tell, turned, overwrite, beam=beam, alpha=alpha)
    print(f"{output}: {count:,} pairs; a student learns from them with  regard train")


def average(
    run: RunFolder,
    out: Annotated[Path, typer.Option(help="Folder for the new model.")],
    last: Annotated[
        int | None, typer.Option(min=1, help="Only the last so many (default: all kept).")
    ] = None,
) -> None:
    """Average the checkpoints kept in a run into a new model."""
    from regard.training.checkpoint import average_run

    steps = average_run(run, out, last)
    many = "s" * (len(steps) > 1)
    told = ", ".join(map(str, steps))
    print(f"{out}: the average of {len(steps)} checkpoint{many} (step{many} {told})")


def recipes() -> None:
    """List the recipes that come with Regard."""
    from regard.recipe import bundled_recipes

    for name, path in bundled_recipes().items():
        first = path.read_text(encoding="utf-8").split("\n", 1)[0]
        print(f"{name:26} {first.removeprefix('#').strip()}")


def info(run: RunFolder, as_json: AsJson = False) -> None:
    """What a run is, where it came from, how good it is."""
    from regard.storage.run_dir import RunDir

    folder = RunDir(run)
    recipe, card = folder.recipe(), folder.card()
    if as_json:
        print(json.dumps({"recipe": recipe.model_dump(mode="json"), "card": card}, indent=2))
        return
    for line in folder.describe(recipe, card):
        print(line)
