"""The command translate, for texts, standard input, files of any size and documents; it can be resumed."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice, tee
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import (
    DECODING,
    INPUT_OUTPUT,
    NON_AUTOREGRESSIVE,
    AsJson,
    Input,
    OutputOrFolder,
    Overwrite,
    Parses,
    PrecisionName,
    RunFolders,
    ShardOption,
    TargetLanguage,
    TextsOrDocuments,
    Threads,
    parse_precision,
    run_folders,
    with_decoding_options,
)
from regard.cli.text_io import (
    CHUNK_LINES,
    check_input,
    chunks,
    count_lines,
    input_lines,
    is_parquet,
    total_lines,
)
from regard.cli.translation_job import DEFAULT_FUZZY, Line, TranslationJob, languages_of
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.data.glossary import Glossary
    from regard.documents.translation_memory import TranslationMemory
    from regard.recipe import Precision
    from regard.storage.resumable_output import ResumableOutput, Shard
    from regard.tasks import Translator


@with_decoding_options
def translate(
    run: RunFolders,
    texts: TextsOrDocuments = None,
    input: Input = None,
    output: OutputOrFolder = None,
    to: TargetLanguage = None,
    sentences: Annotated[
        bool,
        typer.Option(
            "--sentences",
            help="Split each line into sentences, translate them separately, and join the translations.",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = False,
    nbest: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Print the N best translations of each line, or N samples, as tab-separated fields: line number, "
            "score, translation (with --confidence: line number, score, confidence, translation).",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = 1,
    alignment: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the word alignment of each line to this file, in Pharaoh format, for example 0-0 1-2 "
            "(default: none).",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = None,
    confidence: Annotated[
        bool,
        typer.Option(
            "--confidence",
            help="Print the confidence of each translation (0 to 1) before it, separated by a tab.",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = False,
    parses: Parses = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Columns to translate in a CSV or TSV document, by name or number, for example title,text; or "
            "the column to translate in a Parquet file given as --input (default: its only column of text, or source "
            "or text; a document has no default).",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = None,
    as_json: AsJson = False,
    shard: ShardOption = None,
    overwrite: Overwrite = False,
    memory: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Translation memory, for example tm.tmx: exact matches are used as translations, and fuzzy "
            "matches are reported (default: none).",
            rich_help_panel=DECODING,
        ),
    ] = None,
    fuzzy: Annotated[
        float | None,
        typer.Option(
            metavar="SCORE",
            min=0.0,
            max=1.0,
            help="Minimum score of the fuzzy matches to report; 1 reports none (default: 0.75).",
            rich_help_panel=DECODING,
        ),
    ] = None,
    glossary: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Glossary file with one entry per line: source term, tab, target term. Where a source term occurs, "
            "its target term is used (default: none).",
            rich_help_panel=DECODING,
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help='Text that every translation must begin with, for example "Dear" (default: none).',
            rich_help_panel=DECODING,
        ),
    ] = None,
    *,
    decoding: dict[str, Any],
    length: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of tokens in each translation (default: predicted by the model).",
            rich_help_panel=NON_AUTOREGRESSIVE,
        ),
    ] = None,
    precision: PrecisionName = "auto",
    threads: Threads = None,
) -> None:
    """Translate texts, documents, or the lines of a file or of standard input.

    Lines are translated in order: one line in, one line out.

    Documents (DOCX, PPTX, ODT, Markdown, HTML, SRT, VTT, PO, XLIFF, TMX, JSON, YAML, properties, CSV, text) keep
    their structure and formatting. A Parquet file is translated row by row, and the output is a Parquet file.

    With --shard I/N, several machines each translate a part of --input and write OUTPUT-0000I-of-0000N. Concatenated
    in order, these files equal the output of a single process.

    To resume an interrupted translation with --output, run the same command again.
    """
    from regard.cli.documents import (
        Destination,
        find_documents,
        refuse_document_as_lines,
        translate_documents,
    )
    from regard.storage.atomic_files import check_distinct_files

    check_input(texts, input)
    if not texts and not input:
        _check_run_is_no_text(run)
    documents = find_documents(texts or [])
    whole_lines = {
        "nbest": nbest > 1,
        "alignment": alignment,
        "parses": parses,
        "length": length is not None,
        "prefix": prefix,
    }
    destination = None
    if documents:
        refused = {**whole_lines, "sentences": sentences, "confidence": confidence}
        refuse_options("documents", refused)
        destination = Destination.of(documents, output, as_json)
    elif columns and not is_parquet(input):
        raise RegardError(f"--columns {columns}: only for CSV and TSV documents, and for Parquet")
    elif input and not is_parquet(input):
        refuse_document_as_lines(run, input)
    _check_memory_options(memory, fuzzy, whole_lines)
    if sentences:
        refuse_options("--sentences", whole_lines)
    if alignment and nbest > 1:
        raise RegardError(f"--nbest {nbest}: cannot be combined with --alignment")
    inputs = {"--input": input, "--parses": parses, "--glossary": glossary, "--memory": memory}
    check_distinct_files({**inputs, "--output": output, "--alignment": alignment})
    files = LineFiles.of(texts, input, columns, parses, output, alignment, shard)
    if is_parquet(output):
        refuse_options("--output with Parquet", {**whole_lines, "json": as_json})
        as_json = True
    terms = _read_glossary(glossary) if glossary else None
    # Texts of a command line are too few for worker processes.
    workers = not texts or bool(documents)
    model = _load_model(run, parse_precision(precision), threads, files.alignment, workers)
    model = model.with_target_language(to)
    job = TranslationJob(
        model=model,
        decoding=decoding,
        nbest=nbest,
        length=length,
        prefix=prefix or None,
        glossary=terms,
        as_json=as_json,
        with_confidence=confidence,
        with_alignment=alignment is not None,
        with_parses=parses is not None,
        by_sentence=sentences,
        memory=_read_memory(model, memory),
        fuzzy=DEFAULT_FUZZY if fuzzy is None else fuzzy,
    )
    job.check_options()
    if destination:
        translate_documents(job, destination, columns, overwrite)
    else:
        _translate_lines(job, files, overwrite)


# ---------------------------------------------------------------------------------------------
# Options and the model


def _check_run_is_no_text(run: Path) -> None:
    """Refuse a text as the only argument; the error message says how to translate it."""
    text = str(run)
    if not os.access(text, os.F_OK) and (" " in text or not {"/", "+"} & {*text}):
        raise RegardError(
            f"{text}: no such folder (regard runs lists your runs); if it is a text, RUN is missing:  "
            f"regard translate RUN {shlex.quote(text)}"
        )


def refuse_options(subject: str, options: Mapping[str, object]) -> None:
    """Refuse options that apply to whole lines."""
    conflicting = [f"--{name}" for name, value in options.items() if value]
    if conflicting:
        raise RegardError(
            f"{subject}: cannot be combined with {', '.join(conflicting)}, which apply to whole lines"
        )


def _check_memory_options(
    memory: Path | None, fuzzy: float | None, whole_lines: Mapping[str, object]
) -> None:
    """Refuse --fuzzy without a translation memory, and a memory with options that change whole lines."""
    if memory is None and fuzzy is not None:
        raise RegardError(f"--fuzzy {fuzzy:g}: has no effect without --memory")
    if memory is not None:
        unsupported = {name: value for name, value in whole_lines.items() if name != "alignment"}
        refuse_options("--memory", unsupported)


def _load_model(
    run: Path, precision: Precision, threads: int | None, alignment: Path | None, workers: bool
) -> Translator:
    """The model of a run, or of several as an ensemble. workers: use worker processes."""
    from regard.tasks import Translator

    model = Translator.load(run_folders(run), precision=precision, threads=threads)
    if alignment and len(model.runs) > 1:
        raise RegardError(
            f"--alignment {alignment}: not supported for an ensemble; use a single run"
        )
    if workers:
        model.start_workers()
    return model


def _read_glossary(path: Path) -> Glossary:
    from regard.data.glossary import Glossary

    return Glossary.read(path)


def _read_memory(model: Translator, path: Path | None) -> TranslationMemory | None:
    if path is None:
        return None
    from regard.documents.translation_memory import TranslationMemory

    return TranslationMemory.read(path, languages_of(model))


# ---------------------------------------------------------------------------------------------
# Lines


@dataclass(frozen=True)
class LineFiles:
    """Where the lines to translate come from, and where their translations go."""

    texts: list[str] | None
    """texts of the command line"""
    input: Path | None
    """a file; None for ``texts`` and standard input"""
    columns: str | None
    """the column to translate in a Parquet file"""
    parses: Path | None
    output: Path | None
    """None for standard output"""
    alignment: Path | None
    shard: Shard
    """the part of the lines to translate"""

    @classmethod
    def of(
        cls,
        texts: list[str] | None,
        input: Path | None,
        columns: str | None,
        parses: Path | None,
        output: Path | None,
        alignment: Path | None,
        shard_name: str | None,
    ) -> LineFiles:
        """The files of a command; with ``--shard``, outputs are named after the shard."""
        from regard.storage.resumable_output import WHOLE, Shard

        shard = WHOLE
        if shard_name is not None:
            shard = Shard.parse(shard_name)
            if not (input and input.is_file() and output):
                raise RegardError(
                    f"--shard {shard_name}: needs --input with a regular file, and --output"
                )
            output, alignment = shard.path(output), alignment and shard.path(alignment)
        return cls(texts, input, columns, parses, output, alignment, shard)

    @property
    def outputs(self) -> list[Path]:
        return [path for path in (self.output, self.alignment) if path]

    @property
    def is_shard(self) -> bool:
        """Whether only a part of the lines is translated."""
        return self.shard.count > 1

    def lines(self) -> Iterator[Line]:
        """All lines of the input, with their dependency trees."""
        lines = input_lines(self.texts, self.input, self.columns)
        return _with_parses(lines, self.parses, str(self.input or "the texts"))

    def bounds(self) -> tuple[int, int | None]:
        """The first line to translate and the one after the last; None: at the end of the input."""
        if not self.is_shard or not self.input:
            return 0, count_lines(self.input)
        return self.shard.bounds(total_lines(self.input, self.columns), CHUNK_LINES)

    def resume_key(self, job: TranslationJob) -> dict[str, Any] | None:
        """Everything that the output depends on; None if an interrupted job cannot be resumed."""
        # Input from a device or pipe cannot be read again, and a device may have no end.
        if not (self.input and self.output and self.input.is_file()):
            return None
        key = job.resume_key(self.input, self.parses)
        if self.is_shard:
            key["shard"] = str(self.shard)
        if self.columns:
            key["columns"] = self.columns
        return key


def _translate_lines(job: TranslationJob, files: LineFiles, overwrite: bool) -> None:
    """Translate the lines chunk by chunk. An interrupted output is continued."""
    key = files.resume_key(job)
    start, stop = files.bounds()
    opened = _open_output(files.outputs, key, overwrite) if files.outputs else nullcontext()
    with opened as resumable:
        done = resumable.done if resumable else 0
        if resumable and done:
            typer.echo(f"{files.output}: resuming after line {done:,}", err=True)
        if resumable and resumable.complete:
            return
        typer.echo(f"Computing in {job.model.engine.summary}.", err=True)
        if job.with_confidence or job.as_json:
            typer.echo(job.describe_confidence(), err=True)
        lines = files.lines()
        # The lines that are done are skipped, but the last of them may be context.
        skipped = deque(islice(lines, start + done), maxlen=job.model.recipe.data.context)
        job.previous = [line for line, _ in skipped]
        if files.is_shard and stop is not None:
            lines = islice(lines, stop - start - done)
        _translate_chunks(job, files, lines, start, stop, resumable)
        job.report_flagged_lines()


def _translate_chunks(
    job: TranslationJob,
    files: LineFiles,
    lines: Iterator[Line],
    start: int,
    stop: int | None,
    resumable: ResumableOutput | None,
) -> None:
    """Translate the remaining lines; write and count each chunk. start, stop: see ``LineFiles.bounds``."""
    from regard.training.progress import ProgressLine

    done = resumable.done if resumable else 0
    # Where translations go to the terminal, they are the progress.
    hidden = files.output is None and sys.stdout.isatty()
    total = None if stop is None else stop - start
    with closing(ProgressLine("Lines: ", total, done)) as progress:
        for chunk in chunks(lines, streamed=not files.texts and not files.input):
            translated, aligned = job.translate(chunk, start + done)
            done += len(chunk)
            if not hidden:
                progress.advance(done)
            if files.output is None:
                print(translated, end="", flush=True)
            if resumable:
                texts = ([translated] if files.output else []) + (
                    [aligned] if files.alignment else []
                )
                resumable.add(len(chunk), texts)


def _with_parses(lines: Iterator[str], parses: Path | None, where: str) -> Iterator[Line]:
    """Each line with its dependency tree. ``where`` names the lines in error messages."""
    if parses is None:
        return ((line, None) for line in lines)
    from regard.data.formats import read_parses

    texts, copies = tee(lines)
    trees = read_parses(copies, parses, where)
    # The trees come first in zip: their reader must run to its end to report superfluous trees.
    return ((line, tree) for tree, line in zip(trees, texts, strict=True))


# ---------------------------------------------------------------------------------------------
# Output files


ROW_GROUP = 2**16
"""rows of a Parquet file that are written together"""


def _open_output(files: list[Path], key: dict[str, Any] | None, overwrite: bool) -> ResumableOutput:
    """The output files: lines of text, or one Parquet file that is written from them at the end."""
    from regard.storage.resumable_output import ResumableOutput, ResumableRecords

    report = partial(typer.echo, err=True)
    if not is_parquet(files[0]):
        return ResumableOutput(files, key, overwrite, report)
    if key is None:
        raise RegardError(f"--output {files[0]}: Parquet needs --input with a file")
    return ResumableRecords(files[0], key, _to_parquet, overwrite, report)


def _to_parquet(lines: Iterator[str]) -> bytes:
    """A Parquet file with one row for each line of JSON output.

    Rows are written in groups, so that only those of one group are in memory, besides the compressed file.
    """
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    schema = pa.schema(
        {"source": pa.string(), "translation": pa.string(), "confidence": pa.float64()}
    )
    sink = pa.BufferOutputStream()
    with ParquetWriter(sink, schema) as writer:
        while group := [json.loads(line) for line in islice(lines, ROW_GROUP)]:
            best_translations = [record["translations"][0] for record in group]
            columns = {
                "source": [record["source"] for record in group],
                "translation": [translation["text"] for translation in best_translations],
                "confidence": [translation["confidence"] for translation in best_translations],
            }
            writer.write_table(pa.table(columns, schema))
    return bytes(sink.getvalue())
