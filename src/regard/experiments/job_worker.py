"""One training of an experiment, in a process of its own: prepare or share the data, train or resume, score.

    python -m regard.experiments.job_worker JOB.json

Data are prepared once for all trainings with the same token ids; the first process to need them prepares them, and
the others wait. If the process that started this one ends, training is saved and this process ends, too.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from regard.data.corpus import read_pairs, valid_pairs
from regard.data.pairs import Pair
from regard.errors import RegardError
from regard.recipe import Recipe, make_recipe
from regard.storage.atomic_files import write_text
from regard.storage.run_dir import RunDir
from regard.tasks import Model
from regard.training.prepare_data import data_identity, prepare
from regard.training.progress import ProgressReporter
from regard.training.run import Interrupted, train

SCORES = "scores.json"
"""the file of a run folder with its scores; it exists when the training is finished"""
INTERRUPTED = 130
"""exit status of a training that was interrupted and has saved its state"""
FAILED = 2
LOCK_SECONDS = 120.0
"""how long to wait for a process of an earlier command that is still saving"""


def main(job_file: str) -> int:
    """Train and score what the file describes; returns the exit status."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        train_and_score(json.loads(Path(job_file).read_text(encoding="utf-8")))
    except Interrupted:
        return INTERRUPTED
    except RegardError as error:
        print(f"regard: {error}", file=sys.stderr)
        return FAILED
    return 0


def _end_with_parent() -> None:
    """Wait until standard input is closed, which the parent does only by ending; then end like on a signal."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def train_and_score(job: dict[str, Any]) -> None:
    """Train, or resume, in the run folder of a job; write the outputs and scores of its variants."""
    run = RunDir(job["run"])
    recipe = make_recipe(job["recipe"], str(run))
    _wait_until_unlocked(run)
    if run.card():
        model = Model.load(run.folder, recipe.training.device)
    else:
        provide_data(recipe, run, Path(job["prepared"]))
        model = train(recipe, run.folder)
    pairs = split_pairs(recipe, job["split"])
    scores: dict[str, dict[str, Any]] = {}
    for name, decoding in job["variants"].items():
        file = f"outputs-{len(scores)}.jsonl"
        scores[name] = score(model, recipe, decoding, pairs, run.folder / file)
    write_text(run.folder / SCORES, json.dumps({"scores": scores, **describe(run)}, indent=1))


def split_pairs(recipe: Recipe, split: str) -> list[Pair]:
    """The pairs that variants are scored on."""
    if split == "valid":
        return list(valid_pairs(recipe.data))
    assert recipe.data.test is not None
    return list(read_pairs(recipe.data.test, recipe.data, "data.test"))


def score(
    model: Model, recipe: Recipe, decoding: dict[str, Any], pairs: Sequence[Pair], outputs: Path
) -> dict[str, Any]:
    """The score of the first metric, a mean over target languages, and the file with the outputs."""
    values = recipe.model_dump(mode="json") | {"decoding": decoding}
    values["evaluation"]["metrics"] = values["evaluation"]["metrics"][:1]
    model.recipe = make_recipe(values, "the recipe of the experiment")
    start = time.monotonic()
    if recipe.text_only:
        results = model.evaluate(pairs)
        return {"score": fmean(one.value for one in results), "outputs": None}
    lines = model.predict_pairs(pairs)
    seconds = time.monotonic() - start
    write_text(outputs, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
    results = model.score_outputs(lines, pairs)
    return {
        "score": fmean(one.value for one in results),
        "outputs": outputs.name,
        "decoding_seconds": round(seconds, 2),
    }


def describe(run: RunDir) -> dict[str, Any]:
    """What the report says about a training."""
    card = run.card()
    curve = [
        [event["step"], event["loss"]]
        for event in run.log()
        if event.get("event") == "valid" and isinstance(event.get("loss"), float)
    ]
    return {
        "loss": card["valid"]["loss"],
        "steps": card["steps"],
        "seconds": card["seconds"],
        "target_tokens": card["target_tokens"],
        "parameters": card["parameters"],
        "hardware": card["hardware"],
        "curve": curve,
    }


# ---------------------------------------------------------------------------------------------
# Data


def provide_data(recipe: Recipe, run: RunDir, prepared: Path) -> None:
    """Link the prepared data into a run that has none; prepare them first if no other training has."""
    if run.metadata_file.exists():
        return
    identity = json.dumps(data_identity(recipe), sort_keys=True)
    folder = prepared / hashlib.sha256(identity.encode()).hexdigest()[:16]
    prepared.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends, however it ends
        if not folder.exists():
            part = RunDir(folder.with_suffix(".part"))
            shutil.rmtree(part.folder, ignore_errors=True)
            part.folder.mkdir()
            part.write_recipe(recipe)
            prepare(part, recipe, ProgressReporter(part))
            part.folder.replace(folder)
    shared = RunDir(folder)
    shutil.rmtree(run.data, ignore_errors=True)
    run.folder.mkdir(parents=True, exist_ok=True)
    for path in shared.tokenizer_files():
        (run.folder / path.name).unlink(missing_ok=True)
        link(path, run.folder / path.name)
    partial = run.folder / "data.part"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(shared.data, partial, copy_function=link)
    partial.replace(run.data)


def link(source: str | Path, target: str | Path) -> None:
    """A hard link, or a copy where links are not possible; the files are never changed."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _wait_until_unlocked(run: RunDir) -> None:
    """Wait for the training of an earlier command that was killed and is still saving."""
    deadline = time.monotonic() + LOCK_SECONDS
    while run.is_locked() and time.monotonic() < deadline:
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
