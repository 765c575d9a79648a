"""What is reported after training; forgetting is measured on old and new data, where they can be read."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from regard.data.pairs import Pair
from regard.metrics import MetricResult
from regard.recipe import Recipe, make_recipe
from regard.storage.run_dir import RunDir, describe_fine_tuning
from regard.tasks import Model, Translator
from regard.training import evaluation
from regard.training.evaluation import (
    SCORES_BEFORE,
    Summary,
    _in_time,
    choose_examples,
    forgetting_seconds,
    score_after_fine_tuning,
    score_before_fine_tuning,
    summarize,
    summary_seconds,
)
from regard.training.progress import ProgressReporter
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
    assert lines[0] == (
        "On 20 validation pairs: chrF2 50.00 [45.00, 55.00] (the recipe's decoding options; greedy during training)"
    )
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


@pytest.mark.parametrize(
    ("improved", "chosen"),
    [({1.4: 1}, 1.0), ({1.4: 20}, 1.4), ({0.6: 25, 1.4: 20}, 0.6), ({}, 1.0)],
)
def test_the_length_penalty_changes_only_if_another_one_is_significantly_better(
    improved: dict[float, int], chosen: float, tmp_path: Path
) -> None:
    """With a penalty, as many of the 40 translations are right as ``improved`` says; all others are wrong."""
    model = object.__new__(Translator)
    model.recipe = recipe_for(tmp_path, tmp_path)
    model.set_decoding(length_penalty=1.0)
    pairs = [Pair(f"ein Hund {number}", f"{number} dogs run") for number in range(40)]

    def outputs(some: list[Pair]) -> list[str]:
        right = improved.get(model.recipe.decoding.length_penalty, 0)
        return [pair.target if number < right else "x" for number, pair in enumerate(some)]

    recipes = [model.recipe]
    trainer = SimpleNamespace(
        model=model,
        recipe=model.recipe,
        examples=pairs,
        evaluation=SimpleNamespace(outputs=outputs),
        validation_seconds=0.0,
        set_recipe=recipes.append,
    )
    reporter = Messages(RunDir(tmp_path / "run"))
    evaluation.tune_length_penalty(cast(Trainer, trainer), reporter, None)
    assert recipes[-1].decoding.length_penalty == chosen
    verdict = "scores best" if chosen != 1.0 else "is kept; no other is significantly better"
    assert [verdict in text for text in reporter.texts] == [True] * bool(improved)


# ---------------------------------------------------------------------------------------------
# Forgetting


class Messages(ProgressReporter):
    """Collects the messages."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(run)
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


def recipe_for(run: Path, folder: Path) -> Recipe:
    (folder / "new.tsv").write_text("".join(f"ein Hund {n}\ta dog\n" for n in range(40)))
    values: dict[str, Any] = {
        "data": {"root": str(folder), "train": {"pairs": "new.tsv"}, "test": {"pairs": "new.tsv"}},
        "training": {"init_from": str(run)},
        "decoding": {"beam": 1},
        "evaluation": {"metrics": ["chrf"]},
    }
    return make_recipe(values, "test")


def test_old_data_that_are_gone_are_reported_and_new_data_are_scored(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "FORGETTING_PAIRS", 10)
    recipe, run = recipe_for(finished_run, tmp_path), RunDir(tmp_path / "run")
    run.data.mkdir(parents=True)
    reporter = Messages(run)
    score_before_fine_tuning(run, recipe, reporter, None)
    assert (
        "Forgetting is not measured on old data: data.train.pairs: no such file"
        in reporter.texts[0]
    )
    assert f"Before fine-tuning, new data (test of {run}, 10 pairs): chrF2" in reporter.texts[1]
    before = json.loads((run.data / SCORES_BEFORE).read_text())
    assert [*before["sets"]] == ["new"]
    model = Model.load(finished_run, "cpu")
    model.recipe = recipe
    card = score_after_fine_tuning(run, recipe, model, reporter, None)
    assert card is not None
    scores = card["sets"]["new"]
    assert scores["after"][0]["value"] == scores["before"][0]["value"]  # the same model
    assert reporter.texts[2:] == describe_fine_tuning(card)
    before["sets"]["new"]["before"][0]["value"] += 1
    (run.data / SCORES_BEFORE).write_text(json.dumps(before))
    score_after_fine_tuning(run, recipe, model, reporter, None)
    worse = (
        f"On the new data, the model scores worse than before fine-tuning: use {before['from']}, or"
    )
    assert reporter.texts[-1].startswith(worse)
    assert "--minutes" not in reporter.texts[-1]
    score_after_fine_tuning(run, recipe, model, reporter, time.monotonic() + 1_000)
    assert "with more pairs, a longer --minutes, --mix 0.5 or" in reporter.texts[-1]
    late = time.monotonic() - 1
    assert score_after_fine_tuning(run, recipe, model, reporter, late) is None
    assert reporter.texts[-1] == "No time left to measure forgetting"


def test_a_text_that_is_too_long_does_not_end_the_training(
    finished_run: Path, tmp_path: Path
) -> None:
    recipe, run = recipe_for(finished_run, tmp_path), RunDir(tmp_path / "run")
    (tmp_path / "new.tsv").write_text("ein " * 5_000 + "\ta dog\n")
    run.data.mkdir(parents=True)
    reporter = Messages(run)
    score_before_fine_tuning(run, recipe, reporter, None)
    assert "Forgetting is not measured on new data: text 1 has" in reporter.texts[1]
    assert forgetting_seconds(run, recipe) == 0


def test_a_time_limit_reduces_the_number_of_scored_pairs(finished_run: Path) -> None:
    model, pairs = Model.load(finished_run, "cpu"), [Pair("ein Hund", "a dog")] * 300
    assert evaluation._affordable_pairs(model, pairs, None) == 300
    assert evaluation._affordable_pairs(model, pairs, time.monotonic()) == evaluation.TIMED_PAIRS


def test_scores_are_described_with_both_values() -> None:
    values = {"metric": "bleu", "name": "BLEU", "value": 30.0}
    sets = {
        "old": {
            "set": "test of runs/a",
            "pairs": 500,
            "before": [values],
            "after": [{**values, "value": 25.04}],
        },
        "new": {"set": "validation of runs/b", "pairs": 9, "before": [], "after": [values]},
    }
    assert describe_fine_tuning({"sets": sets}) == [
        "Old data (test of runs/a, 500 pairs): BLEU 30.0 before, 25.0 after",
        "New data (validation of runs/b, 9 pairs): BLEU 30.0 after",
    ]


def test_old_pairs_get_the_language_of_the_old_model(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run = recipe_for(finished_run, tmp_path), RunDir(tmp_path / "run")
    run.data.mkdir(parents=True)
    sets = {name: {"pairs": 1, "before": []} for name in ("old", "new")}
    (run.data / SCORES_BEFORE).write_text(json.dumps({"from": "x", "seconds": 0, "sets": sets}))
    scored = list[list[str]]()

    def score(model: object, pairs: list[str]) -> list[object]:
        scored.append(pairs)
        return []

    monkeypatch.setattr(evaluation, "_scored_pairs", lambda recipe: ("test", ["a", "b"]))
    monkeypatch.setattr(evaluation, "with_target_language", lambda pairs, *_: ["tagged", *pairs])
    monkeypatch.setattr(evaluation, "_score", score)
    monkeypatch.setattr(evaluation, "describe_fine_tuning", lambda card: [])
    assert score_after_fine_tuning(
        run, recipe, Model.load(finished_run, "cpu"), Messages(run), None
    )
    assert scored == [["tagged", "a"], ["a"]]
