"""The commands demo, train, recipes, distill, average and plan."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from regard.cli.options import (
    FINE_TUNING,
    INPUT_OUTPUT,
    INTERRUPTED,
    AsJson,
    BadLines,
    Columns,
    LanguagePair,
    NewRunFolder,
    Overwrite,
    RecipeChanges,
    RecipeName,
    ShardOption,
    TargetLanguage,
    parse_bad_lines,
    parse_two,
    run_folders,
    with_decoding_options,
)
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.recipe import DataFiles, Recipe
    from regard.training.autoconfig import AutomaticRecipe
    from regard.training.fine_tuning import FineTuning


DEMO_RUN = Path("runs/demo")


def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Run folder to write.")] = DEMO_RUN,
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
            "files of pairs: TSV, CSV, XLSX, JSONL, Parquet, TMX, XLIFF, PO, zip archives, or a folder of these.",
        ),
    ],
    changes: RecipeChanges = None,
    out: NewRunFolder = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            metavar="MINUTES",
            min=0.1,
            help="Time limit for the whole command: data preparation, training, validation and scoring. The steps, "
            "the schedule and, without a recipe, the model are chosen to fit (default: no limit; without a recipe "
            "and without --from, a limit chosen for the data and the device).",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Train in N processes on this machine and divide each batch among them: one process per GPU. "
            "On a CPU, one process uses all cores, and is usually faster than several (default: one process).",
        ),
    ] = None,
    columns: Columns = None,
    languages: LanguagePair = None,
    on_bad_line: BadLines = "error",
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Fine-tune this run: a run folder, a bundle or an imported model. It determines the model size and "
            "the tokenizer (default: none, a new model is trained).",
            rich_help_panel=FINE_TUNING,
        ),
    ] = None,
    mix: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Share of the training pairs that are drawn from the training data of that run, for example 0.5 "
            "(default: 0).",
            rich_help_panel=FINE_TUNING,
        ),
    ] = None,
    freeze: Annotated[
        str | None,
        typer.Option(
            metavar="GROUPS",
            help="Do not train these groups of weights: encoder, decoder, embeddings, self_attention, cross_attention, "
            "feed_forward or norms, separated by commas; or all groups but one, for example all-but-decoder "
            "(default: none).",
            rich_help_panel=FINE_TUNING,
        ),
    ] = None,
    extend_vocab: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Add up to N entries, learned from the new data, to each vocabulary (default: 0). Needed for a new "
            "language.",
            rich_help_panel=FINE_TUNING,
        ),
    ] = None,
) -> None:
    """Train a model, resume an interrupted run, or fine-tune a finished one (--from).

    Without a recipe, Regard chooses one from the data. To resume, run the same command again.
    """
    world_size = os.environ.get(
        "WORLD_SIZE"
    )  # set by torchrun, or for the processes that are started here
    if processes is not None and world_size is None and processes > 1:
        from regard.training.distributed import run_processes

        raise typer.Exit(run_processes(sys.argv[1:], processes))
    if processes is not None and (world_size or "1") != str(processes):
        raise RegardError(
            f"--processes {processes}: WORLD_SIZE is {world_size}; omit --processes or unset WORLD_SIZE"
        )
    if not all(data):
        raise RegardError("a file name is empty")
    if out is not None and out.exists() and not out.is_dir():
        raise RegardError(f"--out {out}: a file, not a folder")
    from regard.training.run import Interrupted, train as run_training

    start = time.monotonic()
    reading = {
        "columns": parse_two("--columns", columns),
        "languages": parse_two("--languages", languages),
        "on_bad_line": parse_bad_lines(on_bad_line),
    }
    fine_tuning = _fine_tuning(from_, mix, freeze, extend_vocab)
    try:
        planned = _plan(data, changes or [], reading, fine_tuning, out, minutes)
    except KeyboardInterrupt:
        typer.echo("Interrupted while reading the data: nothing was written", err=True)
        raise
    minutes_left = None
    if planned.minutes is not None:
        minutes_left = max(0.1, planned.minutes - (time.monotonic() - start) / 60)
    try:
        run_training(
            planned.recipe,
            planned.out,
            minutes_left,
            automatic=planned.automatic,
            tune_decoding=planned.tune_decoding,
        )
    except Interrupted:
        raise typer.Exit(INTERRUPTED) from None


def _fine_tuning(
    run: Path | None, mix: float | None, freeze: str | None, extend_vocab: int | None
) -> FineTuning | None:
    """The options of fine-tuning; None if a model is trained from scratch."""
    from regard.training.fine_tuning import FineTuning

    groups = None if freeze is None else tuple(group.strip() for group in freeze.split(","))
    options = {"--mix": mix, "--freeze": freeze, "--extend-vocab": extend_vocab}
    if run is not None:
        return FineTuning(run, mix, groups, extend_vocab)
    if misplaced := [f"{option} {value}" for option, value in options.items() if value is not None]:
        raise RegardError(f"{misplaced[0]}: only for fine-tuning; name the run with --from")
    return None


class _Planned(NamedTuple):
    """What ``train`` will do."""

    recipe: Recipe
    out: Path
    minutes: float | None
    tune_decoding: bool = False
    """whether to choose the length penalty on the validation pairs"""
    automatic: AutomaticRecipe | None = None
    """how the recipe was chosen"""


def _plan(
    data: list[str],
    changes: list[str],
    reading: dict[str, Any],
    fine_tuning: FineTuning | None,
    out: Path | None,
    minutes: float | None,
) -> _Planned:
    """The recipe for the arguments of ``train``, and the run folder."""
    from regard.recipe import load_recipe
    from regard.training.fine_tuning import fine_tuning_from_recipe, from_changes

    name = Path(data[0]).resolve().name.split(".")[0] or "data"
    if len(data) == 1 and not _is_data(data[0]):
        for option, key in _RECIPE_KEYS.items():
            if reading[option] not in (None, "error"):
                flag = option.replace("_", "-")
                raise RegardError(f"--{flag} applies to data files; in a recipe, set {key}")
        folder = out or Path("runs") / name
        if fine_tuning is None:
            return _Planned(load_recipe(data[0], changes), folder, minutes)
        recipe, reasons = fine_tuning_from_recipe(fine_tuning, data[0], changes)
        _print_reasons("Fine-tuning with this recipe:", reasons)
        return _Planned(recipe, folder, minutes)
    folder = out or Path("runs") / ("data" if "*" in name or "?" in name else name)
    files, languages = data_files(data, reading), reading["languages"]
    if fine_tuning := fine_tuning or from_changes(changes):
        recipe = _fine_tuning_recipe(fine_tuning, files, changes, languages)
        return _Planned(recipe, folder, minutes)
    return _automatic(files, changes, languages, folder, minutes)


def _fine_tuning_recipe(
    fine_tuning: FineTuning, files: DataFiles, changes: list[str], languages: tuple[str, str] | None
) -> Recipe:
    """A recipe for data files that starts from another run."""
    from regard.data.corpus import CorpusPreview
    from regard.recipe import DataConfig
    from regard.training.fine_tuning import fine_tuning_recipe

    root = str(Path.cwd())
    preview = CorpusPreview(files, DataConfig(root=root, train=files, languages=languages))
    recipe, reasons = fine_tuning_recipe(
        fine_tuning, files, root, changes, preview.languages, preview.pairs()
    )
    _print_reasons("The data:", preview.lines(recipe.data.languages))
    _print_reasons("Fine-tuning with this recipe:", reasons)
    return recipe


def _automatic(
    files: DataFiles,
    changes: list[str],
    languages: tuple[str, str] | None,
    out: Path,
    minutes: float | None,
) -> _Planned:
    """An automatic recipe for data files; the recipe of the run folder if its training is resumed."""
    from regard.data.corpus import CorpusPreview
    from regard.recipe import DataConfig
    from regard.training.autoconfig import autoconfigure, tunes_decoding
    from regard.training.resume import resumable_recipe

    root = str(Path.cwd())
    tune = tunes_decoding(changes)
    if (recipe := resumable_recipe(out, files, root, changes, languages)) is not None:
        return _Planned(recipe, out, minutes, tune)
    config = DataConfig(root=root, train=files, languages=languages)
    preview = CorpusPreview(files, config)
    detected_languages = None if files.source and not config.languages else preview.languages
    automatic = autoconfigure(files, root, changes, detected_languages, preview.pairs(), minutes)
    _print_reasons("The data:", preview.lines())
    title = "No recipe was given. This one was chosen for the data and the device:"
    _print_reasons(title, automatic.reasons)
    return _Planned(automatic.recipe, out, automatic.minutes, tune, automatic)


def _print_reasons(title: str, lines: list[str]) -> None:
    for line in (title, *(f"  {line}" for line in lines)):
        typer.echo(line, err=True)


_RECIPE_KEYS = {
    "columns": "data.train.columns",
    "languages": "data.languages",
    "on_bad_line": "data.train.on_bad_line",
}
"""options that a recipe has keys for"""


def _is_data(name: str) -> bool:
    """Whether the only argument names data; otherwise it is a recipe."""
    from regard.data.corpus import data_path
    from regard.data.formats import is_pattern, pair_suffixes
    from regard.data.text_files import RemoteFile, uncompressed_name
    from regard.recipe import bundled_recipes

    path = data_path(name)
    if isinstance(path, RemoteFile):
        return True
    if is_pair_file(name) or uncompressed_name(name).endswith(".txt") or is_pattern(path):
        return True
    try:
        if path.is_dir() and name not in bundled_recipes():
            return not (path / "recipe.yaml").exists()
        is_file = path.is_file()
    except OSError:  # such as a name that is too long
        return False
    if is_file and path.suffix in (".xls", ".ods"):
        raise RegardError(f"{path}: unsupported spreadsheet format; save it as XLSX or CSV (UTF-8)")
    if is_file and path.suffix not in (".yaml", ".yml"):
        raise RegardError(
            f"{path}: neither a recipe (.yaml) nor a file of pairs ({', '.join(pair_suffixes())}); "
            "for two parallel text files, give both"
        )
    return False


def is_pair_file(name: str) -> bool:
    """Whether the suffix of a file is that of a pair format."""
    from regard.data.formats.base import suffix_format

    return suffix_format(Path(name)) is not None


def data_files(data: list[str], reading: dict[str, Any]) -> DataFiles:
    """Files of pairs, or two parallel files."""
    from regard.data.corpus import data_path
    from regard.data.formats import is_pattern
    from regard.recipe import DataFiles
    from regard.storage.atomic_files import check_distinct_files

    columns, on_bad_line = reading["columns"], reading["on_bad_line"]
    collections = [path.is_dir() or is_pattern(path) for path in map(data_path, data)]
    pairs = [is_pair_file(name) for name in data]
    if len(data) == 1 or all(map(max, collections, pairs)):
        check_distinct_files({f"file {number}": Path(name) for number, name in enumerate(data, 1)})
        return DataFiles(pairs=tuple(data), columns=columns, on_bad_line=on_bad_line)
    if len(data) > 2:
        raise RegardError(
            f"{len(data)} files given: expected a recipe, two parallel text files, or files of pairs"
        )
    if columns:
        raise RegardError(f"--columns {','.join(columns)}: text files have no columns")
    source, target = data
    check_distinct_files({"source": Path(source), "target": Path(target)})
    return DataFiles(source=(source,), target=(target,), on_bad_line=on_bad_line)


def recipes() -> None:
    """List the recipes that come with Regard."""
    from regard.recipe import bundled_recipes

    bundled = bundled_recipes()
    width = max(map(len, bundled))
    for name, path in bundled.items():
        first_line = path.read_text(encoding="utf-8").split("\n", 1)[0]
        print(f"{name:{width}}  {first_line.removeprefix('#').strip()}")


@with_decoding_options
def distill(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Run folder of the teacher, or an ensemble of several, for example runs/a+runs/b.",
        ),
    ],
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
            help="Swap the sides: the translation becomes the source, and the text becomes the target.",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = False,
    shard: ShardOption = None,
    overwrite: Overwrite = False,
    *,
    decoding: dict[str, Any],
) -> None:
    """Translate the training sources, or other texts, to make training pairs for another model.

    To resume after an interruption, run the same command again.
    """
    from functools import partial

    from regard.storage.resumable_output import WHOLE, Shard
    from regard.tasks import Translator
    from regard.training.distillation import distill as write_pairs

    share = Shard.parse(shard) if shard else WHOLE
    model = Translator.load(run_folders(run))
    model.start_workers()
    count = write_pairs(
        model.with_target_language(to),
        output,
        input,
        partial(typer.echo, err=True),
        back_translation,
        overwrite,
        share,
        **decoding,
    )
    path = share.path(output)
    print(f"{path}: {count:,} pairs; train a student on them with  regard train {path}")


def average(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run folder of a trained model, or several runs that started from the same weights.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Run folder to write.")],
    last: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Average only the last N checkpoints (default: all of them)."
        ),
    ] = None,
) -> None:
    """Average the weights of a run's checkpoints, or the models of several runs, into a new model.

    Several runs must have been fine-tuned from the same run, or have started from the same random weights.
    """
    from regard.training.checkpoint import average_run, average_runs

    if len(runs) > 1:
        if last is not None:
            raise RegardError(
                f"--last {last}: the models of several runs are averaged, not checkpoints"
            )
        average_runs(runs, out)
        print(f"{out}: the average of {len(runs)} runs ({', '.join(map(str, runs))})")
        return
    steps = average_run(runs[0], out, last)
    plural = "s" * (len(steps) > 1)
    listing = ", ".join(map(str, steps))
    print(f"{out}: the average of {len(steps)} checkpoint{plural} (step{plural} {listing})")


def plan(
    recipe: RecipeName,
    changes: RecipeChanges = None,
    gpus: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Number of GPUs, or of processes with --kind cpu; repeatable (default: 1, 8, 64, 512).",
        ),
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            metavar="GPU",
            help="GPU model: h200, h100 or a100; or cpu: processes with one core each, timed on this machine.",
        ),
    ] = "h100",
    price: Annotated[
        float | None,
        typer.Option(
            metavar="PRICE",
            min=0,
            help="Price of one GPU per hour, in any currency, for example 2.5; adds the cost to the table "
            "(default: none).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the speed, memory, time and cost of training on GPUs that you do not have.

    The estimates are for three corpora: WMT14 (4.5 million pairs), 300 million pairs, and 10^10 target tokens. Nothing
    is read or trained; with --kind cpu, a few steps on random tokens are timed on one core of this machine.
    """
    from regard.recipe import load_recipe, parse_choice
    from regard.training.cost_model import ACCELERATORS, CPU, describe, estimate

    name = parse_choice([*ACCELERATORS, CPU], kind, "--kind")
    estimates = estimate(load_recipe(recipe, changes or []), name, gpus or [1, 8, 64, 512])
    if as_json:
        print(json.dumps(estimates, indent=2))
        return
    for line in describe(estimates, price):
        print(line)
