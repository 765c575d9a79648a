"""From texts to requests: target languages, dependency trees, and phrases that a translation must contain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from regard.data.protected_spans import ProtectedSpans
from regard.data.special_tokens import EOS, UNK
from regard.data.words import is_unspaced_script
from regard.decoding.hypothesis import Phrase, Spelling
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.data.dependency_trees import ParsedSentence, TokenTree
    from regard.data.tokenizer import Vocabulary

# ---------------------------------------------------------------------------------------------
# Target languages

Languages = str | Sequence[str | None] | None
"""The target language of all texts, or of each."""


def language_of_each(to: Languages, count: int) -> Sequence[str | None]:
    if to is None or isinstance(to, str):
        return [to] * count
    if len(to) != count:
        raise RegardError(
            f"{len(to)} languages (to) for {count} texts: expected one, or one per text"
        )
    return to


@dataclass(frozen=True)
class TargetLanguages:
    """The target languages of a model; empty if it has one language pair."""

    known: Sequence[str]
    default: str | None
    """the language to translate to if none is given"""

    def tags(self, count: int, to: Languages) -> list[tuple[str, ...]]:
        """The tags to prepend to each of ``count`` texts."""
        default = self.default or (self.known[0] if len(self.known) == 1 else None)
        wanted = [code or default for code in language_of_each(to, count)]
        # A language for all texts is checked even if there are no texts.
        self._check([*wanted, to] if isinstance(to, str) else wanted)
        if not any(wanted):
            return [()] * count
        from regard.recipe import language_tag

        return [(language_tag(code),) if code else () for code in wanted]

    def _check(self, wanted: Sequence[str | None]) -> None:
        allowed: list[str | None] = [*self.known] or [None]
        if wrong := [code for code in wanted if code not in allowed]:
            can = "translates to one language only, so omit it"
            if self.known:
                can = f"translates to {', '.join(self.known)}"
            said = f"language {wrong[0]}" if wrong[0] else "no target language given"
            raise RegardError(
                f"{said}: this model {can} (--to on the command line, to=… in Python)"
            )


# ---------------------------------------------------------------------------------------------
# Dependency trees

Parses: TypeAlias = "Sequence[ParsedSentence | None] | None"
"""The parse of each text; a blank text has none."""


def trees_of(
    texts: Sequence[str],
    parses: Parses,
    sources: Sequence[list[int]],
    vocabulary: Vocabulary,
    position: str,
) -> list[TokenTree | None]:
    """The dependency trees of tokenized texts; None for a model that does not use them."""
    if parses is None and position != "tree":
        return [None] * len(texts)
    if parses is None:
        raise RegardError(
            "this model has position: tree, so it needs the parse of every text: "
            "--parses F.conllu on the command line, parses=… in Python"
        )
    if position != "tree":
        raise RegardError(
            f"parses need a model with position: tree; this one has position: {position}"
        )
    from regard.data.dependency_trees import token_tree

    _check_parses(texts, parses)
    return [
        token_tree(text, parse, vocabulary).truncate(len(source))
        for text, parse, source in zip(texts, parses, sources, strict=True)
    ]


def _check_parses(texts: Sequence[str], parses: Sequence[ParsedSentence | None]) -> None:
    from regard.data.dependency_trees import check_parse

    if len(parses) != len(texts):
        raise RegardError(f"{len(parses)} parses for {len(texts)} texts: give one for each")
    for number, (text, parse) in enumerate(zip(texts, parses, strict=True), 1):
        if parse is not None:
            check_parse(text, parse, f"text {number}")
        elif text.strip():
            raise RegardError(f"text {number} has no parse; only blank texts may have none")


# ---------------------------------------------------------------------------------------------
# Phrases


def phrase_of(
    text: str,
    vocabulary: Vocabulary,
    times: int = 1,
    touches_before: bool = False,
    touches_after: bool = False,
    free: bool = False,
) -> Phrase | None:
    """A text as a phrase to generate; None if the tokenizer cannot spell it.

    The phrase must stand between word boundaries, unless it may touch the word before or after it.
    """
    (alone,) = vocabulary.encode([text])
    if vocabulary.decode([alone]) != [text]:
        return None
    border_before = not touches_before and not is_unspaced_script(text[0])
    border_after = not touches_after and not is_unspaced_script(text[-1])
    spellings = [Spelling(tuple(alone), boundary_after=border_after)]
    inside = tuple(vocabulary.encode_continuation(text))
    if inside and inside != tuple(alone):
        spellings.append(Spelling(inside, border_before, border_after))
    never = {*vocabulary.suppressed_tokens, UNK, EOS}
    possible = tuple(one for one in spellings if never.isdisjoint(one.tokens))
    return (
        Phrase(possible, times, free) if any(not one.boundary_before for one in possible) else None
    )


def phrases_of(
    source: str, constraints: Sequence[str], protected: ProtectedSpans, vocabulary: Vocabulary
) -> list[Phrase]:
    """What the translation of a source must contain: the constraints, and the protected spans of the source.

    A protected span that cannot be spelled is skipped, and reported later as missing; such a constraint is an error.
    """
    terms = dict.fromkeys(text.strip() for text in constraints if text.strip())
    found = {text: phrase_of(text, vocabulary) for text in terms}
    if missing := [text for text, phrase in found.items() if phrase is None]:
        which = repr(missing[0]) + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        them = "them" if len(missing) > 1 else "it"
        raise RegardError(
            f"{which} cannot be guaranteed: this model's tokenizer cannot spell {them}"
        )
    found |= {
        text: phrase_of(text, vocabulary, *how, free=True)
        for text, how in protected.occurrences(source).items()
    }
    return [phrase for phrase in found.values() if phrase is not None]


def terms_of_each(
    constraints: Sequence[Sequence[str]] | None, count: int
) -> Sequence[Sequence[str]]:
    """What the translation of each text must contain."""
    if constraints is None:
        return [()] * count
    if len(constraints) != count or any(isinstance(some, str) for some in constraints):
        raise RegardError(
            f"{len(constraints)} constraints for {count} texts: expected one list of terms per text"
        )
    return constraints
