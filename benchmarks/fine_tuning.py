"""Fine-tuning: scores on old and new data before and after, with and without mixing and vocabulary extension.

    python benchmarks/fine_tuning.py                 # on two CPU cores 9 minutes for a base, 1 to 3 for a variant
    python benchmarks/fine_tuning.py --steps 6000 --batch 8192 --old-pairs 200000 --pairs 20000 --test-pairs 1000
    # reads $REGARD_DATA, writes benchmarks/fine_tuning.json

Two experiments: a model of everyday sentences (tatoeba_ende) adapted to image captions (multi30k), and a model of the
texts of a game adapted to office help pages (l10n_enzh). The base model is trained first; each variant then starts from
it with ``regard.train(pairs, init_from=base, …)``, and its card has the scores. Runs that exist are not trained again.
"""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from reporting import markdown_table

import regard
from regard import __version__
from regard.data.text_files import read_lines
from regard.recipe import make_recipe
from regard.storage.run_dir import RunDir
from regard.training.cpu_kernels import fastest_cpu_precision
from regard.training.fine_tuning import RATE_FACTOR, peak_learning_rate
from regard.training.model_card import hardware

MIX, EXTENSION = 0.5, 1_000
RATE_FACTORS = (0.05, 0.1, 0.5, 1.0)
"""learning rates relative to the peak of the base model, compared with the default ``RATE_FACTOR``"""


@dataclass(frozen=True)
class Experiment:
    """Old and new data: files of training and of test pairs. No checkpoint is selected by the test pairs."""

    name: str
    old: Path
    old_test: Path
    new: Path
    new_test: Path
    languages: tuple[str, str]
    tokenize: str = "13a"


@dataclass(frozen=True)
class Sizes:
    """How many pairs are used."""

    old: int
    new: int
    test: int


Variant = dict[str, Any]
"""keyword arguments of ``regard.train``"""


def variants() -> dict[str, Variant]:
    found: dict[str, Variant] = {
        "default": {},
        f"mix {MIX}": {"mix": MIX},
        f"extend {EXTENSION}": {"extend_vocab": EXTENSION},
        f"mix {MIX}, extend {EXTENSION}": {"mix": MIX, "extend_vocab": EXTENSION},
        "freeze embeddings": {"freeze": ["embeddings"]},
        "freeze encoder": {"freeze": ["encoder"]},
    }
    return found | {f"rate {factor}": {"rate": factor} for factor in RATE_FACTORS}


# ---------------------------------------------------------------------------------------------
# Data


def experiments(data: Path, folder: Path, sizes: Sizes) -> list[Experiment]:
    """The experiments, after their pairs have been written as TSV files."""
    tatoeba, multi30k, l10n = data / "tatoeba_ende", data / "multi30k", data / "l10n_enzh"
    cut = partial(_write, folder)
    return [
        Experiment(
            "tatoeba-to-captions",
            cut("tatoeba.tsv", _parallel(tatoeba, "train", "de"), sizes.old),
            cut("tatoeba-test.tsv", _parallel(tatoeba, "valid", "de"), sizes.test),
            cut("captions.tsv", _parallel(multi30k, "train", "de"), sizes.new),
            cut("captions-test.tsv", _parallel(multi30k, "test_2016_flickr", "de"), sizes.test),
            ("en", "de"),
        ),
        Experiment(
            "game-to-office",
            cut("game.tsv", _domain(l10n, "game"), sizes.old),
            cut("game-test.tsv", _parallel(l10n, "valid_game", "zh"), sizes.test),
            cut("office.tsv", _domain(l10n, "office"), sizes.new),
            cut("office-test.tsv", _parallel(l10n, "valid_office", "zh"), sizes.test),
            ("en", "zh"),
            "zh",
        ),
    ]


def _parallel(folder: Path, name: str, target: str) -> Iterator[tuple[str, str]]:
    suffix = ".gz" if (folder / f"{name}.en.gz").is_file() else ""
    sides = [read_lines(folder / f"{name}.{language}{suffix}") for language in ("en", target)]
    yield from ((s.strip(), t.strip()) for s, t in zip(*sides, strict=True))


def _domain(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    domains = read_lines(folder / "train.domain.gz")
    for pair, domain in zip(_parallel(folder, "train", "zh"), domains, strict=True):
        if domain.strip() == name:
            yield pair


def _write(folder: Path, name: str, pairs: Iterator[tuple[str, str]], count: int) -> Path:
    """An evenly spaced selection of the pairs as a TSV file."""
    every = [pair for pair in pairs if all(pair) and "\t" not in "".join(pair)]
    step = max(1.0, len(every) / count)
    chosen = (every[int(number * step)] for number in range(min(count, len(every))))
    path = folder / name
    path.write_text("".join(f"{s}\t{t}\n" for s, t in chosen), encoding="utf-8")
    return path


# ---------------------------------------------------------------------------------------------
# Training


def train_base(
    experiment: Experiment, folder: Path, steps: int, batch: int, changes: list[str]
) -> Path:
    """Train the model to start from; ``changes`` are ``key=value`` settings of its recipe."""
    out = folder / f"{experiment.name}-base"
    values = {
        "data": {
            "train": {"pairs": str(experiment.old)},
            "test": {"pairs": str(experiment.old_test)},
            "languages": experiment.languages,
            "hold_out": 0.01,
        },
        "tokenizer": {"vocab_size": 4_000},
        "model": {"preset": "tiny", "norm_order": "pre", "dropout": 0.1},
        "training": {
            "steps": steps,
            "tokens_per_batch": batch,
            "schedule": "cosine",
            "learning_rate": 0.002,
            "warmup": steps // 10,
            "batching": "packed",
            "precision": "auto" if torch.cuda.is_available() else fastest_cpu_precision(),
            "validate_every": max(1, steps // 4),
            "checkpoint_every": max(1, steps // 4),
            "validate_sentences": 100,
            "best_checkpoint_metric": "loss",
        },
        "decoding": {"beam": 2, "length_penalty": 1.0},
        "evaluation": {"metrics": ["bleu", "chrf"], "tokenize": experiment.tokenize},
    }
    if not RunDir(out).card():
        regard.train(make_recipe(values, experiment.name, changes), out=out)
    return out


def fine_tune(
    experiment: Experiment, base: Path, name: str, variant: Variant, steps: int | None
) -> dict[str, Any]:
    """Fine-tune the base model and return what its card says about it; ``steps``: None if they are to be chosen."""
    out = base.with_name(f"{experiment.name}-{name.replace(', ', '-').replace(' ', '-')}")
    changes = [f"data.test={json.dumps({'pairs': str(experiment.new_test)})}"]
    options = dict(variant)
    changes += [] if steps is None else [f"training.steps={steps}"]
    if factor := options.pop("rate", None):
        changes.append(f"training.learning_rate={factor * _default_rate(base) / RATE_FACTOR:.2g}")
    changes.append(f"data.languages={json.dumps(experiment.languages)}")
    if not RunDir(out).card():
        regard.train(experiment.new, out=out, init_from=base, changes=changes, **options)
    recipe, card = RunDir(out).recipe(), RunDir(out).card()
    return {
        "learning_rate": recipe.training.learning_rate,
        "steps": card["steps"],
        "seconds": card["seconds"],
        "vocabulary": card["vocabulary"],
        **{name: _scores(scores) for name, scores in card["fine_tuning"]["sets"].items()},
    }


def _default_rate(base: Path) -> float:
    return RATE_FACTOR * peak_learning_rate(RunDir(base).recipe())


def _scores(scores: dict[str, Any]) -> dict[str, Any]:
    """The values of each metric before and after."""
    return {
        "pairs": scores["pairs"],
        **{
            when: {one["metric"]: round(one["value"], 2) for one in scores[when]}
            for when in ("before", "after")
        },
    }


def table(found: dict[str, Any]) -> str:
    """A table for each experiment."""
    lines = []
    for name, variants in found["experiments"].items():
        head = ["variant", "old BLEU", "old chrF", "new BLEU", "new chrF", "steps", "minutes"]
        first = next(iter(variants.values()))
        rows = [["before", *_row(first, "before"), "", ""]]
        for variant, scores in variants.items():
            minutes = f"{scores['seconds'] / 60:.1f}"
            rows.append([variant, *_row(scores, "after"), f"{scores['steps']:,}", minutes])
        lines += ["", f"**{name}**", "", *markdown_table(head, rows)]
    return "\n".join(lines)


def _row(scores: dict[str, Any], when: str) -> list[str]:
    return [
        f"{scores[data][when][metric]:.1f}"
        for data in ("old", "new")
        for metric in ("bleu", "chrf")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3_000, help="steps of a base model")
    parser.add_argument("--fine-tuning-steps", type=int, help="default: chosen from the data")
    parser.add_argument("--batch", type=int, default=4_096, help="tokens per batch of a base model")
    parser.add_argument("--old-pairs", type=int, default=200_000, help="pairs of the old data")
    parser.add_argument("--pairs", type=int, default=5_000, help="pairs of the new data")
    parser.add_argument("--test-pairs", type=int, default=300, help="pairs of each test set")
    parser.add_argument(
        "--set", action="append", default=[], dest="changes", help="KEY=VALUE of the base recipe"
    )
    parser.add_argument("--experiments", nargs="*", help="names of experiments (default: all)")
    parser.add_argument("--variants", nargs="*", help="names of variants (default: all)")
    parser.add_argument("--runs", type=Path, default=Path("runs/fine-tuning"))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    data = Path(os.environ.get("REGARD_DATA") or "../shared/data").resolve()
    given.runs.mkdir(parents=True, exist_ok=True)
    folder = given.runs.resolve()
    sizes = Sizes(given.old_pairs, given.pairs, given.test_pairs)
    found: dict[str, Any] = {
        "regard": __version__,
        "hardware": hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "base": {
            "steps": given.steps,
            "tokens_per_batch": given.batch,
            "changes": given.changes,
        },
        "fine_tuning_steps": given.fine_tuning_steps,
        "pairs": asdict(sizes),
        "experiments": {},
    }
    for experiment in experiments(data, folder, sizes):
        if given.experiments and experiment.name not in given.experiments:
            continue
        base = train_base(experiment, folder, given.steps, given.batch, given.changes)
        results = found["experiments"][experiment.name] = {}
        for name, variant in variants().items():
            if not given.variants or name in given.variants:
                results[name] = fine_tune(experiment, base, name, variant, given.fine_tuning_steps)
        given.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
