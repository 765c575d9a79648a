"""The best continuations of a sentence, found without sorting all, are those that sorting all finds."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st

from regard.decoding.beam_search import in_chunks, top_sums


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    V=st.integers(1100, 2000),
    beams=st.integers(1, 5),
    few=st.booleans(),
)
def test_it_is_a_stable_sort_of_all_sums(seed: int, V: int, beams: int, few: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(3, beams, V, generator=draw)
    if few:  # hardly anything is allowed
        x[x < 3.2] = -torch.inf
    totals = torch.randn(3, beams, generator=draw, dtype=torch.float64)
    totals[0, -1] = -torch.inf
    x[1, 0] = torch.nan  # a model that says nothing
    assert in_chunks(x, 4)
    sums = (totals.unsqueeze(2) + x).nan_to_num(nan=-torch.inf, neginf=-torch.inf).flatten(1)
    right, places = sums.sort(dim=1, descending=True, stable=True)
    values, found = top_sums(x, totals, 4)
    assert torch.equal(values, right[:, :4])
    possible = values > -torch.inf
    assert torch.equal(found[possible], places[:, :4][possible])
    assert all(len({*row.tolist()}) == 4 for row in found)


def test_of_equal_ones_the_first_comes_first() -> None:
    x = torch.full((1, 2, 2000), -9.0)
    x[0, 1, 7], x[0, 0, 1999], x[0, 0, 3] = -1.0, -2.0, -2.0
    totals = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    values, found = top_sums(x, totals, 3)
    assert values.tolist() == [[-3.0, -3.0, -3.0]]
    assert found.tolist() == [[3, 1999, 2007]]
