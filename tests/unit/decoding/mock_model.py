"""Mock models for decoding tests: every probability is known, so the best outputs can be found by enumeration."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decoding.beam_search import beam_search
from regard.decoding.hypothesis import Hypothesis
from regard.decoding.length_penalty_and_stopping import gnmt_length_penalty
from regard.decoding.options_and_logits_processors import LogitsProcessor

BOS, EOS = 0, 1
Prefix = tuple[int, ...]
Model = Callable[[int, Prefix], list[float]]
"""sentence and prefix to the logits of the next token"""


@dataclass
class Prefixes:
    """A decoder state that has the sentence and all tokens of each row, so that a wrong ``select`` is noticed."""

    rows: list[tuple[int, Prefix]]
    selects: list[Int[Tensor, "sentences beams"]] = field(default_factory=list)

    def select(self, rows: Int[Tensor, "sentences beams"]) -> "Prefixes":
        lines: list[list[int]] = rows.tolist()
        owners = [{self.rows[row][0] for row in line} for line in lines]
        assert all(len(owner) == 1 for owner in owners), "a line mixes sentences"
        order = [next(iter(owner)) for owner in owners]
        assert order == sorted(set(order)), "sentences out of order"
        selected = [self.rows[row] for line in lines for row in line]
        return Prefixes(selected, [*self.selects, rows])


class MockStep:
    """A model as a step function; records the number of rows of each call."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.calls: list[int] = []
        self.selects = 0

    def __call__(
        self, last: Int[Tensor, "rows"], state: Prefixes
    ) -> tuple[Float[Tensor, "rows V"], Prefixes]:
        assert len(last) == len(state.rows)
        self.calls.append(len(last))
        self.selects = len(state.selects)
        rows = [
            (sentence, (*prefix, token))
            for (sentence, prefix), token in zip(state.rows, last.tolist(), strict=True)
        ]
        assert all(prefix[0] == BOS for _, prefix in rows)
        logits = [self.model(sentence, prefix[1:]) for sentence, prefix in rows]
        return torch.tensor(logits), Prefixes(rows, state.selects)


def initial_state(sentences: int) -> Prefixes:
    return Prefixes([(sentence, ()) for sentence in range(sentences)])


def random_model(seed: int, V: int, spread: float = 2.0) -> Model:
    """Logits that depend on the sentence and on the whole prefix."""

    def model(sentence: int, prefix: Prefix) -> list[float]:
        draw = random.Random(f"{seed} {sentence} {prefix}")
        return [draw.gauss(0, spread) for _ in range(V)]

    return model


def table_model(*tables: dict[Prefix, dict[int, float]], V: int) -> Model:
    """For each sentence: prefix to the probabilities of the next token; tokens not listed are impossible."""

    def model(sentence: int, prefix: Prefix) -> list[float]:
        given = tables[sentence].get(prefix, {})
        return [math.log(given[token]) if token in given else -math.inf for token in range(V)]

    return model


def log_probabilities(model: Model, sentence: int, tokens: Prefix) -> list[float]:
    """The model's log-probability of each token."""
    each = []
    for position, token in enumerate(tokens):
        logits = torch.tensor(model(sentence, tokens[:position]))
        each.append(float(logits.log_softmax(-1)[token]))
    return each


def exhaustive(
    model: Model,
    V: int,
    max_length: int,
    length_penalty: float,
    suppressed: Prefix = (),
    prefix: Prefix = (),
) -> list[tuple[float, Prefix]]:
    """Every sequence up to the maximum length with its score, best first."""
    allowed = [token for token in range(V) if token != EOS and token not in suppressed]
    found = []
    for length in range(len(prefix), max_length + 1):
        for rest in itertools.product(allowed, repeat=length - len(prefix)):
            tokens = (*prefix, *rest)
            total = sum(log_probabilities(model, 0, (*tokens, EOS)))
            found.append((total / gnmt_length_penalty(length + 1, length_penalty), tokens))
    return sorted(found, reverse=True)


def check(
    model: Model, sentence: int, found: list[Hypothesis], length_penalty: float, max_length: int
) -> None:
    """Check that the hypotheses of a sentence are distinct and sorted, and that their values are right."""
    assert len({(tuple(one.tokens), one.finished) for one in found}) == len(found)
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    assert len({one.finished for one in found}) == 1, "truncated hypotheses among finished ones"
    for one in found:
        tokens = (*one.tokens, EOS) if one.finished else tuple(one.tokens)
        expected = log_probabilities(model, sentence, tokens)
        assert one.token_log_probabilities == pytest.approx(expected)
        assert one.log_probability == pytest.approx(sum(expected))
        assert one.score == pytest.approx(
            sum(expected) / gnmt_length_penalty(len(tokens), length_penalty)
        )
        assert math.isfinite(one.score)
        assert len(one.tokens) <= max_length
        assert EOS not in one.tokens


def search(
    model: Model, processors: Sequence[LogitsProcessor], sentences: int = 1, **options: Any
) -> list[list[Hypothesis]]:
    """Beam search with logits processors on a mock model."""
    defaults = {"max_lengths": [6] * sentences, "beam": 3, "length_penalty": 0.6}
    return beam_search(
        MockStep(model),
        initial_state(sentences),
        bos=BOS,
        eos=EOS,
        suppressed=[BOS],
        processors=processors,
        **{**defaults, **options},
    )
