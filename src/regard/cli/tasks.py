"""The commands for tasks other than translation: tag, classify, fill, generate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from regard.cli.options import AsJson, Input, Output, RunFolder, Texts, errors_name_options
from regard.cli.text_io import check_input, chunks, input_lines, write_lines


def tag(
    run: RunFolder,
    texts: Texts = None,
    input: Input = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Tag the words of texts, and print them as word/TAG.

    Words and punctuation must be separated by spaces.
    """
    from regard.storage.atomic_files import check_distinct_files
    from regard.tasks import Tagger

    check_input(texts, input)
    check_distinct_files({"--input": input, "--output": output})
    model = Tagger.load(run)

    def lines() -> Iterator[str]:
        for chunk in chunks(input_lines(texts, input), streamed=not texts and not input):
            for tagged in model.tag(chunk):
                pairs = zip(tagged.words, tagged.tags, strict=True)
                yield _json(tagged._asdict()) if as_json else " ".join(map("/".join, pairs))

    write_lines(lines(), output)


def classify(
    run: RunFolder,
    texts: Texts = None,
    input: Input = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Classify texts: print the most probable label and its probability."""
    from regard.storage.atomic_files import check_distinct_files
    from regard.tasks import Classifier

    check_input(texts, input)
    check_distinct_files({"--input": input, "--output": output})
    model = Classifier.load(run)

    def lines() -> Iterator[str]:
        for chunk in chunks(input_lines(texts, input), streamed=not texts and not input):
            for result in model.classify(chunk):
                line = f"{result.label}\t{result.probability:.4f}"
                yield _json(result._asdict()) if as_json else line

    write_lines(lines(), output)


def fill(
    run: RunFolder,
    text: Annotated[
        str,
        typer.Argument(metavar="TEXT", help="A text with [MASK] in place of each missing token."),
    ],
    best: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of predictions for each [MASK].")
    ] = 5,
    as_json: AsJson = False,
) -> None:
    """Predict masked tokens: print the probability and the text of each prediction, best first."""
    from regard.tasks import MaskedLM

    gaps = MaskedLM.load(run).fill(text, best)
    if as_json:
        print(
            _json({"text": text, "gaps": [[filling._asdict() for filling in gap] for gap in gaps]})
        )
        return
    for number, gap in enumerate(gaps, 1):
        prefix = f"{number}\t" if len(gaps) > 1 else ""
        for filling in gap:
            print(f"{prefix}{filling.probability:.4f}\t{filling.text}")


def generate(
    run: RunFolder,
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="The beginning of the text (default: empty).")
    ] = "",
    tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum number of tokens to generate.")
    ] = 50,
    temperature: Annotated[
        float,
        typer.Option(
            metavar="T",
            min=0.0,
            help="Values below 1 sharpen the distribution, values above 1 flatten it; 0 is greedy search.",
        ),
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(metavar="K", help="Sample from the K most probable tokens; 0 means all.")
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P",
            help="Sample from the most probable tokens that together have probability P, for example 0.9.",
        ),
    ] = 1.0,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Random seed; the same seed gives the same text.")
    ] = 1,
) -> None:
    """Continue a text with a language model, up to the end of the line."""
    from regard.tasks import LanguageModel

    model = LanguageModel.load(run)
    sampling: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "seed": seed}
    with errors_name_options(["temperature", *sampling]):
        print(model.generate(text, tokens, temperature=temperature, **sampling))


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
