"""Mask-predict on mock models, compared with a loop over single candidates."""

import math
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decoding.hypothesis import Hypothesis
from regard.decoding.mask_predict import Iteration, mask_predict

PAD, EOS, MASK = 0, 1, 2
Model = Callable[[int, list[int], int], list[float]]
"""sentence, tokens of the row, and a position, to the logits at that position"""
with_given_length = partial(mask_predict, mask=MASK, pad=PAD, eos=EOS, suppressed=[PAD, MASK, EOS])


def random_model(seed: int, V: int) -> Model:
    """Logits that depend on the sentence and on every token of the row."""

    def model(sentence: int, row: list[int], position: int) -> list[float]:
        draw = random.Random(f"{seed} {sentence} {row} {position}")
        return [draw.gauss(0, 2) for _ in range(V)]

    return model


class MockPredict:
    """A model as a predict function; records the number of masked positions of each call."""

    def __init__(self, model: Model, candidates: int) -> None:
        self.model, self.candidates = model, candidates
        self.calls: list[int] = []

    def __call__(
        self, inputs: Int[Tensor, "rows T"], masked: Bool[Tensor, "rows T"]
    ) -> Float[Tensor, "masked V"]:
        assert torch.equal(masked, inputs == MASK), (
            "exactly the masked positions have the mask token"
        )
        self.calls.append(int(masked.sum()))
        rows = [[token for token in row if token != PAD] for row in inputs.tolist()]
        logits = [
            self.model(row // self.candidates, rows[row], position)
            for row, position in masked.nonzero().tolist()
        ]
        return torch.tensor(logits)


def by_hand(
    model: Model, sentence: int, length: int, iterations: int, suppressed: list[int]
) -> Hypothesis:
    """One candidate, token by token."""
    tokens, confidences = [MASK] * length, [0.0] * length
    for number in range(iterations):
        count = math.floor(length * (iterations - number) / iterations)
        worst = sorted(range(length), key=lambda position: (confidences[position], position))[
            :count
        ]
        inputs = [MASK if position in worst else token for position, token in enumerate(tokens)]
        for position in worst:
            logits = torch.tensor(model(sentence, inputs, position)).log_softmax(-1).tolist()
            allowed = [token for token in range(len(logits)) if token not in suppressed]
            tokens[position] = max(allowed, key=lambda token: logits[token])
            confidences[position] = logits[tokens[position]]
    kept = tokens.index(EOS) + 1 if EOS in tokens else length
    output = [token for token in tokens[:kept] if token != EOS]
    total = sum(confidences[:kept])
    finished = EOS in suppressed or EOS in tokens
    return Hypothesis(output, total, total / kept, confidences[:kept], finished)


def search(
    model: Model, lengths: list[list[int]], iterations: int, suppressed: list[int], nbest: int = 1
) -> list[list[Hypothesis]]:
    return mask_predict(
        MockPredict(model, len(lengths[0])),
        torch.tensor(lengths),
        iterations=iterations,
        mask=MASK,
        pad=PAD,
        eos=EOS,
        nbest=nbest,
        suppressed=suppressed,
    )


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.lists(st.integers(0, 7), min_size=3, max_size=3), min_size=1, max_size=3),
    iterations=st.integers(1, 6),
    cut=st.booleans(),
)
def test_it_equals_the_loop_over_single_candidates(
    seed: int, lengths: list[list[int]], iterations: int, cut: bool
) -> None:
    model = random_model(seed, V=6)
    suppressed = [PAD, MASK] if cut else [PAD, MASK, EOS]
    found = search(model, lengths, iterations, suppressed, nbest=3)
    for sentence, (candidates, results) in enumerate(zip(lengths, found, strict=True)):
        expected = [
            by_hand(model, sentence, length, iterations, suppressed)
            for length in candidates
            if length
        ]
        expected.sort(key=lambda one: one.score, reverse=True)
        assert [one.tokens for one in results] == [one.tokens for one in expected]
        assert [one.finished for one in results] == [one.finished for one in expected]
        for one, other in zip(results, expected, strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-5)
            assert one.log_probability == pytest.approx(other.log_probability, abs=1e-4)
            assert one.token_log_probabilities == pytest.approx(
                other.token_log_probabilities, abs=1e-5
            )


def test_fewer_tokens_are_masked_in_each_iteration_and_only_they_are_predicted() -> None:
    mock = MockPredict(random_model(1, V=6), candidates=1)
    with_given_length(mock, torch.tensor([[10], [5]]), iterations=5)
    assert mock.calls == [10 + 5, 8 + 4, 6 + 3, 4 + 2, 2 + 1]


def test_iterations_with_nothing_left_to_mask_are_skipped() -> None:
    mock = MockPredict(random_model(1, V=6), candidates=1)
    with_given_length(mock, torch.tensor([[2]]), iterations=10)
    assert mock.calls == [2, 1, 1, 1, 1, 1]


def test_other_sentences_change_nothing() -> None:
    model = random_model(3, V=9)
    together = search(model, [[5, 3], [7, 2], [1, 4]], 4, [PAD, MASK, EOS])
    assert together[0] == search(model, [[5, 3]], 4, [PAD, MASK, EOS])[0]


def test_the_highest_mean_wins_not_the_highest_sum() -> None:
    def model(sentence: int, row: list[int], position: int) -> list[float]:
        return [
            0,
            0,
            0,
            3.0 if len(row) == 4 else 2.0,
        ]  # more confident with four tokens than with one

    ((best,),) = search(model, [[1, 4]], 1, [PAD, MASK, EOS])
    assert best.tokens == [3, 3, 3, 3]
    assert best.score == pytest.approx(3 - math.log(3 + math.e**3), rel=1e-6)
    assert best.log_probability == pytest.approx(4 * best.score)


def test_the_output_is_cut_at_the_first_eos() -> None:
    def model(sentence: int, row: list[int], position: int) -> list[float]:
        return [0, 5.0 if position in (2, 4) else 0, 0, 1.0, 0]

    ((best,),) = search(model, [[6]], 1, [PAD, MASK])
    assert best.tokens == [3, 3]
    assert best.finished
    assert len(best.token_log_probabilities) == 3  # that of EOS is the last


def test_an_observer_gets_every_iteration() -> None:
    steps: list[Iteration] = []
    ((best,),) = with_given_length(
        MockPredict(random_model(1, V=6), 1),
        torch.tensor([[4]]),
        iterations=2,
        observer=steps.append,
    )
    assert [(one.inputs == MASK).sum().item() for one in steps] == [4, 2]
    assert steps[-1].tokens[0].tolist() == best.tokens
    kept = steps[1].inputs != MASK
    assert torch.equal(steps[0].tokens[kept], steps[1].tokens[kept])
