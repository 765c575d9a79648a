"""Search against mock models whose every probability is known."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from jaxtyping import Float, Int
from torch import Tensor

from regard.decoding.beam_search import beam_search
from regard.decoding.greedy_and_sampling import greedy, sample
from regard.decoding.hypotheses import Hypothesis, gnmt_length_penalty
from regard.decoding.length_penalty import GNMT, LENGTH_NORMALIZATIONS
from regard.errors import RegardError

BOS, EOS = 0, 1
Prefix = tuple[int, ...]
Model = Callable[[int, Prefix], list[float]]
"""sentence and prefix to the logits of the next token"""


def drawn(*arguments: Any, limits: Sequence[int], **how: Any) -> list[Hypothesis]:
    return sample(*arguments, limits=limits, seeds=range(len(limits)), **how)


SINGLE: dict[str, Callable[..., list[Hypothesis]]] = {"greedy": greedy, "sample": drawn}


@dataclass
class Prefixes:
    """A state that remembers whose row each is and all that was said: a wrong select shows."""

    rows: list[tuple[int, Prefix]]
    selects: list[Int[Tensor, "sentences beams"]] = field(default_factory=list)

    def select(self, rows: Int[Tensor, "sentences beams"]) -> "Prefixes":
        lines: list[list[int]] = rows.tolist()
        owners = [{self.rows[row][0] for row in line} for line in lines]
        assert all(len(owner) == 1 for owner in owners), "a line mixes sentences"
        order = [next(iter(owner)) for owner in owners]
        assert order == sorted(set(order)), "sentences out of order"
        chosen = [self.rows[row] for line in lines for row in line]
        return Prefixes(chosen, [*self.selects, rows])


class Mock:
    """A model as a step; keeps how many rows each call had."""

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


def begin(sentences: int) -> Prefixes:
    return Prefixes([(sentence, ()) for sentence in range(sentences)])


def hashed(seed: int, V: int, spread: float = 2.0) -> Model:
    """Logits that depend on the sentence and on the whole prefix."""

    def model(sentence: int, prefix: Prefix) -> list[float]:
        chance = random.Random(f"{seed} {sentence} {prefix}")
        return [chance.gauss(0, spread) for _ in range(V)]

    return model


def log_probabilities(model: Model, sentence: int, tokens: Prefix) -> list[float]:
    """Of each token after those before it, by the model."""
    each = []
    for place, token in enumerate(tokens):
        logits = torch.tensor(model(sentence, tokens[:place]))
        each.append(float(logits.log_softmax(-1)[token]))
    return each


def exhaustive(
    model: Model,
    V: int,
    limit: int,
    length_penalty: float,
    banned: Prefix = (),
    prefix: Prefix = (),
) -> list[tuple[float, Prefix]]:
    """Every sequence up to the limit with its score, best first."""
    words = [token for token in range(V) if token != EOS and token not in banned]
    found = []
    for length in range(len(prefix), limit + 1):
        for rest in itertools.product(words, repeat=length - len(prefix)):
            tokens = (*prefix, *rest)
            total = sum(log_probabilities(model, 0, (*tokens, EOS)))
            found.append((total / gnmt_length_penalty(length + 1, length_penalty), tokens))
    return sorted(found, reverse=True)


@pytest.mark.parametrize(
    "way", [*SINGLE.values(), partial(beam_search, beam=2, length_penalty=0.0)]
)
def test_nothing_asked_nothing_found(way: Callable[..., list[Any]]) -> None:
    def step(*_: Any) -> Any:
        raise AssertionError("there is nothing to say")

    assert way(step, Prefixes([]), limits=[], start=BOS, end=EOS) == []


def test_length_penalty_is_the_papers() -> None:
    assert gnmt_length_penalty(1, 0.6) == 1.0
    assert gnmt_length_penalty(7, 0.5) == pytest.approx(math.sqrt(2))
    assert gnmt_length_penalty(30, 0.0) == 1.0


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    V=st.integers(2, 4),
    limit=st.integers(0, 3),
    length_penalty=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
    nbest=st.integers(1, 5),
    ban=st.booleans(),
)
def test_a_beam_as_large_as_the_space_is_exhaustive_search(
    seed: int, V: int, limit: int, length_penalty: float, nbest: int, ban: bool
) -> None:
    model, banned = hashed(seed, V), (BOS,) if ban else ()
    expected = exhaustive(model, V, limit, length_penalty, banned)
    beam = max(len(expected) * V, nbest)
    arguments: dict[str, Any] = {
        "start": BOS,
        "end": EOS,
        "beam": beam,
        "length_penalty": length_penalty,
        "nbest": nbest,
    }
    [found] = beam_search(Mock(model), begin(1), limits=[limit], banned=banned, **arguments)
    assert [tuple(one.tokens) for one in found] == [tokens for _, tokens in expected[:nbest]]
    assert [one.score for one in found] == pytest.approx([score for score, _ in expected[:nbest]])
    assert all(one.finished for one in found)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    V=st.integers(3, 9),
    length_penalty=st.sampled_from([0.0, 0.6, 1.5]),
    length_normalization=st.sampled_from([*LENGTH_NORMALIZATIONS.values()]),
)
def test_a_beam_of_one_is_greedy(
    seed: int, V: int, length_penalty: float, length_normalization: type[GNMT]
) -> None:
    def model(sentence: int, prefix: Prefix) -> list[float]:
        # Whole numbers: equal logits are common, as in bf16.
        return [float(round(logit)) for logit in hashed(seed, V)(sentence, prefix)]

    given: dict[str, Any] = {"limits": [6, 0, 3, 12], "start": BOS, "end": EOS}
    given |= {"length_penalty": length_penalty, "length_normalization": length_normalization}
    alone = greedy(Mock(model), begin(4), **given)
    beams = beam_search(Mock(model), begin(4), beam=1, **given)
    assert alone == [found for [found] in beams]


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    beam=st.integers(1, 6),
    length_penalty=st.sampled_from([0.0, 0.6, 1.0]),
    prefixes=st.lists(st.lists(st.integers(2, 6), max_size=3), min_size=5, max_size=5),
)
def test_a_batch_is_its_sentences_one_by_one(
    seed: int, beam: int, length_penalty: float, prefixes: list[list[int]]
) -> None:
    model, limits = hashed(seed, 7), [5, 0, 9, 2, 7]

    def search(sentences: list[int]) -> list[list[Hypothesis]]:
        return beam_search(
            Mock(model),
            Prefixes([(sentence, ()) for sentence in sentences]),
            limits=[limits[sentence] for sentence in sentences],
            prefixes=[prefixes[sentence] for sentence in sentences],
            start=BOS,
            end=EOS,
            beam=beam,
            length_penalty=length_penalty,
            nbest=beam,
            banned=[BOS],
        )

    together = search([0, 1, 2, 3, 4])
    assert together == [search([sentence])[0] for sentence in range(5)]
    for sentence, found in enumerate(together):
        check(
            model, sentence, found, length_penalty, max(limits[sentence], len(prefixes[sentence]))
        )
        assert 1 <= len(found) <= beam
        for one in found:
            shown = prefixes[sentence][: len(one.tokens)]
            assert one.tokens[: len(prefixes[sentence])] == shown == prefixes[sentence]


def check(
    model: Model, sentence: int, found: list[Hypothesis], length_penalty: float, limit: int
) -> None:
    """What must hold of every list of hypotheses: true numbers, distinct, sorted."""
    assert len({(tuple(one.tokens), one.finished) for one in found}) == len(found)
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    assert len({one.finished for one in found}) == 1, "cut-off hypotheses among finished ones"
    for one in found:
        said = (*one.tokens, EOS) if one.finished else tuple(one.tokens)
        expected = log_probabilities(model, sentence, said)
        assert one.token_log_probabilities == pytest.approx(expected)
        assert one.log_probability == pytest.approx(sum(expected))
        assert one.score == pytest.approx(
            sum(expected) / gnmt_length_penalty(len(said), length_penalty)
        )
        assert math.isfinite(one.score)
        assert len(one.tokens) <= limit
        assert EOS not in one.tokens


def table(*lines: dict[Prefix, dict[int, float]], V: int) -> Model:
    """For each sentence: prefix to the next token's probabilities; unknown ones have none."""

    def model(sentence: int, prefix: Prefix) -> list[float]:
        given = lines[sentence].get(prefix, {})
        return [math.log(given[token]) if token in given else -math.inf for token in range(V)]

    return model


def test_the_beam_finds_what_greedy_misses() -> None:
    model = table(
        {(): {2: 0.6, 3: 0.4}, (2,): {2: 0.5, EOS: 0.5}, (2, 2): {EOS: 1.0}, (3,): {EOS: 1.0}}, V=4
    )
    [alone] = greedy(Mock(model), begin(1), limits=[5], start=BOS, end=EOS)
    [[best, second]] = beam_search(
        Mock(model), begin(1), limits=[5], start=BOS, end=EOS, beam=2, length_penalty=0.0, nbest=2
    )
    assert alone.tokens[0] == 2
    assert alone.log_probability == pytest.approx(math.log(0.3))
    assert best.tokens == [3]
    assert best.log_probability == pytest.approx(math.log(0.4))
    assert second.log_probability == pytest.approx(math.log(0.3))


def test_a_long_hypothesis_wins_by_the_length_penalty() -> None:
    model = table({(): {EOS: 0.5, 2: 0.5}, (2,): {2: 0.9, EOS: 0.1}, (2, 2): {EOS: 1.0}}, V=3)

    def best(length_penalty: float) -> list[int]:
        [[one]] = beam_search(
            Mock(model),
            begin(1),
            limits=[5],
            start=BOS,
            end=EOS,
            beam=3,
            length_penalty=length_penalty,
        )
        return one.tokens

    assert best(0.0) == []
    assert best(1.0) == [2, 2]


def test_finished_sentences_leave_the_batch() -> None:
    def model(sentence: int, prefix: Prefix) -> list[float]:
        # Sentence 0 says one word, sentence 1 two, …: far more probable than all else.
        wanted = EOS if len(prefix) > sentence else 2 + len(prefix) % 2
        return [9.0 if token == wanted else token / 10 for token in range(5)]

    mock = Mock(model)
    found = greedy(mock, begin(3), limits=[9] * 3, start=BOS, end=EOS)
    assert mock.calls == [3, 3, 2, 1]
    assert mock.selects == 2, "select only when a sentence leaves"
    assert [one.tokens for one in found] == [[2], [2, 3], [2, 3, 2]]

    mock = Mock(model)
    beams = beam_search(
        mock, begin(3), limits=[9] * 3, start=BOS, end=EOS, beam=2, length_penalty=0.6
    )
    assert [one.tokens for [one] in beams] == [[2], [2, 3], [2, 3, 2]]
    assert mock.calls[:2] == [3, 6]
    assert mock.calls == sorted(mock.calls[:2]) + sorted(mock.calls[2:], reverse=True)
    assert mock.calls[-1] == 2


def test_the_search_ends_when_nothing_better_can_come() -> None:
    model = table({(): {EOS: 0.9, 2: 0.1}, **{(2,) * n: {2: 1.0} for n in range(1, 60)}}, V=3)
    mock = Mock(model)
    [[one]] = beam_search(
        mock, begin(1), limits=[50], start=BOS, end=EOS, beam=4, length_penalty=0.1, nbest=1
    )
    assert one.tokens == []
    assert len(mock.calls) == 1


def test_at_the_limit_a_hypothesis_without_end_is_cut_off() -> None:
    endless = table({(2,) * n: {2: 0.75, 3: 0.25} for n in range(9)} | {(3,): {3: 1.0}}, V=4)
    [one] = greedy(Mock(endless), begin(1), limits=[3], start=BOS, end=EOS)
    total = one.log_probability
    assert one == Hypothesis.of([2, 2, 2], one.token_log_probabilities, total, length_penalty=0.0)
    assert not one.finished
    assert one.log_probability == pytest.approx(3 * math.log(0.75))
    [two] = greedy(Mock(endless), begin(1), limits=[0], start=BOS, end=EOS)
    assert two == Hypothesis([], 0.0, 0.0, [], False)


def test_end_is_preferred_to_any_cut_off_hypothesis() -> None:
    poor = {(): {2: 0.99, EOS: 0.01}} | {(2,) * n: {2: 1.0} for n in range(1, 9)}
    [found] = beam_search(
        Mock(table(poor, V=4)),
        begin(1),
        limits=[3],
        start=BOS,
        end=EOS,
        beam=2,
        length_penalty=0.6,
        nbest=2,
    )
    assert [(one.tokens, one.finished) for one in found] == [([], True)]


@pytest.mark.parametrize("search", ["greedy", "beam", "sample"])
def test_where_nothing_may_come_the_hypothesis_is_cut_off(search: str) -> None:
    model = table({(): {2: 1.0}, (2,): {3: 1.0}}, {(): {2: 1.0}, (2,): {EOS: 1.0}}, V=4)
    rules: dict[str, Any] = {"limits": [9, 9], "start": BOS, "end": EOS, "banned": [3]}
    if search == "beam":
        lists = beam_search(Mock(model), begin(2), beam=3, length_penalty=0.6, nbest=3, **rules)
        assert [len(found) for found in lists] == [1, 1]
        stuck, free = [found[0] for found in lists]
    else:
        stuck, free = SINGLE[search](Mock(model), begin(2), **rules)
    assert (stuck.tokens, stuck.finished, stuck.score) == ([2], False, 0.0)
    assert (free.tokens, free.finished) == ([2], True)


@pytest.mark.parametrize("search", ["greedy", "beam", "sample"])
def test_prefixes_are_forced_and_banned_tokens_never_come(search: str) -> None:
    model = hashed(7, 8)
    prefixes = [[5, 3, 3], [], [2]]
    rules: dict[str, Any] = {"limits": [2, 6, 6], "start": BOS, "end": EOS, "prefixes": prefixes}
    rules["banned"] = [BOS, 3, 4]
    if search == "beam":
        found = beam_search(Mock(model), begin(3), beam=4, length_penalty=1.0, nbest=4, **rules)
    else:
        found = [[one] for one in SINGLE[search](Mock(model), begin(3), **rules)]
    for sentence, (some, prefix) in enumerate(zip(found, prefixes, strict=True)):
        check(model, sentence, some, 1.0 if search == "beam" else 0.0, [3, 6, 6][sentence])
        for one in some:
            assert one.tokens[: len(prefix)] == prefix
            assert not {BOS, 3, 4} & set(one.tokens[len(prefix) :])


def test_a_forced_prefix_leaves_the_rest_exhaustive() -> None:
    model = hashed(3, 4)
    [found] = beam_search(
        Mock(model),
        begin(1),
        limits=[4],
        prefixes=[[2, 3]],
        start=BOS,
        end=EOS,
        beam=200,
        length_penalty=0.6,
        nbest=5,
    )
    expected = exhaustive(model, 4, 4, 0.6, prefix=(2, 3))
    assert [tuple(one.tokens) for one in found] == [tokens for _, tokens in expected[:5]]


def draws(count: int, **how: Any) -> list[Hypothesis]:
    probabilities = {2: 0.5, 3: 0.3, 4: 0.15, 5: 0.05}
    line: dict[Prefix, dict[int, float]] = {(n,): {EOS: 1.0} for n in range(2, 6)}
    model = table(*[line | {(): probabilities}] * count, V=6)
    rules: dict[str, Any] = {"limits": [3] * count, "start": BOS, "end": EOS}
    seed = how.pop("seed", 1)
    seeds = [10_000 * seed + number for number in range(count)]
    return sample(Mock(model), begin(count), **rules, seeds=seeds, **how)


def shares(found: list[Hypothesis]) -> list[float]:
    return [sum(one.tokens == [n] for one in found) / len(found) for n in range(2, 6)]


def test_sampling_follows_the_model_and_its_truncations() -> None:
    assert shares(draws(2000)) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.04)
    assert shares(draws(2000, top_k=2)) == pytest.approx([5 / 8, 3 / 8, 0, 0], abs=0.04)
    assert shares(draws(2000, top_p=0.7)) == pytest.approx([5 / 8, 3 / 8, 0, 0], abs=0.04)
    assert shares(draws(50, top_p=0.01)) == [1.0, 0, 0, 0]
    assert shares(draws(50, temperature=0.01)) == [1.0, 0, 0, 0]
    squares = [0.25, 0.09, 0.0225, 0.0025]
    sharper = [square / sum(squares) for square in squares]
    assert shares(draws(2000, temperature=0.5)) == pytest.approx(sharper, abs=0.04)


def test_sampling_repeats_with_its_seed_and_tells_the_models_probabilities() -> None:
    assert draws(50, seed=4) == draws(50, seed=4) != draws(50, seed=5)
    for one in draws(50, top_k=1, temperature=0.2):
        assert one.token_log_probabilities == pytest.approx([math.log(0.5), 0.0])


def test_no_sentences_no_hypotheses() -> None:
    mock = Mock(hashed(0, 3))
    assert greedy(mock, begin(0), limits=[], start=BOS, end=EOS) == []
    assert (
        beam_search(mock, begin(0), limits=[], start=BOS, end=EOS, beam=2, length_penalty=0.0) == []
    )
    assert mock.calls == []


def test_bad_settings_are_explained() -> None:
    with pytest.raises(RegardError, match="nbest 3: must be from 1 to the beam, 2"):
        beam_search(
            Mock(hashed(0, 3)),
            begin(1),
            limits=[1],
            start=BOS,
            end=EOS,
            beam=2,
            length_penalty=0.0,
            nbest=3,
        )
    for wrong in ({"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}):
        with pytest.raises(RegardError, match=next(iter(wrong))):
            draws(1, **wrong)
