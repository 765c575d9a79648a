"""What each way to get more out of a small corpus brings: a recipe, one word of it changed at a time.

    python benchmarks/ablation.py                         # every variant of multi30k-tiny, three seeds
    python benchmarks/ablation.py --minutes 8 --jobs 6    # a slice of it; the same command goes on
    python benchmarks/ablation.py multi30k --only "the recipe" "no label smoothing" --set training.steps=3000

It may be stopped at any time. What is finished is in ``ablation.json`` and is not done again; what is not is saved when
the minutes are over, or on Ctrl-C, and goes on when the command is given again (run folders are under ``--runs``).
Text is prepared once for all trainings that learn from the same ids. ``ablation.md`` is the table.

Every variant differs from the recipe in one thing, so its row says what the recipe would lose, or gain, by it; one that
does not differ, or that the recipe does not admit, is left out. Choose by the validation column: the whole set,
searched as the recipe says. The test is scored with ``--test`` only, for the record.

Intervals are 95%, from the spread between seeds: Student's t with one degree of freedom less than there are seeds, and
Welch's for a difference.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import Any, NamedTuple

import numpy as np

from regard.errors import RegardError
from regard.recipe import Recipe, load_recipe
from regard.storage.run_dir import RunDir, write_text
from regard.training.prepare import identity_of
from regard.training.trainer import interrupts

HERE = Path(__file__).parent
BOTH_WAYS = (
    "data.train={source: [multi30k/train.en.gz, multi30k/train.de.gz], "
    "target: [multi30k/train.de.gz, multi30k/train.en.gz], to: [de, en]}"
)
BASE = "the recipe"
VARIANTS: dict[str, list[str]] = {
    BASE: [],
    "R-Drop 1": ["training.rdrop=1"],
    "R-Drop 5": ["training.rdrop=5"],
    "BPE-dropout 0.1": ["training.subword_sampling=0.1"],
    "unigram, alpha 0.2": ["tokenizer.kind=unigram", "training.subword_sampling=0.2"],
    "vocabulary of 3,000": ["tokenizer.vocab_size=3000"],
    "dropout 0.1": ["model.dropout=0.1"],
    "dropout 0.3": ["model.dropout=0.3"],
    "none in attention and feed-forward": [
        "model.attention_dropout=0",
        "model.activation_dropout=0",
    ],
    "source words dropped 0.1": ["training.word_dropout=0.1"],
    "target words dropped 0.1": ["training.target_word_dropout=0.1"],
    "no label smoothing": ["training.label_smoothing=0"],
    "EMA 0.999": ["training.ema=0.999"],
    "no averaging": ["training.average=none"],
    "2+2 layers of 176": [
        *("model.encoder_layers=2", "model.decoder_layers=2"),
        *("model.d_model=176", "model.d_ff=352"),
    ],
    "8+8 layers of 96": [
        *("model.encoder_layers=8", "model.decoder_layers=8"),
        *("model.d_model=96", "model.d_ff=192"),
    ],
    "norm after": ["model.norm_order=post"],
    "warm-up 2,000": ["training.warmup=2000"],
    "output not tied": ["model.tie_output=false"],
    "embeddings not tied": ["model.tie_embeddings=false"],
    "both directions": [BOTH_WAYS, "data.valid.to=de", "data.test.to=de"],
    "translations of a teacher": ["data.train={pairs: multi30k/distilled-fast.tsv}"],
    "half of the pairs": ["data.train={pairs: multi30k/half.jsonl}"],
    "half, the rest back-translated": [
        "data.train={pairs: [multi30k/half.jsonl, multi30k/rest-back.jsonl], tag: [null, bt]}"
    ],
}
"""widths go with multi30k-tiny's layers: about as many parameters; the teacher is that of recipes/multi30k-fast.yaml,
and benchmarks/back.py writes the halves"""
ENDING = 25.0
"""seconds before the minutes are over at which trainings are told to save and end"""
SCORES = "scores.json"
INTERRUPTED = 130
"""the status of a training that was told to end, and has saved"""


class Job(NamedTuple):
    variant: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.variant}/{self.seed}"


class Plan(NamedTuple):
    """What is asked for of every training."""

    recipe: str
    changes: Sequence[str]
    test: bool
    runs: Path
    """where the run folders are"""

    def folder(self, job: Job) -> Path:
        words = "".join(sign if sign.isalnum() else "-" for sign in job.variant)
        return self.runs / f"{words}-{job.seed}"

    def sets(self, job: Job) -> list[str]:
        untested = [] if self.test else ["data.test=null"]
        return [*VARIANTS[job.variant], *self.changes, f"training.seed={job.seed}", *untested]

    def load(self, job: Job) -> Recipe:
        return load_recipe(self.recipe, self.sets(job))

    def command(self, job: Job) -> list[str]:
        sets = [word for change in self.sets(job) for word in ("--set", change)]
        return [sys.executable, __file__, self.recipe, "--work", str(self.folder(job)), *sets]


def admitted(plan: Plan, names: Sequence[str]) -> Iterator[str]:
    """The variants that are recipes, and others than the base; says which are not."""
    base = plan.load(Job(BASE, 1))
    for name in names:
        try:
            same = plan.load(Job(name, 1)) == base
        except RegardError as error:
            print(f"{name}: left out: {error}")
            continue
        if same and name != BASE:
            print(f"{name}: left out, it is the recipe")
        else:
            yield name


# Trainings


def work(recipe: Recipe, folder: Path) -> None:
    """One training, in a process of its own: train or go on, score the validation pairs, write it down."""
    from regard.data.corpus import valid_pairs
    from regard.training.run import train

    model = train(recipe, folder)
    first = recipe.evaluation.model_copy(update={"metrics": recipe.evaluation.metrics[:1]})
    model.recipe = recipe.model_copy(update={"score": first})
    card = RunDir(folder).card()
    found = {
        # of several languages the mean
        "valid": fmean(one.value for one in model.evaluate(list(valid_pairs(recipe.data)))),
        "test": {
            one["measure"]: fmean(
                each["value"] for each in card["test"] if each["measure"] == one["measure"]
            )
            for one in card["test"]
        },
        "seconds": card["seconds"],
        "hardware": card["hardware"],
    }
    write_text(folder / SCORES, json.dumps(found))


class DataFiles:
    """PreparedData text, shared by all trainings that learn from the same ids."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.known: dict[Job, Path] = {}

    def of(self, job: Job) -> Path:
        """Where the text of a training is kept, or will be."""
        if job not in self.known:
            whole = json.dumps(identity_of(self.plan.load(job)))
            digest = hashlib.sha256(whole.encode()).hexdigest()
            self.known[job] = self.plan.runs / "prepared" / digest[:16]
        return self.known[job]

    def keep(self, job: Job) -> None:
        """What a run has prepared, if it is whole: facts.json is written last."""
        run, place = RunDir(self.plan.folder(job)), self.of(job)
        if place.exists() or not (run.data / "facts.json").is_file():
            return
        part = RunDir(place.with_suffix(".part"))
        shutil.rmtree(part.folder, ignore_errors=True)
        _link(run, part)
        part.folder.replace(place)

    def give(self, job: Job) -> None:
        """Put it into a run that has not begun."""
        run, place = RunDir(self.plan.folder(job)), self.of(job)
        begun = run.weights_file.exists() or (run.data / "facts.json").exists()
        if place.exists() and not begun:
            shutil.rmtree(run.folder, ignore_errors=True)
            _link(RunDir(place), run)
            run.write_recipe(self.plan.load(job))  # without it the folder would be no run


def _link(one: RunDir, other: RunDir) -> None:
    """The same files, not copies: they are written once, and removing one name leaves the other."""
    shutil.copytree(one.data, other.data, copy_function=os.link)
    for path in one.tokenizer_files():
        os.link(path, other.folder / path.name)


def environment(jobs: int) -> dict[str, str]:
    """Cores shared out, and this very regard."""
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    return threads | os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def train_all(
    plan: Plan, waiting: list[Job], jobs: int, deadline: float, stopped: threading.Event
) -> Iterator[Job]:
    """Train them, so many at a time, until all are done, the time is over, or it is stopped; each as it is done."""
    running: dict[Job, subprocess.Popen[bytes]] = {}
    texts = DataFiles(plan)
    plan.runs.mkdir(parents=True, exist_ok=True)
    try:
        while (
            (waiting or running) and not stopped.is_set() and time.monotonic() < deadline - ENDING
        ):
            while len(running) < jobs and (job := _next(waiting, running, texts)):
                waiting.remove(job)
                texts.give(job)
                running[job] = start(plan, job, jobs)
            stopped.wait(0.2)
            for job in running:
                texts.keep(job)
            yield from _ended(plan, running)
        for process in running.values():
            process.send_signal(signal.SIGTERM)  # they save, and can go on
        latest = time.monotonic() + ENDING
        while any(process.poll() is None for process in running.values()):
            if time.monotonic() > latest:
                break
            time.sleep(0.1)
        yield from _ended(plan, running)
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def _next(waiting: Sequence[Job], running: Mapping[Job, Any], texts: DataFiles) -> Job | None:
    """The next training that need not prepare text that another one is just preparing."""
    preparing = {place for place in map(texts.of, running) if not place.exists()}
    return next((job for job in waiting if texts.of(job) not in preparing), None)


def start(plan: Plan, job: Job, jobs: int) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C is for this process alone, which then tells each training once."""
    with plan.folder(job).with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            plan.command(job),
            env=environment(jobs),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _ended(plan: Plan, running: dict[Job, subprocess.Popen[bytes]]) -> Iterator[Job]:
    for job in [job for job, process in running.items() if process.poll() is not None]:
        status = running.pop(job).returncode
        if status == 0:
            yield job
        elif status not in (INTERRUPTED, -signal.SIGTERM):
            log = plan.folder(job).with_suffix(".log")
            *_, last = log.read_text(encoding="utf-8").strip().split("\n")
            print(f"{job.key}: failed, see {log}: {last}", flush=True)


# The table


def student(freedom: float) -> float:
    """The 97.5% point of Student's t.

    With t = sqrt(n) tan(a) the density of t becomes cos(a)^(n-1), up to a factor, so the point is where the area under
    that is 95% of the whole.
    """
    angles = np.linspace(0.0, np.pi / 2, 200_001)
    heights = np.cos(angles) ** (freedom - 1)
    areas = np.concatenate([[0.0], np.cumsum(heights[1:] + heights[:-1])])
    return float(np.sqrt(freedom) * np.tan(np.interp(0.95, areas / areas[-1], angles)))


class Mean(NamedTuple):
    """A mean and half the width of its 95% interval; None: there are too few values to tell."""

    value: float
    error: float | None

    def told(self, form: str) -> str:
        return f"{self.value:{form}}" + ("" if self.error is None else f" ± {self.error:.2f}")


def mean(values: Sequence[float]) -> Mean:
    n = len(values)
    error = student(n - 1) * (variance(values) / n) ** 0.5 if n > 1 else None
    return Mean(fmean(values), error)


def difference(values: Sequence[float], base: Sequence[float]) -> Mean:
    """Welch's: the two may spread differently."""
    apart = fmean(values) - fmean(base)
    if min(len(values), len(base)) < 2:
        return Mean(apart, None)
    parts = [(variance(some) / len(some), len(some) - 1) for some in (values, base)]
    squared = sum(part for part, _ in parts)
    if not squared:
        return Mean(apart, 0.0)
    freedom = squared**2 / sum(part**2 / degrees for part, degrees in parts)
    return Mean(apart, student(freedom) * squared**0.5)


def table(results: Mapping[str, Mapping[str, Any]], measure: str) -> str:
    """One row for each variant that has results, in the order of VARIANTS."""
    found = {
        name: [some for key, some in results.items() if key.rpartition("/")[0] == name]
        for name in VARIANTS
    }
    found = {name: some for name, some in found.items() if some}
    tests = list(dict.fromkeys(name for some in results.values() for name in some["test"]))
    heads = ["variant", "seeds", f"valid {measure}", "against the recipe"]
    heads += [*(f"test {name}" for name in tests), "seconds"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "--:|" * (len(heads) - 1)]
    base = [one["valid"] for one in found.get(BASE, [])]
    for name, some in found.items():
        valid = [one["valid"] for one in some]
        apart = difference(valid, base).told("+.2f") if base and name != BASE else ""
        cells = [name, str(len(some)), mean(valid).told(".2f"), apart]
        for test in tests:
            values = [one["test"][test] for one in some if test in one["test"]]
            cells.append(mean(values).told(".2f") if values else "")
        cells.append(f"{fmean(one['seconds'] for one in some):.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [*lines, "", spread([[one["valid"] for one in some] for some in found.values()])]
    )


def spread(groups: Sequence[Sequence[float]]) -> str:
    """The standard deviation within groups, all together, and what it says of two means of three."""
    squares = sum((x - fmean(group)) ** 2 for group in groups for x in group)
    freedom = sum(len(group) - 1 for group in groups)
    if not freedom:
        return ""
    deviation = (squares / freedom) ** 0.5
    least = student(freedom) * deviation * (2 / 3) ** 0.5
    return (
        f"If all variants spread alike, the standard deviation between seeds is {deviation:.2f} "
        f"({freedom} degrees of freedom), and two means of three seeds differ by more than chance "
        f"from {least:.2f} on.\n"
    )


def write(out: Path, head: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """The JSON first, whole or not at all: it is what going on is based on. Returns the table."""
    content = json.dumps({**head, "results": results}, indent=2, ensure_ascii=False)
    write_text(out, content + "\n")
    words = [head["recipe"], *(f"--set {change}" for change in head["changes"])]
    words += ["--test"] if head["test"] else []
    where = ", ".join(dict.fromkeys(one["hardware"] for one in results.values()))
    told = table(results, head["measure"])
    text = (
        f"# What each part brings\n\n`python benchmarks/ablation.py {' '.join(words)}`; {len(results)} trainings on "
        f"{where}; seconds are of trainings side by side.\n\n{told}"
    )
    write_text(out.with_suffix(".md"), text)
    return told


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "recipe", nargs="?", default="multi30k-tiny", help="a file, or the name of one"
    )
    parser.add_argument("--out", type=Path, default=HERE / "ablation.json")
    parser.add_argument("--runs", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=4, help="trainings side by side")
    parser.add_argument("--minutes", type=float, default=10_000.0, help="end within this time")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--test", action="store_true", help="score the test as well")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * given.minutes
    if given.work:
        one_training(load_recipe(given.recipe, given.changes), given.work)
        return
    plan = Plan(given.recipe, given.changes, given.test, given.runs)
    measure = plan.load(Job(BASE, 1)).evaluation.metrics[0]
    head = {"recipe": given.recipe, "changes": given.changes, "test": given.test}
    head["measure"] = measure
    known = {**head, "results": {}}
    if given.out.is_file():
        known = json.loads(given.out.read_text(encoding="utf-8"))
    for key in ("recipe", "changes", "test"):
        if known[key] != head[key]:
            parser.error(f"{given.out} was made with {key} {known[key]}: choose another --out")
    results = known["results"]
    # All variants with one seed come before any with the next: a table that is cut short is whole in rows.
    variants = list(admitted(plan, given.only))
    every = [Job(variant, seed) for seed in given.seeds for variant in variants]
    waiting = [job for job in every if job.key not in results]
    with interrupts() as stopped:
        for job in train_all(plan, waiting, given.jobs, deadline, stopped):
            folder = plan.folder(job)
            results[job.key] = json.loads((folder / SCORES).read_text(encoding="utf-8"))
            write(given.out, head, results)
            for large in ("checkpoints", "data"):  # what is in the table is not gone on with
                shutil.rmtree(folder / large, ignore_errors=True)
            print(f"{job.key}: {results[job.key]}", flush=True)
    if results:
        print(write(given.out, head, results))
    left = [job.key for job in every if job.key not in results]
    print(f"{len(left)} left; the same command goes on" if left else "all done")


def one_training(recipe: Recipe, folder: Path) -> None:
    from regard.training.run import Interrupted

    try:
        work(recipe, folder)
    except Interrupted:
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    try:
        main()
    except RegardError as wrong:
        sys.exit(f"ablation: {wrong}")
