"""An experiment: a recipe, the keys that vary, and the seeds; all variants are trained, compared and reported.

    --vary model.norm_order=post,pre                                            two values of one key
    --vary training.optimizer+training.learning_rate=adam+0.003,sgd+1.0         keys that change together

All combinations of values are trained (a grid), or one change at a time. The first value of each key is the baseline of
a grid. With one change at a time, the recipe itself is the baseline.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from regard.data.corpus import fingerprint
from regard.demo.corpus import write_corpus
from regard.errors import RegardError
from regard.experiments.jobs import (
    Scheduler,
    finished,
    make_slots,
    remove_large_files,
    run_folder,
)
from regard.experiments.report import write_report
from regard.experiments.results import (
    collect,
    paired_tests,
    summarize_experiment,
    to_json,
    write_results,
)
from regard.metrics import METRICS, MODEL_METRICS, Metric
from regard.recipe import Recipe, load_recipe
from regard.training.planner import duration
from regard.training.prepare_data import check_files
from regard.training.stopping import catch_signals

THE_RECIPE = "the recipe"
"""name of the variant without changes"""
FIXED_KEYS = {
    "training.seed": "use --seeds",
    "training.device": "a comparison needs one device",
    "data.root": "use --set",
    "data.valid": "scores on different data cannot be compared",
    "data.test": "scores on different data cannot be compared",
    "data.hold_out": "scores on different data cannot be compared",
    "evaluation": "scores of different metrics cannot be compared",
}
"""keys and sections that cannot be varied, and why"""
OPEN, CLOSE = "[{(", "]})"
MAX_VARIANTS = 1000


@dataclass(frozen=True)
class Level:
    """One value of what varies."""

    label: str
    """as it is printed: ``model.heads=4``"""
    changes: tuple[str, ...]
    """the values of ``--set`` that select it"""


@dataclass(frozen=True)
class Factor:
    """One thing that varies: a recipe key, or several that change together."""

    name: str
    levels: tuple[Level, ...]


@dataclass(frozen=True)
class Variant:
    """One combination of values, trained with every seed."""

    name: str
    changes: tuple[str, ...] = ()
    levels: tuple[int, ...] = ()
    """in a grid: the index of the level of each factor"""


@dataclass(frozen=True)
class Design:
    """Everything that determines the training runs of an experiment. The first variant is the baseline."""

    base: str
    """a recipe file, or the name of a bundled recipe"""
    changes: tuple[str, ...]
    """changes of the recipe that all variants have"""
    factors: tuple[Factor, ...]
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    split: str = "valid"
    """what is scored: valid or test"""

    def recipe(self, variant: Variant, seed: int) -> Recipe:
        """The recipe of one training run. The test data are removed if they are not scored."""
        test = [] if self.split == "test" else ["data.test=null"]
        changes = [*self.changes, *variant.changes, f"training.seed={seed}", *test]
        return load_recipe(self.base, changes)

    @property
    def baseline(self) -> Variant:
        return self.variants[0]

    @property
    def metric(self) -> Metric:
        """The metric that variants are compared by: the first of the recipe."""
        return METRICS[self.recipe(self.baseline, self.seeds[0]).evaluation.metrics[0]]


def make_design(
    base: str,
    vary: Sequence[str],
    *,
    changes: Sequence[str] = (),
    one_at_a_time: bool = False,
    seeds: int = 3,
    split: str = "valid",
) -> Design:
    """Read and check the arguments of ``regard experiment``; one error has all problems."""
    recipe = load_recipe(base, changes)
    problems: list[str] = []
    factors = [factor for text in vary if (factor := _factor(text, problems))]
    _check_keys(vary, problems)
    if not vary:
        problems.append("nothing to vary: pass --vary KEY=VALUE,VALUE")
    if seeds < 1:
        problems.append(f"--seeds {seeds}: must be 1 or more")
    if split not in ("valid", "test"):
        problems.append(f"--on {split}: must be valid or test")
    if split == "test" and recipe.data.test is None:
        problems.append(f"--on test: {base} has no data.test")
    _raise(problems)
    variants = one_change_each(factors) if one_at_a_time else grid(factors)
    if len(variants) > MAX_VARIANTS:
        raise RegardError(f"{len(variants):,} combinations: at most {MAX_VARIANTS:,} are allowed")
    first = recipe.training.seed
    numbers = tuple(range(first, first + seeds))
    design = Design(base, tuple(changes), tuple(factors), tuple(variants), numbers, split)
    return check_variants(design)


def check_variants(design: Design) -> Design:
    """The design without variants that equal the recipe; refuses those that are no valid recipe."""
    invalid = {
        variant.name: text for variant in design.variants if (text := _invalid(design, variant))
    }
    problems, variants, recipes = list(_explain(design, invalid)), [], dict[str, str]()
    for variant in design.variants:
        if variant.name in invalid:
            continue
        recipe = design.recipe(variant, design.seeds[0])
        same = recipes.setdefault(recipe.model_dump_json(), variant.name)
        if same == variant.name:
            variants.append(variant)
        elif same != THE_RECIPE:
            problems.append(f"{variant.name}: the same recipe as {same}")
        problems += _incomparable(variant, recipe)
    if len(variants) < 2 and not problems:
        problems.append("no variant differs from the recipe")
    _raise(problems)
    return replace(design, variants=tuple(variants))


def _invalid(design: Design, variant: Variant) -> str | None:
    """Why a variant is no valid recipe; None if it is."""
    try:
        design.recipe(variant, design.seeds[0])
    except RegardError as error:
        return one_line(error)
    return None


def _explain(design: Design, invalid: Mapping[str, str]) -> Iterator[str]:
    """The problems of invalid variants; a value that is wrong in all combinations is reported once."""
    explained: set[str] = set()
    for level in [level for factor in design.factors for level in factor.levels]:
        users = [
            variant.name for variant in design.variants if {*level.changes} <= {*variant.changes}
        ]
        level_error = _invalid(design, Variant(level.label, level.changes))
        if users and level_error and invalid.keys() >= {*users}:
            explained |= {*users}
            yield f"{level.label}: {level_error}"
    yield from (f"{name}: {text}" for name, text in invalid.items() if name not in explained)


def grid(factors: Sequence[Factor]) -> list[Variant]:
    """All combinations."""
    variants = []
    for indices in product(*(range(len(factor.levels)) for factor in factors)):
        levels = [factor.levels[index] for factor, index in zip(factors, indices, strict=True)]
        changes = tuple(change for level in levels for change in level.changes)
        variants.append(Variant(", ".join(level.label for level in levels), changes, indices))
    return variants


def one_change_each(factors: Sequence[Factor]) -> list[Variant]:
    """The recipe itself, and each value alone."""
    levels = [level for factor in factors for level in factor.levels]
    return [Variant(THE_RECIPE), *(Variant(level.label, level.changes) for level in levels)]


# ---------------------------------------------------------------------------------------------
# Parsing and checks


def split_values(text: str, separator: str = ",") -> list[str]:
    """Split at separators that are not inside brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in OPEN + CLOSE:
            depth += 1 if character in OPEN else -1
        elif character == separator and depth == 0:
            parts.append("")
            continue
        parts[-1] += character
    return [part.strip() for part in parts]


def _factor(text: str, problems: list[str]) -> Factor | None:
    """A factor from the value of ``--vary``; problems are added to the list."""
    name, equals, values_text = text.partition("=")
    keys = [key.strip() for key in name.split("+")]
    if not equals or not all(re.fullmatch(r"\w+(\.\w+)+", key) for key in keys):
        problems.append(
            f"--vary {text}: expected section.key=value,value, for example model.heads=1,2,4"
        )
        return None
    levels, labels = [], set[str]()
    for value in split_values(values_text):
        values = split_values(value, "+") if len(keys) > 1 else [value]
        if len(values) != len(keys) or not all(values):
            expected = "a value" if len(keys) == 1 else f"{len(keys)} values joined by +"
            problems.append(f"--vary {name}: {value or 'an empty value'}: expected {expected}")
            continue
        changes = tuple(f"{key}={value}" for key, value in zip(keys, values, strict=True))
        if (label := " ".join(changes)) in labels:
            problems.append(f"--vary {name}: {value} is given twice")
        labels.add(label)
        levels.append(Level(label, changes))
    return Factor("+".join(keys), tuple(levels))


def _check_keys(vary: Sequence[str], problems: list[str]) -> None:
    """Refuse keys that cannot be varied, and keys that are given twice."""
    keys = [key.strip() for text in vary for key in text.partition("=")[0].split("+")]
    for key in dict.fromkeys(keys):
        if keys.count(key) > 1:
            problems.append(f"--vary {key}: given twice; list all values after one --vary")
        for fixed, reason in FIXED_KEYS.items():
            if key == fixed or key.startswith(f"{fixed}."):
                problems.append(f"--vary {key}: cannot be varied; {reason}")


def _incomparable(variant: Variant, recipe: Recipe) -> Iterator[str]:
    """Why the scores of a variant cannot be compared with those of the others."""
    varied = {change.partition("=")[0] for change in variant.changes}
    if recipe.data.valid is None and any(key.startswith("data.") for key in varied):
        yield f"{variant.name}: needs data.valid, because pairs held out from different data differ"
    if recipe.evaluation.metrics[0] in MODEL_METRICS and any(
        key.startswith("tokenizer.") for key in varied
    ):
        metric = recipe.evaluation.metrics[0]
        yield f"{variant.name}: {metric} cannot be compared between tokenizers"


def one_line(error: Exception) -> str:
    """An error message in one line."""
    return re.sub(r"\s*\n\s+", "; ", str(error)).replace("problems:;", "problems:")


def _raise(problems: Sequence[str]) -> None:
    if len(problems) == 1:
        raise RegardError(problems[0])
    if problems:
        raise RegardError(f"{len(problems)} problems: {'; '.join(dict.fromkeys(problems))}")


# ---------------------------------------------------------------------------------------------
# Training runs


@dataclass(frozen=True, eq=False)
class TrainingJob:
    """One training run. Variants that differ only in decoding share it."""

    name: str
    """name of the run folder"""
    seed: int
    recipe: Recipe
    variants: tuple[str, ...]
    """the names of the variants that are scored with it"""
    decodings: tuple[dict[str, Any], ...]
    """their decoding sections"""


def training_jobs(design: Design) -> list[TrainingJob]:
    """All training runs, seed by seed: each seed trains every variant, so that partial tables have all rows."""
    decoding = design.recipe(design.baseline, design.seeds[0]).decoding
    fingerprints: dict[str, str] = {}
    jobs = []
    for seed in design.seeds:
        groups: dict[str, list[tuple[Variant, Recipe]]] = {}
        for variant in design.variants:
            recipe = design.recipe(variant, seed)
            trained = recipe.model_copy(update={"decoding": decoding})  # only to compare
            data = recipe.data.model_dump_json()
            if data not in fingerprints:
                fingerprints[data] = _fingerprints(recipe)
            content = trained.model_dump_json() + fingerprints[data]
            groups.setdefault(content, []).append((variant, recipe))
        for content, members in groups.items():
            first, recipe = members[0]
            names = tuple(variant.name for variant, _ in members)
            decodings = tuple(
                variant_recipe.decoding.model_dump(mode="json") for _, variant_recipe in members
            )
            jobs.append(TrainingJob(_folder(first, seed, content), seed, recipe, names, decodings))
    return jobs


def _fingerprints(recipe: Recipe) -> str:
    """The contents of all data files; raises if one does not exist."""
    check_files(recipe)
    return " ".join(fingerprint(files, recipe.data) for files in recipe.data.splits.values())


def _folder(variant: Variant, seed: int, content: str) -> str:
    """A readable name that is different for different recipes and data."""
    slug = re.sub(r"[^\w.=]+", "-", variant.name)[:60].strip("-")
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    return f"{slug}-{digest}-seed{seed}"


# ---------------------------------------------------------------------------------------------
# Run an experiment


FOREVER = 1e9
CORPUS = "corpus"
"""subfolder with the built-in corpus"""


def demo_changes(base: str, changes: Sequence[str], out: Path) -> list[str]:
    """The changes, with the folder of the built-in corpus if the recipe is ``demo`` and names no other data."""
    if base != "demo" or any(change.startswith("data.") for change in changes):
        return list(changes)
    return [*changes, f"data.root={(out / CORPUS).resolve()}"]


def _write_demo_corpus(design: Design, out: Path) -> None:
    corpus = out / CORPUS
    if f"data.root={corpus.resolve()}" in design.changes and not (corpus / "test.de").exists():
        write_corpus(corpus)


def run_experiment(
    design: Design,
    out: Path,
    *,
    minutes: float | None = None,
    jobs: int | None = None,
    command: str = "",
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Train what is missing; returns the contents of results.json, and what happened in this call.

    That is ``failures``, messages by the name of the run, and ``interrupted``, whether a signal ended it.

    It ends after ``minutes``, or on Ctrl-C: training runs are saved, and the same call resumes them. jobs: training
    runs at a time; None: as many as the device takes. report: gets lines of progress.
    """
    deadline = time.monotonic() + (FOREVER if minutes is None else 60 * minutes)
    with _locked(out):
        _write_demo_corpus(design, out)
        all_jobs = training_jobs(design)
        for job in all_jobs:
            if finished(out, job) is not None:
                remove_large_files(run_folder(out, job))
        waiting = [job for job in all_jobs if finished(out, job) is None]
        if len(waiting) < len(all_jobs):
            report(
                f"{len(all_jobs) - len(waiting)} of {len(all_jobs)} training runs are already done"
            )
        slots = make_slots(jobs, all_jobs[0].recipe.training.device)
        scheduler = Scheduler(out, design.split, slots, report)
        content = _write(design, all_jobs, out, command, tests=False)
        progress = _Progress(len(all_jobs), len(waiting), report)
        with catch_signals() as stopped:
            for job in scheduler.run(waiting, deadline, stopped):
                content = _write(design, all_jobs, out, command, tests=False)
                progress.done(job, finished(out, job) or {})
        if content["trainings"]:
            content = _write(design, all_jobs, out, command, tests=True)
    left = sum(finished(out, job) is None for job in all_jobs)
    if left:
        report(
            f"{left} of {len(all_jobs)} training runs are not done; run the same command to resume"
        )
    return {**content, "failures": scheduler.failures, "interrupted": stopped.is_set()}


def check_failures(content: Mapping[str, Any]) -> None:
    """Raise if a training run failed for another reason than divergence."""
    if failures := content["failures"]:
        listing = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
        raise RegardError(f"{len(failures)} training runs failed: {listing}")


def _write(
    design: Design, jobs: Sequence[TrainingJob], out: Path, command: str, tests: bool
) -> dict[str, Any]:
    """Write results, figures and report of what is finished; the paired tests only at the end, since they are slow."""
    scores_by_job = {job.name: scores for job in jobs if (scores := finished(out, job)) is not None}
    results = collect(jobs, scores_by_job)
    paired = paired_tests(design, results, out / "runs") if tests else {}
    summary = summarize_experiment(design, results, paired)
    content = to_json(design, results, summary, len(jobs), command)
    write_results(out, content)
    write_report(out, content)
    return content


class _Progress:
    """Prints a line for each finished training run, with the time left."""

    def __init__(self, total: int, waiting: int, report: Callable[[str], None]) -> None:
        self.total, self.left, self.report = total, waiting, report
        self.waiting, self.start = waiting, time.monotonic()

    def done(self, job: TrainingJob, scores: dict[str, Any]) -> None:
        self.left -= 1
        seconds_per_run = (time.monotonic() - self.start) / (self.waiting - self.left)
        remaining = f", about {duration(seconds_per_run * self.left)} left" if self.left else ""
        counted = f"{self.total - self.left} of {self.total}{remaining}"
        if "diverged" in scores:
            self.report(f"{', '.join(job.variants)}, seed {job.seed}: diverged; {counted}")
            return
        for variant in job.variants:
            value = scores["scores"][variant]["score"]
            self.report(f"{variant}, seed {job.seed}: {value:.2f}; {counted}")


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Allow one process at a time; refuses a folder with other files."""
    if out.exists() and not out.is_dir():
        raise RegardError(f"{out}: a file, not a folder; choose another --out")
    lock = out / ".lock"
    if out.is_dir() and not lock.exists():
        others = sorted(path.name for path in out.iterdir() if path.name != CORPUS)
        if others:
            raise RegardError(
                f"{out}: the folder contains other files ({', '.join(others[:3])}); choose another --out"
            )
    out.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RegardError(f"{out}: another process is running this experiment") from None
        yield
