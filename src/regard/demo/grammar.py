"""The grammar: builds phrases, clauses and sentences in English and German at the same time.

Notable properties:

- A `NounPhrase` has all its German cases, and a `Clause` has its parts but not their order, so one clause
  serves as statement, question, reason and relative clause.
- Negation differs: English negates the verb (didn't eat bread); German uses nicht or, instead of ein or
  no article, kein (aß kein Brot).
- Nothing here is random. `corpus` decides which phrases and clauses there are.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

from regard.data.pairs import Pair
from regard.demo.lexicon import (
    BE,
    CAN,
    Adjective,
    Article,
    Case,
    Noun,
    Verb,
    adjective_form,
    article_form,
    english_third,
    german_finite,
    noun_form,
    personal_pronoun,
    relative_pronoun,
)

Expression = tuple[str, str]  # the same in English and in German
Degree = Literal["", "very", "too", "so"]
Order = Literal["statement", "inverted", "final"]


# Phrases.


class NounPhrase(NamedTuple):
    """A noun phrase or pronoun in English, and in the German cases it is used in."""

    english: str
    german: dict[Case, str]
    plural: bool = False
    first_person: bool = False
    is_denied: bool = False  # German uses kein where English negates the verb


def _pronoun(english: str, column: str) -> NounPhrase:
    return NounPhrase(english, {"nom": personal_pronoun(column)}, plural=column == "p")


_THEY = _pronoun("they", "p")
_HE_OR_SHE = {"m": _pronoun("he", "m"), "f": _pronoun("she", "f")}
_IT = {"m": _pronoun("it", "m"), "f": _pronoun("it", "f"), "n": _pronoun("it", "n")}
WHO = NounPhrase("who", {"nom": "wer"})
PERSONAL = (
    NounPhrase("I", {"nom": "ich"}, first_person=True),
    NounPhrase("we", {"nom": "wir"}, plural=True),
    *_HE_OR_SHE.values(),
    _THEY,
)


def _pronoun_for(noun: Noun, plural: bool) -> NounPhrase:
    if plural:
        return _THEY
    return (_HE_OR_SHE if noun.is_person else _IT)[noun.gender]


@cache
def phrase(
    noun: Noun,
    article: Article,
    adjective: Adjective | None = None,
    plural: bool = False,
    is_denied: bool = False,
) -> NounPhrase:
    """Article, adjective and noun. Plurals and uncountable nouns (bread) have no article instead of "a"."""
    is_bare = article == "a" and (plural or (not noun.english_plural and noun.english != "sheep"))
    words = [adjective.english] if adjective else []
    words.append(noun.english_plural if plural else noun.english)
    if not is_bare:
        words.insert(0, "an" if article == "a" and words[0][0] in "aeiou" else article)
    column = "p" if plural else noun.gender
    german_article: Article | None = "no" if is_denied else None if is_bare else article

    def form(case: Case) -> str:
        before = [article_form(german_article, column, case)] if german_article else []
        if adjective:
            before.append(adjective_form(adjective.german, german_article, column, case))
        return " ".join([*before, noun_form(noun, case, plural)])

    forms: dict[Case, str] = {"nom": form("nom"), "acc": form("acc"), "dat": form("dat")}
    return NounPhrase(" ".join(words), forms, plural, is_denied=is_denied)


def place(prepositions: Expression, where: NounPhrase) -> Expression:
    """In the garden, im Garten: a preposition with the dative."""
    article, noun = where.german["dat"].split(" ", 1)
    start = f"{prepositions[1]} {article}"
    return f"{prepositions[0]} {where.english}", f"{_CONTRACTIONS.get(start, start)} {noun}"


def predicate(adjective: Adjective, degree: Degree) -> Expression:
    """Tired, very tired, too tired, so tired."""
    if not degree:
        return adjective.english, adjective.german
    return f"{degree} {adjective.english}", f"{_DEGREES[degree]} {adjective.german}"


_CONTRACTIONS = {"in dem": "im", "zu dem": "zum", "zu der": "zur"}
_DEGREES: dict[Degree, str] = {"very": "sehr", "too": "zu", "so": "so"}


# Clauses.


class Clause(NamedTuple):
    """Subject, verb and objects, without an order of words."""

    subject: NounPhrase
    verb: Verb
    past: bool
    negated: bool = False
    objects: tuple[tuple[NounPhrase, Case], ...] = ()
    tail: Expression = ("", "")  # the end of the clause: a place or a predicate
    can: bool = False


def english(clause: Clause, inverted: bool = False) -> str:
    """The clause in English; ``inverted``: with the auxiliary first, as in a question."""
    auxiliary, main = _english_verb(clause, inverted)
    start = [auxiliary, clause.subject.english] if inverted else [clause.subject.english, auxiliary]
    objects = [thing.english for thing, _ in clause.objects]
    words = [*start, main, clause.verb.english_rest, *objects, clause.tail[0]]
    return " ".join(filter(None, words))


def _english_verb(clause: Clause, inverted: bool) -> tuple[str, str]:
    """The auxiliary and the main verb; either may be empty."""
    subject, verb, past = clause.subject, clause.verb, clause.past
    is_third = not (subject.plural or subject.first_person)
    if verb is BE and past:
        auxiliary, main = "were" if subject.plural else "was", ""
    elif verb is BE:
        auxiliary, main = "is" if is_third else "are" if subject.plural else "am", ""
    elif clause.can:
        auxiliary, main = "could" if past else "can", verb.english
    elif clause.negated or inverted:
        auxiliary, main = "did" if past else "does" if is_third else "do", verb.english
    elif past:
        auxiliary, main = "", verb.english_past
    else:
        auxiliary, main = "", english_third(verb.english) if is_third else verb.english
    if clause.negated:
        auxiliary = {"am": "am not", "can": "can't"}.get(auxiliary, auxiliary + "n't")
    return auxiliary, main


def german(clause: Clause, order: Order) -> str:
    """The clause in German, with its verb second (statement), first (inverted) or last (final).

    Nicht follows the objects and precedes the end of the clause: place, predicate, prefix and infinitive.
    """
    subject, verb = clause.subject, clause.verb
    finite = german_finite(
        CAN if clause.can else verb, subject.first_person, subject.plural, clause.past
    )
    middle = [thing.german[case] for thing, case in clause.objects]
    if clause.negated and not any(thing.is_denied for thing, _ in clause.objects):
        middle.append("nicht")
    middle.append(clause.tail[1])
    end = verb.prefix + verb.infinitive if clause.can else verb.prefix
    if order == "final":
        words = [subject.german["nom"], *middle, f"{end} {finite}" if clause.can else end + finite]
    elif order == "inverted":
        words = [finite, subject.german["nom"], *middle, end]
    else:
        words = [subject.german["nom"], finite, *middle, end]
    return " ".join(filter(None, words))


def relative(noun: Noun, clause: Clause, case: Case) -> Expression:
    """The clause as a relative clause about the noun, which is its subject (nominative) or its object."""
    pronoun = relative_pronoun(noun.gender, case)
    if case == "nom":
        who = NounPhrase("who" if noun.is_person else "that", {"nom": pronoun})
        clause = clause._replace(subject=who)
        return english(clause), german(clause, "final")
    whom = "whom" if noun.is_person else "that"
    return f"{whom} {english(clause)}", f"{pronoun} {german(clause, 'final')}"


def related_subject(noun: Noun, relative_clause: Expression) -> NounPhrase:
    """The noun with a relative clause about it, which ends in a comma in German."""
    head = phrase(noun, "the")
    return NounPhrase(
        f"{head.english} {relative_clause[0]}",
        {"nom": f"{head.german['nom']}, {relative_clause[1]},"},
    )


# Sentences.


def statement(clause: Clause, time: Expression | None = None) -> Pair:
    """A main clause, not yet a complete sentence; a time expression before it inverts the German order."""
    if time is None:
        return Pair(english(clause), german(clause, "statement"))
    return Pair(f"{time[0]} {english(clause)}", f"{time[1]} {german(clause, 'inverted')}")


def question(clause: Clause, question_word: Expression | None = None) -> Pair:
    """Did the dog wait? With a question word: why did the dog wait?"""
    source, target = english(clause, inverted=True), german(clause, "inverted")
    if question_word:
        source, target = f"{question_word[0]} {source}", f"{question_word[1]} {target}"
    return sentence(source, target, "?")


def sentence(source: str, target: str, punctuation: str = ".") -> Pair:
    """A complete sentence: a capital letter at the beginning, punctuation at the end."""
    source, target = (text[0].upper() + text[1:] + punctuation for text in (source, target))
    return Pair(source, target)


# Sentences with a reason.


class Reason(NamedTuple):
    """An action that is done or not done, and the adjective of its subject or object that is the reason."""

    verb: Verb
    subject: Noun
    object: Noun
    adjective: Adjective
    of_subject: bool
    hinders: bool

    @property
    def antecedent(self) -> Noun:
        return self.subject if self.of_subject else self.object


class Framing(NamedTuple):
    """Because or although, with or without can, too or very or neither."""

    although: bool
    can: bool
    degree: Degree


class Tense(NamedTuple):
    past: bool
    time: Expression | None = None  # at the beginning of the sentence


def explain(
    reason: Reason, framing: Framing, tense: Tense, subject: NounPhrase, thing: NounPhrase
) -> Pair:
    """The dog didn't cross the street because it was too tired."""
    verb, (past, time) = reason.verb, tense
    negated = reason.hinders != framing.although
    main = Clause(subject, verb, past, negated, ((thing, verb.case),), can=framing.can)
    pronoun = _pronoun_for(reason.antecedent, subject.plural and reason.of_subject)
    why = Clause(pronoun, BE, past, tail=predicate(reason.adjective, framing.degree))
    conjunction = ("although", "obwohl") if framing.although else ("because", "weil")
    statements = statement(main, time)
    return sentence(
        f"{statements.source} {conjunction[0]} {english(why)}",
        f"{statements.target}, {conjunction[1]} {german(why, 'final')}",
    )
