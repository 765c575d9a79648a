"""The main job in about three minutes on two CPU available_cores, with nothing to download.

A corpus from the built-in grammar, a small Transformer, a test score, and the question the paper's readers ask: in
"The dog didn't cross the street because it was too tired", what does *it* mean? German has to know.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from regard.data.corpus import Pair
from regard.demo.grammar import Split, challenge, generate, pronoun_is_right
from regard.metrics import Result
from regard.recipe import load_recipe
from regard.storage.run_dir import RunDir, write_text
from regard.tasks import Translator
from regard.training.run import refuse_strangers, train

PAIRS: dict[Split, int] = {"train": 120_000, "valid": 500, "test": 1_000}

DOGS = (
    "The dog didn't cross the street because it was too tired.",
    "The dog didn't cross the street because it was too wide.",
)


def demo(out: Path) -> None:
    console = Console(highlight=False)
    run = RunDir(out)
    refuse_strangers(run)
    text = run.data / "text"
    if not (text / "test.de").exists():
        console.print(f"Writing an English-German corpus to {text}")
        write_corpus(text)
    train(load_recipe("demo", [f"data.root={text.resolve()}"]), out)
    model = Translator.load(out)
    right, asked = score_challenge(model)
    run.write_card({**run.card(), "challenge": {"right": right, "asked": asked}})
    console.print()
    best, *_ = (Result(**result) for result in run.card()["test"])
    console.print(f"{best.name} {best.value:.1f} on {PAIRS['test']:,} sentences it has not seen;")
    console.print(
        f"{right} of {asked} pronouns right for nouns and adjectives that no pronoun joined in training."
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
    for ending, lines in zip((".en", ".de"), zip(*pairs, strict=True), strict=True):
        text = "".join(f"{line}\n" for line in lines)
        write_text(stem.with_suffix(ending), text)


def score_challenge(model: Translator) -> tuple[int, int]:
    """How many pronouns are right that stand for a noun with an adjective as none did in training."""
    items = challenge()
    translations = model.translate([item.source for item in items])
    right = sum(map(pronoun_is_right, items, translations))
    return right, len(items)
