"""The commands serve, import and export: an HTTP server, and conversion from and to other libraries."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.options import PrecisionName, RunFolder, Threads, parse_precision
from regard.errors import RegardError
from regard.storage.atomic_files import shared_folder

if TYPE_CHECKING:
    from regard.inspection.head_ablation import HeadTable
    from regard.tasks import Translator


def serve(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders of trained models.")
    ],
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            metavar="PORT", min=0, max=65535, help="Port to listen on; 0 selects a free one."
        ),
    ] = 8000,
    api_keys: Annotated[
        str | None,
        typer.Option(
            metavar="KEY,KEY…",
            envvar="REGARD_API_KEYS",
            help="API keys that clients must use, separated by commas (default: no key is needed).",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Additional host name to accept in the Host header; repeatable; * allows all "
            "(default: localhost, --host and every IP address).",
        ),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Origin whose web pages may call the API, for example https://example.org; repeatable; "
            "* allows all (default: none).",
        ),
    ] = None,
    rate_limit: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Maximum number of POST requests per client per minute; 0 means no limit. A client is identified by "
            "the API key in its Authorization header, otherwise by its address.",
        ),
    ] = 0,
    access_log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Append one JSON object per request, without texts, to this file; - means standard output "
            "(default: no log).",
        ),
    ] = None,
    languages: Annotated[
        str | None,
        typer.Option(
            metavar="FROM,TO",
            help="Source and target language codes, for example en,de (default: from the run).",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory limit for the weights of all models in all --workers, for example 2GB; if it is exceeded, the "
            "least recently used models are unloaded (default: no limit).",
        ),
    ] = None,
    pivot: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LANGUAGE",
            help="Pivot language that connects two models: with en, German is translated to French through English; "
            "repeatable (default: none).",
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Number of processes that serve requests on the same port, each with its own copy of the models.",
        ),
    ] = 1,
    precision: PrecisionName = "auto",
    threads: Threads = None,
) -> None:
    """Serve translation models over HTTP, with the LibreTranslate API and a web page.

    With several models, requests are routed by language. The models are reloaded on SIGHUP and when card.json changes.
    """
    with share_metrics():  # before prometheus_client is imported
        try:
            from regard.server.schemas import Settings
            from regard.server.supervisor import serve as run_server
        except ModuleNotFoundError as error:
            raise RegardError(f"serve needs {error.name}: pip install 'regard[serve]'") from None
        keys = tuple(filter(None, map(str.strip, (api_keys or "").split(","))))
        if api_keys is not None and not keys:
            raise RegardError(
                f"--api-keys {api_keys!r}: contains no key, so anyone could use the server; "
                "specify at least one"
            )
        pair = None if languages is None else _language_pair(languages)
        settings = Settings(
            api_keys=keys,
            allowed_hosts=tuple(allowed_host or ()),
            cors_origins=_origins(cors or []),
            rate_limit=rate_limit,
            access_log=access_log is not None,
            memory=None if memory is None else _bytes(memory),
            pivots=tuple(pivot or ()),
        )
        if access_log is not None:
            _write_access_log(access_log)
        chosen_precision = parse_precision(precision)
        run_server(runs, host, port, settings, "auto", chosen_precision, threads, pair, workers)


@contextmanager
def share_metrics() -> Iterator[None]:
    """Let the processes of the server share their metrics in a temporary folder."""
    variable = "PROMETHEUS_MULTIPROC_DIR"
    if variable in os.environ:
        yield
        return
    with shared_folder("regard-metrics-") as folder:
        os.environ[variable] = str(folder)
        try:
            yield
        finally:
            del os.environ[variable]


SIZE_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}


def _bytes(size: str) -> int:
    match = re.fullmatch(rf"([0-9.]+) ?({'|'.join(SIZE_UNITS)})", size)
    try:
        return int(float(match[1]) * SIZE_UNITS[match[2]]) if match else int("")
    except ValueError:
        raise RegardError(
            f"--memory {size}: expected a number and a unit, for example 2GB or 500MB"
        ) from None


def _write_access_log(file: Path) -> None:
    """Send the records of the logger ``regard.access`` to a file."""
    try:
        handler: logging.Handler = (
            logging.StreamHandler(sys.stdout) if file == Path("-") else logging.FileHandler(file)
        )
    except OSError as error:
        raise RegardError(f"--access-log {file}: {error.strerror}") from None
    logger = logging.getLogger("regard.access")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)


def _origins(origins: list[str]) -> tuple[str, ...]:
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"https?://[^/?#\s]+", origin):
            raise RegardError(
                f"--cors {origin}: expected an origin, for example https://example.org, or *"
            )
    return tuple(origins)


def _language_pair(languages: str) -> tuple[str, str]:
    codes = re.fullmatch(r"([\w-]+),([\w-]+)", languages)
    if codes is None:
        raise RegardError(
            f"--languages {languages}: expected two codes separated by a comma, for example en,de"
        )
    return codes[1], codes[2]


def import_(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER | FILE", help="The model to import, as saved by its library."
        ),
    ],
    format_: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="FORMAT",
            help="Format of the model: huggingface (MarianMT, OPUS-MT) or torch.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Run folder to write.")],
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="For torch: the run folder that provides the recipe and the tokenizer (default: none).",
        ),
    ] = None,
) -> None:
    """Convert a model from another library to a run folder, and verify that both compute the same outputs."""
    from regard.interop.convert import import_model

    for line in import_model(model, format_, out, like):
        print(line)


def export(
    run: RunFolder,
    format_: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="Format to write: huggingface, ctranslate2, ctranslate2-int8, onnx, torch, html (one file that "
            "translates in a browser), or bundle (only the files needed to use the model).",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER | FILE",
            help="Folder to write; for html, a file (default: RUN.html).",
            show_default=False,
        ),
    ] = None,
    heads: Annotated[
        bool,
        typer.Option(
            "--heads",
            help="For html: also measure the contribution of each attention head on a sample of the validation data, "
            "and show it in the file.",
        ),
    ] = False,
) -> None:
    """Convert a model to the format of another library, and verify that both compute the same outputs."""
    from regard.interop.convert import EXPORTS, export_model

    if out is None:
        if format_ != "html" and format_ in EXPORTS:
            raise RegardError(f"--to {format_} needs --out FOLDER")
        out = Path(f"{run.resolve().name}.html")
    if heads and format_ != "html":
        raise RegardError(f"--heads works only with --to html, not with --to {format_}")
    for line in _export_with_heads(run, out) if heads else export_model(run, format_, out):
        print(line)


def _export_with_heads(run: Path, out: Path) -> list[str]:
    """Write an HTML file that shows what each head contributes."""
    from regard.cli.evaluate import measure_heads
    from regard.inspection.page_data import validation_sample
    from regard.inspection.teacher_forcing import check_supported
    from regard.interop.html_export import export_html

    def measure(model: Translator) -> HeadTable:
        check_supported(model)
        return measure_heads(model, validation_sample(model))

    return export_html(run, out, measure)
