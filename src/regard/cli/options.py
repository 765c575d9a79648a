"""Arguments and options that several commands share."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.recipe import Precision

INPUT_OUTPUT = "Input and output"
FINE_TUNING = "Fine-tuning"
DECODING = "Decoding"
SAMPLING = "Sampling"
NON_AUTOREGRESSIVE = "Decoding of non-autoregressive models"
PERFORMANCE = "Performance"
"""panels of the help"""

INTERRUPTED = 130
"""exit status of a process that was ended by SIGINT"""


class _NoPythonTypes:
    """Leaves the types of arguments and flags out of the help: users do not need <list[str]> or <bool>."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if isinstance(parameter, TyperArgument):
                parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
            elif isinstance(parameter, TyperOption) and parameter.is_flag:
                parameter.metavar = ""
        return parameters


class Command(_NoPythonTypes, TyperCommand):
    """A command of ``regard``."""


class Group(_NoPythonTypes, TyperGroup):
    """A group of commands of ``regard``."""


class DefaultGroup(Group):
    """A group with a default command: ``regard runs FOLDER`` means ``regard runs list FOLDER``."""

    default_command = ""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        asks_for_help = any(argument in ctx.help_option_names for argument in args[:1])
        if not asks_for_help and (not args or args[0] not in self.commands):
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)


def default_group(command: str) -> type[TyperGroup]:
    """A group whose default is this command."""
    return type("DefaultGroup", (DefaultGroup,), {"default_command": command})


RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of a trained model.")]
RunFolders = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="Run folder of a trained model, or an ensemble of several, for example runs/a+runs/b.",
    ),
]
RecipeName = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A recipe: a YAML file or a name from  regard recipes."),
]
RecipeChanges = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the recipe, for example training.steps=500; repeatable (default: none).",
    ),
]
NewRunFolder = Annotated[
    Path | None,
    typer.Option("--out", metavar="FOLDER", help="Run folder to write (default: runs/NAME)."),
]
Texts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TEXT",
        help="Texts to process (default: the lines of --input, or of standard input).",
    ),
]
TextsOrDocuments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TEXT|DOCUMENT",
        help="Texts, or documents such as report.docx or '*.md' (default: the lines of --input, or of "
        "standard input).",
    ),
]
Input = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Read lines from this file, which may be compressed: .gz, .zst, .xz (default: standard input).",
        rich_help_panel=INPUT_OUTPUT,
    ),
]
OutputOrFolder = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="PATH",
        help="File to write, or folder for documents (default: standard output); an existing file is replaced "
        "only at the end.",
        rich_help_panel=INPUT_OUTPUT,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File to write (default: standard output); an existing file is replaced only at the end.",
        rich_help_panel=INPUT_OUTPUT,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Start from the beginning and discard the unfinished output of an interrupted command.",
        rich_help_panel=INPUT_OUTPUT,
    ),
]
ShardOption = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Process only part I of N, for example 3/8; other processes or machines process the other parts "
        "(default: all of it).",
        rich_help_panel=INPUT_OUTPUT,
    ),
]
Parses = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="CoNLL-U file with the dependency tree of each line, for models with position: tree (default: none).",
        rich_help_panel=INPUT_OUTPUT,
    ),
]
TargetLanguage = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="LANGUAGE",
        help="Target language of a multilingual model, for example de (default: its only target language; "
        "required if there are several).",
        rich_help_panel=INPUT_OUTPUT,
    ),
]
Columns = Annotated[
    str | None,
    typer.Option(
        metavar="SOURCE,TARGET",
        help="Columns, keys or languages of the source and the target in files of pairs, by name or number, "
        "for example en,de or 2,3 (default: detected from headers, keys and language codes).",
        rich_help_panel=INPUT_OUTPUT,
    ),
]
LanguagePair = Annotated[
    str | None,
    typer.Option(
        "--languages",
        metavar="SOURCE,TARGET",
        help="Source and target language, for example en,de (default: detected from the files).",
        rich_help_panel=INPUT_OUTPUT,
    ),
]
BadLines = Annotated[
    str,
    typer.Option(
        "--on-bad-line",
        metavar="error | skip",
        help="What to do with a line that cannot be parsed: error stops; skip skips it and reports the count.",
        rich_help_panel=INPUT_OUTPUT,
    ),
]
PrecisionName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Precision: fp32, bf16, int8, or auto, the fastest one that the machine supports.",
        rich_help_panel=PERFORMANCE,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Number of batches to process at the same time on a CPU (default: the number of cores).",
        rich_help_panel=PERFORMANCE,
    ),
]


def parse_two(option: str, value: str | None) -> tuple[str, str] | None:
    """Check the value of an option that names source and target."""
    if value is None:
        return None
    names = [name.strip() for name in value.split(",")]
    if len(names) != 2 or not all(names):
        raise RegardError(f"{option} {value}: expected two names and a comma, for example en,de")
    return names[0], names[1]


def parse_bad_lines(value: str) -> str:
    """Check the value of ``--on-bad-line``."""
    if value not in ("error", "skip"):
        raise RegardError(f"--on-bad-line {value}: must be error or skip")
    return value


def parse_precision(name: str) -> Precision:
    """Check the value of ``--precision``."""
    if name == "auto":
        return "auto"
    from regard.recipe import Precision, parse_choice

    precision: Precision = parse_choice(get_args(Precision), name, "--precision")
    return precision


def decoding_options(
    beam: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Beam size; 1 is greedy search (default: from the recipe).",
            rich_help_panel=DECODING,
        ),
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            metavar="ALPHA",
            help="Exponent of the length penalty; larger values favour longer translations "
            "(default: from the recipe).",
            rich_help_panel=DECODING,
        ),
    ] = None,
    length_normalization: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Length penalty and stopping rule of beam search: gnmt (as in the paper), transformers or "
            "ctranslate2 (default: from the recipe).",
            rich_help_panel=DECODING,
        ),
    ] = None,
    no_repeat_ngram: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Never generate the same sequence of N tokens twice in a translation; 0 turns this off "
            "(default: from the recipe).",
            rich_help_panel=DECODING,
        ),
    ] = None,
    protect: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help="Copy these spans unchanged: placeholders ({name}, %s, <b>, URLs) or numbers; "
            "repeatable (default: from the recipe).",
            rich_help_panel=DECODING,
        ),
    ] = None,
    mbr: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Minimum Bayes risk decoding: draw N samples and return the one most similar to "
            "the others; 0 turns this off (default: from the recipe).",
            rich_help_panel=DECODING,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override any key of the recipe's decoding section, for example "
            "coverage_penalty=0.2; repeatable (default: none).",
            rich_help_panel=DECODING,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="T",
            help="Sample instead of searching; values below 1 sharpen the distribution, values above 1 "
            "flatten it (default: from the recipe).",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            help="Sample from the K most probable tokens; 0 means all (default: from the recipe).",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Sample from the most probable tokens that together have probability P, for example "
            "0.9 (default: from the recipe).",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Random seed; the same seed gives the same samples (default: from the recipe).",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of mask-predict iterations; 1 predicts all tokens once (default: from the recipe).",
            rich_help_panel=NON_AUTOREGRESSIVE,
        ),
    ] = None,
    length_beam: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of candidate lengths to decode (default: from the recipe).",
            rich_help_panel=NON_AUTOREGRESSIVE,
        ),
    ] = None,
) -> dict[str, Any]:
    """The decoding options that were given on the command line, by the recipe's key.

    The parameters are the options of the command line: see ``with_decoding_options``.
    """
    options = {name: value for name, value in locals().items() if name != "overrides"}
    specified = {name: value for name, value in options.items() if value is not None}
    if overrides:
        from regard.recipe import decoding_overrides

        specified |= decoding_overrides(overrides)
    return specified


def with_decoding_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command: its parameter ``decoding`` is replaced by the options of ``decoding_options``.

    The command gets the result of ``decoding_options`` instead.
    """
    shared = _parameters(decoding_options)
    command_parameters = _parameters(command)
    index = [parameter.name for parameter in command_parameters].index("decoding")
    names = [parameter.name for parameter in shared]

    def run(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in names}
        decoding = decoding_options(**given)
        # Not the values of --set, whose keys are those of the recipe.
        options = [name for name in decoding if decoding[name] is given.get(name)]
        with errors_name_options(options):
            command(**arguments, decoding=decoding)

    decorated: Any = update_wrapper(run, command)
    parameters = [*command_parameters[:index], *shared, *command_parameters[index + 1 :]]
    decorated.__signature__ = inspect.Signature(parameters)
    decorated.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@contextmanager
def errors_name_options(names: Iterable[str]) -> Iterator[None]:
    """Let an error about decoding keys that were given as options name these: ``--beam``, not ``decoding.beam``."""
    try:
        yield
    except RegardError as error:
        message = str(error)
        if not message.startswith("decoding."):
            raise
        for name in names:
            option = f"--{name.replace('_', '-')}"
            message = re.sub(rf"(^|; )decoding\.{name}(\.\d+)?:", rf"\1{option}:", message)
        raise RegardError(message) from None


def call_with_defaults(command: Callable[..., None], **arguments: Any) -> None:
    """Call a command as the command line does, with the default of every option that is not given."""
    parameters = inspect.signature(command).parameters
    command(**{name: parameter.default for name, parameter in parameters.items()} | arguments)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function, with evaluated annotations, all by keyword."""
    hints = get_type_hints(function, include_extras=True)
    return [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(function).parameters.items()
    ]


def run_folders(run: Path) -> Path | list[Path]:
    """The run folder that an argument names, or several folders joined by +."""
    if run.exists() or "+" not in str(run):
        return run
    folders = str(run).split("+")
    if not all(folders):
        raise RegardError(f"{run}: expected run folders joined by +, for example runs/a+runs/b")
    return [Path(folder) for folder in folders]
