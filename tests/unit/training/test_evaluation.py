"""What is reported after training."""

import time
from types import SimpleNamespace
from typing import cast

import pytest

from regard.data.pairs import Pair
from regard.metrics import MetricResult
from regard.tasks import Translator
from regard.training.evaluation import (
    Summary,
    _in_time,
    choose_examples,
    summarize,
    summary_seconds,
)
from regard.training.trainer import Trainer


def test_examples_range_from_the_best_to_the_worst() -> None:
    words = "abcdefgh"
    pairs = [Pair(f"source {n}", words) for n in range(9)]
    translations = [words[: 8 - n] or "x" for n in range(9)]
    examples = choose_examples(pairs, translations)
    ranks = ["best", "top 25%", "median", "low 25%", "worst"]
    assert [example.rank for example in examples] == ranks
    assert [example.pair.source[-1] for example in examples] == ["0", "2", "4", "6", "8"]
    scores = [example.chrf for example in examples]
    assert scores == sorted(scores, reverse=True)
    assert (scores[0], scores[-1]) == (100, 0)


def test_one_pair_is_one_example() -> None:
    (example,) = choose_examples([Pair("a", "b")], ["b"])
    assert example.rank == "best"


def test_the_summary_has_scores_with_intervals_and_two_lines_for_each_example() -> None:
    result = MetricResult("chrf", "chrF2", 50.0, 45.0, 55.0, "signature", True)
    summary = Summary(20, [result], choose_examples([Pair("a", "b"), Pair("c", "d")], ["b", "x"]))
    lines = summary.lines()
    assert lines[0] == "On 20 validation pairs: chrF2 50.00 [45.00, 55.00]"
    assert len(lines) == 1 + 2 * 2
    assert Summary(0, [], []).lines() == []


def test_examples_without_scores_say_why() -> None:
    summary = Summary(2, [], choose_examples([Pair("a", "b"), Pair("c", "d")], ["b", "x"]))
    lines = summary.lines()
    assert lines[0] == "No time left to score the validation pairs; 2 of them:"
    assert len(lines) == 1 + 2 * 2


@pytest.mark.parametrize(("seconds", "shown"), [(10.0, 5), (100.0, 0)])
def test_a_few_examples_are_translated_after_the_deadline(seconds: float, shown: int) -> None:
    """A beam of 4 over 5 of 20 examples takes half of a validation."""
    pairs = [Pair(f"source {n}", f"target {n}") for n in range(20)]
    recipe = SimpleNamespace(decoding=SimpleNamespace(beam=4), data=SimpleNamespace(test=None))
    evaluation = SimpleNamespace(outputs=lambda pairs: [pair.target for pair in pairs])
    model = object.__new__(Translator)
    trainer = SimpleNamespace(
        recipe=recipe,
        model=model,
        examples=pairs,
        evaluation=evaluation,
        validation_seconds=seconds,
    )
    summary = summarize(cast(Trainer, trainer), deadline=time.monotonic())
    assert (summary.pairs, summary.results) == (shown, [])
    assert len(summary.examples) == shown


@pytest.mark.parametrize(("left", "scored"), [(21.5, 100), (20.5, 50), (6.5, 25), (4.5, 0)])
def test_as_many_pairs_are_scored_as_there_is_time_for(
    left: float, scored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A beam of 4 over all 100 examples takes two validations, 20 seconds, and 1 more; they are evenly spaced."""
    monkeypatch.setattr("regard.training.evaluation.time.monotonic", lambda: 1000.0)
    recipe = SimpleNamespace(decoding=SimpleNamespace(beam=4), data=SimpleNamespace(test=None))
    model = object.__new__(Translator)
    monkeypatch.setattr(model, "score_outputs", lambda *_: [len], raising=False)
    trainer = SimpleNamespace(
        recipe=recipe,
        model=model,
        examples=[Pair(f"source {n}", f"target {n}") for n in range(100)],
        evaluation=SimpleNamespace(outputs=lambda pairs: [pair.target for pair in pairs]),
        validation_seconds=10.0,
    )
    summary = summarize(cast(Trainer, trainer), 1000.0 + left)
    assert (summary.pairs if summary.results else 0) == scored


@pytest.mark.parametrize(("test", "seconds"), [(None, 21.0), ("test.tsv", 11.0)])
def test_time_is_reserved_for_the_summary(test: str | None, seconds: float) -> None:
    """A beam of 4 over all examples takes two validations; with test data only half of the 400 are translated."""
    recipe = SimpleNamespace(decoding=SimpleNamespace(beam=4), data=SimpleNamespace(test=test))
    trainer = SimpleNamespace(
        recipe=recipe,
        model=object.__new__(Translator),
        examples=[Pair("a", "b")] * 400,
        validation_seconds=10.0,
    )
    assert summary_seconds(cast(Trainer, trainer)) == seconds
    trainer.examples = []
    assert summary_seconds(cast(Trainer, trainer)) == 0


def test_the_length_penalty_is_tuned_only_if_there_is_time() -> None:
    """A beam of 4 over half of the examples takes about as long as one validation, 10 seconds, and 1 more."""
    recipe = SimpleNamespace(decoding=SimpleNamespace(beam=4))
    trainer = cast(Trainer, SimpleNamespace(recipe=recipe, validation_seconds=10.0))
    assert _in_time(trainer, None, 0.5)
    assert _in_time(trainer, time.monotonic() + 20, 0.5)
    assert not _in_time(trainer, time.monotonic() + 10.5, 0.5)
    assert not _in_time(trainer, time.monotonic() + 20, 0.5, reserved=15)
