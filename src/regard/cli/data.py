"""The commands of ``regard data``: check, clean, score, convert and prepare pairs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from regard.cli.options import (
    INPUT_OUTPUT,
    AsJson,
    BadLines,
    Columns,
    Group,
    LanguagePair,
    NewRunFolder,
    Overwrite,
    RecipeChanges,
    RecipeName,
    ShardOption,
    parse_bad_lines,
    parse_two,
)
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.data.corpus import CorpusPreview
    from regard.data.formats.writers import PairWriter
    from regard.data.pairs import Pair
    from regard.data.quality import RuleSet
    from regard.data.quality_report import QualityReport

app = typer.Typer(
    cls=Group, no_args_is_help=True, help="Check, clean, score, convert and prepare training pairs."
)

Files = Annotated[
    list[str],
    typer.Argument(
        metavar="FILES",
        help="Two parallel text files, or files of pairs in any format that  regard train  reads.",
    ),
]
Skip = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RULE", help="Turn a rule off, for example language; repeatable (default: none)."
    ),
]
Thresholds = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="RULE.KEY=VALUE",
        help="Set a threshold of a rule, for example ratio.max_ratio=4; repeatable (default: none).",
    ),
]
Valid = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help="Validation data to compare with: a file of pairs, or two parallel text files (repeat the "
        "option) (default: none).",
    ),
]
Test = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help="Test data to compare with: a file of pairs, or two parallel text files (repeat the "
        "option) (default: none).",
    ),
]


@app.command()
def check(
    files: Files,
    valid: Valid = None,
    test: Test = None,
    as_json: AsJson = False,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write the report as one HTML file (default: no file).",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = None,
    skip: Skip = None,
    thresholds: Thresholds = None,
    columns: Columns = None,
    languages: LanguagePair = None,
    on_bad_line: BadLines = "error",
) -> None:
    """Report problems in pairs: damaged text, noise, duplicates, misalignment, and overlap with test data."""
    from regard.data.quality_report import html_report, make_report, next_steps
    from regard.storage.atomic_files import check_writable, write_text

    if html:
        check_writable(html)
    corpus = Corpus(files, columns, languages, on_bad_line)
    held_out = corpus.held_out(valid, test)
    rules = corpus.rules(skip, thresholds, held_out)
    report = make_report(
        progress(corpus.pairs(), "Checking"),
        rules,
        files,
        corpus.languages,
        {name: split.pairs() for name, split in held_out.items()},
    )
    report.skipped_lines = corpus.skipped()
    cleaning_options = {"--valid": valid, "--test": test, "--skip": skip, "--set": thresholds}
    cleaning = [
        f"{option} {shlex.quote(value)}"
        for option in cleaning_options
        for value in cleaning_options[option] or ()
    ]
    report.next_steps = next_steps(
        report, f"{shlex.join(files)} {corpus.options()}".strip(), " ".join(cleaning)
    )
    if html:
        write_text(html, html_report(report))
    if as_json:
        print(json.dumps(report.to_dict(), ensure_ascii=False, indent=2))
    else:
        print_report(report)
    if html:
        typer.echo(f"{html}: written", err=True)


@app.command()
def clean(
    files: Files,
    output: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE",
            help="File of pairs to write (.tsv, .csv, .jsonl, .json, .parquet, .tmx, .xlf, .xlsx; text formats also "
            "with .gz, .zst, .xz), or two parallel text files (repeat the option).",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ],
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the rejected pairs to this TSV file: reason, number, source, target (default: no file).",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = None,
    valid: Valid = None,
    test: Test = None,
    skip: Skip = None,
    thresholds: Thresholds = None,
    columns: Columns = None,
    languages: LanguagePair = None,
    on_bad_line: BadLines = "error",
) -> None:
    """Write the pairs that pass the rules of  regard data check; --report also writes the rejected ones.

    The same files and thresholds always give the same result. Output files appear only when they are complete.
    """
    from regard.storage.atomic_files import check_distinct_files

    corpus = Corpus(files, columns, languages, on_bad_line)
    check_distinct_files({**corpus.roles(), **_output_roles(output), "--report": report})
    held_out = corpus.held_out(valid, test)
    with pair_files(output, corpus.languages, report) as pair_output:
        rules = corpus.rules(skip, thresholds, held_out)
        counts = _clean(corpus, rules, pair_output)
    for line in corpus.skipped():
        typer.echo(line, err=True)
    for rule, reason in rules.skipped.items():
        typer.echo(f"not applied: {rule}: {reason}", err=True)
    total = sum(counts.values())
    kept = counts.pop("")
    print(
        f"{' '.join(map(str, output))}: {kept:,} of {total:,} pairs kept ({kept / max(1, total):.1%})"
    )
    for rule, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"  {rule:20} {count:10,}  {count / total:7.2%}")


def _clean(corpus: Corpus, rules: RuleSet, pair_output: PairFiles) -> dict[str, int]:
    """Write each pair to one of the files. Returns the number of pairs by reason; the reason of kept pairs is empty."""
    import numpy as np

    from regard.data.text_features import batches

    counts = {"": 0}
    for batch in batches(progress(corpus.pairs(), "Cleaning")):
        reasons = [""] * len(batch)
        for name, marks in rules.apply(batch, reports=False):
            for number in np.flatnonzero(marks & ~batch.rejected).tolist():
                reasons[number] = name
        for number, (pair, reason) in enumerate(
            zip(batch.pairs, reasons, strict=True), batch.start + 1
        ):
            counts[reason] = counts.get(reason, 0) + 1
            if reason:
                pair_output.reject(reason, number, pair)
            else:
                pair_output.writer.write(pair)
    return counts


@app.command()
def convert(
    files: Files,
    output: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE",
            help="File of pairs to write (.tsv, .csv, .jsonl, .json, .parquet, .tmx, .xlf, .xlsx; text formats also "
            "with .gz, .zst, .xz), or two parallel text files (repeat the option).",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ],
    columns: Columns = None,
    languages: LanguagePair = None,
    on_bad_line: BadLines = "error",
) -> None:
    """Convert pairs to another format; the suffixes of the file names determine the formats."""
    from regard.storage.atomic_files import check_distinct_files

    corpus = Corpus(files, columns, languages, on_bad_line)
    check_distinct_files({**corpus.roles(), **_output_roles(output)})
    count = 0
    with pair_files(output, corpus.languages) as pair_output:
        for pair in progress(corpus.pairs(), "Converting"):
            pair_output.writer.write(pair)
            count += 1
    for line in corpus.skipped():
        typer.echo(line, err=True)
    print(f"{' '.join(map(str, output))}: {count:,} pairs")


@app.command()
def score(
    files: Files,
    output: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="TSV file to write: score, source, target.",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ],
    order: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Order of the pairs: score (best first) or input.",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = "score",
    epochs: Annotated[
        float,
        typer.Option(metavar="N", min=0.01, help="Epochs to train each of the two models for."),
    ] = 3.0,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="Device to train on: cpu, cuda or auto.")
    ] = "auto",
    models: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for the two models; existing models in it are reused (default: OUTPUT.models, which is "
            "removed at the end unless --shard is given).",
        ),
    ] = None,
    shard: ShardOption = None,
    overwrite: Overwrite = False,
    columns: Columns = None,
    languages: LanguagePair = None,
    on_bad_line: BadLines = "error",
) -> None:
    """Rank pairs by dual conditional cross-entropy, computed by two small models that are trained on the same pairs.

    The score is near 1 if both models find the pair probable, and near 0 if one of them finds it improbable.

    With --shard I/N and --order input, several machines that share the --models folder each score a part of the
    pairs and write OUTPUT-0000I-of-0000N. Concatenated in order, these files equal the output of a single process.

    To resume an interrupted command, run it again.
    """
    import shutil

    from regard.storage.atomic_files import check_distinct_files, check_writable
    from regard.storage.resumable_output import WHOLE, Shard
    from regard.training.pair_scoring import PairScorer, write_scores

    if order not in ("score", "input"):
        raise RegardError(f"--order {order}: expected score or input")
    share = Shard.parse(shard) if shard else WHOLE
    if share != WHOLE and order != "input":
        raise RegardError(
            f"--shard {shard}: needs --order input, because a single part cannot be ranked against the others"
        )
    folder, output = models or output.with_suffix(".models"), share.path(output)
    corpus = Corpus(files, columns, languages, on_bad_line)
    check_distinct_files({**corpus.roles(), "--output": output, "--models": folder})
    check_writable(output)
    identity = {"pairs": corpus.fingerprint()}

    def report(line: str) -> None:
        typer.echo(line, err=True)

    scorer = PairScorer.train(
        lambda: progress(corpus.pairs(), "Reading"), folder, identity, epochs, device, report
    )
    count = write_scores(
        scorer, corpus.pairs, output, identity, order == "score", share, overwrite, report
    )
    for line in corpus.skipped():
        report(line)
    if share == WHOLE and models is None:
        shutil.rmtree(folder)
    print(f"{output}: {count:,} pairs{', best first' * (order == 'score')}")


@app.command()
def prepare(
    recipe: RecipeName,
    changes: RecipeChanges = None,
    out: NewRunFolder = None,
    shard: ShardOption = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Number of processes (default: one per core, fewer for small data).",
        ),
    ] = None,
) -> None:
    """Tokenize the data of a recipe without training;  regard train  with the same recipe and --out uses the result.

    Finished work is skipped. With --shard, several machines that share the run folder each tokenize a part; then run
    the command without --shard to combine the parts. The result is the same as that of a single process.
    """
    from regard.recipe import load_recipe
    from regard.storage.resumable_output import WHOLE, Shard
    from regard.training.run import prepare_data

    folder = out or Path("runs") / (Path(recipe).resolve().name.split(".")[0] or "data")
    share = Shard.parse(shard) if shard else WHOLE
    run = prepare_data(load_recipe(recipe, changes or []), folder, share, workers)
    if share == WHOLE:
        print(f"{run}: data prepared")


# ---------------------------------------------------------------------------------------------
# Input


class Corpus:
    """The files of a command."""

    def __init__(
        self, files: list[str], columns: str | None, languages: str | None, on_bad_line: str
    ) -> None:
        from regard.cli.train import data_files
        from regard.data.corpus import CorpusPreview
        from regard.recipe import DataConfig

        self.read_options = (columns, languages, on_bad_line)
        self.names = files
        reading = {
            "columns": parse_two("--columns", columns),
            "on_bad_line": parse_bad_lines(on_bad_line),
        }
        self.files = data_files(files, reading)
        config = DataConfig(
            root=str(Path.cwd()), train=self.files, languages=parse_two("--languages", languages)
        )
        self.config = config
        self.preview: CorpusPreview = CorpusPreview(self.files, config)
        self.languages = self.preview.languages

    def pairs(self) -> Iterator[Pair]:
        """All pairs; files are read again in each call."""
        self.preview.skipped.clear()
        return self.preview.pairs()

    def skipped(self) -> list[str]:
        """Messages about the lines that the last call skipped."""
        return self.preview.skipped.messages()

    def held_out(self, valid: list[str] | None, test: list[str] | None) -> dict[str, Corpus]:
        """The validation and test data that were given."""
        split_files = {"valid": valid, "test": test}
        return {name: self._like(files) for name, files in split_files.items() if files}

    def _like(self, files: list[str]) -> Corpus:
        """Other files, read in the same way; parallel text files have no columns."""
        from regard.cli.train import data_files

        columns, languages, on_bad_line = self.read_options
        is_text = data_files(files, {"columns": None, "on_bad_line": "error"}).source
        return Corpus(files, None if is_text else columns, languages, on_bad_line)

    def rules(
        self, skip: list[str] | None, thresholds: list[str] | None, held_out: dict[str, Corpus]
    ) -> RuleSet:
        """The rules, after a first pass over the corpus."""
        from regard.data.quality import RuleSet, make_rules, survey

        rules = make_rules(thresholds or [], skip or [])
        splits = {name: split.pairs() for name, split in held_out.items()}
        facts = survey(progress(self.pairs(), "Reading"), self.languages, splits)
        if not facts.sample:
            raise RegardError(f"{' '.join(self.names)}: no pairs")
        return RuleSet(rules, facts)

    def fingerprint(self) -> str:
        """A hash of the contents of the files, and of how they are read."""
        from regard.data.corpus import fingerprint

        return fingerprint(self.files, self.config)

    def roles(self) -> dict[str, Path]:
        """The files by role, for error messages."""
        return {f"input file {number}": Path(name) for number, name in enumerate(self.names, 1)}

    def options(self) -> str:
        """How the files are read, as options of a command."""
        columns, languages, on_bad_line = self.read_options
        values = {"--columns": columns, "--languages": languages}
        words = [f"{option} {shlex.quote(value)}" for option, value in values.items() if value]
        return " ".join([*words, *(["--on-bad-line skip"] if on_bad_line == "skip" else [])])


def progress(pairs: Iterable[Pair], activity: str) -> Iterator[Pair]:
    """Pass pairs through, and show the count and the speed on standard error."""
    from regard.training.progress import ProgressLine

    line = ProgressLine(f"{activity} pairs: ")
    for count, pair in enumerate(pairs, 1):
        yield pair
        if count % 1024 == 0:
            line.advance(count)
    line.close()


# ---------------------------------------------------------------------------------------------
# Output


def _output_roles(output: list[Path]) -> dict[str, Path]:
    if len(output) > 2:
        raise RegardError(
            f"--output: {len(output)} files; expected one, or two for parallel text files"
        )
    if len(output) == 1:
        return {"--output": output[0]}
    return {f"--output {number}": path for number, path in enumerate(output, 1)}


class PairFiles:
    """The files that a command writes."""

    def __init__(self, writer: PairWriter, rejected: TextIO | None) -> None:
        self.writer, self.rejected = writer, rejected

    def reject(self, reason: str, number: int, pair: Pair) -> None:
        """Write a rejected pair, with the number that it has in the input."""
        if self.rejected:
            from regard.data.formats.writers import one_field

            source, target = map(one_field, pair[:2])
            self.rejected.write(f"{reason}\t{number}\t{source}\t{target}\n")


@contextmanager
def pair_files(
    output: list[Path], languages: tuple[str, str] | None, report: Path | None = None
) -> Iterator[PairFiles]:
    """Files that get their names when all of them are complete."""
    from regard.data.formats.writers import ParallelWriter, output_format
    from regard.storage.atomic_files import atomic_files

    names = [path.name for path in output]
    format_class = output_format(output[0]) if len(output) == 1 else None
    with ExitStack() as stack:
        paths = stack.enter_context(atomic_files([*output, *([report] if report else [])]))
        writer: PairWriter = (
            format_class(paths[0], names[0], languages)
            if format_class
            else ParallelWriter(paths[:2], names)
        )
        stack.enter_context(writer)
        rejected = None
        if report:
            file = paths[-1].open("w", encoding="utf-8", newline="")
            rejected = stack.enter_context(file)
            rejected.write("reason\tnumber\tsource\ttarget\n")
        yield PairFiles(writer, rejected)


# ---------------------------------------------------------------------------------------------
# The report in the terminal


def print_report(report: QualityReport) -> None:
    """Print a report."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    languages = f", {report.languages[0]} to {report.languages[1]}" if report.languages else ""
    share = report.rejected / max(1, report.pairs)
    lines = [
        f"{report.pairs:,} pairs{languages}; {report.rejected:,} ({share:.1%}) would be dropped",
        "",
    ]
    for finding in report.findings:
        action = "" if finding.rejects else "  (only reported)"
        lines.append(f"{finding.rule}: {finding.count:,} ({finding.share:.2%}){action}")
        lines.append(f"  {finding.meaning}; {finding.advice}")
        for example in finding.examples:
            explanation = f"  [{example.explanation}]" if example.explanation else ""
            texts = "  →  ".join(_short(text) for text in (example.source, example.target))
            lines.append(f"    {example.number:,}: {texts}{explanation}")
    for split in report.held_out:
        lines.append(
            f"{split.name}: {split.overlap:,} of {split.sources:,} sources are in the training data; "
            f"{split.unknown_words:.1%} unknown words; vocabulary distance {split.distance:.3f} (0 to 1)"
        )
    lines += [f"not applied: {rule}: {reason}" for rule, reason in report.not_applied.items()]
    lines += report.skipped_lines
    lines += ["", "What to do:", *(f"  {step}" for step in report.next_steps)]
    for line in lines:
        console.print(line, soft_wrap=True)


def _short(text: str) -> str:
    visible = "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text[:60]
    )
    return f"{visible[:59]}…" if len(text) > 60 else visible or "(empty)"
