"""What each way to get more out of a small corpus brings: multi30k, one word of the recipe changed at a time.

    python benchmarks/ablation.py                                   # every variant, three seeds: hours on one GPU
    python benchmarks/ablation.py --minutes 8 --jobs 6              # a slice of it; the same command goes on
    python benchmarks/ablation.py --only "R-Drop 1" --set training.steps=3000

Several trainings share one GPU. What is finished is in ``ablation.json`` and is not done again; what is not is saved
when the minutes are over, and goes on when the command is given again (run folders are under ``--runs``).
``ablation.md`` is the table. Every variant differs from the recipe in one thing, so its row says what the recipe would
lose, or gain, by it. Choose by the validation column; the test columns are for the record.

Intervals are 95%, from the spread between seeds: the standard deviation is taken to be the same for all variants and is
estimated from all of them together, so that three seeds are enough to say something.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

HERE = Path(__file__).parent
RECIPE = "multi30k"
BOTH_WAYS = (
    "data.train={source: [multi30k/train.en.gz, multi30k/train.de.gz], "
    "target: [multi30k/train.de.gz, multi30k/train.en.gz], to: [de, en]}"
)
VARIANTS: dict[str, list[str]] = {
    "the recipe": [],
    "packed": ["training.batches=packed"],
    "R-Drop 1": ["training.rdrop=1"],
    "R-Drop 5": ["training.rdrop=5"],
    "BPE-dropout 0.05": ["training.sampling=0.05"],
    "BPE-dropout 0.1": ["training.sampling=0.1"],
    "unigram, alpha 0.2": ["tokenizer.kind=unigram", "training.sampling=0.2"],
    "R-Drop 1 and BPE-dropout 0.05": ["training.rdrop=1", "training.sampling=0.05"],
    "vocabulary of 3,000": ["tokenizer.size=3000"],
    "vocabulary of 10,000": ["tokenizer.size=10000"],
    "dropout 0.2": ["model.dropout=0.2"],
    "dropout 0.4": ["model.dropout=0.4"],
    "dropout 0.1 in attention and feed-forward": [
        "model.attention_dropout=0.1",
        "model.feedforward_dropout=0.1",
    ],
    "source words dropped 0.1": ["training.word_dropout=0.1"],
    "target words dropped 0.1": ["training.target_word_dropout=0.1"],
    "no label smoothing": ["training.label_smoothing=0"],
    "label smoothing 0.2": ["training.label_smoothing=0.2"],
    "EMA 0.999": ["training.ema=0.999"],
    "no averaging": ["training.average=none"],
    "4+4 layers of 320": [
        *("model.encoder_layers=4", "model.decoder_layers=4"),
        *("model.width=320", "model.feedforward=1280", "model.heads=5"),
    ],
    "10+6 layers of 224": [
        *("model.encoder_layers=10", "model.width=224", "model.feedforward=896"),
    ],
    "norm after": ["model.norm_place=after"],
    "warm-up 4,000": ["training.warmup=4000"],
    "output not tied": ["model.tie_output=false"],
    "embeddings not tied": ["model.tie_embeddings=false"],
    "both directions": [BOTH_WAYS, "data.valid.to=de", "data.test.to=de"],
}
ENDING = 25.0
"""seconds before the minutes are over at which trainings are told to save and end"""


class Job(NamedTuple):
    variant: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.variant}/{self.seed}"

    def folder(self, runs: Path) -> Path:
        words = "".join(sign if sign.isalnum() else "-" for sign in self.variant)
        return runs / f"{words}-{self.seed}"


# Trainings


def command(job: Job, runs: Path, changes: Sequence[str]) -> list[str]:
    given = [*VARIANTS[job.variant], *changes, f"training.seed={job.seed}"]
    sets = [word for change in given for word in ("--set", change)]
    out = str(job.folder(runs))
    return [sys.executable, "-m", "regard", "train", RECIPE, "--out", out, *sets]


def environment(jobs: int) -> dict[str, str]:
    """Cores shared out, and this very regard."""
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    return threads | os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def train_all(
    waiting: list[Job], runs: Path, changes: Sequence[str], jobs: int, deadline: float
) -> Iterator[Job]:
    """Train them, so many at a time, until all are done or the time is over; each as it is done."""
    running: dict[Job, subprocess.Popen[bytes]] = {}
    runs.mkdir(parents=True, exist_ok=True)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                job = waiting.pop(0)
                with job.folder(runs).with_suffix(".log").open("ab") as log:
                    running[job] = subprocess.Popen(
                        command(job, runs, changes), env=environment(jobs), stdout=log, stderr=log
                    )
            time.sleep(0.2)
            for job in [job for job, process in running.items() if process.poll() is not None]:
                if running.pop(job).returncode == 0:
                    yield job
                else:
                    print(f"{job.key}: failed, see {job.folder(runs).with_suffix('.log')}")
            if time.monotonic() > deadline - ENDING:
                return
    finally:
        for process in running.values():
            process.send_signal(signal.SIGTERM)  # they save, and can go on
        for process in running.values():
            try:
                process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def scores(folder: Path) -> dict[str, float]:
    """What the card of a finished run says."""
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    found = {"valid": card["valid"]["best_bleu"], "seconds": card["seconds"]}
    for result in card["test"]:
        found.setdefault(result["measure"], result["value"])
    return found


# The table


def pooled(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """The standard deviation within groups, and its degrees of freedom."""
    squares = sum((x - fmean(group)) ** 2 for group in groups for x in group)
    freedom = sum(len(group) - 1 for group in groups)
    return (squares / freedom) ** 0.5 if freedom else 0.0, freedom


def student(freedom: int) -> float:
    """The 97.5% point of Student's t, by Cornish and Fisher's expansion: 0.05% off at 4 degrees, less above."""
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    terms = enumerate((z, first, second, third, fourth))
    return sum(term / freedom**power for power, term in terms)


def table(results: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> str:
    by_variant: dict[str, list[Mapping[str, float]]] = {}
    for key, found in results.items():
        by_variant.setdefault(key.rpartition("/")[0], []).append(found)
    columns = {"valid": "valid BLEU, greedy", "bleu": "test BLEU", "bleu_lc": "lower case"}
    lines = [
        "| variant | seeds | " + " | ".join(columns.values()) + " | valid against the recipe |",
        "|---|---|" + "---|" * (len(columns) + 1),
    ]
    groups = {
        column: {
            name: [found[column] for found in by_variant[name] if column in found]
            for name in names
            if name in by_variant
        }
        for column in columns
    }
    spread = {column: pooled(list(some.values())) for column, some in groups.items()}
    for name in groups["valid"]:
        cells = [_mean(groups[column][name], *spread[column]) for column in columns]
        cells.append(_difference(groups["valid"][name], groups["valid"].get(names[0]), spread))
        lines.append(f"| {name} | {len(by_variant[name])} | {' | '.join(cells)} |")
    deviation, freedom = spread["valid"]
    note = f"Standard deviation between seeds: {deviation:.2f} valid BLEU ({freedom} degrees of freedom)."
    return "\n".join([*lines, "", note, ""])


def _mean(values: Sequence[float], deviation: float, freedom: int) -> str:
    if not values:
        return ""
    if not freedom:
        return f"{fmean(values):.2f}"
    return f"{fmean(values):.2f} ± {student(freedom) * deviation / len(values) ** 0.5:.2f}"


def _difference(
    values: Sequence[float],
    base: Sequence[float] | None,
    spread: Mapping[str, tuple[float, int]],
) -> str:
    if not base or values is base:
        return ""
    difference = fmean(values) - fmean(base)
    deviation, freedom = spread["valid"]
    if not freedom:
        return f"{difference:+.2f}"
    error = student(freedom) * deviation * (1 / len(values) + 1 / len(base)) ** 0.5
    return f"{difference:+.2f} ± {error:.2f}"


def write(out: Path, results: Mapping[str, Any], changes: Sequence[str], seconds: float) -> None:
    """The JSON first, whole or not at all: it is what going on is based on."""
    content = {"recipe": RECIPE, "changes": list(changes), "results": results}
    part = out.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(out)
    said = " ".join(f"--set {change}" for change in changes)
    head = f"`python benchmarks/ablation.py {said}`".replace(" `", "`")
    text = f"# What each part brings\n\n{head}; {len(results)} trainings.\n\n"
    out.with_suffix(".md").write_text(text + table(results, list(VARIANTS)), encoding="utf-8")
    print(f"{out}: {len(results)} trainings, after {seconds:.0f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=HERE / "ablation.json")
    parser.add_argument("--runs", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=4, help="trainings side by side")
    parser.add_argument("--minutes", type=float, default=10_000.0, help="end within this time")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="A.B=C")
    given = parser.parse_args(arguments)
    start = time.monotonic()
    known: dict[str, Any] = {"changes": given.changes, "results": {}}
    if given.out.is_file():
        known = json.loads(given.out.read_text(encoding="utf-8"))
    if known["changes"] != given.changes:
        parser.error(f"{given.out} was made with --set {known['changes']}: choose another --out")
    results = known["results"]
    # All variants with one seed come before any with the next: a table that is cut short is whole in rows.
    jobs = [Job(variant, seed) for seed in given.seeds for variant in given.only]
    waiting = [job for job in jobs if job.key not in results]
    deadline = start + 60 * given.minutes
    for job in train_all(waiting, given.runs, given.changes, given.jobs, deadline):
        folder = job.folder(given.runs)
        results[job.key] = scores(folder)
        for large in ("checkpoints", "data"):
            shutil.rmtree(folder / large, ignore_errors=True)
        write(given.out, results, given.changes, time.monotonic() - start)
    left = [job.key for job in jobs if job.key not in results]
    print(f"{len(left)} left; the same command goes on" if left else "all done")


if __name__ == "__main__":
    main()
