"""Beam search on mock models whose every probability is known."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from regard.decoding.beam_search import beam_search
from regard.decoding.hypothesis import Hypothesis
from regard.decoding.top_k import chunks_are_faster, top_k, top_k_sums
from regard.errors import RegardError
from tests.unit.decoding.mock_model import (
    BOS,
    EOS,
    MockStep,
    Prefixes,
    check,
    exhaustive,
    initial_state,
    random_model,
    table_model,
)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    V=st.integers(2, 4),
    max_length=st.integers(0, 3),
    length_penalty=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
    nbest=st.integers(1, 5),
    suppress=st.booleans(),
)
def test_a_beam_as_large_as_the_space_is_exhaustive_search(
    seed: int, V: int, max_length: int, length_penalty: float, nbest: int, suppress: bool
) -> None:
    model, suppressed = random_model(seed, V), (BOS,) if suppress else ()
    expected = exhaustive(model, V, max_length, length_penalty, suppressed)
    beam = max(len(expected) * V, nbest)
    arguments: dict[str, Any] = {
        "bos": BOS,
        "eos": EOS,
        "beam": beam,
        "length_penalty": length_penalty,
        "nbest": nbest,
    }
    [found] = beam_search(
        MockStep(model),
        initial_state(1),
        max_lengths=[max_length],
        suppressed=suppressed,
        **arguments,
    )
    assert [tuple(one.tokens) for one in found] == [tokens for _, tokens in expected[:nbest]]
    assert [one.score for one in found] == pytest.approx([score for score, _ in expected[:nbest]])
    assert all(one.finished for one in found)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    beam=st.integers(1, 6),
    length_penalty=st.sampled_from([0.0, 0.6, 1.0]),
    prefixes=st.lists(st.lists(st.integers(2, 6), max_size=3), min_size=5, max_size=5),
)
def test_a_batch_gives_the_results_of_single_sentences(
    seed: int, beam: int, length_penalty: float, prefixes: list[list[int]]
) -> None:
    model, max_lengths = random_model(seed, 7), [5, 0, 9, 2, 7]

    def search(sentences: list[int]) -> list[list[Hypothesis]]:
        return beam_search(
            MockStep(model),
            Prefixes([(sentence, ()) for sentence in sentences]),
            max_lengths=[max_lengths[sentence] for sentence in sentences],
            prefixes=[prefixes[sentence] for sentence in sentences],
            bos=BOS,
            eos=EOS,
            beam=beam,
            length_penalty=length_penalty,
            nbest=beam,
            suppressed=[BOS],
        )

    together = search([0, 1, 2, 3, 4])
    assert together == [search([sentence])[0] for sentence in range(5)]
    for sentence, found in enumerate(together):
        check(
            model,
            sentence,
            found,
            length_penalty,
            max(max_lengths[sentence], len(prefixes[sentence])),
        )
        assert 1 <= len(found) <= beam
        for one in found:
            assert one.tokens[: len(prefixes[sentence])] == prefixes[sentence]


def test_a_long_hypothesis_wins_by_the_length_penalty() -> None:
    model = table_model({(): {EOS: 0.5, 2: 0.5}, (2,): {2: 0.9, EOS: 0.1}, (2, 2): {EOS: 1.0}}, V=3)

    def best(length_penalty: float) -> list[int]:
        [[one]] = beam_search(
            MockStep(model),
            initial_state(1),
            max_lengths=[5],
            bos=BOS,
            eos=EOS,
            beam=3,
            length_penalty=length_penalty,
        )
        return one.tokens

    assert best(0.0) == []
    assert best(1.0) == [2, 2]


def test_the_search_stops_when_no_better_hypothesis_is_possible() -> None:
    model = table_model({(): {EOS: 0.9, 2: 0.1}, **{(2,) * n: {2: 1.0} for n in range(1, 60)}}, V=3)
    mock = MockStep(model)
    [[one]] = beam_search(
        mock,
        initial_state(1),
        max_lengths=[50],
        bos=BOS,
        eos=EOS,
        beam=4,
        length_penalty=0.1,
        nbest=1,
    )
    assert one.tokens == []
    assert len(mock.calls) == 1


def test_the_search_continues_while_an_active_hypothesis_leads() -> None:
    """Two poor hypotheses fill the beam in step 2, when a better one still needs two tokens."""
    tree = {
        (): {2: 0.9, EOS: 0.1},
        (2,): {3: 0.9, EOS: 0.1},
        (2, 3): {2: 1.0},
        (2, 3, 2): {EOS: 1.0},
    }
    [[one]] = beam_search(
        MockStep(table_model(tree, V=4)),
        initial_state(1),
        max_lengths=[9],
        bos=BOS,
        eos=EOS,
        beam=2,
        length_penalty=0.6,
    )
    assert one.tokens == [2, 3, 2]


def test_a_finished_hypothesis_is_preferred_to_a_truncated_one() -> None:
    poor = {(): {2: 0.99, EOS: 0.01}} | {(2,) * n: {2: 1.0} for n in range(1, 9)}
    [found] = beam_search(
        MockStep(table_model(poor, V=4)),
        initial_state(1),
        max_lengths=[3],
        bos=BOS,
        eos=EOS,
        beam=2,
        length_penalty=0.6,
        nbest=2,
    )
    assert [(one.tokens, one.finished) for one in found] == [([], True)]


def test_the_rest_after_a_forced_prefix_is_searched_exhaustively() -> None:
    model = random_model(3, 4)
    [found] = beam_search(
        MockStep(model),
        initial_state(1),
        max_lengths=[4],
        prefixes=[[2, 3]],
        bos=BOS,
        eos=EOS,
        beam=200,
        length_penalty=0.6,
        nbest=5,
    )
    expected = exhaustive(model, 4, 4, 0.6, prefix=(2, 3))
    assert [tuple(one.tokens) for one in found] == [tokens for _, tokens in expected[:5]]


def test_nbest_larger_than_the_beam_is_an_error() -> None:
    with pytest.raises(RegardError, match="nbest 3: must be between 1 and beam, 2"):
        beam_search(
            MockStep(random_model(0, 3)),
            initial_state(1),
            max_lengths=[1],
            bos=BOS,
            eos=EOS,
            beam=2,
            length_penalty=0.0,
            nbest=3,
        )


# Top-k


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), V=st.integers(1, 3000), count=st.integers(1, 10))
def test_top_k_is_torch_topk(seed: int, V: int, count: int) -> None:
    x = torch.randn(2, 3, V, generator=torch.Generator().manual_seed(seed))
    right = x.topk(min(count, V))
    values, indices = top_k(x, count)
    assert torch.equal(values, right.values)
    assert torch.equal(indices, right.indices)


def test_top_k_with_a_part_of_a_chunk_at_the_end() -> None:
    x = torch.randn(2, 3, 2003, generator=torch.Generator().manual_seed(1))
    x[..., 2001] = 10.0
    values, indices = top_k(x, 4)
    assert torch.equal(indices, x.topk(4).indices)
    assert torch.equal(values, x.topk(4).values)


def test_top_k_with_few_possible_values() -> None:
    x = torch.full((1, 2000), -torch.inf)
    x[0, 1999], x[0, 5] = 1.0, 2.0
    values, indices = top_k(x, 4)
    assert indices[0, :2].tolist() == [5, 1999]
    assert values[0, 2:].tolist() == [-torch.inf] * 2
    assert len({*indices[0].tolist()}) == 4


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    V=st.integers(1100, 2000),
    beams=st.integers(1, 5),
    few=st.booleans(),
)
def test_top_k_sums_is_a_stable_sort_of_all_sums(seed: int, V: int, beams: int, few: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(3, beams, V, generator=draw)
    if few:  # few values are possible
        x[x < 3.2] = -torch.inf
    totals = torch.randn(3, beams, generator=draw, dtype=torch.float64)
    totals[0, -1] = -torch.inf
    x[1, 0] = torch.nan  # a row in which no token is allowed
    assert chunks_are_faster(x, 4)
    sums = (totals.unsqueeze(2) + x).nan_to_num(nan=-torch.inf, neginf=-torch.inf).flatten(1)
    expected, indices = sums.sort(dim=1, descending=True, stable=True)
    values, found = top_k_sums(x, totals, 4)
    assert torch.equal(values, expected[:, :4])
    possible = values > -torch.inf
    assert torch.equal(found[possible], indices[:, :4][possible])
    assert all(len({*row.tolist()}) == 4 for row in found)


def test_of_equal_sums_the_first_comes_first() -> None:
    x = torch.full((1, 2, 2000), -9.0)
    x[0, 1, 7], x[0, 0, 1999], x[0, 0, 3] = -1.0, -2.0, -2.0
    totals = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    values, found = top_k_sums(x, totals, 3)
    assert values.tolist() == [[-3.0, -3.0, -3.0]]
    assert found.tolist() == [[3, 1999, 2007]]
