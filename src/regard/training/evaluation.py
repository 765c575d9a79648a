"""Evaluation during and after training: validation, the summary, the length penalty, and forgetting.

With several processes, each computes a share of a validation, and the main process gets all results in order. It
decides what is computed, because only it knows the time left and the selected weights. The others wait in ``assist``
and compute their share of whatever it requests, until it calls ``dismiss``.

The summary after training has scores with intervals, and examples from best to worst.

Catastrophic forgetting is measured for fine-tuned models: the scores before and after training, on old and on new data.
The old data are the test set of the run that training started from, or else its validation set; the new data are those
of the recipe. That run is scored before training, and its scores are stored with the prepared data. The fine-tuned
model is scored at the end. The card has both.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.data.corpus import read_pairs, valid_pairs
from regard.data.pairs import Pair, language_of
from regard.data.token_dataset import RowIndices
from regard.errors import RegardError
from regard.metrics import Comparison, MetricResult
from regard.nn.network import copy_weights, named_weights
from regard.recipe import Precision, Recipe
from regard.storage.atomic_files import write_text
from regard.storage.run_dir import RunDir, describe_fine_tuning
from regard.tasks import Model, Translator
from regard.training.checkpoint import checkpoint_files
from regard.training.fine_tuning import initial_run, with_target_language
from regard.training.progress import ProgressReporter, shorten_text

if TYPE_CHECKING:
    from regard.training.trainer import Trainer

# ---------------------------------------------------------------------------------------------
# One validation


class Validation(NamedTuple):
    """The result of one validation."""

    loss: float
    """mean negative log-likelihood per target token, without label smoothing"""
    result: MetricResult | None
    """the score of the validation examples"""
    objective: float
    """what checkpoints are selected by, lower is better: the loss; the score, negated if higher is better; or the
    negated step, if the last checkpoint is selected"""

    @property
    def sort_key(self) -> tuple[float, float]:
        """Orders validations, best first; ties are broken by the loss."""
        return self.objective, self.loss


def evenly_spaced(pairs: Iterable[Pair], count: int, most: int) -> list[Pair]:
    """At most ``most`` of ``count`` pairs, evenly spaced: files are often sorted."""
    if most == 0:
        return []  # the pairs need not be read
    selected = min(count, most)
    indices = {number * count // selected for number in range(selected)}
    return [pair for index, pair in enumerate(pairs) if index in indices]


def perplexity(loss: float) -> float:
    """exp(loss), or a very large number."""
    return math.exp(min(loss, 700.0))  # larger values overflow


def report_validation(
    reporter: ProgressReporter,
    step: int,
    validation: Validation,
    best: bool,
    change: float | None,
    seconds: float,
    note: str,
) -> None:
    """Print and log a validation.

    best: whether its weights are selected.
    change: the improvement of the score since the validation before.
    seconds: how long the validation took.
    note: added to the printed line.
    """
    values = {"loss": validation.loss, "perplexity": perplexity(validation.loss)}
    text = f"step {step:,}: validation loss {validation.loss:.3f}"
    if validation.result is not None:
        values[validation.result.metric] = validation.result.value
        text += f", {validation.result.name} {validation.result.value:.2f}"
        if change is not None:
            sign = 1 if validation.result.higher_is_better else -1
            text += f" ({round(sign * change, 2) + 0.0:+.2f})"
    reporter.log("valid", step=step, best=best, seconds=round(seconds, 3), **values)
    reporter.message(text + note)


# ---------------------------------------------------------------------------------------------
# In several processes


class LossRequest(NamedTuple):
    """Compute the summed loss of each batch of the validation data."""

    items: Sequence[RowIndices]
    """the rows of each batch"""

    def compute(self, trainer: Trainer, share: slice) -> list[float]:
        return [trainer.summed_validation_loss(rows) for rows in self.items[share]]


class OutputRequest(NamedTuple):
    """Compute the output for the source of each pair."""

    items: Sequence[Pair]
    quick: bool
    recipe: Recipe
    """its decoding section may have changed since training began"""
    precision: Precision

    def compute(self, trainer: Trainer, share: slice) -> list[str]:
        model, pairs = trainer.model, self.items[share]
        model.recipe = self.recipe
        model.set_precision(self.precision)
        return model.predict_pairs(pairs, quick=self.quick) if pairs else []


class DistributedEvaluation:
    """Losses and outputs of a trainer's network, computed by all processes together."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.group = trainer, trainer.group

    # -----------------------------------------------------------------------------------------
    # The main process; with the weights and in the mode that its network has at the moment

    def losses(self, batches: Sequence[RowIndices]) -> list[float]:
        """The summed loss of each batch of validation rows."""
        return self._share(LossRequest(batches))

    def outputs(self, pairs: Sequence[Pair], *, quick: bool = False) -> list[str]:
        """As ``Model.predict_pairs``: in fp32 an output does not depend on the pairs beside it."""
        model = self.trainer.model
        return self._share(OutputRequest(pairs, quick, model.recipe, model.precision))

    def dismiss(self) -> None:
        """Let the other processes return from ``assist``."""
        self.group.broadcast(None)

    def _share(self, request: LossRequest | OutputRequest) -> list[Any]:
        assert self.group.is_main
        return self._compute(self.group.broadcast(request))

    # -----------------------------------------------------------------------------------------
    # The other processes

    def assist(self) -> None:
        """Compute shares for the main process until it dismisses this one; afterwards all is as before."""
        assert not self.group.is_main
        trainer = self.trainer
        network, model = trainer.network, trainer.model
        weights = {name: weight.clone() for name, weight in named_weights(network).items()}
        recipe, precision = model.recipe, model.precision
        trainer.distributed_loss_fn.eval()
        while True:
            request: LossRequest | OutputRequest | None = None
            request = self.group.broadcast(request)
            if request is None:
                break
            self._compute(request)
        trainer.distributed_loss_fn.train()
        copy_weights(network, weights, "the weights")
        model.recipe = recipe
        model.set_precision(precision)

    # -----------------------------------------------------------------------------------------
    # All processes

    def _compute(self, request: LossRequest | OutputRequest) -> list[Any]:
        """The results for all items, in their order."""
        rank, size = self.group.rank, self.group.size
        self.group.broadcast_tensors(named_weights(self.trainer.network).values())
        shares: list[list[Any]] = self.group.gather(
            request.compute(self.trainer, slice(rank, None, size))
        )
        return [shares[number % size][number // size] for number in range(len(request.items))]


# ---------------------------------------------------------------------------------------------
# After training


LENGTH_PENALTIES = (0.6, 1.0, 1.4)
MAX_TUNING_PAIRS = 200
"""validation pairs that the length penalty is tuned on"""
MIN_SCORED_PAIRS = 20
"""with fewer validation pairs, nothing is scored"""
EXAMPLES, EXAMPLE_SECONDS = 5, 5.0
"""validation pairs that are shown, also after the deadline, if their translation takes no longer than this"""


class Example(NamedTuple):
    """A validation pair and its translation."""

    rank: str
    """best, top 25%, median, low 25% or worst, by chrF: its place among the translations, not a judgement"""
    pair: Pair
    translation: str
    chrf: float


class Summary(NamedTuple):
    pairs: int
    """validation pairs that were translated"""
    results: list[MetricResult]
    examples: list[Example]

    def lines(self) -> list[str]:
        """The lines that are printed at the end of training."""
        if not self.examples:
            return []
        scores = ", ".join(str(result).partition("  ")[0] for result in self.results)
        lines = [
            f"On {self.pairs:,} validation pairs: {scores} (the recipe's decoding options; greedy during training)"
        ]
        if not self.results:
            lines = [f"No time left to score the validation pairs; {self.pairs} of them:"]
        for rank, pair, translation, chrf in self.examples:
            lines.append(f"  {rank:8} {shorten_text(pair.source)}")
            lines.append(
                f"  chrF {chrf:3.0f} {shorten_text(translation)}   (reference: {shorten_text(pair.target)})"
            )
        return lines


def summarize(trainer: Trainer, deadline: float | None) -> Summary:
    """Translate the validation examples as ``regard translate`` would, score them, and choose five examples.

    If there is not enough time for all of them, as many as possible are translated, evenly spaced. Without time for
    ``MIN_SCORED_PAIRS``, only a few are, and not scored. Empty if the task is not translation, or if even these take
    too long.
    """
    model, pairs = trainer.model, trainer.examples
    if trainer.recipe.data.test is not None:
        # The test set is scored, so these are only for the examples.
        pairs = pairs[:MAX_TUNING_PAIRS]
    if not isinstance(model, Translator) or not pairs:
        return Summary(0, [], [])
    pairs = pairs[:: _thinning(trainer, deadline, len(pairs))]
    in_time = _in_time(trainer, deadline, len(pairs) / len(trainer.examples))
    if not in_time:
        pairs = pairs[:EXAMPLES]
        if _beam_seconds(trainer, len(pairs) / len(trainer.examples)) > EXAMPLE_SECONDS:
            return Summary(0, [], [])
    translations = trainer.evaluation.outputs(pairs)
    results = model.score_outputs(translations, pairs) if in_time else []
    return Summary(len(pairs), results, choose_examples(pairs, translations))


def _thinning(trainer: Trainer, deadline: float | None, count: int) -> int:
    """n, if every n-th of the first ``count`` examples can be translated in time; 1 if too few would be left."""
    if deadline is None:
        return 1
    each = _beam_seconds(trainer, 1 / len(trainer.examples))
    affordable = (deadline - time.monotonic() - 1) / max(each, 1e-9)
    return 1 if affordable < MIN_SCORED_PAIRS else math.ceil(count / affordable)


def summary_seconds(trainer: Trainer) -> float:
    """How long the summary takes; ``validation_seconds`` of the trainer must be known."""
    if not isinstance(trainer.model, Translator) or not trainer.examples:
        return 0.0
    count = len(trainer.examples)
    if trainer.recipe.data.test is not None:
        count = min(count, MAX_TUNING_PAIRS)
    return _beam_seconds(trainer, count / len(trainer.examples)) + 1


def choose_examples(pairs: list[Pair], translations: list[str]) -> list[Example]:
    """The best, the median and the worst translation, and those at the quartiles, by chrF of the sentence."""
    from regard.metrics.sacrebleu import sentence_chrf

    values = [
        sentence_chrf(translation, pair.target)
        for pair, translation in zip(pairs, translations, strict=True)
    ]
    order = sorted(range(len(pairs)), key=lambda index: -values[index])
    last = len(order) - 1
    places = {
        "best": 0,
        "top 25%": last // 4,
        "median": last // 2,
        "low 25%": 3 * last // 4,
        "worst": last,
    }
    chosen = {order[place]: rank for rank, place in reversed(places.items())}
    return [
        Example(rank, pairs[index], translations[index], values[index])
        for index, rank in sorted(chosen.items(), key=lambda item: order.index(item[0]))
    ]


def tune_length_penalty(
    trainer: Trainer, reporter: ProgressReporter, deadline: float | None
) -> None:
    """Choose the length penalty that scores best on some validation pairs, and write it into the recipe.

    It is changed only if another one is significantly better: on few pairs, the best one is often chance.
    """
    model, pairs = trainer.model, trainer.examples[:MAX_TUNING_PAIRS]
    if not isinstance(model, Translator) or not pairs:
        return
    if model.non_autoregressive or trainer.recipe.decoding.is_sampling:
        return  # they have no length penalty
    current = trainer.recipe.decoding.length_penalty
    outputs: dict[float, list[str]] = {}
    summary = summary_seconds(trainer)  # is more important than this
    for penalty in sorted({current, *LENGTH_PENALTIES}, key=lambda value: value != current):
        if not _in_time(trainer, deadline, len(pairs) / len(trainer.examples), summary):
            break
        model.set_decoding(length_penalty=penalty)
        outputs[penalty] = trainer.evaluation.outputs(pairs)
    comparisons = {
        penalty: _comparison(model, texts, outputs[current], pairs)
        for penalty, texts in outputs.items()
        if texts != outputs[current]
    }
    best = max(
        (one for one, found in comparisons.items() if found.better and found.significant),
        key=lambda penalty: abs(comparisons[penalty].difference),
        default=current,
    )
    model.set_decoding(length_penalty=best)
    trainer.set_recipe(trainer.recipe.model_copy(update={"decoding": model.recipe.decoding}))
    if comparisons:
        one = next(iter(comparisons.values()))
        scores = dict.fromkeys(outputs, one.baseline)  # where the outputs are the same
        scores |= {penalty: comparison.system for penalty, comparison in comparisons.items()}
        listing = ", ".join(f"{penalty:g}: {scores[penalty]:.1f}" for penalty in sorted(scores))
        verdict = "scores best" if best != current else "is kept; no other is significantly better"
        reporter.message(
            f"Length penalty {best:g} {verdict} on {len(pairs):,} validation pairs ({one.name}: {listing})"
        )


def _comparison(
    model: Translator, outputs: list[str], baseline: list[str], pairs: list[Pair]
) -> Comparison:
    """The first metric of the recipe for these outputs and for a baseline."""
    from regard.metrics import compare

    evaluation = model.recipe.evaluation
    (comparison,) = compare(
        evaluation.metrics[:1],
        outputs,
        baseline,
        [pair.target for pair in pairs],
        [pair.source for pair in pairs],
        tokenize=evaluation.tokenize,
    )
    return comparison


def _in_time(trainer: Trainer, deadline: float | None, share: float, reserved: float = 0.0) -> bool:
    """Whether there is time for a beam search over this share of the examples, and for ``reserved`` seconds more."""
    if deadline is None:
        return True
    return time.monotonic() + _beam_seconds(trainer, share) + 1 + reserved < deadline


def _beam_seconds(trainer: Trainer, share: float) -> float:
    """How long a beam search over this share of the examples takes."""
    return share * trainer.recipe.decoding.beam * trainer.validation_seconds / 2


# ---------------------------------------------------------------------------------------------
# Forgetting: the scores of a fine-tuned model, and of the run that it started from

SCORES_BEFORE = "before.json"
"""The scores before training, in the folder of the prepared data."""
FORGETTING_PAIRS = 500
"""at most this many pairs of each data set are scored, evenly spaced"""
TIMED_PAIRS = 8
"""pairs that are translated to estimate the time"""
FORGETTING_SHARE = 0.05
"""of the time limit, for each of the four scores"""


def score_before_fine_tuning(
    run: RunDir, recipe: Recipe, reporter: ProgressReporter, deadline: float | None
) -> None:
    """Score the run ``training.init_from`` on its own data and on the new data; nothing if this run is resumed."""
    if recipe.training.init_from is None or checkpoint_files(run.checkpoints):
        return
    (run.data / SCORES_BEFORE).unlink(missing_ok=True)
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
            pairs = pairs[: _affordable_pairs(model, pairs, deadline)]
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
                f"Before fine-tuning, {name} data ({kind} of {of}, {len(pairs):,} pairs): {_format_scores(results)}"
            )
    scores = {"from": str(initial), "seconds": round(seconds, 1), "sets": sets}
    write_text(run.data / SCORES_BEFORE, json.dumps(scores, indent=2) + "\n")


def forgetting_seconds(run: RunDir, recipe: Recipe) -> float:
    """How long ``score_after_fine_tuning`` takes: as long as scoring took before."""
    path = run.data / SCORES_BEFORE
    if recipe.training.init_from is None or not path.is_file():
        return 0.0
    return float(json.loads(path.read_text(encoding="utf-8"))["seconds"])


def score_after_fine_tuning(
    run: RunDir, recipe: Recipe, model: Model, reporter: ProgressReporter, deadline: float | None
) -> dict[str, Any] | None:
    """The scores before and after, for the card; None if there is nothing to compare with."""
    path = run.data / SCORES_BEFORE
    if recipe.training.init_from is None or not path.is_file():
        return None
    before = json.loads(path.read_text(encoding="utf-8"))
    if deadline is not None and time.monotonic() + forgetting_seconds(run, recipe) > deadline:
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
        longer = "" if deadline is None else "a longer --minutes, "
        reporter.message(
            f"On the new data, the model scores worse than before fine-tuning: use {before['from']}, or fine-tune "
            f"with more pairs, {longer}--mix 0.5 or a smaller training.learning_rate"
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
    step = max(1.0, len(pairs) / FORGETTING_PAIRS)
    return kind, [pairs[int(number * step)] for number in range(min(len(pairs), FORGETTING_PAIRS))]


def _affordable_pairs(model: Model, pairs: Sequence[Pair], deadline: float | None) -> int:
    """The number of pairs that can be scored in ``FORGETTING_SHARE``."""
    if deadline is None:
        return len(pairs)
    few = pairs[:TIMED_PAIRS]
    start = time.monotonic()
    _score(model, few)
    each = (time.monotonic() - start) / len(few)
    seconds = FORGETTING_SHARE * max(0.0, deadline - start)
    return max(len(few), min(len(pairs), int(seconds / max(each, 1e-6))))


def _score(model: Model, pairs: Sequence[Pair]) -> list[MetricResult]:
    """The scores of a model; none if it does not know the target language of a pair."""
    known = model.recipe.data.targets
    if not known:
        pairs = [Pair(*pair) if language_of(pair) else pair for pair in pairs]
    elif any(language_of(pair) not in known for pair in pairs):
        return []
    return model.evaluate(pairs)


def _format_scores(results: Sequence[MetricResult]) -> str:
    return ", ".join(f"{result.name} {result.value:.1f}" for result in results)
