"""The program ``regard``: the list of its commands, and how errors are reported."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard import __version__
from regard.cli.options import INTERRUPTED, Command, Group
from regard.errors import RegardError

if TYPE_CHECKING:
    app: typer.Typer

TRAINING = "Train"
INFERENCE = "Use a model"
ANALYSIS = "Evaluate and inspect"
DEPLOYMENT = "Serve and convert"

RENAMED_COMMANDS = {"continue": "generate"}
"""Commands of earlier versions and their current names."""

_DECODING = {
    "--alpha": "--length-penalty",
    "--rounds": "--iterations",
    "--candidates": "--length-beam",
}
RENAMED_OPTIONS: dict[str, dict[str, str]] = {
    "translate": {
        **_DECODING,
        "--manner": "--length-normalization",
        "--keep": "--protect",
        "--no-repeat": "--no-repeat-ngram",
    },
    "evaluate": _DECODING,
    "look": _DECODING,
    "distill": {"--alpha": "--length-penalty", "--turned": "--back-translation"},
}
"""Options of earlier versions and their current names, by command."""


def _print_version(requested: bool) -> None:
    if requested:
        print(f"regard {__version__}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options that come before a command; the help of the program is given to ``typer.Typer``."""


COMMANDS = {
    "demo": ("train:demo", TRAINING),
    "train": ("train:train", TRAINING),
    "plan": ("train:plan", TRAINING),
    "recipes": ("train:recipes", TRAINING),
    "distill": ("train:distill", TRAINING),
    "average": ("train:average", TRAINING),
    "data": ("data:app", TRAINING),
    "translate": ("translate:translate", INFERENCE),
    "tag": ("tasks:tag", INFERENCE),
    "classify": ("tasks:classify", INFERENCE),
    "fill": ("tasks:fill", INFERENCE),
    "generate": ("tasks:generate", INFERENCE),
    "evaluate": ("evaluate:evaluate", ANALYSIS),
    "look": ("evaluate:look", ANALYSIS),
    "info": ("runs:info", ANALYSIS),
    "runs": ("runs:app", ANALYSIS),
    "experiment": ("experiment:app", ANALYSIS),
    "lab": ("experiment:lab", ANALYSIS),
    "bench": ("bench:app", ANALYSIS),
    "selftest": ("bench:selftest", ANALYSIS),
    "serve": ("serve_and_convert:serve", DEPLOYMENT),
    "import": ("serve_and_convert:import_", DEPLOYMENT),
    "export": ("serve_and_convert:export", DEPLOYMENT),
}
"""Each command or group of commands: its location in this package, and its panel in the help."""


def make_app(command: str = "") -> typer.Typer:
    """The program with all commands, or with one command, in which case only its module is imported."""
    program = typer.Typer(
        cls=Group,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Train, evaluate, inspect and serve Transformer models for translation and other text tasks.",
        epilog="New here? Try  regard demo  or, with your own files,  regard train SOURCE TARGET",
    )
    program.callback()(_global_options)
    for name, (location, panel) in COMMANDS.items():
        if command in ("", name):
            module, attribute = location.split(":")
            entry = getattr(import_module(f"regard.cli.{module}"), attribute)
            if isinstance(entry, typer.Typer):
                program.add_typer(entry, name=name, rich_help_panel=panel)
            else:
                program.command(name, rich_help_panel=panel)(entry)
    _prepare_help(program)
    return program


def __getattr__(name: str) -> Any:
    """The program with all commands is made when it is first used."""
    if name != "app":
        raise AttributeError(f"module 'regard.cli.main' has no attribute {name!r}")
    return globals().setdefault("app", make_app())


def _prepare_help(commands: typer.Typer) -> None:
    """Join the lines of each paragraph of the docstrings, so that the help is wrapped to the width of the terminal.

    Commands and groups get classes that hide Python types in the help.
    """
    for command in commands.registered_commands:
        command.cls = Command
        text = inspect.cleandoc(command.callback.__doc__ or "") if command.callback else ""
        command.help = "\n\n".join(paragraph.replace("\n", " ") for paragraph in text.split("\n\n"))
    for group in commands.registered_groups:
        if group.typer_instance:
            _prepare_help(group.typer_instance)


def die_with_torchrun() -> None:
    """Let the kernel send SIGTERM to this process when the torchrun that started it dies.

    If torchrun is stopped while it is starting its processes, it does not stop those that are already running. They
    would wait for the others forever.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from regard.inference.worker_pool import death_signal

        death_signal(signal.SIGTERM)()


def main() -> None:
    """Run a command. User errors and system errors are one line on standard error, with exit status 2."""
    # Idle OpenMP threads sleep: threads that spin can be ten times slower when the machine is busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    limit_onednn_cache(sys.argv[1:3])
    limit_library_threads()
    die_with_torchrun()
    try:
        with note_interrupts() as interrupted:
            try:
                _check_renamed(sys.argv[1:])
                status = _run(sys.argv[1:])
            except Exception:
                if (
                    interrupted.is_set()
                ):  # a library may turn it into another error, such as a damaged file
                    raise KeyboardInterrupt from None
                raise
            finally:
                _flush()
    except RegardError as error:
        message = str(error)
    except OSError as error:
        message = str(error.strerror or error)
        message = f"{error.filename}: {message}" if error.filename else message
    except KeyboardInterrupt:  # before typer handles it, or after
        sys.exit(INTERRUPTED)
    except typer.Abort:
        sys.exit(1)
    except Exception as error:
        usage = _usage_message(error)
        if usage is None:
            raise
        message = usage
    else:
        sys.exit(status if isinstance(status, int) else 0)
    if message:
        print(f"regard: {message}", file=sys.stderr)
    sys.exit(2)


def _run(arguments: Sequence[str]) -> object:
    """Run the command that the arguments name. Returns its exit status, or None.

    ``translate RUN TEXT …`` without options is called directly: typer validates options with pydantic, whose import
    takes as long as the whole translation.
    """
    command = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    if (
        command != "translate"
        or len(arguments) < 3
        or any(argument[:1] == "-" for argument in arguments)
    ):
        return make_app(command)(prog_name="regard", standalone_mode=False)
    from regard.cli.options import call_with_defaults
    from regard.cli.translate import translate

    run, *texts = arguments[1:]
    call_with_defaults(translate, run=Path(run), texts=texts)
    return None


@contextmanager
def note_interrupts() -> Iterator[threading.Event]:
    """An event that is set on SIGINT (Ctrl-C); KeyboardInterrupt is raised as usual."""
    event = threading.Event()
    usual = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if usual is not signal.default_int_handler or not in_main_thread:  # the caller handles it
        yield event
        return

    def interrupt(number: int, frame: object) -> None:
        event.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, usual)


def _check_renamed(arguments: Sequence[str]) -> None:
    """Refuse the commands and options of earlier versions, and name their replacements."""
    command = next((argument for argument in arguments if not argument.startswith("-")), "")
    if command in RENAMED_COMMANDS:
        raise RegardError(f"the command {command} was renamed to {RENAMED_COMMANDS[command]}")
    renamed = RENAMED_OPTIONS.get(command, {})
    for argument in arguments:
        option = argument.partition("=")[0]
        if argument == "--":
            return
        if option in renamed:
            raise RegardError(f"{option} was renamed to {renamed[option]}")


def _usage_message(error: Exception) -> str | None:
    """One line for a mistake in the command's options or arguments; empty if the help was printed instead.

    None for any other error. Such errors are recognized by their attributes, because their classes differ between
    versions of typer.
    """
    if not hasattr(error, "format_message"):
        return None
    text = " ".join(error.format_message().split()).rstrip(".").replace("'", "")
    if not text:
        return text
    text = text[0].lower() + text[1:]
    text = text.replace(". Did you mean", "; did you mean")
    if similar := getattr(error, "possibilities", None):
        from difflib import get_close_matches

        option = getattr(error, "option_name", "")
        names = {name.lstrip("-"): name for name in similar}
        close = get_close_matches(option.lstrip("-"), names, n=1)
        text = f"no such option: {option}"
        text += "".join(f"; did you mean {names[name]}?" for name in close)
    elif text.startswith("invalid value for "):
        name, _, reason = text.removeprefix("invalid value for ").partition(": ")
        reason = reason.replace("Input should be", "must be")
        reason = reason.replace("a valid integer", "an integer").replace("a valid ", "a ")
        text = f"{name}{_value_of(name, sys.argv)}: {reason.partition(', unable to parse')[0]}"
    context = getattr(error, "ctx", None)
    return text if context is None else f"{text} (see {context.command_path} --help)"


def _value_of(option: str, arguments: Sequence[str]) -> str:
    """The value of an option as it was written, after a space; empty if it is not found."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == option:
            return f" {following}"
        if argument.startswith(f"{option}="):
            return f" {argument.partition('=')[2]}"
    return ""


def _flush() -> None:
    """Flush standard output, and report a failure. A reader that closed the pipe early is not an error."""
    try:
        if sys.stdout:  # it may be closed
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise Python flushes again and complains
        if isinstance(error, BrokenPipeError):
            sys.exit(1)  # as typer does
        raise RegardError(f"cannot write to standard output: {error.strerror}") from None


CACHED_KERNELS, CACHED_TRAINING_KERNELS = "64", "256"
TRAINING_COMMANDS = {"demo", "train", "plan", "experiment", "lab", "bench"}
"""commands that run training steps, themselves or in processes that inherit the environment; so does data score"""


def limit_onednn_cache(command: Sequence[str] = ()) -> None:
    """Limit the number of kernels that oneDNN caches, unless the user has set it.

    oneDNN compiles a kernel for each shape and caches about a thousand of them, twice: 0.8 GB, however small the model.
    Sentences that end one by one give a new shape in every step; shapes that recur do so soon. A training step has
    about a hundred matrix products, and packed rows have a few sizes. The variables are read when the first kernel is
    compiled.

    command: the first two arguments of the program.
    """
    training = not TRAINING_COMMANDS.isdisjoint(command[:1]) or [*command] == ["data", "score"]
    kernels = CACHED_TRAINING_KERNELS if training else CACHED_KERNELS
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", kernels)
    os.environ.setdefault("LRU_CACHE_CAPACITY", kernels)


def limit_library_threads() -> None:
    """Keep numpy and pyarrow from starting threads when they are imported, unless the user has configured them.

    Worker processes can be forked only from a process without threads (inference/worker_pool.py).
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
