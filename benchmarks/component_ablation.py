"""What one choice in a recipe changes: the demo's model, trained once for each choice, everything else unchanged.

    python benchmarks/component_ablation.py               # all missing rows; about half an hour on two cores
    python benchmarks/component_ablation.py --minutes 10  # part of it; the same command resumes
    python benchmarks/component_ablation.py --seeds 1 2 3 --only "model.norm=rms" "model.activation=swiglu"
    python benchmarks/component_ablation.py --speeds      # speed and memory of all rows that are trained

Finished rows are in ``component_ablation.json`` and are not trained again; after each run the table in
docs/parts.md is updated. Training runs end early, long before the demo is perfect, so that differences can be seen.

Two models train at a time, with one thread each. Speeds are measured afterwards, in one process with one thread: all
rows take turns, and the median counts. They are in CPU time, so that other load on the machine changes them little. The
memory of a step is what the forward pass stores for the backward pass, counted exactly.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import redirect_stderr
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from reporting import markdown_table, replace_section, student_t
from torch import Tensor

from regard.demo.corpus import challenge, write_corpus
from regard.demo.demo import score_challenge
from regard.errors import RegardError
from regard.recipe import Recipe, load_recipe
from regard.storage.atomic_files import write_text
from regard.storage.run_dir import RunDir
from regard.tasks import Translator
from regard.training.data_loader import TrainingBatch
from regard.training.distributed import process_group
from regard.training.model_card import hardware
from regard.training.prepare_data import open_prepared
from regard.training.run import prepare_data as prepare_run, train
from regard.training.trainer import Trainer

RESULTS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[1] / "docs" / "parts.md"
BEGIN = "<!-- measured: written by python benchmarks/component_ablation.py -->\n"
END = "<!-- end of measured -->\n"

STEPS = 350
COMMON = [f"training.steps={STEPS}", "evaluation.metrics=[bleu]"]
BASE = ""
ATTENTION = "model.attention"
ROWS: dict[str, list[str]] = {
    "": [BASE],
    "score": [f"{ATTENTION}.score=dot_product", f"{ATTENTION}.score=additive"],
    "weighting": [f"{ATTENTION}.weighting=relu"],
    "pattern": [
        f"{ATTENTION}.encoder=window {ATTENTION}.window_size=2",
        f"{ATTENTION}.decoder=window {ATTENTION}.window_size=2",
        f"{ATTENTION}.encoder=linformer {ATTENTION}.linformer_k=8",
        f"{ATTENTION}.cross_attention=linformer {ATTENTION}.linformer_k=8",
        f"{ATTENTION}.encoder=bigbird {ATTENTION}.block_size=1 {ATTENTION}.global_blocks=1 "
        f"{ATTENTION}.random_blocks=1",
    ],
    "heads": [
        *(f"{ATTENTION}.key_value_heads={heads}" for heads in (1, 2)),
        *(f"model.heads={heads}" for heads in (1, 2, 8)),
    ],
    "position": [
        f"model.position={name}" for name in ("none", "index", "learned", "rotary", "relative")
    ],
    "norm": [
        *("model.norm=rms", "model.norm=batch", "model.norm_order=post"),
        "model.norm=none model.norm_order=post",
        "model.norm=rms model.activation=swiglu",
    ],
    "depth": [
        f"model.encoder_layers={depth} model.decoder_layers={depth}{norm}"
        for depth in (1, 3)
        for norm in ("", " model.norm=none model.norm_order=post")
    ],
    "activation": [f"model.activation={name}" for name in ("gelu", "swish", "swiglu")],
    "optimizer": [
        "training.optimizer=adamw training.weight_decay=0.01",
        "training.optimizer=muon",
        "training.optimizer=muon training.learning_rate=0.01",
        "training.optimizer=rmsprop training.learning_rate=0.001",
        "training.optimizer=adagrad training.learning_rate=0.03",
        "training.optimizer=momentum training.learning_rate=0.3",
        "training.optimizer=sgd training.learning_rate=1.0",
        "training.optimizer=rmsprop",
        "training.optimizer=adagrad training.learning_rate=0.01",
        "training.optimizer=momentum training.learning_rate=0.1",
        "training.optimizer=sgd training.learning_rate=3.0",
    ],
    "schedule": [
        "training.schedule=noam training.learning_rate=0.4",
        "training.schedule=constant",
    ],
    "smoothing": ["training.label_smoothing=0", "training.label_smoothing_over=others"],
    "embeddings": ["model.tie_embeddings=false", "model.tie_output=false"],
}
"""by topic; a row is the values of --set, separated by spaces"""
BASE_SEEDS = 6
"""trainings of the recipe itself, whose deviation all rows are compared with"""
REPEATS, STEPS_PER_REPEAT = 5, 2
"""of the speed measurement"""


class Job(NamedTuple):
    row: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.row or 'the recipe'}/{self.seed}"

    def folder(self, runs: Path) -> Path:
        name = "".join(character if character.isalnum() else "-" for character in self.key)
        return runs / name

    def recipe(self, root: Path) -> Recipe:
        changes = [*COMMON, f"training.seed={self.seed}", f"data.root={root}", *self.row.split()]
        return load_recipe("demo", changes)


def rows() -> list[str]:
    return [row for some in ROWS.values() for row in some]


# ---------------------------------------------------------------------------------------------
# Training


def prepare_data(runs: Path) -> RunDir:
    """The corpus and its prepared data, created once for all training runs."""
    corpus, run = (runs / "corpus").resolve(), RunDir(runs / "data")
    if not (corpus / "test.de").exists():
        write_corpus(corpus)
    return prepare_run(Job(BASE, 1).recipe(corpus), run.folder)


def train_job(job: Job, runs: Path) -> dict[str, Any]:
    """One training run, in its own process."""
    prepared, run = RunDir(runs / "data"), RunDir(job.folder(runs))
    recipe = job.recipe((runs / "corpus").resolve())
    shutil.rmtree(run.folder, ignore_errors=True)  # an interrupted one starts again
    shutil.copytree(prepared.data, run.data, copy_function=os.link)
    for path in prepared.tokenizer_files():
        os.link(path, run.folder / path.name)
    run.write_recipe(recipe)
    with (run.folder / "output.txt").open("w") as output, redirect_stderr(output):
        try:
            model = train(recipe, run.folder)
        except RegardError as error:
            return {"failed": str(error)}
    card = run.card()
    (bleu,) = card["test"]
    assert isinstance(model, Translator)
    pronouns, total = score_challenge(model)
    shutil.rmtree(run.checkpoints)
    return {
        "bleu": round(bleu["value"], 2),
        "low": round(bleu["low"], 2),
        "high": round(bleu["high"], 2),
        "pronouns": pronouns,
        "pronouns_total": total,
        "loss": round(card["valid"]["loss"], 4),
        "parameters": card["parameters"],
        "seconds": card["seconds"],
    }


def train_all(
    waiting: Sequence[Job], runs: Path, jobs: int, deadline: float
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """The results as they finish. No training is started that would not finish before the deadline."""
    running: dict[Future[dict[str, Any]], Job] = {}
    pending, longest = list(waiting), 0.0
    started: dict[Job, float] = {}
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (1,)) as pool:
        while pending or running:
            while pending and len(running) < jobs and time.monotonic() + longest < deadline:
                job = pending.pop(0)
                started[job] = time.monotonic()
                running[pool.submit(train_job, job, runs)] = job
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                job = running.pop(future)
                longest = max(longest, time.monotonic() - started[job])
                yield job, future.result()


# ---------------------------------------------------------------------------------------------
# Speed and memory


class RowBenchmark:
    """The speed measurement of one row: its trained model, and a trainer."""

    def __init__(self, job: Job, runs: Path, sentences: Sequence[str]) -> None:
        run = RunDir(job.folder(runs))
        self.model = Translator.load(run.folder, "cpu", threads=1)
        self.sentences = sentences
        recipe = run.recipe()
        with process_group("cpu") as group:
            self.trainer = Trainer(run, recipe, open_prepared(run, recipe), group)
        self.batches = self.trainer.batches()
        self.training_speeds: list[float] = []
        self.translation_speeds: list[float] = []
        self.saved_bytes = saved_bytes(self.trainer, next(self.batches))
        self.model.translate(sentences[:8])

    def train(self) -> None:
        batches = list(islice(self.batches, STEPS_PER_REPEAT))
        start = time.process_time()
        for one in batches:
            self.trainer.step([one])
        seconds = time.process_time() - start
        self.training_speeds.append(sum(one.tokens for one in batches) / seconds)

    def translate(self) -> None:
        start = time.process_time()
        self.model.translate(self.sentences)
        self.translation_speeds.append(len(self.sentences) / (time.process_time() - start))

    def to_json(self) -> dict[str, float]:
        return {
            "tokens_per_second": round(statistics.median(self.training_speeds)),
            "sentences_per_second": round(statistics.median(self.translation_speeds), 1),
            "megabytes": round(self.saved_bytes / 1e6, 1),
        }


def saved_bytes(trainer: Trainer, batch: TrainingBatch) -> int:
    """The bytes that the forward pass stores for the backward pass, without the weights."""
    sizes: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        trainer.step([batch])
    for weight in trainer.network.parameters():
        sizes.pop(weight.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def speeds(runs: Path, trained: Sequence[str]) -> dict[str, dict[str, float]]:
    """The speeds of all trained rows, which take turns on the same batches and sentences."""
    torch.set_num_threads(1)
    sentences = [item.source for item in challenge()[::2]]
    available = [row for row in trained if RunDir(Job(row, 1).folder(runs)).card_file.exists()]
    benchmarks = {row: RowBenchmark(Job(row, 1), runs, sentences) for row in available}
    for _ in range(REPEATS):
        for one in benchmarks.values():
            one.train()
            one.translate()
    return {row: one.to_json() for row, one in benchmarks.items()}


# ---------------------------------------------------------------------------------------------
# The table

Results = Mapping[str, Any]


def training_runs(results: Results, row: str) -> list[dict[str, Any]]:
    """The results of a row, one for each training run."""
    name = row or "the recipe"
    return [one for key, one in results.items() if key.rpartition("/")[0] == name]


def deviation(results: Results, metric: str) -> tuple[float, int]:
    """The pooled standard deviation between seeds of all rows that have several, and its degrees of freedom."""
    groups = [
        [one[metric] for one in training_runs(results, row) if "failed" not in one]
        for row in rows()
    ]
    several = [group for group in groups if len(group) > 1]
    squares = sum(statistics.variance(group) * (len(group) - 1) for group in several)
    freedom = sum(len(group) - 1 for group in several)
    return (squares / freedom) ** 0.5 if freedom else 0.0, freedom


def difference_from_recipe(results: Results, row: str, metric: str) -> str:
    """The difference from the recipe; bold if it is larger than the deviation between seeds explains."""
    some, base = (
        [one[metric] for one in training_runs(results, name) if "failed" not in one]
        for name in (row, BASE)
    )
    if row == BASE or not some or not base:
        return ""
    difference = statistics.fmean(some) - statistics.fmean(base)
    spread, freedom = deviation(results, metric)
    text = f"{round(difference, 1) + 0.0:+.1f}"  # never -0.0
    if not freedom:
        return text
    smallest = margin(spread, freedom, len(some), len(base))
    return f"**{text}**" if abs(difference) > smallest else text


def margin(spread: float, freedom: int, *seeds: int) -> float:
    """The smallest significant difference (95%) of two means of this many seeds."""
    return student_t(freedom) * spread * math.sqrt(sum(1 / count for count in seeds))


def cells_of(results: Results, speed: Mapping[str, Mapping[str, float]], row: str) -> list[str]:
    some = training_runs(results, row)
    cells = ["<br>".join(f"`{word}`" for word in row.split()) or "the recipe", str(len(some))]
    finished = [one for one in some if "failed" not in one]
    if finished:
        bleu = statistics.fmean(one["bleu"] for one in finished)
        half = statistics.fmean(one["high"] - one["low"] for one in finished) / 2
        pronouns = sorted({one["pronouns"] for one in finished})
        cells += [f"{bleu:.1f} ± {half:.1f}", difference_from_recipe(results, row, "bleu")]
        cells += ["–".join(map(str, [*pronouns[:1], *pronouns[1:][-1:]]))]
        cells += [f"{finished[0]['parameters'] / 1000:,.0f}k"]
    else:
        cells += ["failed", "", "", ""]
    if row in speed:
        one = speed[row]
        base = speed.get(BASE, one)["tokens_per_second"]
        relative = one["tokens_per_second"] / base
        cells += [f"{one['tokens_per_second']:,.0f} ({relative:.2f})"]
        cells += [f"{one['sentences_per_second']:.0f}", f"{one['megabytes']:.0f}"]
    else:
        cells += ["", "", ""]
    return cells


def table(known: Mapping[str, Any]) -> str:
    """A line for each row that has results."""
    results = known["results"]
    head = ["changed", "seeds", "BLEU", "against the recipe", "pronouns of 204", "weights"]
    head += ["tokens/s", "sentences/s", "MB"]
    measured = [row for row in rows() if training_runs(results, row)]
    lines = markdown_table(head, [cells_of(results, known["speeds"], row) for row in measured])
    (bleu, freedom), (pronouns, _) = (deviation(results, key) for key in ("bleu", "pronouns"))
    if not freedom:
        return "\n".join([*lines, ""])
    smallest = margin(bleu, freedom, 1, len(training_runs(results, BASE)))
    note = (
        f"The standard deviation between seeds is {bleu:.2f} BLEU and {pronouns:.0f} pronouns "
        f"({freedom} degrees of freedom, pooled over all rows with several seeds), so the smallest "
        f"significant difference of one training run from the recipe is {smallest:.1f} BLEU."
    )
    return "\n".join([*lines, "", note, ""])


def with_table(page: str, known: Mapping[str, Any]) -> str:
    return replace_section(PAGE, page, BEGIN, END, f"\n{table(known)}\n")


def write(known: Mapping[str, Any]) -> None:
    """Write the JSON file first, because resuming depends on it."""
    write_text(RESULTS, json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    write_text(PAGE, with_table(PAGE.read_text(encoding="utf-8"), known))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/component_ablation"))
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--minutes", type=float, default=10_000.0, help="end within this time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--only", nargs="+", choices=rows(), default=rows(), metavar="ROW")
    parser.add_argument("--speeds", action="store_true", help="measure speed and memory instead")
    given = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * given.minutes
    known: dict[str, Any] = {"steps": STEPS, "results": {}, "speeds": {}}
    if RESULTS.is_file():
        known = json.loads(RESULTS.read_text(encoding="utf-8"))
    if known["steps"] != STEPS:
        parser.error(
            f"{RESULTS} was measured with {known['steps']} steps, not {STEPS}: move it away first"
        )
    results = known["results"]
    if given.speeds:
        known["speeds"] = speeds(given.runs, [row for row in rows() if training_runs(results, row)])
        known["hardware"] = hardware(torch.device("cpu"))
        write(known)
        return
    jobs = [Job(BASE, seed) for seed in range(1, BASE_SEEDS + 1)] if BASE in given.only else []
    jobs += [Job(row, seed) for seed in given.seeds for row in given.only if row != BASE]
    prepare_data(given.runs)
    waiting = [job for job in jobs if job.key not in results]
    for job, result in train_all(waiting, given.runs, given.jobs, deadline):
        results[job.key] = result
        write(known)
        print(f"{job.key}: {result}", flush=True)
    left = sum(job.key not in results for job in jobs)
    print(f"{left} left; run the same command to resume" if left else "all done")


if __name__ == "__main__":
    main()
