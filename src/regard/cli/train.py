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
    BadLines,
    Columns,
    LanguagePair,
    Overwrite,
    RunFolder,
    TargetLanguage,
    parse_bad_lines,
    parse_two,
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
            "files of pairs: TSV, CSV, JSONL, Parquet, TMX, XLIFF, PO, zip archives, or a folder of these.",
        ),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a value of the recipe, for example model.dropout=0.2; repeatable.",
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
    columns: Columns = None,
    languages: LanguagePair = None,
    on_bad_line: BadLines = "error",
) -> None:
    """Train a model, or resume an interrupted run.

    Without a recipe, Regard chooses one from the data. To resume, run the same command again.
    """
    from regard.training.run import Interrupted, train as run_training

    reading = {
        "columns": parse_two("--columns", columns),
        "languages": parse_two("--languages", languages),
        "on_bad_line": parse_bad_lines(on_bad_line),
    }
    recipe, name = _recipe(data, changes or [], reading)
    try:
        run_training(recipe, out or Path("runs") / name, minutes)
    except Interrupted:
        raise typer.Exit(INTERRUPTED) from None


def _recipe(data: list[str], changes: list[str], reading: dict[str, Any]) -> tuple[Recipe, str]:
    """The recipe for the arguments of ``train``, and a name for its run."""
    from regard.data.corpus import CorpusPreview
    from regard.recipe import DataConfig, load_recipe
    from regard.training.autoconfig import autoconfigure

    name = Path(data[0]).resolve().name.split(".")[0] or "data"
    if len(data) == 1 and not _is_data(data[0]):
        for option, key in _RECIPE_KEYS.items():
            if reading[option] not in (None, "error"):
                flag = option.replace("_", "-")
                raise RegardError(f"--{flag} is for files; in a recipe, write {key}")
        return load_recipe(data[0], changes), name
    files = _data_files(data, reading)
    root = str(Path.cwd())
    config = DataConfig(root=root, train=files, languages=reading["languages"])
    preview = CorpusPreview(files, config)
    languages = None if files.source and not config.languages else preview.languages
    recipe, reasons = autoconfigure(files, root, changes, languages, preview.pairs())
    typer.echo("No recipe was given. This one was chosen from the data:", err=True)
    for reason in reasons:
        typer.echo(f"  {reason}", err=True)
    typer.echo("The data:", err=True)
    for line in preview.lines():
        typer.echo(f"  {line}", err=True)
    return recipe, "data" if "*" in name or "?" in name else name


_RECIPE_KEYS = {
    "columns": "data.train.columns",
    "languages": "data.languages",
    "on_bad_line": "data.train.on_bad_line",
}
"""options that a recipe has keys for"""


def _is_data(name: str) -> bool:
    """Whether the only argument names data; otherwise it is a recipe."""
    from regard.data.formats import is_pattern, pair_suffixes
    from regard.data.text_files import uncompressed_name
    from regard.recipe import bundled_recipes

    path = Path(name)
    if _is_pair_file(name) or uncompressed_name(name).endswith(".txt") or is_pattern(path):
        return True
    try:
        if path.is_dir() and name not in bundled_recipes():
            return not (path / "recipe.yaml").exists()
        is_file = path.is_file()
    except OSError:  # such as a name that is too long
        return False
    if is_file and path.suffix in (".xlsx", ".xls", ".ods"):
        raise RegardError(f"{path}: a spreadsheet; save it as CSV (UTF-8) and give that file")
    if is_file and path.suffix not in (".yaml", ".yml"):
        raise RegardError(
            f"{path}: neither a recipe (.yaml) nor a file of pairs ({', '.join(pair_suffixes())}); "
            "of two parallel text files, give both"
        )
    return False


def _is_pair_file(name: str) -> bool:
    """Whether a file is one of pairs, by its suffix."""
    from regard.data.input_format import suffix_format

    return suffix_format(Path(name)) is not None


def _data_files(data: list[str], reading: dict[str, Any]) -> DataFiles:
    """Files of pairs, or two parallel files."""
    from regard.data.formats import is_pattern
    from regard.recipe import DataFiles
    from regard.storage.atomic_files import check_distinct_files

    columns, on_bad_line = reading["columns"], reading["on_bad_line"]
    collections = [Path(name).is_dir() or is_pattern(Path(name)) for name in data]
    pairs = [_is_pair_file(name) for name in data]
    if len(data) == 1 or all(map(max, collections, pairs)):
        check_distinct_files({f"file {number}": Path(name) for number, name in enumerate(data, 1)})
        return DataFiles(pairs=tuple(data), columns=columns, on_bad_line=on_bad_line)
    if len(data) > 2:
        raise RegardError(
            f"{len(data)} files given: train takes a recipe, two parallel text files, or files of pairs"
        )
    if columns:
        raise RegardError(f"--columns {','.join(columns)}: text files have no columns")
    source, target = data
    check_distinct_files({"source": Path(source), "target": Path(target)})
    return DataFiles(source=(source,), target=(target,), on_bad_line=on_bad_line)


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
