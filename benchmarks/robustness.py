"""What `training.augment` changes: BLEU on plain, upper-cased, title-cased and misspelled text, with and without it.

    python benchmarks/robustness.py RECIPE --out FOLDER [--seeds 1 2 3] [--jobs 6] [--set KEY=VALUE ...] [--augment …]

Trains the recipe with and without augmentation for each seed, in FOLDER/plain-1, FOLDER/augmented-1 …; runs that are
there already are resumed or reused. Every run is then scored on its test data in five variants. Upper case and title
case are applied to the references as well, the other changes to the sources only. The last column is the difference to
the BLEU of the same run on plain text, the last block the difference between the two means.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import mean, stdev

import regard
from regard.data.augmentation import title_case, with_typos, without_final_punctuation
from regard.data.corpus import read_pairs
from regard.data.pairs import Pair
from regard.data.recasing import upper_case
from regard.metrics import score
from regard.recipe import load_recipe
from regard.tasks import Translator

AUGMENT = ("upper=0.05", "title=0.05", "typos=0.05", "no_final_punctuation=0.1")
Change = Callable[[str], str]


def variants() -> dict[str, tuple[Change, Change]]:
    """How each variant changes sources and references."""
    return {
        "plain": (str, str),
        "upper": (upper_case, upper_case),
        "title": (title_case, title_case),
        "typos": (partial(with_typos, rng=Random(1)), str),
        "no_final_punctuation": (without_final_punctuation, str),
    }


def bleu_of_variants(model: Translator, pairs: Sequence[Pair], tokenize: str) -> dict[str, float]:
    """The BLEU of a model on each variant of some pairs."""
    found = {}
    for name, (change_source, change_target) in variants().items():
        sources = [change_source(pair.source) for pair in pairs]
        references = [change_target(pair.target) for pair in pairs]
        outputs = model.translate(sources)
        both = outputs, references, sources
        (result,) = score(["bleu"], *both, tokenize=tokenize, intervals=False)
        found[name] = result.value
    return found


def run_one(
    recipe: str, out: Path, changes: Sequence[str], sentences: int | None
) -> dict[str, float]:
    """Train a run, unless it is trained, and score it."""
    loaded = load_recipe(recipe, changes)
    model = regard.train(loaded, regard.Translator, out=out)
    data = loaded.data
    assert data.test is not None, "the recipe needs data.test"
    pairs = list(read_pairs(data.test, data, "data.test"))[:sentences]
    return bleu_of_variants(model, pairs, loaded.evaluation.tokenize)


def report(results: dict[str, list[dict[str, float]]]) -> None:
    """One line for each kind of run and variant: mean, standard deviation, difference to plain text."""
    means = {}
    for kind, runs in results.items():
        plain = mean(run["plain"] for run in runs)
        for variant in runs[0]:
            values = [run[variant] for run in runs]
            means[kind, variant] = mean(values)
            spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
            print(
                f"{kind:10} {variant:22} {mean(values):6.2f}{spread}  {mean(values) - plain:+.2f}"
            )
    for variant in next(iter(results.values()))[0]:
        difference = means["augmented", variant] - means["plain", variant]
        print(f"augmented - plain, {variant:22} {difference:+.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--augment", nargs="+", default=AUGMENT, metavar="KEY=VALUE")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--sentences", type=int, help="score only the first N test pairs")
    given = parser.parse_args()
    augment = [f"training.augment.{one}" for one in given.augment]
    results: dict[str, list[dict[str, float]]] = {"plain": [], "augmented": []}
    jobs = [(kind, seed) for seed in given.seeds for kind in results]
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        running = [
            pool.submit(
                run_one,
                given.recipe,
                given.out / f"{kind}-{seed}",
                [
                    *given.changes,
                    f"training.seed={seed}",
                    *(augment if kind == "augmented" else ()),
                ],
                given.sentences,
            )
            for kind, seed in jobs
        ]
        for (kind, seed), future in zip(jobs, running, strict=True):
            found = future.result()
            results[kind].append(found)
            print(kind, seed, json.dumps({name: round(bleu, 2) for name, bleu in found.items()}))
    (given.out / "robustness.json").write_text(json.dumps(results, indent=2) + "\n")
    report(results)


if __name__ == "__main__":
    main()
