from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from regard.data.pairs import Pair
from regard.demo.corpus import (
    Challenge,
    Split,
    challenge,
    distinct_sentences,
    generate,
    held_out,
    pronoun_is_correct,
    pronoun_test,
    reason_pronoun,
    reasons,
    split_of,
    wordings,
)
from regard.demo.grammar import Clause, Order, english, explain, german, phrase
from regard.demo.lexicon import (
    ADJECTIVE,
    ADJECTIVES,
    BE,
    NOUN,
    NOUNS,
    VERB,
    VERBS,
    Adjective,
    Article,
    Case,
    Noun,
    Verb,
    adjective_form,
    article_form,
    english_third,
    fits,
    german_finite,
    noun_form,
    personal_pronoun,
    relative_pronoun,
)
from regard.tasks import Translator

CASES: tuple[Case, ...] = ("nom", "acc", "dat")
COUNT = 50_000


@cache
def train() -> tuple[Pair, ...]:
    return tuple(generate("train", COUNT))


@pytest.mark.parametrize(
    ("article", "table"),
    [
        ("the", "der die das die / den die das die / dem der dem den"),
        ("a", "ein eine ein . / einen eine ein . / einem einer einem ."),
        ("no", "kein keine kein keine / keinen keine kein keine / keinem keiner keinem keinen"),
    ],
)
def test_articles(article: Article, table: str) -> None:
    for case, row in zip(CASES, table.split(" / "), strict=True):
        assert [article_form(article, column, case) or "." for column in "mfnp"] == row.split()


@pytest.mark.parametrize(
    ("article", "table"),
    [
        ("the", "alte alte alte alten / alten alte alte alten / alten alten alten alten"),
        ("a", "alter alte altes alten / alten alte altes alten / alten alten alten alten"),
        ("no", "alter alte altes alten / alten alte altes alten / alten alten alten alten"),
        (None, "alter alte altes alte / alten alte altes alte / altem alter altem alten"),
    ],
)
def test_adjective_endings(article: Article | None, table: str) -> None:
    for case, row in zip(CASES, table.split(" / "), strict=True):
        assert [adjective_form("alt", article, column, case) for column in "mfnp"] == row.split()


def test_adjective_stems() -> None:
    stems = {"müde": "müder", "hoch": "hoher", "teuer": "teurer", "sauer": "saurer", "eng": "enger"}
    for adjective, form in stems.items():
        assert adjective_form(adjective, "a", "m", "nom") == form


def test_relative_pronouns() -> None:
    table = "der die das die / den die das die / dem der dem denen"
    for case, row in zip(CASES, table.split(" / "), strict=True):
        assert [relative_pronoun(column, case) for column in "mfnp"] == row.split()


@pytest.mark.parametrize(
    ("noun", "singular", "plural"),
    [
        ("boy", "Junge Jungen Jungen", "Jungen Jungen Jungen"),
        ("student", "Student Studenten Studenten", "Studenten Studenten Studenten"),
        ("bear", "Bär Bären Bären", "Bären Bären Bären"),
        ("lion", "Löwe Löwen Löwen", "Löwen Löwen Löwen"),
        ("farmer", "Bauer Bauern Bauern", "Bauern Bauern Bauern"),
        ("dog", "Hund Hund Hund", "Hunde Hunde Hunden"),
        ("child", "Kind Kind Kind", "Kinder Kinder Kindern"),
        ("apple", "Apfel Apfel Apfel", "Äpfel Äpfel Äpfeln"),
        ("car", "Auto Auto Auto", "Autos Autos Autos"),
    ],
)
def test_nouns(noun: str, singular: str, plural: str) -> None:
    assert [noun_form(NOUN[noun], case) for case in CASES] == singular.split()
    assert [noun_form(NOUN[noun], case, plural=True) for case in CASES] == plural.split()


def test_phrases() -> None:
    old, sour = ADJECTIVE["old"], ADJECTIVE["sour"]
    a_dog = phrase(NOUN["dog"], "a", old)
    assert a_dog.english == "an old dog"
    assert list(a_dog.german.values()) == ["ein alter Hund", "einen alten Hund", "einem alten Hund"]
    milk = phrase(NOUN["milk"], "a", sour)
    assert milk.english == "sour milk"
    assert list(milk.german.values()) == ["saure Milch", "saure Milch", "saurer Milch"]
    assert phrase(NOUN["sheep"], "a").english == "a sheep"
    assert phrase(NOUN["cat"], "a", is_denied=True).german["acc"] == "keine Katze"


@pytest.mark.parametrize(
    ("verb", "forms"),
    [
        ("überqueren", "überquere überquert überqueren überquerte überquerten"),
        ("helfen", "helfe hilft helfen half halfen"),
        ("füttern", "füttere füttert füttern fütterte fütterten"),
        ("öffnen", "öffne öffnet öffnen öffnete öffneten"),
        ("einladen", "lade lädt laden lud luden"),
        ("fressen", "fresse frisst fressen fraß fraßen"),
    ],
)
def test_verbs(verb: str, forms: str) -> None:
    assert _conjugated(VERB[verb]) == forms.split()


def test_to_be() -> None:
    assert _conjugated(BE) == ["bin", "ist", "sind", "war", "waren"]


def _conjugated(verb: Verb) -> list[str]:
    persons = [(True, False, False), (False, False, False), (False, True, False)]
    times = [*persons, (False, False, True), (False, True, True)]
    return [german_finite(verb, *which) for which in times]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("statement", "der Hund sieht die Katze nicht an"),
        ("inverted", "sieht der Hund die Katze nicht an"),
        ("final", "der Hund die Katze nicht ansieht"),
    ],
)
def test_one_clause_in_every_order(order: Order, expected: str) -> None:
    dog, cat = phrase(NOUN["dog"], "the"), phrase(NOUN["cat"], "the")
    clause = Clause(dog, VERB["ansehen"], past=False, negated=True, objects=((cat, "acc"),))
    assert german(clause, order) == expected
    assert english(clause) == "the dog doesn't look at the cat"
    assert english(clause, inverted=True) == "doesn't the dog look at the cat"


def test_kein_is_the_negation() -> None:
    dog, cat = phrase(NOUN["dog"], "the"), phrase(NOUN["cat"], "a", is_denied=True)
    clause = Clause(dog, VERB["sehen"], past=True, negated=True, objects=((cat, "acc"),), can=True)
    assert german(clause, "final") == "der Hund keine Katze sehen konnte"
    assert english(clause) == "the dog couldn't see a cat"


def test_english_third_person() -> None:
    verbs = ["cross", "go", "carry", "play", "watch", "buy", "see"]
    thirds = ["crosses", "goes", "carries", "plays", "watches", "buys", "sees"]
    assert list(map(english_third, verbs)) == thirds


def test_the_lexicon_is_large_and_consistent() -> None:
    assert len(NOUNS) >= 60
    assert len(VERBS) >= 40
    assert len(ADJECTIVES) >= 40
    assert {noun.gender for noun in NOUNS if noun.is_living} == set("mfn")
    known = frozenset[str]().union(*(noun.tags for noun in NOUNS))
    assert all(adjective.fits <= known for adjective in ADJECTIVES)
    # No English past may look like the present, or "they read" would have two translations.
    assert all(verb.english != verb.english_past for verb in VERBS)


def test_the_dog_sentences() -> None:
    items = challenge()
    dog, street = (
        "The dog didn't cross the street because it was too",
        "Der Hund überquerte die Straße",
    )
    assert Challenge(f"{dog} tired.", f"{street} nicht, weil er zu müde war.", "er") in items
    assert Challenge(f"{dog} wide.", f"{street} nicht, weil sie zu breit war.", "sie") in items


@pytest.mark.parametrize(
    ("pattern", "meaning"),
    [
        (r"^Der \w+ sah .* nicht an\.$", "nicht before the prefix"),
        (r" konnte .* nicht \w+en, weil ", "nicht before the infinitive"),
        (r"^Gestern \w+ (der|die|das) ", "verb second"),
        (r" (im|zum|zur) ", "contraction"),
        (r", (der|die|das|den|dem) .*, (ist|war) ", "relative clause between commas"),
        (r" (keine|keinen|kein) ", "kein"),
        (r"^W(er|en|em|as|arum|o|ann) .*\?$", "questions"),
    ],
)
def test_patterns_occur(pattern: str, meaning: str) -> None:
    assert any(re.search(pattern, pair.target) for pair in train()), meaning


def test_no_wrong_patterns() -> None:
    wrong = re.compile(
        r"\b(in|zu) dem\b|\bzu der\b|nicht (der|die|das|den|dem)\b(?!.*\b(im|auf|hinter)\b)"
        r"|\bnicht (ein|eine|einen|einem|einer) \w| {2}|\bvon dem\b"
    )
    assert [pair for pair in train() if wrong.search(pair.target)] == []
    wrong_english = re.compile(r"\b[Aa] [aeiou]|\b[Aa]n [^aeiou]|n't \w+ (didn't|no)\b| {2}")
    assert [pair for pair in train() if wrong_english.search(pair.source)] == []


def test_english_determines_german() -> None:
    targets = {pair.source: pair.target for pair in train()}
    again = [pair for pair in generate("train", COUNT // 2, seed=2) if pair.source in targets]
    assert len(again) > 500
    assert all(targets[pair.source] == pair.target for pair in again)


def test_sentences_look_like_sentences() -> None:
    for source, target in train():
        assert source[0].isupper()
        assert target[0].isupper()
        assert source[-1] == target[-1]
        assert source[-1] in ".?"
        assert 2 <= len(source.split()) <= 20
        assert ("because" in source) == (", weil " in target)
        assert ("although" in source) == (", obwohl " in target)


def test_splits_are_disjoint() -> None:
    splits: tuple[Split, ...] = ("valid", "test")
    for split in splits:
        pairs = list(generate(split, 1000, seed=3))
        assert len({pair.source for pair in pairs}) == 1000
        assert {split_of(pair.source) for pair in pairs} == {split}
    assert len({pair.source for pair in train()}) == COUNT
    assert {split_of(pair.source) for pair in train()} == {"train"}


class ParsedReason(NamedTuple):
    """The parts of a sentence with a reason, found without the grammar."""

    subject: Noun
    object: Noun
    adjective: Adjective
    pronoun: str
    german_pronoun: str

    @property
    def is_of_subject(self) -> bool:
        return fits(self.adjective, self.subject)

    @property
    def antecedent(self) -> Noun:
        return self.subject if self.is_of_subject else self.object


NOUN_BY_WORD = {
    word: noun for noun in NOUNS for word in (noun.english, noun.english_plural) if word
}


def _parse_reason(source: str, target: str) -> ParsedReason | None:
    found = re.search(r"^(.*) (?:because|although) (\w+) .*?(\w+)\.$", source)
    if not found:
        return None
    nouns = [NOUN_BY_WORD[word] for word in found[1].split() if word in NOUN_BY_WORD]
    clause = re.search(r", (?:weil|obwohl) (\w+) ", target)
    assert clause
    reason = ParsedReason(nouns[0], nouns[-1], ADJECTIVE[found[3]], found[2], clause[1])
    assert fits(reason.adjective, reason.subject) != fits(reason.adjective, reason.object), source
    return reason


@cache
def _train_reasons() -> tuple[ParsedReason, ...]:
    return tuple(filter(None, (_parse_reason(*pair) for pair in train())))


def test_pronouns_agree_with_their_antecedents() -> None:
    assert 0.35 < len(_train_reasons()) / COUNT < 0.45
    for reason in _train_reasons():
        column = "p" if reason.pronoun == "they" else reason.antecedent.gender
        assert reason.german_pronoun == personal_pronoun(column)


def test_held_out_pairs_are_not_in_training_but_their_parts_are() -> None:
    trained = {(reason.antecedent, reason.adjective) for reason in _train_reasons()}
    dog, street = (NOUN["dog"], ADJECTIVE["tired"]), (NOUN["street"], ADJECTIVE["wide"])
    assert {dog, street} <= held_out()
    assert not trained & held_out()
    nouns, adjectives = Counter(noun for noun, _ in trained), Counter(word for _, word in trained)
    assert all(nouns[noun] >= 2 and adjectives[adjective] >= 2 for noun, adjective in held_out())


def test_challenge_is_balanced() -> None:
    items = challenge()
    assert len({item.source for item in items}) == len(items) == 204
    assert Counter(item.pronoun for item in items) == {"er": 68, "sie": 68, "es": 68}
    parsed = [reason for item in items if (reason := _parse_reason(item.source, item.target))]
    cells = Counter((reason.antecedent.gender, reason.is_of_subject) for reason in parsed)
    assert set(cells.values()) == {34}
    assert all(reason.subject.gender != reason.object.gender for reason in parsed)
    assert all((reason.antecedent, reason.adjective) in held_out() for reason in parsed)


def test_pronoun_is_correct() -> None:
    for item in challenge():
        assert pronoun_is_correct(item, item.target)
        other = "er" if item.pronoun == "sie" else "sie"
        assert not pronoun_is_correct(item, re.sub(r"weil \w+", f"weil {other}", item.target))
    assert not pronoun_is_correct(challenge()[0], "Er schlief.")


def test_every_wording_is_a_different_sentence() -> None:
    assert len(set(reasons())) == len(reasons())
    some = [
        (reason, *wording) for reason in reasons()[::400] for wording in product(*wordings(reason))
    ]
    assert len({explain(*wording).source for wording in some}) == len(some)


def test_more_than_a_million_sentences() -> None:
    assert distinct_sentences() > 1_000_000


def test_requesting_too_many_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        next(generate("valid", 10**9))


def test_the_same_in_every_process() -> None:
    code = (
        "from hashlib import sha256; from regard.demo.corpus import challenge, generate\n"
        "print(sha256(repr([*generate('train', 2000, 7), *challenge()]).encode()).hexdigest())"
    )
    path = os.pathsep.join(sys.path)
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


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
