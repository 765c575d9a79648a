"""The main job in about four minutes on two CPU cores, with nothing to download.

A corpus from the built-in grammar, a small Transformer, a test score, and the question the paper's readers ask: in
"The dog didn't cross the street because it was too tired", what does *it* mean? German has to know.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from regard.learn.train import train
from regard.model import Model
from regard.recipe import load_recipe
from regard.run import Run
from regard.score import Result
from regard.text.corpus import Pair
from regard.text.grammar import Split, challenge, generate, pronoun_is_right

PAIRS: dict[Split, int] = {"train": 120_000, "valid": 500, "test": 1_000}

DOGS = (
    "The dog didn't cross the street because it was too tired.",
    "The dog didn't cross the street because it was too wide.",
)


def demo(out: Path) -> None:
    console = Console(highlight=False)
    run = Run(out)
    text = run.data / "text"
    if not (text / "test.de").exists():
        console.print(f"Writing an English-German corpus to {text}")
        write_corpus(text)
    model = train(load_recipe("demo", [f"data.root={text.resolve()}"]), out)
    right, asked = score_challenge(model)
    run.write_card({**run.card(), "challenge": {"right": right, "asked": asked}})
    console.print()
    for result in run.card()["test"]:
        console.print(f"Test        {Result(**result)}", soft_wrap=True)
    console.print(
        f"Challenge   {right} of {asked} pronouns right in sentences of unseen pairs of words"
    )
    console.print()
    for source, translation in zip(DOGS, model.translate(DOGS), strict=True):
        console.print(f"  [dim]{escape(source)}[/]\n  [bold]{escape(translation)}[/]\n")
    console.print(f'Try it:  regard translate {out} "The cat was hungry."')


def write_corpus(folder: Path) -> None:
    """Plain text files, two for each split; test.de is written last and says that all are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in PAIRS.items():
        write_pairs(folder / split, generate(split, count))


def write_pairs(stem: Path, pairs: Iterable[Pair]) -> None:
    source, target = zip(*pairs, strict=True)
    stem.with_suffix(".en").write_text("\n".join(source) + "\n", encoding="utf-8")
    stem.with_suffix(".de").write_text("\n".join(target) + "\n", encoding="utf-8")


def score_challenge(model: Model) -> tuple[int, int]:
    """How many pronouns are right in sentences whose noun and adjective never met in training."""
    items = challenge()
    translations = model.translate([item.source for item in items])
    right = sum(map(pronoun_is_right, items, translations))
    return right, len(items)
