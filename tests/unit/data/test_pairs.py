"""Pairs with extra data: tags, context, parses."""

import copy
import pickle

import pytest

from regard.data.dependency_trees import ParsedSentence
from regard.data.pairs import ContextPair, Pair, ParsedPair, TaggedPair, context_of, tags_of

PLAIN = Pair("a", "b")
TAGGED = TaggedPair.from_pair(PLAIN, ("2de",))
CONTEXT = ContextPair.with_context(TAGGED, ("before",))
PARSED = ParsedPair.from_pair(PLAIN, ParsedSentence(["a"], ["NOUN"], [0], {}))
PAIRS = [PLAIN, TAGGED, CONTEXT, PARSED]


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_unpack_to_source_and_target(pair: Pair) -> None:
    source, target = pair
    assert (source, target) == ("a", "b") == (pair.source, pair.target)


def test_extra_data_count_in_comparisons() -> None:
    for i, pair in enumerate(PAIRS):
        for j, other in enumerate(PAIRS):
            assert (pair == other) is (i == j)
            assert (pair != other) is (i != j)
            assert hash(pair) == hash(other)
    assert TaggedPair.from_pair(PLAIN, ("2de",)) == TAGGED != TaggedPair.from_pair(PLAIN, ("2fr",))
    assert TAGGED._replace(target="c") != TAGGED
    assert TAGGED != "ab"
    assert len({*PAIRS, *PAIRS}) == len(PAIRS)


def test_empty_extra_data_equal_none() -> None:
    assert TaggedPair("a", "b") == PLAIN == ("a", "b") == ParsedPair("a", "b")
    assert ContextPair.with_context(TAGGED, ()) == TAGGED


@pytest.mark.parametrize("pair", PAIRS)
def test_extra_data_are_kept(pair: Pair) -> None:
    assert pair._replace(source="c")._replace(source="a") == pair
    assert type(pair._replace(source="c")) is type(pair)
    assert copy.copy(pair) == pair == pickle.loads(pickle.dumps(pair))
    replaced = CONTEXT._replace(source="c")
    assert (tags_of(replaced), context_of(replaced)) == (("2de",), ("before",))


def test_repr_shows_extra_data() -> None:
    assert repr(PLAIN) == "Pair(source='a', target='b')"
    assert repr(TAGGED) == "TaggedPair(source='a', target='b', tags=('2de',))"
    assert repr(CONTEXT).endswith(", tags=('2de',), context=('before',))")
