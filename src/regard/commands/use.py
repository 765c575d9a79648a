"""To use a model, and to see how good it is: tag, classify, fill, continue, evaluate, look."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.commands.arguments import (
    Alpha,
    AsJson,
    Beam,
    Candidates,
    Changes,
    Given,
    Input,
    Output,
    PrecisionName,
    Rounds,
    RunFolder,
    Threads,
    To,
    Trees,
    precision_of,
)
from regard.commands.lines import given_lines, one_way_in, portions_of, tell
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.model import Model
    from regard.text.corpus import Pair


def tag(
    run: RunFolder,
    texts: Given = None,
    input: Input = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Tag the words of texts, as word/TAG; words stand between blanks, full stops too."""
    from regard.model import Tagger
    from regard.run import one_role

    one_way_in(texts, input)
    one_role({"--input": input, "--output": output})
    model = Tagger.load(run)

    def lines() -> Iterator[str]:
        for portion in portions_of(given_lines(texts, input), streamed=not texts and not input):
            for found in model.tag(portion):
                both = zip(found.words, found.tags, strict=True)
                yield _json(found._asdict()) if as_json else " ".join(map("/".join, both))

    tell(lines(), output)


def classify(
    run: RunFolder,
    texts: Given = None,
    input: Input = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Classify texts: the label and its probability."""
    from regard.model import Classifier
    from regard.run import one_role

    one_way_in(texts, input)
    one_role({"--input": input, "--output": output})
    model = Classifier.load(run)

    def lines() -> Iterator[str]:
        for portion in portions_of(given_lines(texts, input), streamed=not texts and not input):
            for found in model.classify(portion):
                plain = f"{found.label}\t{found.probability:.4f}"
                yield _json(found._asdict()) if as_json else plain

    tell(lines(), output)


def fill(
    run: RunFolder,
    text: Annotated[str, typer.Argument(help="A text with [MASK] where a word is to be guessed.")],
    best: Annotated[int, typer.Option(min=1, help="So many guesses for each [MASK].")] = 5,
    as_json: AsJson = False,
) -> None:
    """Guess hidden words: probability and word, best first."""
    from regard.model import Filler

    gaps = Filler.load(run).fill(text, best)
    if as_json:
        print(_json({"text": text, "gaps": [[one._asdict() for one in gap] for gap in gaps]}))
        return
    for number, gap in enumerate(gaps, 1):
        which = f"{number}\t" if len(gaps) > 1 else ""
        for filling in gap:
            print(f"{which}{filling.probability:.4f}\t{filling.text}")


def go_on(
    run: RunFolder,
    text: Annotated[str, typer.Argument(help="How it begins.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens more.")] = 50,
    temperature: Annotated[
        float,
        typer.Option(min=0.0, help="Below 1 is safer, above 1 wilder; 0 takes the likeliest."),
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest of this share.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Another seed, another text.")] = 1,
) -> None:
    """Continue a text, to the end of its line at most."""
    from regard.model import Continuer

    model = Continuer.load(run)
    print(model.go_on(text, tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed))


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def evaluate(
    run: RunFolder,
    source: Annotated[Path | None, typer.Option(help="Texts, one a line …")] = None,
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
    from regard.model import Model
    from regard.recipe import search_changes

    files = {"source": source, "target": reference, "pairs": pairs, "conllu": conllu, "text": text}
    files["parses"] = parses
    model = Model.load(run, precision=precision_of(precision), threads=threads)
    ways = {"beam": beam, "alpha": alpha, "rounds": rounds, "candidates": candidates}
    ways |= search_changes(changes or [])
    _search_by(model, ways)
    scored = _scored_on(model, {role: str(file) for role, file in files.items() if file}, to)
    model.work_in_processes()
    comparisons: list[Any] = []
    if against is None:
        results = model.evaluate(scored)
    else:
        other = type(model).load(against, precision=precision_of(precision), threads=threads)
        other.work_in_processes()
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
    from regard.model import Translator

    asked = {name: value for name, value in ways.items() if value is not None}
    if asked and not isinstance(model, Translator):
        raise RegardError(f"--{next(iter(asked))} is for models to translate, not to {model.task}")
    model.search_by(**asked)


def _check_language(model: Model, to: str | None) -> None:
    """That it is one the model translates to."""
    from regard.model import Translator

    if to is None:
        return
    if not isinstance(model, Translator):
        raise RegardError(f"--to {to} is for models to translate, not to {model.task}")
    model.targets.tags(0, to)


def _scored_on(model: Model, files: dict[str, str], to: str | None) -> list[Pair]:
    """The pairs of the files named, or of the recipe's test, or those of one language."""
    from pydantic import ValidationError

    from regard.recipe import Data, Texts
    from regard.text.corpus import language_of, read_pairs

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
        texts: Texts = Texts.model_validate(files)
    except ValidationError:
        raise RegardError(
            "give either --source and --reference, or --pairs, or --conllu, or --text"
        ) from None
    return list(read_pairs(texts, Data(root=".", train=texts), section=""))


def look(
    run: RunFolder,
    text: Annotated[str, typer.Argument(help="One sentence.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("look.html"),
    beam: Beam = None,
    alpha: Alpha = None,
    rounds: Rounds = None,
    candidates: Candidates = None,
    checkpoints: Annotated[
        bool,
        typer.Option("--checkpoints", help="Show also how the alignment formed while it learned."),
    ] = False,
    parses: Annotated[
        Path | None, typer.Option(help="CoNLL-U, the tree of the sentence; for position: tree.")
    ] = None,
    to: To = None,
) -> None:
    """See one sentence pass: every head, every candidate, the beam; one HTML file that needs nothing else."""
    from regard.look import page
    from regard.model import Translator
    from regard.run import write_text
    from regard.text.corpus import read_parses

    if not text.strip():
        raise RegardError("the text is blank: there is nothing to look at")
    model = Translator.load(run).into(to)
    ways = {"beam": beam, "alpha": alpha, "rounds": rounds, "candidates": candidates}
    asked: dict[str, Any] = {name: value for name, value in ways.items() if value is not None}
    (parse,) = read_parses([text], parses, "the sentence") if parses else [None]
    found = model.trace(text, **asked, parse=parse, checkpoints=checkpoints)
    write_text(out, page(found))
    print(f"{out}: open it in a browser")
