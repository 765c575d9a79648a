"""The command that serves a model over HTTP: serve."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from regard.cli.options import PrecisionName, RunFolder, Threads, precision_of
from regard.errors import RegardError


def serve(
    run: RunFolder,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    api_keys: Annotated[
        str | None,
        typer.Option(envvar="REGARD_API_KEYS", help="Keys that may use it, with commas between."),
    ] = None,
    languages: Annotated[
        str | None,
        typer.Option(
            metavar="FROM,TO", help="Codes of the languages, such as en,de, if the run has none."
        ),
    ] = None,
    precision: PrecisionName = "auto",
    threads: Threads = None,
) -> None:
    """Serve a model over HTTP; clients of LibreTranslate work unchanged."""
    try:
        from regard.server.serve import serve as listen
        from regard.server.settings import Settings
    except ModuleNotFoundError as error:
        raise RegardError(f"serve needs {error.name}: pip install 'regard[serve]'") from None
    keys = tuple(filter(None, map(str.strip, (api_keys or "").split(","))))
    if api_keys is not None and not keys:
        raise RegardError(f"--api-keys {api_keys!r}: no key in it, and all could use the server")
    settings = Settings(api_keys=keys)
    pair = None if languages is None else _pair(languages)
    listen(run, host, port, settings, "auto", precision_of(precision), threads, pair)


def _pair(languages: str) -> tuple[str, str]:
    codes = re.fullmatch(r"([\w-]+),([\w-]+)", languages)
    if codes is None:
        raise RegardError(f"--languages {languages}: two codes with a comma, such as en,de")
    return codes[1], codes[2]
