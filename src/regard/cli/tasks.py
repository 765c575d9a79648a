"""The commands of the other tasks: tag, classify, fill, continue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import (
    AsJson,
    Given,
    Input,
    Output,
    RunFolder,
)
from regard.cli.text_io import given_lines, one_way_in, portions_of, tell

if TYPE_CHECKING:
    pass


def tag(
    run: RunFolder,
    texts: Given = None,
    input: Input = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Tag the words of texts, as word/TAG; words stand between blanks, full stops too."""
    from regard.storage.run_dir import check_distinct_files
    from regard.tasks import Tagger

    one_way_in(texts, input)
    check_distinct_files({"--input": input, "--output": output})
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
    from regard.storage.run_dir import check_distinct_files
    from regard.tasks import Classifier

    one_way_in(texts, input)
    check_distinct_files({"--input": input, "--output": output})
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
    from regard.tasks import MaskedLM

    gaps = MaskedLM.load(run).fill(text, best)
    if as_json:
        print(_json({"text": text, "gaps": [[one._asdict() for one in gap] for gap in gaps]}))
        return
    for number, gap in enumerate(gaps, 1):
        which = f"{number}\t" if len(gaps) > 1 else ""
        for filling in gap:
            print(f"{which}{filling.probability:.4f}\t{filling.text}")


def generate(
    run: RunFolder,
    text: Annotated[str, typer.Argument(help="How it begins.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens more.")] = 50,
    temperature: Annotated[
        float,
        typer.Option(min=0.0, help="Below 1 is safer, above 1 wilder; 0 takes the likeliest."),
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(help="Sample from the k most probable tokens; 0 is all.")
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(help="Sample from the most probable tokens with this total probability."),
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Another seed, another text.")] = 1,
) -> None:
    """Continue a text, to the end of its line at most."""
    from regard.tasks import LanguageModel

    model = LanguageModel.load(run)
    print(
        model.generate(text, tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    )


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
