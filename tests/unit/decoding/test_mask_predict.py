"""Mask-predict against a loop over single candidates, with mock models whose every probability is known."""

import math
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decoding.hypotheses import Hypothesis
from regard.decoding.mask_predict import Iteration, mask_predict

PAD, EOS, MASK = 0, 1, 2
Model = Callable[[int, list[int], int], list[float]]
"""sentence, what stands in the row, and a place, to the logits there"""
of_known_length = partial(mask_predict, mask=MASK, pad=PAD, end=EOS, banned=[PAD, MASK, EOS])


def hashed(seed: int, V: int) -> Model:
    """Logits that depend on the sentence and on every word of the row."""

    def model(sentence: int, row: list[int], place: int) -> list[float]:
        chance = random.Random(f"{seed} {sentence} {row} {place}")
        return [chance.gauss(0, 2) for _ in range(V)]

    return model


class Mock:
    """A model as a predict function, which is asked for hidden places alone; counts them."""

    def __init__(self, model: Model, candidates: int) -> None:
        self.model, self.candidates = model, candidates
        self.asked: list[int] = []

    def __call__(
        self, read: Int[Tensor, "rows T"], hidden: Bool[Tensor, "rows T"]
    ) -> Float[Tensor, "places V"]:
        assert torch.equal(hidden, read == MASK), "a word known is not hidden, one hidden not read"
        self.asked.append(int(hidden.sum()))
        rows = [[token for token in row if token != PAD] for row in read.tolist()]
        logits = [
            self.model(row // self.candidates, rows[row], place)
            for row, place in hidden.nonzero().tolist()
        ]
        return torch.tensor(logits)


def by_hand(
    model: Model, sentence: int, length: int, iterations: int, banned: list[int]
) -> Hypothesis:
    """One candidate, word by word."""
    words, sureness = [MASK] * length, [0.0] * length
    for number in range(iterations):
        count = math.floor(length * (iterations - number) / iterations)
        worst = sorted(range(length), key=lambda place: (sureness[place], place))[:count]
        read = [MASK if place in worst else word for place, word in enumerate(words)]
        for place in worst:
            logits = torch.tensor(model(sentence, read, place)).log_softmax(-1).tolist()
            allowed = [token for token in range(len(logits)) if token not in banned]
            words[place] = max(allowed, key=lambda token: logits[token])
            sureness[place] = logits[words[place]]
    kept = words.index(EOS) + 1 if EOS in words else length
    tokens = [word for word in words[:kept] if word != EOS]
    total = sum(sureness[:kept])
    finished = EOS in banned or EOS in words
    return Hypothesis(tokens, total, total / kept, sureness[:kept], finished)


def search(
    model: Model, lengths: list[list[int]], iterations: int, banned: list[int], nbest: int = 1
) -> list[list[Hypothesis]]:
    return mask_predict(
        Mock(model, len(lengths[0])),
        torch.tensor(lengths),
        iterations=iterations,
        mask=MASK,
        pad=PAD,
        end=EOS,
        nbest=nbest,
        banned=banned,
    )


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.lists(st.integers(0, 7), min_size=3, max_size=3), min_size=1, max_size=3),
    iterations=st.integers(1, 6),
    cut=st.booleans(),
)
def test_it_is_the_loop_over_single_candidates(
    seed: int, lengths: list[list[int]], iterations: int, cut: bool
) -> None:
    model = hashed(seed, V=6)
    banned = [PAD, MASK] if cut else [PAD, MASK, EOS]
    found = search(model, lengths, iterations, banned, nbest=3)
    for sentence, (some, mine) in enumerate(zip(lengths, found, strict=True)):
        wanted = [by_hand(model, sentence, length, iterations, banned) for length in some if length]
        wanted.sort(key=lambda one: one.score, reverse=True)
        assert [one.tokens for one in mine] == [one.tokens for one in wanted]
        assert [one.finished for one in mine] == [one.finished for one in wanted]
        for one, other in zip(mine, wanted, strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-5)
            assert one.log_probability == pytest.approx(other.log_probability, abs=1e-4)
            assert one.token_log_probabilities == pytest.approx(
                other.token_log_probabilities, abs=1e-5
            )


def test_fewer_words_are_hidden_in_each_round_and_only_they_are_predicted() -> None:
    mock = Mock(hashed(1, V=6), candidates=1)
    of_known_length(mock, torch.tensor([[10], [5]]), iterations=5)
    assert mock.asked == [10 + 5, 8 + 4, 6 + 3, 4 + 2, 2 + 1]


def test_rounds_with_nothing_left_to_hide_are_not_made() -> None:
    mock = Mock(hashed(1, V=6), candidates=1)
    of_known_length(mock, torch.tensor([[2]]), iterations=10)
    assert mock.asked == [2, 1, 1, 1, 1, 1]


def test_other_sentences_change_nothing() -> None:
    model = hashed(3, V=9)
    together = search(model, [[5, 3], [7, 2], [1, 4]], 4, [PAD, MASK, EOS])
    assert together[0] == search(model, [[5, 3]], 4, [PAD, MASK, EOS])[0]


def test_the_highest_mean_wins_not_the_highest_sum() -> None:
    def model(sentence: int, row: list[int], place: int) -> list[float]:
        return [0, 0, 0, 3.0 if len(row) == 4 else 2.0]  # surer of each word of four than of one

    ((best,),) = search(model, [[1, 4]], 1, [PAD, MASK, EOS])
    assert best.tokens == [3, 3, 3, 3]
    assert best.score == pytest.approx(3 - math.log(3 + math.e**3), rel=1e-6)
    assert best.log_probability == pytest.approx(4 * best.score)


def test_all_after_the_first_end_is_cut() -> None:
    def model(sentence: int, row: list[int], place: int) -> list[float]:
        return [0, 5.0 if place in (2, 4) else 0, 0, 1.0, 0]

    ((best,),) = search(model, [[6]], 1, [PAD, MASK])
    assert best.tokens == [3, 3]
    assert best.finished
    assert len(best.token_log_probabilities) == 3  # EOS's is the last


def test_rounds_can_be_watched() -> None:
    seen: list[Iteration] = []
    ((best,),) = of_known_length(
        Mock(hashed(1, V=6), 1), torch.tensor([[4]]), iterations=2, observer=seen.append
    )
    assert [(one.read == MASK).sum().item() for one in seen] == [4, 2]
    assert seen[-1].said[0].tolist() == best.tokens
    kept = seen[1].read != MASK
    assert torch.equal(seen[0].said[kept], seen[1].said[kept])
