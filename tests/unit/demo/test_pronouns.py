"""The demo's test of pronouns, for head ablation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from regard.demo.corpus import challenge, generate
from regard.demo.pronouns import pronoun_test, reason_pronoun
from regard.tasks import Translator

REFERENCES = [
    "Der Hund überquerte die Straße nicht, weil er zu müde war.",
    "Er sah die Katze.",
    "Gestern zog der Esel den Schlitten, obwohl er schwer war.",
]


def test_the_pronoun_of_a_reason() -> None:
    assert [*map(reason_pronoun, REFERENCES)] == ["er", None, "er"]
    for item in challenge():
        assert reason_pronoun(item.target) == item.pronoun
    for pair in generate("valid", 200):
        has_reason = " because " in pair.source or " although " in pair.source
        assert (reason_pronoun(pair.target) is not None) == has_reason, pair


def test_pronouns_are_tested_for_the_model_of_the_demo_only(make_run: Callable[..., Path]) -> None:
    model = Translator.load(make_run(), "cpu")
    assert model.run is not None
    model.run.write_card({"note": "another corpus"})
    assert pronoun_test(model, REFERENCES) is None
    model.run.write_card({"challenge": {"correct": 1, "total": 1}})
    correct = pronoun_test(model, REFERENCES)
    assert correct is not None
    assert correct(0, REFERENCES[0]) is True
    assert correct(0, REFERENCES[0].replace(" er ", " sie ")) is False
    assert correct(0, "Der Hund.") is False
    assert correct(1, "weil sie") is None
    assert pronoun_test(model, REFERENCES[1:2]) is None
