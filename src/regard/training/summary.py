"""The report after training: scores with intervals and examples from best to worst; tuning of the length penalty."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from regard.data.pairs import Pair
from regard.metrics import MetricResult
from regard.tasks import Translator
from regard.training.progress import ProgressReporter, shorten_text

if TYPE_CHECKING:
    from regard.training.trainer import Trainer

LENGTH_PENALTIES = (0.6, 1.0, 1.4)
MAX_TUNING_PAIRS = 200
"""validation pairs that the length penalty is tuned on"""
EXAMPLES, EXAMPLE_SECONDS = 5, 5.0
"""validation pairs that are shown, also after the deadline, if their translation takes no longer than this"""


class Example(NamedTuple):
    """A validation pair and its translation."""

    rank: str
    """best, good, typical, poor or worst, by chrF"""
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
        lines = [f"On {self.pairs:,} validation pairs: {scores}"]
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

    Without time, only a few pairs are translated, and not scored. Empty if the task is not translation, or if even
    these take too long.
    """
    model, pairs = trainer.model, trainer.examples
    if trainer.recipe.data.test is not None:
        pairs = pairs[
            :MAX_TUNING_PAIRS
        ]  # the test set is scored, so these are only for the examples
    if not isinstance(model, Translator) or not pairs:
        return Summary(0, [], [])
    in_time = _in_time(trainer, deadline, len(pairs) / len(trainer.examples))
    if not in_time:
        pairs = pairs[:EXAMPLES]
        if _beam_seconds(trainer, len(pairs) / len(trainer.examples)) > EXAMPLE_SECONDS:
            return Summary(0, [], [])
    translations = trainer.evaluation.outputs(pairs)
    results = model.score_outputs(translations, pairs) if in_time else []
    return Summary(len(pairs), results, choose_examples(pairs, translations))


def summary_seconds(trainer: Trainer) -> float:
    """How long the summary takes; ``validation_seconds`` of the trainer must be known."""
    if not isinstance(trainer.model, Translator) or not trainer.examples:
        return 0.0
    count = len(trainer.examples)
    if trainer.recipe.data.test is not None:
        count = min(count, MAX_TUNING_PAIRS)
    return _beam_seconds(trainer, count / len(trainer.examples)) + 1


def choose_examples(pairs: list[Pair], translations: list[str]) -> list[Example]:
    """The best, a good, a typical, a poor and the worst translation, by chrF of the sentence."""
    from sacrebleu import sentence_chrf

    values = [
        sentence_chrf(translation, [pair.target]).score
        for pair, translation in zip(pairs, translations, strict=True)
    ]
    order = sorted(range(len(pairs)), key=lambda index: -values[index])
    last = len(order) - 1
    places = {
        "best": 0,
        "good": last // 4,
        "typical": last // 2,
        "poor": 3 * last // 4,
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
    """Choose the length penalty that scores best on some validation pairs, and write it into the recipe."""
    model, pairs = trainer.model, trainer.examples[:MAX_TUNING_PAIRS]
    if not isinstance(model, Translator) or not pairs:
        return
    if model.non_autoregressive or trainer.recipe.decoding.is_sampling:
        return  # they have no length penalty
    current = trainer.recipe.decoding.length_penalty
    scores: dict[float, float] = {}
    summary = summary_seconds(trainer)  # is more important than this
    for penalty in sorted({current, *LENGTH_PENALTIES}, key=lambda value: value != current):
        if not _in_time(trainer, deadline, len(pairs) / len(trainer.examples), summary):
            break
        model.set_decoding(length_penalty=penalty)
        outputs = trainer.evaluation.outputs(pairs)
        (result,) = model.score_outputs(outputs, pairs, quick=True)
        scores[penalty] = result.value if result.higher_is_better else -result.value
    best = max(scores, key=lambda penalty: scores[penalty]) if scores else current
    model.set_decoding(length_penalty=best)
    trainer.apply(trainer.recipe.model_copy(update={"decoding": model.recipe.decoding}))
    if len(set(scores.values())) > 1:
        listing = ", ".join(
            f"{penalty:g}: {abs(scores[penalty]):.1f}" for penalty in sorted(scores)
        )
        name = trainer.recipe.evaluation.metrics[0]
        reporter.message(
            f"Length penalty {best:g} scores best on validation pairs ({name}: {listing})"
        )


def _in_time(trainer: Trainer, deadline: float | None, share: float, reserved: float = 0.0) -> bool:
    """Whether there is time for a beam search over this share of the examples, and for ``reserved`` seconds more."""
    if deadline is None:
        return True
    return time.monotonic() + _beam_seconds(trainer, share) + 1 + reserved < deadline


def _beam_seconds(trainer: Trainer, share: float) -> float:
    """How long a beam search over this share of the examples takes."""
    return share * trainer.recipe.decoding.beam * trainer.validation_seconds / 2
