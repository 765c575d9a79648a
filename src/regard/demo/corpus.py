"""A small English-German corpus generated from a grammar, so that the demo needs no download.

Notable properties:

- Many sentences have a pronoun that only the meaning resolves: "The dog didn't cross the street
  because it was too tired" (er, the dog) or "too wide" (sie, the street). The adjective fits
  exactly one of the two nouns, and the German pronoun shows which one was understood.
- English determines German: every English sentence has one translation. English past is always German
  simple past, and present is present.
- A hash of the English sentence determines its split, so train, valid and test are disjoint for every
  seed, and the split of any sentence can be checked.
- Some pairs of noun and adjective are held out: in no split does a pronoun refer to that noun with
  that adjective. `challenge` consists of exactly these pairs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from math import prod
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from regard.data.pairs import Pair
from regard.demo import lexicon
from regard.demo.grammar import (
    PERSONAL,
    WHO,
    Clause,
    Degree,
    Expression,
    Framing,
    NounPhrase,
    Reason,
    Tense,
    explain,
    phrase,
    place,
    predicate,
    question,
    related_subject,
    relative,
    sentence,
    statement,
)
from regard.demo.lexicon import Adjective, Article, Frame, Noun, Verb, fits, nouns_with
from regard.storage.atomic_files import write_text

if TYPE_CHECKING:
    from regard.inspection.head_ablation import Correct
    from regard.tasks import Translator

Split = Literal["train", "valid", "test"]
PAIRS: dict[Split, int] = {"train": 120_000, "valid": 500, "test": 1_000}
"""the number of pairs of each split"""
T = TypeVar("T")


def _pick(rng: Random, items: Sequence[T]) -> T:
    """A random element; `Random.choice` takes twice as long."""
    return items[int(rng.random() * len(items))]


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


# Sentences with a reason, in which a pronoun must be resolved.


class Wordings(NamedTuple):
    """The ways to put a reason into words; the first of each is the simplest."""

    framings: tuple[Framing, ...]
    tenses: tuple[Tense, ...]
    subjects: tuple[NounPhrase, ...]
    objects: tuple[NounPhrase, ...]


_TENSES = (Tense(True), Tense(False), *(Tense(True, time) for time in lexicon.TIMES_PAST))
_ATTRIBUTES = tuple(lexicon.ADJECTIVE[word] for word in ("white", "black", "old", "big", "small"))
_UNWILLING = frozenset(  # reasons not to want something, rather than not to be able to
    lexicon.ADJECTIVE[word]
    for word in (
        *("lazy", "stubborn", "timid", "nervous", "careful", "impatient"),
        *("spooky", "damp", "cramped", "boring", "dirty"),
    )
)


@cache
def reasons() -> tuple[Reason, ...]:
    """All reasons, including those that are held out."""
    candidates = (reason for frame in lexicon.ACTIONS for reason in _reasons_of(frame))
    return tuple(dict.fromkeys(candidates))


def _reasons_of(frame: Frame) -> Iterator[Reason]:
    """Every reason of the frame in which the adjective fits only one of the two nouns."""
    for subject in frame.subjects:
        if subject.is_person and subject.gender == "n":  # she or it, es or sie: both are used
            continue
        for thing in frame.objects:
            for adjective in (*frame.hinders, *frame.drives):
                of_subject, of_object = fits(adjective, subject), fits(adjective, thing)
                if of_subject != of_object:
                    hinders = adjective in frame.hinders
                    yield Reason(frame.verb, subject, thing, adjective, of_subject, hinders)


@cache
def held_out() -> frozenset[tuple[Noun, Adjective]]:
    """The pairs of antecedent and adjective that are reserved for the challenge.

    The two of the dog sentence, then others by hash, the same number for each gender of animals and of things.
    Every noun and adjective keeps a few partners in training, so that all parts of a challenge are learned.
    """
    animals = [reason for reason in reasons() if not reason.subject.is_person]
    pairs = {(reason.antecedent, reason.adjective) for reason in animals}
    partners = Counter[Noun | Adjective](part for pair in pairs for part in pair)
    cells = Counter[tuple[str, bool]]()
    held = set()
    for noun, adjective in sorted(pairs, key=_held_out_order):
        cell = noun.gender, noun.is_living
        if (
            cells[cell] < _HELD_OUT_PER_CELL
            and min(partners[noun], partners[adjective]) > _MIN_PARTNERS
        ):
            held.add((noun, adjective))
            partners.subtract((noun, adjective))
            cells[cell] += 1
    return frozenset(held)


_HELD_OUT_PER_CELL = 11  # pairs for each gender of animals and of things
_MIN_PARTNERS = 2  # partners in training that every noun and adjective keeps at least


def _held_out_order(pair: tuple[Noun, Adjective]) -> tuple[bool, int]:
    name = f"{pair[0].english}/{pair[1].english}"
    return name not in ("dog/tired", "street/wide"), _digest(name)


def _is_held_out(reason: Reason) -> bool:
    return (reason.antecedent, reason.adjective) in held_out()


@cache
def wordings(reason: Reason) -> Wordings:
    """All wordings of a reason."""
    subject, thing = reason.subject, reason.object
    plurals = [phrase(subject, "the", plural=True)] if subject.english_plural else []
    of_subject = [word for word in _ATTRIBUTES if fits(word, subject)]
    of_object = [w for w in _ATTRIBUTES[:3] if fits(w, thing) and w != reason.adjective]
    return Wordings(
        _framings(reason),
        _TENSES,
        (phrase(subject, "the"), *plurals, *(phrase(subject, "the", word) for word in of_subject)),
        (phrase(thing, "the"), *(phrase(thing, "the", word) for word in of_object)),
    )


def _framings(reason: Reason) -> tuple[Framing, ...]:
    although: tuple[Degree, ...] = ("",) if reason.adjective.is_absolute else ("very", "")
    can_be_too = reason.hinders and not reason.adjective.is_absolute
    because: tuple[Degree, ...] = ("too", *although) if can_be_too else although
    unable = reason.hinders and reason.adjective not in _UNWILLING
    return (
        *(Framing(False, False, degree) for degree in because),
        *(Framing(False, True, degree) for degree in because if unable),
        *(Framing(True, False, degree) for degree in although),
    )


@cache
def _training_reasons() -> dict[tuple[bool, bool], tuple[tuple[Reason, ...], ...]]:
    """The reasons that are not held out, by (is person, is about the subject), grouped by verb and polarity."""
    groups: dict[tuple[bool, bool], dict[tuple[Verb, bool], list[Reason]]] = {}
    for reason in reasons():
        if not _is_held_out(reason):
            group = groups.setdefault((reason.subject.is_person, reason.of_subject), {})
            group.setdefault((reason.verb, reason.hinders), []).append(reason)
    return {key: tuple(map(tuple, group.values())) for key, group in groups.items()}


def _reason_sentence(rng: Random) -> Pair:
    key = (rng.random() < 0.25, rng.random() < 0.5)
    reason = _pick(rng, _pick(rng, _training_reasons()[key]))
    framings, tenses, subjects, objects = wordings(reason)
    tense = tenses[0] if rng.random() < 0.4 else _pick(rng, tenses)
    subject = subjects[0] if rng.random() < 0.6 else _pick(rng, subjects)
    thing = objects[0] if rng.random() < 0.6 else _pick(rng, objects)
    return explain(reason, _pick(rng, framings), tense, subject, thing)


# Other sentences.


@cache
def _adjectives_of(noun: Noun) -> tuple[Adjective, ...]:
    return tuple(adjective for adjective in lexicon.ADJECTIVES if fits(adjective, noun))


_DESCRIBED = tuple(noun for noun in lexicon.NOUNS if _adjectives_of(noun))
_LIVING, _PEOPLE = nouns_with("animal person"), nouns_with("person")
_PLURAL_NOUNS = frozenset(nouns_with("animal fruit carrot sausage text portable")) - {
    lexicon.NOUN["sheep"]
}
_DRAWBACKS = frozenset(adjective for frame in lexicon.ACTIONS for adjective in frame.hinders)
_GIFTS = nouns_with("gift apple pear")
_NOUNS_FOR_WHAT = nouns_with(
    "plant fodder savoury drink pullable portable text ware gate door window"
)
_CIRCUMSTANCES = (("where", "wo"), ("when", "wann"), ("why", "warum"))
_ARTICLE_CHOICES: dict[str, tuple[Article, ...]] = {
    "definite": ("the",),
    "positive": ("the", "the", "a"),
    "any": ("the", "the", "the", "a", "a", "no"),
}


def _noun_phrase(rng: Random, noun: Noun, articles: str, negated: bool = False) -> NounPhrase:
    """A noun phrase, singular or plural, with or without an adjective."""
    adjectives = _adjectives_of(noun)
    adjective = _pick(rng, adjectives) if adjectives and rng.random() < 0.3 else None
    article = _pick(rng, _ARTICLE_CHOICES[articles])
    has_plural = noun in _PLURAL_NOUNS if article == "a" else bool(noun.english_plural)
    plural = has_plural and rng.random() < 0.25
    return phrase(noun, article, adjective, plural, is_denied=negated and article == "a")


def _plain(rng: Random, noun: Noun) -> NounPhrase:
    return phrase(noun, "the", plural=bool(noun.english_plural) and rng.random() < 0.3)


def _degree(rng: Random, adjective: Adjective, degrees: tuple[Degree, ...]) -> Degree:
    return "" if adjective.is_absolute else _pick(rng, degrees)


def _subject(rng: Random, noun: Noun, negated: bool) -> NounPhrase:
    if noun.is_person and rng.random() < 0.3:
        return _pick(rng, PERSONAL)
    return _noun_phrase(rng, noun, "definite" if negated else "any")


def _action(rng: Random, frame: Frame, subject: Noun, negated: bool) -> Clause:
    """A clause of subject, verb, and an object that is not the subject."""
    noun = _pick(rng, frame.objects)
    while noun is subject:
        noun = _pick(rng, frame.objects)
    thing = _noun_phrase(rng, noun, "positive", negated)
    past = rng.random() < 0.6
    who = _subject(rng, subject, negated)
    return Clause(who, frame.verb, past, negated, ((thing, frame.verb.case),))


def _action_sentence(rng: Random) -> Pair:
    frame = _pick(rng, lexicon.ACTIONS)
    clause = _action(rng, frame, _pick(rng, frame.subjects), rng.random() < 0.3)
    is_dated = clause.past and frame.verb not in lexicon.STATES and rng.random() < 0.4
    return sentence(*statement(clause, _pick(rng, lexicon.TIMES_PAST) if is_dated else None))


def _question_sentence(rng: Random) -> Pair:
    """Did the dog cross the street? Why did it? Who crossed it? What did it cross?"""
    frame, draw = _pick(rng, lexicon.ACTIONS), rng.random()
    noun, negated = _pick(rng, frame.subjects), draw < 0.6 and rng.random() < 0.25
    clause = _action(rng, frame, noun, negated)
    if draw > 0.8 and noun.is_person:
        return sentence(*statement(clause._replace(subject=WHO)), "?")
    clause = clause._replace(subject=_noun_phrase(rng, noun, "definite"))
    question_word = _object_question(frame)
    if draw > 0.6 and question_word:
        return question(clause._replace(objects=()), question_word)
    return question(clause, ("why", "warum") if draw < 0.3 else None)


@cache
def _object_question(frame: Frame) -> Expression | None:
    """The question word for the object: who for living beings, what for things, none for places."""
    if all(noun.is_living for noun in frame.objects):
        return ("who", "wem" if frame.verb.case == "dat" else "wen")
    return ("what", "was") if all(noun in _NOUNS_FOR_WHAT for noun in frame.objects) else None


def _description_sentence(rng: Random) -> Pair:
    """The street is very wide. Why was the dog so tired?"""
    noun, draw, past = _pick(rng, _DESCRIBED), rng.random(), rng.random() < 0.5
    adjective, negated = _pick(rng, _adjectives_of(noun)), rng.random() < 0.3
    degrees: tuple[Degree, ...] = ("", "very", "too") if adjective in _DRAWBACKS else ("", "very")
    degree = _degree(rng, adjective, degrees)
    is_personal = noun.is_person and draw < 0.3
    subject = _pick(rng, PERSONAL) if is_personal else _plain(rng, noun)
    clause = Clause(subject, lexicon.BE, past, tail=predicate(adjective, degree))
    if draw < 0.7:
        return sentence(*statement(clause._replace(negated=negated)))
    if draw < 0.85 or adjective.is_absolute:
        return question(clause)
    return question(clause._replace(tail=predicate(adjective, "so")), ("why", "warum"))


def _place(rng: Random, places: Sequence[tuple[str, str, Noun]]) -> Expression:
    preposition, german_preposition, noun = _pick(rng, places)
    adjective = _pick(rng, _adjectives_of(noun)) if rng.random() < 0.2 else None
    return place((preposition, german_preposition), phrase(noun, "the", adjective))


def _doing_sentence(rng: Random) -> Pair:
    """The child slept in the garden. Every day she goes to the lake. Where did the dog wait?"""
    draw, past, negated = rng.random(), rng.random() < 0.6, rng.random() < 0.25
    if draw < 0.3:
        who, goal = _subject(rng, _pick(rng, _LIVING), negated), _place(rng, lexicon.GOALS)
        clause = Clause(who, _pick(rng, lexicon.GOING), past, negated, tail=goal)
    else:
        verb, nouns = _pick(rng, lexicon.DOINGS)
        clause = Clause(_subject(rng, _pick(rng, nouns), negated), verb, past, negated)
        if draw > 0.85:
            who = _noun_phrase(rng, _pick(rng, nouns), "definite")
            question_word = _pick(rng, _CIRCUMSTANCES if not verb.prefix else _CIRCUMSTANCES[1:])
            return question(clause._replace(subject=who, negated=False), question_word)
        if draw < 0.7 and not verb.prefix:
            clause = clause._replace(tail=_place(rng, lexicon.PLACES))
    is_dated = not clause.subject.english.startswith("no ") and not negated and rng.random() < 0.4
    times = lexicon.TIMES_PAST if past else lexicon.TIMES_PRESENT
    return sentence(*statement(clause, _pick(rng, times) if is_dated else None))


def _giving_sentence(rng: Random) -> Pair:
    """The woman showed the child the picture."""
    negated, past = rng.random() < 0.25, rng.random() < 0.6
    giver, taker = rng.sample(_PEOPLE, 2)
    subject = _subject(rng, giver, negated)
    whom = _noun_phrase(rng, taker, "definite")
    gift = _noun_phrase(rng, _pick(rng, _GIFTS), "positive", negated)
    clause = Clause(
        subject, _pick(rng, lexicon.GIVING), past, negated, ((whom, "dat"), (gift, "acc"))
    )
    return sentence(*statement(clause))


def _relative_sentence(rng: Random) -> Pair:
    """The dog that crossed the street was tired. We saw the dog that crossed the street."""
    frame, past, draw = _pick(rng, lexicon.ACTIONS), rng.random() < 0.6, rng.random()
    subject = _pick(rng, frame.subjects)
    clause = _action(rng, frame, subject, False)._replace(past=past)
    if draw < 0.35:
        thing = _pick(rng, [noun for noun in frame.objects if noun is not subject])
        who = _noun_phrase(rng, subject, "definite")
        relative_clause = relative(thing, clause._replace(subject=who, objects=()), frame.verb.case)
        return _describe_related(rng, thing, relative_clause, past)
    relative_clause = relative(subject, clause, "nom")
    if draw < 0.65 or frame.verb in lexicon.NOTICING:
        return _describe_related(rng, subject, relative_clause, past)
    is_named = draw < 0.85 and not subject.is_person
    witness = _plain(rng, _pick(rng, _PEOPLE)) if is_named else _pick(rng, PERSONAL)
    verb = _pick(rng, lexicon.NOTICING)
    main = statement(Clause(witness, verb, past, objects=((phrase(subject, "the"), verb.case),)))
    return sentence(f"{main.source} {relative_clause[0]}", f"{main.target}, {relative_clause[1]}")


def _describe_related(rng: Random, noun: Noun, relative_clause: Expression, past: bool) -> Pair:
    adjective = _pick(rng, _adjectives_of(noun))
    tail = predicate(adjective, _degree(rng, adjective, ("", "very")))
    return sentence(
        *statement(Clause(related_subject(noun, relative_clause), lexicon.BE, past, tail=tail))
    )


# The corpus.

_SENTENCE_KINDS: tuple[tuple[int, Callable[[Random], Pair]], ...] = (
    (40, _reason_sentence),
    (18, _action_sentence),
    (12, _question_sentence),
    (9, _description_sentence),
    (8, _doing_sentence),
    (5, _giving_sentence),
    (8, _relative_sentence),
)
_TENTHS: dict[Split, int] = {"train": 8, "valid": 1, "test": 1}  # size of each split


def split_of(source: str) -> Split:
    """The split that an English sentence belongs to."""
    tenth = _digest(source) % 10
    return "valid" if tenth == 0 else "test" if tenth == 1 else "train"


def generate(split: Split, count: int, seed: int = 1) -> Iterator[Pair]:
    """``count`` distinct pairs of a split, always the same for the same seed."""
    limit = (
        distinct_sentences() * _TENTHS[split] // 40
    )  # a quarter, because the last ones take long to find
    if count > limit:
        raise ValueError(f"{count} pairs requested of split {split}, which has at most {limit}")
    rng = Random(f"{split} {seed}")
    kinds = [write_sentence for weight, write_sentence in _SENTENCE_KINDS for _ in range(weight)]
    generated: set[str] = set()
    while len(generated) < count:
        pair = _pick(rng, kinds)(rng)
        if pair.source not in generated and split_of(pair.source) == split:
            generated.add(pair.source)
            yield pair


def write_corpus(folder: Path, pairs: Mapping[Split, int] = PAIRS) -> None:
    """Write two text files for each split. test.de is written last, so its existence means that all are complete.

    pairs: the number of pairs of each split.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in pairs.items():
        write_pairs(folder / split, generate(split, count))


def write_pairs(stem: Path, pairs: Iterable[Pair]) -> None:
    for suffix, lines in zip((".en", ".de"), zip(*pairs, strict=True), strict=True):
        text = "".join(f"{line}\n" for line in lines)
        write_text(stem.with_suffix(suffix), text)


@cache
def distinct_sentences() -> int:
    """A lower bound: the number of sentences with a reason; no two wordings are the same sentence."""
    return sum(prod(map(len, wordings(reason))) for reason in reasons() if not _is_held_out(reason))


# The challenge.


class Challenge(NamedTuple):
    """A sentence whose translation must have `pronoun` in its because-clause."""

    source: str
    target: str
    pronoun: str


def challenge() -> list[Challenge]:
    """Sentences with held-out pairs of noun and adjective.

    The pronouns er, sie and es, and references to subjects and objects, are equally frequent. Subject and object
    differ in gender, so that the pronoun shows which one is meant.
    """
    shuffled = [
        reason
        for reason in reasons()
        if _is_held_out(reason)
        and not reason.subject.is_person
        and reason.subject.gender != reason.object.gender
    ]
    Random("challenge").shuffle(shuffled)
    shuffled.sort(key=lambda reason: not _is_dog_sentence(reason))
    cells: dict[tuple[str, bool], list[Challenge]] = {}
    uses: Counter[tuple[Noun, Adjective]] = Counter()
    for reason in shuffled:
        pair = reason.antecedent, reason.adjective
        cell = cells.setdefault((reason.antecedent.gender, reason.of_subject), [])
        if len(cell) < _CELL_SIZE and uses[pair] < _MAX_USES:
            uses[pair] += 1
            cell.append(_as_challenge(reason, past=len(cell) % 2 == 0))
    return [item for cell in cells.values() for item in cell]


_CELL_SIZE = 34  # sentences for each pronoun and grammatical role
_MAX_USES = 4  # sentences for each pair of noun and adjective


def _is_dog_sentence(reason: Reason) -> bool:
    names = reason.subject.english, reason.object.english, reason.adjective.english
    return names in (("dog", "street", "tired"), ("dog", "street", "wide"))


def _as_challenge(reason: Reason, past: bool) -> Challenge:
    framings, _, subjects, objects = wordings(reason)
    pair = explain(reason, framings[0], Tense(past), subjects[0], objects[0])
    return Challenge(*pair, lexicon.personal_pronoun(reason.antecedent.gender))


def pronoun_is_correct(challenge: Challenge, translation: str) -> bool:
    """Whether the first pronoun after *weil* is the expected one."""
    match = re.search(r"\bweil\b.*?\b(er|sie|es)\b", translation)
    return match is not None and match[1] == challenge.pronoun


def reason_pronoun(german: str) -> str | None:
    """The pronoun of a clause with *weil* or *obwohl*; None if the sentence has none."""
    match = re.search(r"\b(?:weil|obwohl)\b.*?\b(er|sie|es)\b", german)
    return match[1] if match else None


def pronoun_test(model: Translator, references: Sequence[str]) -> Correct | None:
    """A test of translations for ``ablate_heads``: whether each has the pronoun of its reference in the reason clause.

    None if the model is not the demo's, or if no reference has such a pronoun. Sentences without one are not tested.
    """
    if model.run is None or "challenge" not in model.run.card():
        return None
    expected = [*map(reason_pronoun, references)]

    def correct(number: int, translation: str) -> bool | None:
        pronoun = expected[number]
        return None if pronoun is None else reason_pronoun(translation) == pronoun

    return correct if any(expected) else None
