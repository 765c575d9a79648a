"""What one word of a recipe changes: the demo's model, trained once for each choice, all else as it is.

    python benchmarks/parts.py                      # every row that is missing; about half an hour on two available_cores
    python benchmarks/parts.py --minutes 10         # a slice of it; the same command goes on
    python benchmarks/parts.py --seeds 1 2 3 --only "model.norm=rms" "model.activation=swiglu"
    python benchmarks/parts.py --speeds             # time and memory of all rows that are trained

What is finished stands in ``parts.json`` and is not done again; after each training the table in docs/parts.md is
written anew. Trainings end early, long before the demo is perfect: a difference in what is learned can then be seen.

Two trainings go side by side, with one thread each. Speeds are measured afterwards, in one process with one thread: all
rows take turns, round after round, and the median counts. They are of seconds of CPU time, so that others who use the
machine disturb them little. The memory of a step is what forward keeps for backward, counted to the byte.
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
from ablation import student
from torch import Tensor

from regard.demo.demo import score_challenge, write_corpus
from regard.demo.grammar import challenge
from regard.errors import RegardError
from regard.recipe import Recipe, load_recipe
from regard.storage.run_dir import RunDir, write_text
from regard.tasks import Translator
from regard.training.distributed import join
from regard.training.prepare import open_prepared, prepare
from regard.training.progress import ProgressReporter
from regard.training.run import hardware, train
from regard.training.trainer import Trainer, TrainingBatch

RESULTS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[1] / "docs" / "parts.md"
BEGIN = "<!-- measured: written by python benchmarks/parts.py -->\n"
EOS = "<!-- end of measured -->\n"

STEPS = 350
ALWAYS = [f"training.steps={STEPS}", "evaluation.metrics=[bleu]"]
BASE = ""
ATTENTION = "model.attention"
ROWS: dict[str, list[str]] = {
    "": [BASE],
    "score": [f"{ATTENTION}.score=unscaled", f"{ATTENTION}.score=additive"],
    "weighting": [f"{ATTENTION}.weighting=relu"],
    "pattern": [
        f"{ATTENTION}.encoder=window {ATTENTION}.reach=2",
        f"{ATTENTION}.decoder=window {ATTENTION}.reach=2",
        f"{ATTENTION}.encoder=linformer {ATTENTION}.rows=8",
        f"{ATTENTION}.memory=linformer {ATTENTION}.rows=8",
        f"{ATTENTION}.encoder=bigbird {ATTENTION}.block=1 {ATTENTION}.global_blocks=1 "
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
        *("model.norm=rms", "model.norm=batch", "model.norm=none", "model.norm_order=post"),
        "model.norm=rms model.activation=swiglu",
    ],
    "depth": [
        f"model.encoder_layers={depth} model.decoder_layers={depth}{norm}"
        for depth in (1, 3)
        for norm in ("", " model.norm=none")
    ],
    "activation": [f"model.activation={name}" for name in ("gelu", "swish", "swiglu")],
    "optimizer": [
        "training.optimizer=adamw training.weight_decay=0.01",
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
        "training.schedule=paper training.learning_rate=0.4",
        "training.schedule=constant",
    ],
    "smoothing": ["training.label_smoothing=0", "training.label_smoothing_over=others"],
    "embeddings": ["model.tie_embeddings=false", "model.tie_output=false"],
}
"""by what they are about; a row is what goes behind --set, with blanks between"""
BASE_SEEDS = 6
"""how often the recipe itself is trained: the spread that all rows are judged by"""
ROUNDS, STEPS_OF_A_ROUND = 5, 2
"""of the measurement of speeds"""


class Job(NamedTuple):
    row: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.row or 'the recipe'}/{self.seed}"

    def folder(self, runs: Path) -> Path:
        words = "".join(sign if sign.isalnum() else "-" for sign in self.key)
        return runs / words

    def recipe(self, root: Path) -> Recipe:
        changes = [*ALWAYS, f"training.seed={self.seed}", f"data.root={root}", *self.row.split()]
        return load_recipe("demo", changes)


def rows() -> list[str]:
    return [row for some in ROWS.values() for row in some]


# Trainings


def text_of(runs: Path) -> RunDir:
    """The corpus and its ids, made once for all trainings."""
    corpus, run = (runs / "corpus").resolve(), RunDir(runs / "text")
    if not (corpus / "test.de").exists():
        write_corpus(corpus)
    prepare(run, Job(BASE, 1).recipe(corpus), ProgressReporter(run))
    return run


def work(job: Job, runs: Path) -> dict[str, Any]:
    """One training, in a process of its own."""
    text, run = RunDir(runs / "text"), RunDir(job.folder(runs))
    recipe = job.recipe((runs / "corpus").resolve())
    shutil.rmtree(run.folder, ignore_errors=True)  # one that was stopped begins again
    shutil.copytree(text.data, run.data, copy_function=os.link)
    for path in text.tokenizer_files():
        os.link(path, run.folder / path.name)
    run.write_recipe(recipe)
    with (run.folder / "said.txt").open("w") as said, redirect_stderr(said):
        try:
            model = train(recipe, run.folder)
        except RegardError as error:
            return {"failed": str(error)}
    card = run.card()
    (bleu,) = card["test"]
    assert isinstance(model, Translator)
    pronouns, asked = score_challenge(model)
    shutil.rmtree(run.checkpoints)
    return {
        "bleu": round(bleu["value"], 2),
        "low": round(bleu["low"], 2),
        "high": round(bleu["high"], 2),
        "pronouns": pronouns,
        "asked": asked,
        "loss": round(card["valid"]["loss"], 4),
        "parameters": card["parameters"],
        "seconds": card["seconds"],
    }


def train_all(
    waiting: Sequence[Job], runs: Path, jobs: int, deadline: float
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Each as it is done; none is begun that would not be done in time."""
    running: dict[Future[dict[str, Any]], Job] = {}
    left, longest = list(waiting), 0.0
    begun: dict[Job, float] = {}
    fresh = get_context("spawn")
    with ProcessPoolExecutor(jobs, fresh, torch.set_num_threads, (1,)) as pool:
        while left or running:
            while left and len(running) < jobs and time.monotonic() + longest < deadline:
                job = left.pop(0)
                begun[job] = time.monotonic()
                running[pool.submit(work, job, runs)] = job
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                job = running.pop(future)
                longest = max(longest, time.monotonic() - begun[job])
                yield job, future.result()


# Time and memory


class Side:
    """One row in the measurement of speeds: its model as it was trained, and another that learns."""

    def __init__(self, job: Job, runs: Path, sentences: Sequence[str]) -> None:
        run = RunDir(job.folder(runs))
        self.model = Translator.load(run.folder, "cpu", threads=1)
        self.sentences = sentences
        recipe = run.recipe()
        with join("cpu") as group:
            self.trainer = Trainer(run, recipe, open_prepared(run, recipe), group)
        self.batches = self.trainer.batches()
        self.learning: list[float] = []
        self.searching: list[float] = []
        self.kept = bytes_kept(self.trainer, next(self.batches))
        self.model.translate(sentences[:8])

    def learn(self) -> None:
        drawn = list(islice(self.batches, STEPS_OF_A_ROUND))
        start = time.process_time()
        for one in drawn:
            self.trainer.step([one])
        seconds = time.process_time() - start
        self.learning.append(sum(one.tokens for one in drawn) / seconds)

    def search(self) -> None:
        start = time.process_time()
        self.model.translate(self.sentences)
        self.searching.append(len(self.sentences) / (time.process_time() - start))

    def to_json(self) -> dict[str, float]:
        return {
            "tokens_per_second": round(statistics.median(self.learning)),
            "sentences_per_second": round(statistics.median(self.searching), 1),
            "megabytes": round(self.kept / 1e6, 1),
        }


def bytes_kept(trainer: Trainer, drawn: TrainingBatch) -> int:
    """What forward keeps for backward, each piece of memory once; weights are not counted."""
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        trainer.step([drawn])
    for weight in trainer.network.parameters():
        found.pop(weight.untyped_storage().data_ptr(), None)
    return sum(found.values())


def speeds(runs: Path, trained: Sequence[str]) -> dict[str, dict[str, float]]:
    """All rows in turn, round after round, on the same batches and sentences."""
    torch.set_num_threads(1)
    sentences = [item.source for item in challenge()[::2]]
    there = [row for row in trained if RunDir(Job(row, 1).folder(runs)).card_file.exists()]
    sides = {row: Side(Job(row, 1), runs, sentences) for row in there}
    for _ in range(ROUNDS):
        for side in sides.values():
            side.learn()
            side.search()
    return {row: side.to_json() for row, side in sides.items()}


# The table

Results = Mapping[str, Any]


def found(results: Results, row: str) -> list[dict[str, Any]]:
    """What was measured of a row, a training each."""
    name = row or "the recipe"
    return [one for key, one in results.items() if key.rpartition("/")[0] == name]


def deviation(results: Results, measure: str) -> tuple[float, int]:
    """The standard deviation between seeds, of all rows that have several, and its degrees of freedom."""
    groups = [
        [one[measure] for one in found(results, row) if "failed" not in one] for row in rows()
    ]
    several = [group for group in groups if len(group) > 1]
    squares = sum(statistics.variance(group) * (len(group) - 1) for group in several)
    freedom = sum(len(group) - 1 for group in several)
    return (squares / freedom) ** 0.5 if freedom else 0.0, freedom


def apart(results: Results, row: str, measure: str) -> str:
    """Difference from the recipe; bold where the spread between seeds does not explain it."""
    some, base = (
        [one[measure] for one in found(results, name) if "failed" not in one]
        for name in (row, BASE)
    )
    if row == BASE or not some or not base:
        return ""
    difference = statistics.fmean(some) - statistics.fmean(base)
    spread, freedom = deviation(results, measure)
    told = f"{round(difference, 1) + 0.0:+.1f}"  # and never -0.0
    if not freedom:
        return told
    least = margin(spread, freedom, len(some), len(base))
    return f"**{told}**" if abs(difference) > least else told


def margin(spread: float, freedom: int, *seeds: int) -> float:
    """From here on two means of so many seeds differ by more than chance, in 95 of 100 cases."""
    return student(freedom) * spread * math.sqrt(sum(1 / count for count in seeds))


def line(results: Results, speed: Mapping[str, Mapping[str, float]], row: str) -> str:
    some = found(results, row)
    cells = ["<br>".join(f"`{word}`" for word in row.split()) or "the recipe", str(len(some))]
    whole = [one for one in some if "failed" not in one]
    if whole:
        bleu = statistics.fmean(one["bleu"] for one in whole)
        half = statistics.fmean(one["high"] - one["low"] for one in whole) / 2
        pronouns = sorted({one["pronouns"] for one in whole})
        cells += [f"{bleu:.1f} ± {half:.1f}", apart(results, row, "bleu")]
        cells += ["–".join(map(str, [*pronouns[:1], *pronouns[1:][-1:]]))]
        cells += [f"{whole[0]['parameters'] / 1000:,.0f}k"]
    else:
        cells += ["failed", "", "", ""]
    if row in speed:
        one = speed[row]
        share = one["tokens_per_second"] / speed[BASE]["tokens_per_second"] if BASE in speed else 1
        cells += [f"{one['tokens_per_second']:,.0f} ({share:.2f})"]
        cells += [f"{one['sentences_per_second']:.0f}", f"{one['megabytes']:.0f}"]
    else:
        cells += ["", "", ""]
    return f"| {' | '.join(cells)} |"


def table(known: Mapping[str, Any]) -> str:
    """A line for each row that has results."""
    results = known["results"]
    heads = ["changed", "seeds", "BLEU", "against the recipe", "pronouns of 204", "weights"]
    heads += ["tokens/s", "sentences/s", "MB"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "--:|" * (len(heads) - 1)]
    lines += [line(results, known["speeds"], row) for row in rows() if found(results, row)]
    (bleu, freedom), (pronouns, _) = (deviation(results, key) for key in ("bleu", "pronouns"))
    if not freedom:
        return "\n".join([*lines, ""])
    least = margin(bleu, freedom, 1, len(found(results, BASE)))
    told = (
        f"Between seeds the standard deviation is {bleu:.2f} BLEU and {pronouns:.0f} pronouns "
        f"({freedom} degrees of freedom, all rows with several seeds together), so one training "
        f"differs from the recipe by more than chance from {least:.1f} BLEU on."
    )
    return "\n".join([*lines, "", told, ""])


def with_table(page: str, known: Mapping[str, Any]) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(EOS)
    assert end, f"{PAGE} has no {BEGIN} … {EOS}"
    return f"{before}{begin}\n{table(known)}\n{end}{after}"


def write(known: Mapping[str, Any]) -> None:
    """The JSON first: it is what going on is based on."""
    write_text(RESULTS, json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    write_text(PAGE, with_table(PAGE.read_text(encoding="utf-8"), known))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/parts"))
    parser.add_argument("--jobs", type=int, default=2, help="trainings side by side")
    parser.add_argument("--minutes", type=float, default=10_000.0, help="end within this time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--only", nargs="+", choices=rows(), default=rows(), metavar="ROW")
    parser.add_argument("--speeds", action="store_true", help="measure time and memory instead")
    given = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * given.minutes
    known: dict[str, Any] = {"steps": STEPS, "results": {}, "speeds": {}}
    if RESULTS.is_file():
        known = json.loads(RESULTS.read_text(encoding="utf-8"))
    if known["steps"] != STEPS:
        parser.error(f"{RESULTS} is of {known['steps']} steps, not {STEPS}: put it aside first")
    results = known["results"]
    if given.speeds:
        known["speeds"] = speeds(given.runs, [row for row in rows() if found(results, row)])
        known["hardware"] = hardware(torch.device("cpu"))
        write(known)
        return
    asked = [Job(BASE, seed) for seed in range(1, BASE_SEEDS + 1)] if BASE in given.only else []
    asked += [Job(row, seed) for seed in given.seeds for row in given.only if row != BASE]
    text_of(given.runs)
    waiting = [job for job in asked if job.key not in results]
    for job, result in train_all(waiting, given.runs, given.jobs, deadline):
        results[job.key] = result
        write(known)
        print(f"{job.key}: {result}", flush=True)
    left = sum(job.key not in results for job in asked)
    print(f"{left} left; the same command goes on" if left else "all done")


if __name__ == "__main__":
    main()
