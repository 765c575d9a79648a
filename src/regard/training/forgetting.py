"""Catastrophic forgetting: the scores of a fine-tuned model, and of the run it started from, on old and on new data.

The old data are the test set of the old run, or else its validation set; the new data are those of the recipe. The old
run is scored before training, and its scores are stored with the prepared data. The fine-tuned model is scored at the
end. The card has both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from regard.data.corpus import read_pairs, valid_pairs
from regard.data.pairs import Pair, language_of
from regard.errors import RegardError
from regard.metrics import MetricResult
from regard.recipe import Recipe
from regard.storage.atomic_files import write_text
from regard.storage.run_dir import RunDir, describe_fine_tuning
from regard.tasks import Model
from regard.training.checkpoint import checkpoint_files
from regard.training.fine_tuning import initial_run, with_target_language
from regard.training.progress import ProgressReporter

BEFORE = "before.json"
"""The scores before training, in the folder of the prepared data."""
SCORED_PAIRS = 500
"""at most this many pairs of each data set are scored, evenly spaced"""
WARM_UP_PAIRS = 8
"""pairs that are translated to estimate the time"""
SHARE_OF_TIME = 0.05
"""of the time limit, for each of the four scores"""


def score_before(
    run: RunDir, recipe: Recipe, reporter: ProgressReporter, deadline: float | None
) -> None:
    """Score the run ``training.init_from`` on its own data and on the new data; nothing if this run is resumed."""
    if recipe.training.init_from is None or checkpoint_files(run.checkpoints):
        return
    (run.data / BEFORE).unlink(missing_ok=True)
    initial, theirs = initial_run(recipe)
    if theirs.task != recipe.task or recipe.text_only:
        return  # the scores would not be comparable
    model = Model.load(initial.folder, recipe.training.device)
    # Decoded and scored in the same way before and after.
    same = {"decoding": recipe.decoding, "evaluation": recipe.evaluation}
    model.recipe = model.recipe.model_copy(update=same)
    sets, seconds = {}, 0.0
    for name, of, data in (("old", initial, theirs), ("new", run, recipe)):
        try:
            kind, pairs = _scored_pairs(data)
            pairs = pairs[: _affordable(model, pairs, deadline)]
            start = time.monotonic()
            results = _score(model, pairs)
        except RegardError as error:  # no data, or a text that is too long for the model
            reporter.message(f"Forgetting is not measured on {name} data: {error}")
            continue
        seconds += time.monotonic() - start
        sets[name] = {
            "set": f"{kind} of {of}",
            "pairs": len(pairs),
            "before": [result.to_json() for result in results],
        }
        if results:
            reporter.message(
                f"Before fine-tuning, {name} data ({kind} of {of}, {len(pairs):,} pairs): "
                f"{_values(results)}"
            )
    scores = {"from": str(initial), "seconds": round(seconds, 1), "sets": sets}
    write_text(run.data / BEFORE, json.dumps(scores, indent=2) + "\n")


def scoring_seconds(run: RunDir, recipe: Recipe) -> float:
    """How long ``score_after`` takes: as long as scoring took before."""
    path = run.data / BEFORE
    if recipe.training.init_from is None or not path.is_file():
        return 0.0
    return float(json.loads(path.read_text(encoding="utf-8"))["seconds"])


def score_after(
    run: RunDir, recipe: Recipe, model: Model, reporter: ProgressReporter, deadline: float | None
) -> dict[str, Any] | None:
    """The scores before and after, for the card; None if there is nothing to compare with."""
    path = run.data / BEFORE
    if recipe.training.init_from is None or not path.is_file():
        return None
    before = json.loads(path.read_text(encoding="utf-8"))
    if deadline is not None and time.monotonic() + scoring_seconds(run, recipe) > deadline:
        reporter.message("No time left to measure forgetting")
        return None
    for name, scores in before["sets"].items():
        try:
            _, theirs = initial_run(recipe)
            _, pairs = _scored_pairs(theirs if name == "old" else recipe)
            pairs = pairs[: scores["pairs"]]
            if name == "old":
                pairs = list(with_target_language(pairs, theirs, recipe))
            scores["after"] = [result.to_json() for result in _score(model, pairs)]
        except RegardError as error:
            reporter.message(f"Forgetting is not measured on {name} data: {error}")
    training = recipe.training.model_dump(include={"mix", "freeze", "extend_vocab"})
    card = {"from": before["from"], **training, "sets": before["sets"]}
    for line in describe_fine_tuning(card):
        reporter.message(line)
    if _is_worse(card["sets"].get("new", {})):
        reporter.message(
            f"The new data score worse than before fine-tuning: use {before['from']}, or fine-tune with more pairs, "
            "--mix 0.5 or a smaller training.learning_rate"
        )
    return card


def _is_worse(scores: Mapping[str, Any]) -> bool:
    """Whether the first metric is worse after fine-tuning than before."""
    if not (scores.get("before") and scores.get("after")):
        return False
    before, after = scores["before"][0], scores["after"][0]
    change: float = after["value"] - before["value"]
    return (change if after["higher_is_better"] else -change) < 0


def _scored_pairs(recipe: Recipe) -> tuple[str, list[Pair]]:
    """``test`` or ``validation`` and pairs of that set, evenly spaced."""
    data, kind = recipe.data, "test"
    if data.test is not None:
        pairs = list(read_pairs(data.test, data, "data.test"))
    else:
        kind, pairs = "validation", list(valid_pairs(data))
    if not pairs:
        raise RegardError(f"the {kind} data have no pairs")
    step = max(1.0, len(pairs) / SCORED_PAIRS)
    return kind, [pairs[int(number * step)] for number in range(min(len(pairs), SCORED_PAIRS))]


def _affordable(model: Model, pairs: Sequence[Pair], deadline: float | None) -> int:
    """The number of pairs that can be scored in ``SHARE_OF_TIME``."""
    if deadline is None:
        return len(pairs)
    few = pairs[:WARM_UP_PAIRS]
    start = time.monotonic()
    _score(model, few)
    each = (time.monotonic() - start) / len(few)
    seconds = SHARE_OF_TIME * max(0.0, deadline - start)
    return max(len(few), min(len(pairs), int(seconds / max(each, 1e-6))))


def _score(model: Model, pairs: Sequence[Pair]) -> list[MetricResult]:
    """The scores of a model; none if it does not know the target language of a pair."""
    known = model.recipe.data.targets
    if not known:
        pairs = [Pair(*pair) if language_of(pair) else pair for pair in pairs]
    elif any(language_of(pair) not in known for pair in pairs):
        return []
    return model.evaluate(pairs)


def _values(results: Sequence[MetricResult]) -> str:
    return ", ".join(f"{result.name} {result.value:.1f}" for result in results)
