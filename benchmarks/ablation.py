"""What each technique for small corpora gains: a recipe with one change at a time.

    python benchmarks/ablation.py                         # every variant of multi30k-tiny, three seeds
    python benchmarks/ablation.py --minutes 8 --jobs 6    # part of it; the same command resumes
    python benchmarks/ablation.py multi30k --only "the recipe" "no label smoothing" --set training.steps=3000

It can be stopped at any time. Finished training runs are in ``ablation.json`` and are not repeated; unfinished ones are
saved when the time is over, or on Ctrl-C, and resumed by the same command (their run folders are under ``--runs``).
Data are prepared once for all training runs that use the same ids. ``ablation.md`` is the table.

Some variants have two stages: they start from the run of another variant with the same seed, or learn from an ensemble
of all its seeds (``FINE_TUNED``, ``TAUGHT``), and wait until it is trained. ``--ensembles`` also scores an ensemble of
the seeds of every variant.

Every variant differs from the recipe in one thing, so its row shows what the recipe would lose or gain by it. Variants
that do not differ, or that the recipe does not allow, are skipped. Compare by the validation column: the whole set,
decoded with the options of the recipe. The test set is scored only with ``--test``.

Intervals are 95%, from the deviation between seeds: Student's t with one degree of freedom less than seeds, and Welch's
t for a difference.
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

from reporting import markdown_table, student_t

from regard.errors import RegardError
from regard.recipe import Recipe, load_recipe
from regard.storage.atomic_files import write_text
from regard.storage.run_dir import RunDir
from regard.training.prepare_data import data_identity
from regard.training.stopping import catch_signals

HERE = Path(__file__).parent
BOTH_DIRECTIONS = (
    "data.train={source: [multi30k/train.en.gz, multi30k/train.de.gz], "
    "target: [multi30k/train.de.gz, multi30k/train.en.gz], to: [de, en]}"
)
SIMCUT_1 = ["training.rdrop=0", "training.simcut=1"]
SIMCUT_3 = ["training.rdrop=0", "training.simcut=3"]
BASE = "the recipe"
VARIANTS: dict[str, list[str]] = {
    BASE: [],
    "no R-Drop": ["training.rdrop=0"],
    "R-Drop 1": ["training.rdrop=1"],
    "R-Drop 5": ["training.rdrop=5"],
    "SimCut 1": SIMCUT_1,
    "SimCut 3": SIMCUT_3,
    "BPE-dropout 0.1": ["training.subword_sampling=0.1"],
    "unigram, alpha 0.2": ["tokenizer.kind=unigram", "training.subword_sampling=0.2"],
    "vocabulary of 3,000": ["tokenizer.vocab_size=3000"],
    "vocabulary of 5,000": ["tokenizer.vocab_size=5000"],
    "vocabulary of 12,000": ["tokenizer.vocab_size=12000"],
    "dropout 0.1": ["model.dropout=0.1"],
    "dropout 0.3": ["model.dropout=0.3"],
    "no dropout in attention and feed-forward": [
        "model.attention_dropout=0",
        "model.activation_dropout=0",
    ],
    "source words dropped 0.1": ["training.word_dropout=0.1"],
    "target words dropped 0.1": ["training.target_word_dropout=0.1"],
    "no label smoothing": ["training.label_smoothing=0"],
    "EMA 0.999": ["training.ema=0.999"],
    "no averaging": ["training.average=none", "training.keep_checkpoints=5"],
    "2+2 layers of 176": [
        *("model.encoder_layers=2", "model.decoder_layers=2"),
        *("model.d_model=176", "model.d_ff=352"),
    ],
    "8+8 layers of 96": [
        *("model.encoder_layers=8", "model.decoder_layers=8"),
        *("model.d_model=96", "model.d_ff=192"),
    ],
    "post-norm": ["model.norm_order=post"],
    "warm-up 2,000": ["training.warmup=2000"],
    "output not tied": ["model.tie_output=false"],
    "embeddings not tied": ["model.tie_embeddings=false"],
    "both directions": [BOTH_DIRECTIONS, "data.valid.to=de", "data.test.to=de"],
    "both directions, no tag": ["data.bidirectional=true"],
    "both directions, then one": [],
    "both directions, no tag, SimCut 3": ["data.bidirectional=true", *SIMCUT_3],
    "both directions, then one, SimCut 3": SIMCUT_3,
    "taught by an ensemble": [],
    "taught by an ensemble, SimCut 3": SIMCUT_3,
    "translations of a teacher": ["data.train={pairs: multi30k/distilled-fast.tsv}"],
    "half of the pairs": ["data.train={pairs: multi30k/half.jsonl}"],
    "half, the rest back-translated": [
        "data.train={pairs: [multi30k/half.jsonl, multi30k/rest-back.jsonl], tag: [null, bt]}"
    ],
}
"""The sizes give about as many parameters as multi30k-tiny. The teacher is that of recipes/multi30k-fast.yaml, and
benchmarks/back_translation_data.py writes the halves."""
FINE_TUNED = {
    "both directions, then one": "both directions, no tag",
    "both directions, then one, SimCut 3": "both directions, no tag, SimCut 3",
}
"""variants that start from the run of another variant with the same seed (Bi-SimCut, Gao et al. 2022)"""
TAUGHT = {"taught by an ensemble": BASE, "taught by an ensemble, SimCut 3": "SimCut 3"}
"""variants that learn the probabilities of an ensemble of another variant's seeds (``training.teacher``)"""
SAVE_SECONDS = 25.0
"""how long before the deadline training runs are told to save and exit"""
SCORES = "scores.json"
INTERRUPTED = 130
"""exit status of a training run that was interrupted and has saved its state"""


class Job(NamedTuple):
    variant: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.variant}/{self.seed}"


class Plan(NamedTuple):
    """What all training runs have in common."""

    recipe: str
    changes: Sequence[str]
    test: bool
    runs: Path
    """where the run folders are"""
    seeds: Sequence[int] = (1, 2, 3)

    def folder(self, job: Job) -> Path:
        name = "".join(character if character.isalnum() else "-" for character in job.variant)
        return self.runs / f"{name}-{job.seed}"

    def changes_for(self, job: Job) -> list[str]:
        no_test = [] if self.test else ["data.test=null"]
        return [*VARIANTS[job.variant], *self.changes, f"training.seed={job.seed}", *no_test]

    def previous(self, job: Job) -> list[Job]:
        """The training runs that a run starts from or learns from."""
        if job.variant in FINE_TUNED:
            return [Job(FINE_TUNED[job.variant], job.seed)]
        return [Job(TAUGHT[job.variant], seed) for seed in self.seeds if job.variant in TAUGHT]

    def load(self, job: Job) -> Recipe:
        """The recipe of a training run, without the runs of ``previous``, which may not exist yet."""
        return load_recipe(self.recipe, self.changes_for(job))

    def command(self, job: Job) -> list[str]:
        changes = self.changes_for(job)
        folders = [str(self.folder(one).absolute()) for one in self.previous(job)]
        if job.variant in FINE_TUNED:
            changes.append(f"training.init_from={json.dumps(folders[0])}")
        elif job.variant in TAUGHT:
            changes.append(f"training.teacher={json.dumps(folders)}")
        arguments = [word for change in changes for word in ("--set", change)]
        return [sys.executable, __file__, self.recipe, "--train", str(self.folder(job)), *arguments]


def valid_variants(plan: Plan, names: Sequence[str]) -> Iterator[str]:
    """The variants that are valid recipes and differ from the base; prints which are skipped."""
    base = plan.load(Job(BASE, 1))
    for name in names:
        try:
            same = plan.load(Job(name, 1)) == base
        except RegardError as error:
            print(f"{name}: skipped: {error}")
            continue
        if missing := {one.variant for one in plan.previous(Job(name, 1))} - {*names}:
            print(f"{name}: skipped, it needs {min(missing)}")
        elif same and name != BASE and not plan.previous(Job(name, 1)):
            print(f"{name}: skipped, equal to the recipe")
        else:
            yield name


# ---------------------------------------------------------------------------------------------
# Training


def train_and_score(recipe: Recipe, folder: Path) -> None:
    """One training run, in its own process: train or resume, score the validation pairs, write the scores."""
    from regard.data.corpus import valid_pairs
    from regard.training.run import train

    model = train(recipe, folder)
    first = recipe.evaluation.model_copy(update={"metrics": recipe.evaluation.metrics[:1]})
    model.recipe = recipe.model_copy(update={"evaluation": first})
    card = RunDir(folder).card()
    found = {
        # the mean over target languages
        "valid": fmean(one.value for one in model.evaluate(list(valid_pairs(recipe.data)))),
        "test": {
            one["metric"]: fmean(
                each["value"] for each in card["test"] if each["metric"] == one["metric"]
            )
            for one in card["test"]
        },
        "seconds": card["seconds"],
        "hardware": card["hardware"],
    }
    write_text(folder / SCORES, json.dumps(found))


class SharedData:
    """Prepared data, shared by all training runs that use the same ids."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.folders: dict[Job, Path] = {}

    def folder(self, job: Job) -> Path:
        """The folder of a training's prepared data, which may not exist yet."""
        if job not in self.folders:
            identity = json.dumps(data_identity(self.plan.load(job)))
            digest = hashlib.sha256(identity.encode()).hexdigest()
            self.folders[job] = self.plan.runs / "prepared" / digest[:16]
        return self.folders[job]

    def store(self, job: Job) -> None:
        """Store the data that a run has prepared, if complete: metadata.json is written last."""
        run, folder = RunDir(self.plan.folder(job)), self.folder(job)
        if self.plan.previous(job):
            return  # its ids are those of another run's tokenizer
        if folder.exists() or not (run.data / "metadata.json").is_file():
            return
        part = RunDir(folder.with_suffix(".part"))
        shutil.rmtree(part.folder, ignore_errors=True)
        _link(run, part)
        part.folder.replace(folder)

    def provide(self, job: Job) -> None:
        """Link the data into a run that has not started."""
        run, folder = RunDir(self.plan.folder(job)), self.folder(job)
        started = run.weights_file.exists() or (run.data / "metadata.json").exists()
        if folder.exists() and not started and not self.plan.previous(job):
            shutil.rmtree(run.folder, ignore_errors=True)
            _link(RunDir(folder), run)
            run.write_recipe(self.plan.load(job))  # without it, the folder would not be a run


def _link(one: RunDir, other: RunDir) -> None:
    """Hard links, not copies: the files are never changed, and deleting one name leaves the other."""
    shutil.copytree(one.data, other.data, copy_function=os.link)
    for path in one.tokenizer_files():
        os.link(path, other.folder / path.name)


def environment(jobs: int) -> dict[str, str]:
    """The environment of a training: its share of the cores, and the same import path."""
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    return threads | os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def train_all(
    plan: Plan, waiting: list[Job], jobs: int, deadline: float, stopped: threading.Event
) -> Iterator[Job]:
    """Train, ``jobs`` at a time, until all are done, the deadline, or a stop; yields each job that is done."""
    running: dict[Job, subprocess.Popen[bytes]] = {}
    data = SharedData(plan)
    plan.runs.mkdir(parents=True, exist_ok=True)
    try:
        while (
            (waiting or running)
            and not stopped.is_set()
            and time.monotonic() < deadline - SAVE_SECONDS
        ):
            while len(running) < jobs and (job := _next(waiting, running, data)):
                waiting.remove(job)
                data.provide(job)
                running[job] = start(plan, job, jobs)
            stopped.wait(0.2)
            for job in running:
                data.store(job)
            yield from _ended(plan, running)
        for process in running.values():
            process.send_signal(signal.SIGTERM)  # they save, and can be resumed
        latest = time.monotonic() + SAVE_SECONDS
        while any(process.poll() is None for process in running.values()):
            if time.monotonic() > latest:
                break
            time.sleep(0.1)
        yield from _ended(plan, running)
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def _next(waiting: Sequence[Job], running: Mapping[Job, Any], data: SharedData) -> Job | None:
    """The next training that waits for no other, and whose data no other training is preparing at the moment."""
    preparing = {folder for folder in map(data.folder, running) if not folder.exists()}
    unfinished = {*waiting, *running}
    ready = (job for job in waiting if unfinished.isdisjoint(data.plan.previous(job)))
    return next((job for job in ready if data.folder(job) not in preparing), None)


def start(plan: Plan, job: Job, jobs: int) -> subprocess.Popen[bytes]:
    """Start a training run in its own session: Ctrl-C reaches only this process, which signals each run once."""
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


def ensemble_name(variant: str) -> str:
    return f"{variant}: ensemble of its seeds"


def score_ensembles(plan: Plan, variants: Sequence[str], results: dict[str, Any]) -> None:
    """Score an ensemble of the trained seeds of each variant on the validation pairs, if there are several."""
    from regard.data.corpus import valid_pairs
    from regard.tasks import Translator

    for variant in variants:
        jobs = [job for job in (Job(variant, seed) for seed in plan.seeds) if job.key in results]
        key = f"{ensemble_name(variant)}/{'+'.join(str(job.seed) for job in jobs)}"
        if len(jobs) < 2 or key in results:
            continue
        for old in [one for one in results if one.startswith(f"{ensemble_name(variant)}/")]:
            del results[old]  # of fewer seeds
        recipe = plan.load(jobs[0])
        model = Translator.load([plan.folder(job) for job in jobs])
        first = recipe.evaluation.model_copy(update={"metrics": recipe.evaluation.metrics[:1]})
        model.recipe = recipe.model_copy(update={"evaluation": first})
        start = time.monotonic()
        valid = fmean(one.value for one in model.evaluate(list(valid_pairs(recipe.data))))
        results[key] = {
            "valid": valid,
            "test": {},
            "seconds": time.monotonic() - start,
            "hardware": results[jobs[0].key]["hardware"],
        }


# ---------------------------------------------------------------------------------------------
# The table


class Mean(NamedTuple):
    """A mean and half the width of its 95% interval; None: too few values."""

    value: float
    error: float | None

    def format(self, spec: str) -> str:
        return f"{self.value:{spec}}" + ("" if self.error is None else f" ± {self.error:.2f}")


def mean(values: Sequence[float]) -> Mean:
    n = len(values)
    error = student_t(n - 1) * (variance(values) / n) ** 0.5 if n > 1 else None
    return Mean(fmean(values), error)


def difference(values: Sequence[float], base: Sequence[float]) -> Mean:
    """Welch's t: the variances may differ."""
    gap = fmean(values) - fmean(base)
    if min(len(values), len(base)) < 2:
        return Mean(gap, None)
    terms = [(variance(some) / len(some), len(some) - 1) for some in (values, base)]
    squared = sum(term for term, _ in terms)
    if not squared:
        return Mean(gap, 0.0)
    freedom = squared**2 / sum(term**2 / degrees for term, degrees in terms)
    return Mean(gap, student_t(freedom) * squared**0.5)


def table(results: Mapping[str, Mapping[str, Any]], metric: str) -> str:
    """One row for each variant that has results, in the order of VARIANTS; then the ensembles."""
    found = {
        name: [some for key, some in results.items() if key.rpartition("/")[0] == name]
        for name in [*VARIANTS, *map(ensemble_name, VARIANTS)]
    }
    found = {name: some for name, some in found.items() if some}
    tests = list(dict.fromkeys(name for some in results.values() for name in some["test"]))
    head = ["variant", "seeds", f"valid {metric}", "against the recipe"]
    head += [*(f"test {name}" for name in tests), "seconds"]
    rows = []
    base = [one["valid"] for one in found.get(BASE, [])]
    for name, some in found.items():
        valid = [one["valid"] for one in some]
        gap = difference(valid, base).format("+.2f") if base and name != BASE else ""
        cells = [name, str(len(some)), mean(valid).format(".2f"), gap]
        for test in tests:
            values = [one["test"][test] for one in some if test in one["test"]]
            cells.append(mean(values).format(".2f") if values else "")
        cells.append(f"{fmean(one['seconds'] for one in some):.0f}")
        rows.append(cells)
    return "\n".join(
        [
            *markdown_table(head, rows),
            "",
            spread([[one["valid"] for one in some] for some in found.values()]),
        ]
    )


def spread(groups: Sequence[Sequence[float]]) -> str:
    """The pooled standard deviation within groups, and the smallest significant difference of two means of three."""
    squares = sum((x - fmean(group)) ** 2 for group in groups for x in group)
    freedom = sum(len(group) - 1 for group in groups)
    if not freedom:
        return ""
    deviation = (squares / freedom) ** 0.5
    smallest = student_t(freedom) * deviation * (2 / 3) ** 0.5
    return (
        f"If all variants have the same variance, the standard deviation between seeds is {deviation:.2f} "
        f"({freedom} degrees of freedom), and the smallest significant difference of two means of three "
        f"seeds is {smallest:.2f}.\n"
    )


def write(out: Path, head: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Write the JSON file first, because resuming depends on it, then the table; returns the table."""
    content = json.dumps({**head, "results": results}, indent=2, ensure_ascii=False)
    write_text(out, content + "\n")
    words = [head["recipe"], *(f"--set {change}" for change in head["changes"])]
    words += ["--test"] if head["test"] else []
    where = ", ".join(dict.fromkeys(one["hardware"] for one in results.values()))
    text = table(results, head["metric"])
    page = (
        f"# What each technique gains\n\n`python benchmarks/ablation.py {' '.join(words)}`; {len(results)} training "
        f"runs on {where}; seconds are of several training runs at a time.\n\n{text}"
    )
    write_text(out.with_suffix(".md"), page)
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("recipe", nargs="?", default="multi30k-tiny", help="a recipe file or name")
    parser.add_argument("--out", type=Path, default=HERE / "ablation.json")
    parser.add_argument("--runs", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=4, help="trainings at a time")
    parser.add_argument("--minutes", type=float, default=10_000.0, help="stop after this time")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--test", action="store_true", help="also score the test set")
    parser.add_argument(
        "--ensembles", action="store_true", help="also score ensembles of the seeds"
    )
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * given.minutes
    if given.train:
        one_training(load_recipe(given.recipe, given.changes), given.train)
        return
    plan = Plan(given.recipe, given.changes, given.test, given.runs, given.seeds)
    metric = plan.load(Job(BASE, 1)).evaluation.metrics[0]
    head = {"recipe": given.recipe, "changes": given.changes, "test": given.test}
    head["metric"] = metric
    known = {**head, "results": {}}
    if given.out.is_file():
        known = json.loads(given.out.read_text(encoding="utf-8"))
    for key in ("recipe", "changes", "test"):
        if known[key] != head[key]:
            parser.error(f"{given.out} was written with {key} {known[key]}: choose another --out")
    results = known["results"]
    # All variants with one seed come before the next seed, so that a partial table has all rows.
    variants = list(valid_variants(plan, given.only))
    every = [Job(variant, seed) for seed in given.seeds for variant in variants]
    waiting = [job for job in every if job.key not in results]
    with catch_signals() as stopped:
        for job in train_all(plan, waiting, given.jobs, deadline, stopped):
            folder = plan.folder(job)
            results[job.key] = json.loads((folder / SCORES).read_text(encoding="utf-8"))
            write(given.out, head, results)
            for large in ("checkpoints", "data"):  # finished training runs are not resumed
                shutil.rmtree(folder / large, ignore_errors=True)
            print(f"{job.key}: {results[job.key]}", flush=True)
    if given.ensembles:
        score_ensembles(plan, variants, results)
    if results:
        print(write(given.out, head, results))
    left = [job.key for job in every if job.key not in results]
    print(f"{len(left)} left; run the same command to resume" if left else "all done")


def one_training(recipe: Recipe, folder: Path) -> None:
    from regard.training.run import Interrupted

    try:
        train_and_score(recipe, folder)
    except Interrupted:
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    try:
        main()
    except RegardError as error:
        sys.exit(f"ablation: {error}")
