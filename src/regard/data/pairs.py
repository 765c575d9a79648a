"""A pair of source and target text, and the extra data that a pair may have."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from regard.data.dependency_trees import ParsedSentence


class Pair(NamedTuple):
    source: str
    target: str


class AnnotatedPair(Pair):
    """Base class of pairs with extra data. The data are attributes, so every pair unpacks to source and target.

    They count in comparisons, and ``_replace`` keeps them. A pair whose extra data are empty equals a plain one.
    """

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple):
            return NotImplemented
        return tuple.__eq__(self, other) and extra_data(self) == extra_data(other)

    def __ne__(self, other: object) -> bool:  # that of tuples ignores __eq__
        return not self == other

    __hash__ = Pair.__hash__

    def __repr__(self) -> str:
        extra = "".join(f", {name}={value!r}" for name, value in vars(self).items())
        return f"{super().__repr__()[:-1]}{extra})"

    def _replace(self, **texts: Any) -> Self:
        changed = super()._replace(**texts)
        vars(changed).update(vars(self))
        return changed


class TaggedPair(AnnotatedPair):
    """A pair with tags, which are prepended to its source: ``2de`` for target language de, ``bt`` for its origin."""

    tags: tuple[str, ...] = ()

    @classmethod
    def from_pair(cls, pair: Pair, tags: tuple[str, ...]) -> TaggedPair:
        tagged = cls(*pair)
        tagged.tags = tags
        return tagged


class ContextPair(TaggedPair):
    """A pair with the sources before it in its document."""

    context: tuple[str, ...] = ()

    @classmethod
    def with_context(cls, pair: Pair, context: tuple[str, ...]) -> ContextPair:
        context_pair = cls(*pair)
        context_pair.tags, context_pair.context = tags_of(pair), context
        return context_pair


class ParsedPair(AnnotatedPair):
    """A pair with the dependency parse of its source."""

    parse: ParsedSentence | None = None
    """None only if the source is blank"""

    @classmethod
    def from_pair(cls, pair: Pair, parse: ParsedSentence | None) -> ParsedPair:
        parsed = cls(*pair)
        parsed.parse = parse
        return parsed


def extra_data(pair: tuple[str, ...]) -> tuple[object, ...]:
    """The tags, the context and the parse of a pair; empty ones for a plain pair."""
    return (
        pair.tags if isinstance(pair, TaggedPair) else (),
        pair.context if isinstance(pair, ContextPair) else (),
        pair.parse if isinstance(pair, ParsedPair) else None,
    )


def tags_of(pair: Pair) -> tuple[str, ...]:
    return pair.tags if isinstance(pair, TaggedPair) else ()


def context_of(pair: Pair) -> tuple[str, ...]:
    return pair.context if isinstance(pair, ContextPair) else ()


def previous_sentences(
    sources: Sequence[str], count: int, before: Sequence[str] = ()
) -> list[tuple[str, ...]]:
    """Up to ``count`` sources before each source in its document; a blank one ends a document.

    before: the sources that precede the first one.
    """
    previous: deque[str] = deque(maxlen=count)
    contexts = []
    for source in (*before, *sources):
        contexts.append(tuple(previous))
        if source.strip():
            previous.append(source)
        else:
            previous.clear()
    return contexts[len(before) :]


def parse_of(pair: Pair) -> ParsedSentence | None:
    return pair.parse if isinstance(pair, ParsedPair) else None


def language_of(pair: Pair) -> str | None:
    """The target language, if the pair is tagged with one."""
    return next((tag[1:] for tag in tags_of(pair) if tag.startswith("2")), None)
