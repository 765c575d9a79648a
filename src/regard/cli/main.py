"""The command line: which commands there are. What they do stands in ``commands/``."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from regard import __version__
from regard.cli import convert, evaluate, inspect, serve, tasks, train
from regard.cli.bench import app as bench
from regard.cli.translate import translate
from regard.errors import RegardError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The Transformer, whole: pairs of text in; a trained, scored model out.",
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        print(f"regard {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_tell_version, is_eager=True, help="Tell which version this is."
        ),
    ] = False,
) -> None:
    """What goes before a command."""


app.command()(train.demo)
app.command()(train.train)
app.command()(translate)
app.command()(tasks.tag)
app.command()(tasks.classify)
app.command()(tasks.fill)
app.command()(tasks.generate)
app.command()(train.distill)
app.command()(evaluate.evaluate)
app.command()(inspect.look)
app.command()(serve.serve)
app.command()(train.average)
app.command("import")(convert.import_)
app.command()(convert.export)
app.command()(train.recipes)
app.command()(train.info)
app.add_typer(bench, name="bench")


def main() -> None:
    """RunDir a command; a RegardError, or what the system refuses, becomes one line and exit status 2."""
    # Threads that wait asleep: threads that spin can cost ten times the speed beside other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        try:
            app()
        finally:
            _flush()
    except RegardError as error:
        said = str(error)
    except OSError as error:
        said = str(error.strerror or error)
        said = f"{error.filename}: {said}" if error.filename else said
    print(f"regard: {said}", file=sys.stderr)
    sys.exit(2)


def _flush() -> None:
    """Say that standard output takes no more, where it can still be said; a reader who has enough is left in peace."""
    try:
        if sys.stdout:  # it may be closed
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python tries, and complains, once more
        if isinstance(error, BrokenPipeError):
            sys.exit(1)  # as typer does
        raise RegardError(f"standard output: cannot be written: {error.strerror}") from None
