"""The commands evaluate (score a model, or compare two) and look (inspect the translation of one sentence)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import (
    DECODING,
    INPUT_OUTPUT,
    AsJson,
    BadLines,
    Columns,
    LanguagePair,
    Parses,
    PrecisionName,
    RunFolder,
    RunFolders,
    TargetLanguage,
    Threads,
    parse_bad_lines,
    parse_precision,
    parse_two,
    run_folders,
    with_decoding_options,
)
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.data.pairs import Pair
    from regard.inspection.head_ablation import HeadTable
    from regard.recipe import DataConfig
    from regard.tasks import Model, Translator
    from regard.training.train_test_overlap import OverlapScores


CHUNK_SIZE = 2_048
"""texts that are translated before the progress is shown"""


@with_decoding_options
def evaluate(
    run: RunFolders,
    source: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Source texts, one per line; needs --reference (default: data.test of the recipe).",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Reference translations or labels, one per line of --source (default: data.test of the recipe).",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Sources and references in one file, instead of --source and --reference: TSV, CSV, XLSX, JSONL, "
            "Parquet, TMX, XLIFF, PO, a zip archive or a folder of these (default: data.test of the recipe).",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = None,
    columns: Columns = None,
    languages: LanguagePair = None,
    on_bad_line: BadLines = "error",
    conllu: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="CoNLL-U file to score, for tagging (default: data.test of the recipe).",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text file to score, for masked_lm and language_model (default: data.test of the recipe).",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN2",
            help="Also compare with this run or ensemble, using a paired significance test (default: none).",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = None,
    parses: Parses = None,
    to: TargetLanguage = None,
    as_json: AsJson = False,
    *,
    decoding: dict[str, Any],
    precision: PrecisionName = "fp32",
    threads: Threads = None,
) -> None:
    """Score a model on test data, with 95% confidence intervals.

    Without files, the data.test files of the recipe are scored.
    """
    from regard.tasks import Model

    files = {
        "source": source,
        "target": reference,
        "pairs": pairs,
        "conllu": conllu,
        "text": text,
        "parses": parses,
    }
    model = Model.load(run_folders(run), precision=parse_precision(precision), threads=threads)
    _set_decoding(model, decoding)
    test_files: dict[str, Any] = {role: str(file) for role, file in files.items() if file}
    if columns or languages or parse_bad_lines(on_bad_line) == "skip":
        if not (pairs or source):
            option = "--columns" if columns else "--languages" if languages else "--on-bad-line"
            raise RegardError(f"{option} needs --pairs or --source")
        test_files |= {"columns": parse_two("--columns", columns), "on_bad_line": on_bad_line}
        _check_direction(model, test_files["columns"])
    test = _test_pairs(model, test_files, to, parse_two("--languages", languages))
    model.start_workers()
    comparisons: list[Any] = []
    overlap = None
    if against is not None:
        compared_model = type(model).load(
            run_folders(against), precision=parse_precision(precision), threads=threads
        )
        compared_model.start_workers()
        _set_decoding(compared_model, decoding)
        # A model that is scored by its probabilities cannot be compared, and has no outputs.
        outputs = [] if model.recipe.text_only else _predict(model, test)
        results, comparisons = model.compare(compared_model, test, outputs)
        overlap = _overlap(model, outputs, test)
    elif model.recipe.text_only:
        results = model.evaluate(test)
    else:
        outputs = _predict(model, test)
        results = model.score_outputs(outputs, test)
        overlap = _overlap(model, outputs, test)
    if as_json:
        answer: dict[str, Any] = {"run": str(run), "sentences": len(test)}
        answer["scores"] = [result.to_json() for result in results]
        answer["training_overlap"] = overlap.to_json() if overlap else None
        if against is not None:
            answer["against"] = str(against)
            answer["comparisons"] = [comparison.to_json() for comparison in comparisons]
        print(json.dumps(answer, indent=2, ensure_ascii=False))
        return
    for line in [*results, *comparisons, *(overlap.messages() if overlap else ())]:
        print(line)


def _predict(model: Model, pairs: Sequence[Pair]) -> list[str]:
    """The outputs for the sources, with progress on standard error."""
    from regard.training.progress import ProgressLine

    line, outputs = ProgressLine("Outputs: ", len(pairs)), list[str]()
    while len(outputs) < len(pairs):
        outputs += model.predict_pairs(pairs[len(outputs) : len(outputs) + CHUNK_SIZE])
        line.advance(len(outputs))
    line.close()
    return outputs


def _overlap(model: Model, outputs: Sequence[str], test: Sequence[Pair]) -> OverlapScores | None:
    """The test sources that are in the training data; None if that is not known."""
    from regard.training.train_test_overlap import OverlapScores

    run = model.runs[0]  # the members of an ensemble usually have the same training data
    overlap = OverlapScores.of(model, run, outputs, test)
    if overlap is None and "data" in run.card():  # not an imported model
        typer.echo(
            "Cannot check whether test sources are in the training data: the prepared data were deleted, and the "
            "training files are missing or have changed.",
            err=True,
        )
    return overlap


def _set_decoding(model: Model, decoding: dict[str, Any]) -> None:
    """Change how a translation model decodes; other models have no decoding options."""
    from regard.tasks import Translator

    if not decoding:
        return
    if not isinstance(model, Translator):
        option = f"--{next(iter(decoding)).replace('_', '-')}"
        raise RegardError(f"{option}: only for translation models, not for {model.task}")
    model.set_decoding(**decoding)


def _check_language(model: Model, to: str | None) -> None:
    """Refuse a language that the model does not translate to."""
    from regard.tasks import Translator

    if to is None:
        return
    if not isinstance(model, Translator):
        raise RegardError(f"--to {to}: only for translation models, not for {model.task}")
    model.languages.tags(0, to)


def _check_direction(model: Model, columns: tuple[str, str] | None) -> None:
    """Refuse columns that are named after the languages of the model in the wrong order."""
    from regard.data.language_identification import language_code

    data = model.recipe.data
    if columns is None or not _is_opposite(data, tuple(map(language_code, columns))):
        return
    if data.bidirectional:
        _note_direction(data)
        return
    source, target = data.language_pair
    raise RegardError(
        f"--columns {','.join(columns)}: wrong order; the model translates {source} to {target}"
    )


def _is_opposite(data: DataConfig, named: tuple[str | None, ...]) -> bool:
    """Whether two languages are target and source of a model that translates from one known language to another."""
    one_way = data.named and not data.targets
    return one_way and named == data.language_pair[::-1] != data.language_pair


def _note_direction(data: DataConfig) -> None:
    """Say that a model of both directions is scored in the one in which it was not validated."""
    source, target = data.language_pair
    typer.echo(
        f"note: these pairs are {target} to {source}; the model is trained in both directions, and was validated from "
        f"{source} to {target}",
        err=True,
    )


def _test_pairs(
    model: Model, files: dict[str, Any], to: str | None, languages: tuple[str, str] | None = None
) -> list[Pair]:
    """The pairs of the files, or of the recipe's data.test; ``to`` selects a target language."""
    from pydantic import ValidationError

    from regard.data.corpus import read_pairs
    from regard.data.formats import Skipped
    from regard.data.pairs import language_of
    from regard.recipe import DataConfig, DataFiles

    data = model.recipe.data
    _check_language(model, to)
    if to and files:
        files["to"] = to
    if not files:
        if data.test is None:
            raise RegardError(
                "nothing to score: the recipe has no data.test; use --source and --reference, "
                "--pairs, --conllu or --text"
            )
        pairs = read_pairs(data.test, data, "data.test")
        chosen = [pair for pair in pairs if to is None or language_of(pair) == to]
        if not chosen:
            suffix = "" if to is None else f" to {to}"
            raise RegardError(f"nothing to score: the recipe's data.test has no pairs{suffix}")
        return chosen
    try:
        test: DataFiles = DataFiles.model_validate(files)
    except ValidationError:
        if files.get("columns") and "pairs" not in files:
            raise RegardError("--columns needs --pairs") from None
        raise RegardError(
            "expected one of: --source and --reference; --pairs; --conllu; --text"
        ) from None
    skipped = Skipped()
    # The languages of the model select those of a file that has several.
    language_pair = languages or data.languages
    test_data = DataConfig(root=".", train=test, languages=language_pair, context=data.context)
    named = DataConfig(root=".", train=test).language_pair
    is_opposite = _is_opposite(data, named)
    if is_opposite and data.bidirectional:
        _note_direction(data)
    elif is_opposite:
        typer.echo(
            f"warning: the names of the files say {named[0]} to {named[1]}, but the model translates "
            f"{named[1]} to {named[0]}; are --source and --reference swapped?",
            err=True,
        )
    test_pairs = list(read_pairs(test, test_data, "", skipped))
    for line in skipped.messages():
        typer.echo(line, err=True)
    return test_pairs


# ---------------------------------------------------------------------------------------------
# look: inspect the translation of one sentence on an HTML page


@with_decoding_options
def look(
    run: RunFolder,
    text: Annotated[
        str | None,
        typer.Argument(metavar="TEXT", help="The sentence to translate.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="HTML file to write (default: look.html; without TEXT, no file).",
            show_default=False,
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = None,
    parses: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="CoNLL-U file with the dependency tree of the sentence, for models with position: tree "
            "(default: none).",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = None,
    to: TargetLanguage = None,
    checkpoints: Annotated[
        bool,
        typer.Option("--checkpoints", help="Also show the alignment at each training checkpoint."),
    ] = False,
    lenses: Annotated[
        bool,
        typer.Option(
            "--lenses",
            help="Also show what the model would predict after each layer, and what each prediction depends on.",
        ),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="A second sentence: also show which activations make the two translations differ "
            "(default: none).",
        ),
    ] = None,
    heads: Annotated[
        bool,
        typer.Option(
            "--heads",
            help="Also show the contribution of each attention head: the change of the scores on a sample of the "
            "validation data if the head is ablated. TEXT is then optional.",
        ),
    ] = False,
    pairs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Sources and references for --heads, in any format that  regard evaluate --pairs  reads "
            "(default: the validation data).",
            rich_help_panel=INPUT_OUTPUT,
        ),
    ] = None,
    prefix: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="Text that the translation must begin with (default: none).",
            show_default=False,
            rich_help_panel=DECODING,
        ),
    ] = "",
    *,
    decoding: dict[str, Any],
) -> None:
    """Show how a model translates one sentence: write an HTML page with attention, candidates and beam search.

    The page is one file that works offline. The translation and the results of --lenses and --heads are also printed.
    """
    from dataclasses import replace

    from regard.data.formats import read_parses
    from regard.inspection.html_page import page
    from regard.storage.atomic_files import check_writable, write_text
    from regard.tasks import Translator

    if text is None and not heads:
        raise RegardError("nothing to show: TEXT or --heads is required")
    if text is not None and not text.strip():
        raise RegardError("nothing to show: TEXT is blank")
    if pairs is not None and not heads:
        raise RegardError(f"--pairs {pairs}: has no effect without --heads")
    if text is not None:
        out = out or Path("look.html")
    elif out is None and (lenses or checkpoints or against or parses or prefix or decoding):
        raise RegardError("without TEXT, only --heads, --pairs and --to have an effect")
    if out is not None:
        check_writable(out)
    model = Translator.load(run).with_target_language(to)
    table = None
    if heads:
        sample = _head_pairs(model, pairs, to)
        table = measure_heads(model, sample)
        print(f"{table}\n")
        text = text or sample[0].source
    if out is None or text is None:
        return
    (parse,) = read_parses([text], parses, "the sentence") if parses else [None]
    trace = model.trace(
        text,
        **decoding,
        prefix=prefix,
        parse=parse,
        checkpoints=checkpoints,
        lenses=lenses,
        against=against,
    )
    write_text(out, page(replace(trace, head_table=table)))
    print(trace.translation)
    if trace.lenses:
        print(f"\n{trace.lenses}\n")
    print(f"{out}: open it in a browser")


def _head_pairs(model: Translator, file: Path | None, to: str | None) -> list[Pair]:
    """The pairs of the file, or a sample of the validation data."""
    from regard.inspection.page_data import validation_sample
    from regard.inspection.teacher_forcing import check_supported

    check_supported(model)
    if file is None:
        try:
            return validation_sample(model)
        except RegardError as error:
            raise RegardError(
                f"{error}; use --pairs FILE to measure --heads on other data"
            ) from None
    candidates = _test_pairs(model, {"pairs": str(file)}, to)
    if nonblank := [pair for pair in candidates if all(map(str.strip, pair))]:
        return nonblank
    raise RegardError(f"{file}: no pairs to measure the heads on")


def measure_heads(model: Translator, pairs: Sequence[Pair]) -> HeadTable:
    """Measure the contribution of each head; progress goes to standard error."""
    from regard.demo.corpus import pronoun_test
    from regard.inspection.head_ablation import ablate_heads, all_heads
    from regard.training.progress import ProgressLine

    line = ProgressLine("Heads: ", len(all_heads(model)))
    sources, references = zip(*pairs, strict=True)
    table = ablate_heads(
        model,
        sources,
        references,
        progress=lambda count, _: line.advance(count),
        correct=pronoun_test(model, references),
        tested="pronouns",
    )
    line.close()
    return table
