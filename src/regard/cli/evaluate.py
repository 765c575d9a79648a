"""The command that scores a model: evaluate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import (
    Alpha,
    AsJson,
    Beam,
    Candidates,
    Changes,
    PrecisionName,
    Rounds,
    RunFolder,
    Threads,
    To,
    Trees,
    precision_of,
)
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.data.corpus import Pair
    from regard.tasks import Model


def evaluate(
    run: RunFolder,
    source: Annotated[Path | None, typer.Option(help="DataFiles, one a line …")] = None,
    reference: Annotated[Path | None, typer.Option(help="… and what is right for each.")] = None,
    pairs: Annotated[Path | None, typer.Option(help="Or both in a TSV or JSONL file.")] = None,
    conllu: Annotated[Path | None, typer.Option(help="Or tagged sentences.")] = None,
    text: Annotated[Path | None, typer.Option(help="Or text alone: for mask and continue.")] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="RUN2", help="Another run, compared by a paired test.")
    ] = None,
    beam: Beam = None,
    alpha: Alpha = None,
    rounds: Rounds = None,
    candidates: Candidates = None,
    changes: Changes = None,
    parses: Trees = None,
    to: To = None,
    precision: PrecisionName = "fp32",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Score a model on the files given, or on its recipe's data.test: each figure with its 95% interval."""
    from regard.recipe import decoding_overrides
    from regard.tasks import Model

    files = {"source": source, "target": reference, "pairs": pairs, "conllu": conllu, "text": text}
    files["parses"] = parses
    model = Model.load(run, precision=precision_of(precision), threads=threads)
    ways = {"beam": beam, "length_penalty": alpha, "iterations": rounds, "candidates": candidates}
    ways |= decoding_overrides(changes or [])
    _search_by(model, ways)
    scored = _scored_on(model, {role: str(file) for role, file in files.items() if file}, to)
    model.start_workers()
    comparisons: list[Any] = []
    if against is None:
        results = model.evaluate(scored)
    else:
        other = type(model).load(against, precision=precision_of(precision), threads=threads)
        other.start_workers()
        _search_by(other, ways)
        results, comparisons = model.compare(other, scored)
    if as_json:
        answer: dict[str, Any] = {"run": str(run), "sentences": len(scored)}
        answer["scores"] = [result.to_json() for result in results]
        if against is not None:
            answer["against"] = str(against)
            answer["comparisons"] = [comparison.to_json() for comparison in comparisons]
        print(json.dumps(answer, indent=2, ensure_ascii=False))
        return
    for line in [*results, *comparisons]:
        print(line)


def _search_by(model: Model, ways: dict[str, Any]) -> None:
    """Change how a translator searches."""
    from regard.tasks import Translator

    asked = {name: value for name, value in ways.items() if value is not None}
    if not asked:
        return
    if not isinstance(model, Translator):
        raise RegardError(f"--{next(iter(asked))} is for translation models, not for {model.task}")
    model.set_decoding(**asked)


def _check_language(model: Model, to: str | None) -> None:
    """That it is one the model translates to."""
    from regard.tasks import Translator

    if to is None:
        return
    if not isinstance(model, Translator):
        raise RegardError(f"--to {to} is for models to translate, not to {model.task}")
    model.languages.tags(0, to)


def _scored_on(model: Model, files: dict[str, str], to: str | None) -> list[Pair]:
    """The pairs of the files named, or of the recipe's test, or those of one language."""
    from pydantic import ValidationError

    from regard.data.corpus import language_of, read_pairs
    from regard.recipe import Data, DataFiles

    data = model.recipe.data
    _check_language(model, to)
    if to and files:
        files["to"] = to
    if not files:
        if data.test is None:
            raise RegardError(
                "nothing to score: the recipe has no data.test; give --source and --reference, "
                "--pairs, --conllu or --text"
            )
        pairs = read_pairs(data.test, data, "data.test")
        wanted = [pair for pair in pairs if to is None or language_of(pair) == to]
        if not wanted:
            asked = "" if to is None else f" to {to}"
            raise RegardError(f"nothing to score: data.test of the recipe has no pairs{asked}")
        return wanted
    try:
        texts: DataFiles = DataFiles.model_validate(files)
    except ValidationError:
        raise RegardError(
            "give either --source and --reference, or --pairs, or --conllu, or --text"
        ) from None
    return list(read_pairs(texts, Data(root=".", train=texts), section=""))
