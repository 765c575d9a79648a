"""The demo: train, score and try a small translator in about three minutes on two CPU cores, without any download.

The corpus comes from the built-in grammar (``corpus.py``). It tests what attention is known for: in "The dog didn't
cross the street because it was too tired", what does *it* refer to? The German pronoun shows the answer.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from regard.demo.corpus import PAIRS, challenge, pronoun_is_correct, write_corpus
from regard.metrics import MetricResult
from regard.recipe import load_recipe
from regard.storage.run_dir import RunDir
from regard.tasks import Translator
from regard.training.resume import check_run_folder
from regard.training.run import train

EXAMPLES = (
    "The dog didn't cross the street because it was too tired.",
    "The dog didn't cross the street because it was too wide.",
)


def demo(out: Path) -> None:
    """Write the corpus, train, score, and translate two examples; ``out`` is the run folder."""
    console = Console(highlight=False)
    run = RunDir(out)
    check_run_folder(run)
    corpus = run.data / "text"
    if not (corpus / "test.de").exists():
        console.print(f"Writing an English-German corpus to {corpus}")
        write_corpus(corpus)
    train(load_recipe("demo", [f"data.root={corpus.resolve()}"]), out)
    model = Translator.load(out)
    correct, total = score_challenge(model)
    run.write_card({**run.card(), "challenge": {"correct": correct, "total": total}})
    console.print()
    first, *_ = (MetricResult(**result) for result in run.card()["test"])
    console.print(f"{first.name} {first.value:.1f} on {PAIRS['test']:,} test sentences;")
    console.print(
        f"{correct} of {total} pronouns correct for noun-adjective pairs that are not in the training data."
    )
    console.print()
    for source, translation in zip(EXAMPLES, model.translate(EXAMPLES), strict=True):
        console.print(f"  [dim]{escape(source)}[/]\n  [bold]{escape(translation)}[/]\n")
    console.print(f'Try it:  regard translate {out} "The cat was hungry."')


def score_challenge(model: Translator) -> tuple[int, int]:
    """The number of correct pronouns in the challenge set, and its size."""
    items = challenge()
    translations = model.translate([item.source for item in items])
    correct = sum(map(pronoun_is_correct, items, translations))
    return correct, len(items)
