"""A length_normalization that cuts at the limit takes no step to ask for EOS there; else it is the search it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.decoding.beam_search import beam_search
from regard.decoding.greedy_and_sampling import greedy
from regard.decoding.length_penalty import LENGTH_NORMALIZATIONS

BOS, EOS, V = 0, 1, 9


class Past:
    """What was said in each row."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def select(self, rows: Tensor) -> Past:
        return Past(self.rows[rows.flatten()])


class CountMetric:
    """Logits by the last two tokens; says how often it was asked."""

    def __init__(self, end: float) -> None:
        draw = torch.Generator().manual_seed(3)
        self.table = torch.randn(V, V, V, generator=draw)
        self.table[..., BOS], self.table[..., EOS] = -torch.inf, end
        self.steps = 0

    def __call__(self, tokens: Tensor, state: Past) -> tuple[Tensor, Past]:
        self.steps += 1
        return self.table[state.rows[:, -1], tokens], Past(
            torch.cat([state.rows, tokens[:, None]], 1)
        )


def best(model: CountMetric, beam: int, limits: list[int], length_normalization: Any) -> list[Any]:
    asked: dict[str, Any] = {"limits": limits, "start": BOS, "end": EOS, "length_penalty": 0.0}
    state = Past(torch.zeros(len(limits), 1, dtype=torch.long))
    if beam == 1:
        return greedy(
            model, state, length_normalization=LENGTH_NORMALIZATIONS[length_normalization], **asked
        )
    return [
        one
        for one, *_ in beam_search(
            model,
            state,
            beam=beam,
            length_normalization=LENGTH_NORMALIZATIONS[length_normalization],
            **asked,
        )
    ]


@pytest.mark.parametrize("beam", [1, 4])
def test_no_step_asks_for_an_end_that_has_no_room(beam: int) -> None:
    limits = [6, 1, 3]
    cutting, asking = CountMetric(-50.0), CountMetric(-50.0)
    cut, asked = (
        best(cutting, beam, limits, "ctranslate2"),
        best(asking, beam, limits, "transformers"),
    )
    assert (cutting.steps, asking.steps) == (6, 7)
    for one, other, limit in zip(cut, asked, limits, strict=True):
        assert len(one.tokens) == limit
        assert not one.finished
        assert one.tokens == other.tokens[:limit]
        assert one.log_probability == pytest.approx(sum(other.token_log_probabilities[:limit]))


def exhaustive(table: Tensor, limit: int) -> tuple[float, list[int]]:
    """The most probable sequence: ended before the limit, or as long as it."""
    log = table.log_softmax(-1)
    ways = [(0.0, [BOS, BOS])]
    ended: list[tuple[float, list[int]]] = []
    for _ in range(limit):
        grown = []
        for total, said in ways:
            each = log[said[-2], said[-1]].double()
            ended.append((total + float(each[EOS]), said[2:]))
            grown += [(total + float(each[token]), [*said, token]) for token in range(2, V)]
        ways = grown
    return max([*ended, *((total, said[2:]) for total, said in ways)])


@pytest.mark.parametrize("end", [-3.0, -0.5, 1.0])
def test_a_wide_beam_finds_the_best_of_all_that_end_or_are_cut(end: float) -> None:
    model = CountMetric(end)
    for limit in (1, 2, 3):
        (one,) = best(model, 7**3, [limit], "ctranslate2")
        total, tokens = exhaustive(model.table, limit)
        assert one.tokens == tokens
        assert one.score == pytest.approx(total, abs=1e-5)


def test_nothing_at_all_is_said_where_there_is_no_room() -> None:
    for beam in (1, 3):
        (one,) = best(CountMetric(-50.0), beam, [0], "ctranslate2")
        assert one.tokens == []
