"""From texts to requests: target languages, dependency trees, and phrases that a translation must contain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from regard.data.protected_spans import ProtectedSpans
from regard.data.special_tokens import EOS, UNK
from regard.data.words import is_unspaced_script
from regard.decoding.hypothesis import Phrase, Tokenization
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
        codes = [code or default for code in language_of_each(to, count)]
        # A language for all texts is checked even if there are no texts.
        self._check([*codes, to] if isinstance(to, str) else codes)
        if not any(codes):
            return [()] * count
        from regard.recipe import language_tag

        return [(language_tag(code),) if code else () for code in codes]

    def _check(self, codes: Sequence[str | None]) -> None:
        allowed: list[str | None] = [*self.known] or [None]
        if unsupported := [code for code in codes if code not in allowed]:
            capability = "translates to one language only, so omit it"
            if self.known:
                capability = f"translates to {', '.join(self.known)}"
            subject = f"language {unsupported[0]}" if unsupported[0] else "no target language given"
            raise RegardError(
                f"{subject}: this model {capability} (--to on the command line, to=… in Python)"
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
    """A text as a phrase to generate; None if the tokenizer cannot encode it without unknown tokens.

    The phrase must stand between word boundaries, unless it may touch the word before or after it.
    """
    (ids,) = vocabulary.encode([text])
    if vocabulary.decode([ids]) != [text]:
        return None
    border_before = not touches_before and not is_unspaced_script(text[0])
    border_after = not touches_after and not is_unspaced_script(text[-1])
    tokenizations = [Tokenization(tuple(ids), boundary_after=border_after)]
    continuation_ids = tuple(vocabulary.encode_continuation(text))
    if continuation_ids and continuation_ids != tuple(ids):
        tokenizations.append(Tokenization(continuation_ids, border_before, border_after))
    excluded = {*vocabulary.suppressed_tokens, UNK, EOS}
    allowed = tuple(
        tokenization for tokenization in tokenizations if excluded.isdisjoint(tokenization.tokens)
    )
    if all(tokenization.boundary_before for tokenization in allowed):
        return None
    return Phrase(allowed, times, free)


def phrases_of(
    source: str, constraints: Sequence[str], protected: ProtectedSpans, vocabulary: Vocabulary
) -> list[Phrase]:
    """What the translation of a source must contain: the constraints, and the protected spans of the source.

    A protected span that cannot be encoded without unknown tokens is skipped, and reported later as missing; such a
    constraint is an error.
    """
    terms = dict.fromkeys(text.strip() for text in constraints if text.strip())
    phrases = {text: phrase_of(text, vocabulary) for text in terms}
    if missing := [text for text, phrase in phrases.items() if phrase is None]:
        named = repr(missing[0]) + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        pronoun = "them" if len(missing) > 1 else "it"
        raise RegardError(
            f"{named} cannot be guaranteed: this model's tokenizer cannot encode {pronoun} without unknown tokens"
        )
    phrases |= {
        text: phrase_of(text, vocabulary, *conditions, free=True)
        for text, conditions in protected.occurrences(source).items()
    }
    return [phrase for phrase in phrases.values() if phrase is not None]


def terms_of_each(
    constraints: Sequence[Sequence[str]] | None, count: int
) -> Sequence[Sequence[str]]:
    """What the translation of each text must contain."""
    if constraints is None:
        return [()] * count
    if len(constraints) != count or any(isinstance(text_terms, str) for text_terms in constraints):
        raise RegardError(
            f"{len(constraints)} constraints for {count} texts: expected one list of terms per text"
        )
    return constraints
