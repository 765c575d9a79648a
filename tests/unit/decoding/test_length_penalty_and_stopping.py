"""Length penalties, and hypotheses that are cut at the maximum length without a step for EOS."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.decoding.beam_search import beam_search
from regard.decoding.greedy_and_sampling import greedy
from regard.decoding.hypothesis import Hypothesis
from regard.decoding.length_penalty_and_stopping import (
    LENGTH_NORMALIZATIONS,
    BeamState,
    gnmt_length_penalty,
)

BOS, EOS, V = 0, 1, 9


def test_the_gnmt_length_penalty_is_that_of_the_paper() -> None:
    assert gnmt_length_penalty(1, 0.6) == 1.0
    assert gnmt_length_penalty(7, 0.5) == pytest.approx(math.sqrt(2))
    assert gnmt_length_penalty(30, 0.0) == 1.0


class Tokens:
    """A decoder state: the tokens of each row so far."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def select(self, rows: Tensor) -> Tokens:
        return Tokens(self.rows[rows.flatten()])


class TrigramStep:
    """A step function whose logits depend on the last two tokens; counts its calls. eos: the logit of EOS."""

    def __init__(self, eos: float) -> None:
        draw = torch.Generator().manual_seed(3)
        self.table = torch.randn(V, V, V, generator=draw)
        self.table[..., BOS], self.table[..., EOS] = -torch.inf, eos
        self.steps = 0

    def __call__(self, tokens: Tensor, state: Tokens) -> tuple[Tensor, Tokens]:
        self.steps += 1
        rows = torch.cat([state.rows, tokens[:, None]], 1)
        return self.table[state.rows[:, -1], tokens], Tokens(rows)


def best(step: TrigramStep, beam: int, max_lengths: list[int], rule: str) -> list[Hypothesis]:
    """The best hypothesis of each sentence; a beam of 1 is greedy search."""
    options: dict[str, Any] = {"max_lengths": max_lengths, "bos": BOS, "eos": EOS}
    options |= {"length_penalty": 0.0, "length_normalization": LENGTH_NORMALIZATIONS[rule]}
    state = Tokens(torch.zeros(len(max_lengths), 1, dtype=torch.long))
    if beam == 1:
        return greedy(step, state, **options)
    return [first for first, *_ in beam_search(step, state, beam=beam, **options)]


@pytest.mark.parametrize("beam", [1, 4])
def test_no_step_predicts_eos_at_the_maximum_length(beam: int) -> None:
    max_lengths = [6, 1, 3]
    cutting, forcing = TrigramStep(-50.0), TrigramStep(-50.0)
    cut = best(cutting, beam, max_lengths, "ctranslate2")
    forced = best(forcing, beam, max_lengths, "transformers")
    assert (cutting.steps, forcing.steps) == (6, 7)
    for one, other, length in zip(cut, forced, max_lengths, strict=True):
        assert len(one.tokens) == length
        assert not one.finished
        assert one.tokens == other.tokens[:length]
        assert one.log_probability == pytest.approx(sum(other.token_log_probabilities[:length]))


def exhaustive(table: Tensor, max_length: int) -> tuple[float, list[int]]:
    """The most probable sequence that ends before the maximum length or has that length."""
    log_probabilities = table.log_softmax(-1)
    active = [(0.0, [BOS, BOS])]
    ended: list[tuple[float, list[int]]] = []
    for _ in range(max_length):
        longer = []
        for total, tokens in active:
            each = log_probabilities[tokens[-2], tokens[-1]].double()
            ended.append((total + float(each[EOS]), tokens[2:]))
            longer += [(total + float(each[token]), [*tokens, token]) for token in range(2, V)]
        active = longer
    return max([*ended, *((total, tokens[2:]) for total, tokens in active)])


@pytest.mark.parametrize("eos", [-3.0, -0.5, 1.0])
def test_a_wide_beam_finds_the_best_of_all_that_end_or_are_cut(eos: float) -> None:
    step = TrigramStep(eos)
    for max_length in (1, 2, 3):
        (one,) = best(step, 7**3, [max_length], "ctranslate2")
        total, tokens = exhaustive(step.table, max_length)
        assert one.tokens == tokens
        assert one.score == pytest.approx(total, abs=1e-5)


def test_a_maximum_length_of_zero_gives_an_empty_hypothesis() -> None:
    for beam in (1, 3):
        (one,) = best(TrigramStep(-50.0), beam, [0], "ctranslate2")
        assert one.tokens == []


@pytest.mark.parametrize(
    ("rule", "active", "finished", "done"),
    [
        # The penalty of 7 tokens is 2, and at most 4.
        ("gnmt", -8.0, (-1.9, -math.inf), True),  # can reach -2 at best
        ("gnmt", -8.0, (-2.1, -math.inf), False),
        ("gnmt", -8.0, (-2.1, -9.0), True),  # the beam is full, and -4 is not ahead
        ("gnmt", -8.0, (-4.1, -9.0), False),
        # The penalty is 7.
        ("transformers", -42.0, (-3.0, -5.9), True),
        ("transformers", -42.0, (-3.0, -6.1), False),
        ("transformers", -42.0, (-3.0, -math.inf), False),
        ("transformers", -math.inf, (-3.0, -math.inf), True),
        ("ctranslate2", -42.0, (-3.0, -9.0), True),
        ("ctranslate2", -42.0, (-3.0, -math.inf), False),
        ("ctranslate2", -math.inf, (-3.0, -math.inf), True),
    ],
)
def test_when_a_search_is_done(
    rule: str, active: float, finished: tuple[float, float], done: bool
) -> None:
    """A beam of two, of which the best is asked for, with length_penalty 1."""
    state = BeamState(torch.tensor([active]), torch.tensor([finished]), 7, torch.tensor([4.0]))
    assert LENGTH_NORMALIZATIONS[rule].is_done(state, 1.0, 1).tolist() == [done]
