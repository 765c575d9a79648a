"""Greedy search and sampling on mock models, and what holds for all decoding methods."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError

from regard.decoding.beam_search import beam_search
from regard.decoding.greedy_and_sampling import greedy, sample
from regard.decoding.hypothesis import Hypothesis
from regard.decoding.length_penalty_and_stopping import (
    LENGTH_NORMALIZATIONS,
    LengthNormalization,
)
from regard.decoding.options_and_logits_processors import DecodingConfig, TopK, TopP
from regard.errors import RegardError
from tests.unit.decoding.mock_model import (
    BOS,
    EOS,
    MockStep,
    Prefix,
    Prefixes,
    check,
    initial_state,
    random_model,
    table_model,
)


def sampled(*arguments: Any, max_lengths: Sequence[int], **options: Any) -> list[Hypothesis]:
    return sample(*arguments, max_lengths=max_lengths, seeds=range(len(max_lengths)), **options)


SINGLE: dict[str, Callable[..., list[Hypothesis]]] = {"greedy": greedy, "sample": sampled}


@pytest.mark.parametrize(
    "decode", [*SINGLE.values(), partial(beam_search, beam=2, length_penalty=0.0)]
)
def test_an_empty_batch_gives_no_hypotheses(decode: Callable[..., list[Any]]) -> None:
    def step(*_: Any) -> Any:
        raise AssertionError("there is nothing to decode")

    assert decode(step, Prefixes([]), max_lengths=[], bos=BOS, eos=EOS) == []


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    V=st.integers(3, 9),
    length_penalty=st.sampled_from([0.0, 0.6, 1.5]),
    length_normalization=st.sampled_from([*LENGTH_NORMALIZATIONS.values()]),
)
def test_a_beam_of_one_is_greedy(
    seed: int, V: int, length_penalty: float, length_normalization: type[LengthNormalization]
) -> None:
    def model(sentence: int, prefix: Prefix) -> list[float]:
        # Rounded, so that equal logits are common, as in bf16.
        return [float(round(logit)) for logit in random_model(seed, V)(sentence, prefix)]

    options: dict[str, Any] = {"max_lengths": [6, 0, 3, 12], "bos": BOS, "eos": EOS}
    options |= {"length_penalty": length_penalty, "length_normalization": length_normalization}
    greedy_results = greedy(MockStep(model), initial_state(4), **options)
    beams = beam_search(MockStep(model), initial_state(4), beam=1, **options)
    assert greedy_results == [found for [found] in beams]


def test_beam_search_finds_what_greedy_search_misses() -> None:
    model = table_model(
        {(): {2: 0.6, 3: 0.4}, (2,): {2: 0.5, EOS: 0.5}, (2, 2): {EOS: 1.0}, (3,): {EOS: 1.0}}, V=4
    )
    [alone] = greedy(MockStep(model), initial_state(1), max_lengths=[5], bos=BOS, eos=EOS)
    [[best, second]] = beam_search(
        MockStep(model),
        initial_state(1),
        max_lengths=[5],
        bos=BOS,
        eos=EOS,
        beam=2,
        length_penalty=0.0,
        nbest=2,
    )
    assert alone.tokens[0] == 2
    assert alone.log_probability == pytest.approx(math.log(0.3))
    assert best.tokens == [3]
    assert best.log_probability == pytest.approx(math.log(0.4))
    assert second.log_probability == pytest.approx(math.log(0.3))


def test_finished_sentences_leave_the_batch() -> None:
    def model(sentence: int, prefix: Prefix) -> list[float]:
        # Sentence 0 has one token, sentence 1 two, …, all of them far more probable than others.
        best = EOS if len(prefix) > sentence else 2 + len(prefix) % 2
        return [9.0 if token == best else token / 10 for token in range(5)]

    mock = MockStep(model)
    found = greedy(mock, initial_state(3), max_lengths=[9] * 3, bos=BOS, eos=EOS)
    assert mock.calls == [3, 3, 2, 1]
    assert mock.selects == 2, "select only when a sentence is done"
    assert [one.tokens for one in found] == [[2], [2, 3], [2, 3, 2]]

    mock = MockStep(model)
    beams = beam_search(
        mock, initial_state(3), max_lengths=[9] * 3, bos=BOS, eos=EOS, beam=2, length_penalty=0.6
    )
    assert [one.tokens for [one] in beams] == [[2], [2, 3], [2, 3, 2]]
    assert mock.calls[:2] == [3, 6]
    assert mock.calls == sorted(mock.calls[:2]) + sorted(mock.calls[2:], reverse=True)
    assert mock.calls[-1] == 2


def test_a_hypothesis_without_eos_is_truncated_at_the_maximum_length() -> None:
    endless = table_model({(2,) * n: {2: 0.75, 3: 0.25} for n in range(9)} | {(3,): {3: 1.0}}, V=4)
    [one] = greedy(MockStep(endless), initial_state(1), max_lengths=[3], bos=BOS, eos=EOS)
    total = one.log_probability
    assert one == Hypothesis([2, 2, 2], total, total, one.token_log_probabilities, False)
    assert not one.finished
    assert one.log_probability == pytest.approx(3 * math.log(0.75))
    [two] = greedy(MockStep(endless), initial_state(1), max_lengths=[0], bos=BOS, eos=EOS)
    assert two == Hypothesis([], 0.0, 0.0, [], False)


@pytest.mark.parametrize("search", ["greedy", "beam", "sample"])
def test_a_hypothesis_without_allowed_tokens_is_truncated(search: str) -> None:
    model = table_model({(): {2: 1.0}, (2,): {3: 1.0}}, {(): {2: 1.0}, (2,): {EOS: 1.0}}, V=4)
    rules: dict[str, Any] = {"max_lengths": [9, 9], "bos": BOS, "eos": EOS, "suppressed": [3]}
    if search == "beam":
        lists = beam_search(
            MockStep(model), initial_state(2), beam=3, length_penalty=0.6, nbest=3, **rules
        )
        assert [len(found) for found in lists] == [1, 1]
        truncated, finished = [found[0] for found in lists]
    else:
        truncated, finished = SINGLE[search](MockStep(model), initial_state(2), **rules)
    assert (truncated.tokens, truncated.finished, truncated.score) == ([2], False, 0.0)
    assert (finished.tokens, finished.finished) == ([2], True)


@pytest.mark.parametrize("search", ["greedy", "beam", "sample"])
def test_prefixes_are_forced_and_suppressed_tokens_never_generated(search: str) -> None:
    model = random_model(7, 8)
    prefixes = [[5, 3, 3], [], [2]]
    rules: dict[str, Any] = {"max_lengths": [2, 6, 6], "bos": BOS, "eos": EOS, "prefixes": prefixes}
    rules["suppressed"] = [BOS, 3, 4]
    if search == "beam":
        found = beam_search(
            MockStep(model), initial_state(3), beam=4, length_penalty=1.0, nbest=4, **rules
        )
    else:
        found = [[one] for one in SINGLE[search](MockStep(model), initial_state(3), **rules)]
    for sentence, (some, prefix) in enumerate(zip(found, prefixes, strict=True)):
        check(model, sentence, some, 1.0 if search == "beam" else 0.0, [3, 6, 6][sentence])
        for one in some:
            assert one.tokens[: len(prefix)] == prefix
            assert not {BOS, 3, 4} & set(one.tokens[len(prefix) :])


def test_an_empty_batch_runs_no_step() -> None:
    mock = MockStep(random_model(0, 3))
    assert greedy(mock, initial_state(0), max_lengths=[], bos=BOS, eos=EOS) == []
    assert (
        beam_search(
            mock, initial_state(0), max_lengths=[], bos=BOS, eos=EOS, beam=2, length_penalty=0.0
        )
        == []
    )
    assert mock.calls == []


def draws(count: int, **options: Any) -> list[Hypothesis]:
    probabilities = {2: 0.5, 3: 0.3, 4: 0.15, 5: 0.05}
    line: dict[Prefix, dict[int, float]] = {(n,): {EOS: 1.0} for n in range(2, 6)}
    model = table_model(*[line | {(): probabilities}] * count, V=6)
    rules: dict[str, Any] = {"max_lengths": [3] * count, "bos": BOS, "eos": EOS}
    seed = options.pop("seed", 1)
    seeds = [10_000 * seed + number for number in range(count)]
    return sample(MockStep(model), initial_state(count), **rules, seeds=seeds, **options)


def frequencies(found: list[Hypothesis]) -> list[float]:
    return [sum(one.tokens == [n] for one in found) / len(found) for n in range(2, 6)]


def test_samples_follow_the_distribution_and_its_truncations() -> None:
    assert frequencies(draws(2000)) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.04)
    assert frequencies(draws(2000, processors=[TopK(2)])) == pytest.approx(
        [5 / 8, 3 / 8, 0, 0], abs=0.04
    )
    assert frequencies(draws(2000, processors=[TopP(0.7)])) == pytest.approx(
        [5 / 8, 3 / 8, 0, 0], abs=0.04
    )
    assert frequencies(draws(50, processors=[TopP(0.01)])) == [1.0, 0, 0, 0]
    # 0.6 of the two tokens that top-k leaves, of which the first has 5 / 8.
    assert frequencies(draws(50, processors=[TopK(2), TopP(0.6)])) == [1.0, 0, 0, 0]
    assert frequencies(draws(50, processors=[TopK(9), TopP(1.0)])) == frequencies(draws(50))
    assert frequencies(draws(50, temperature=0.01)) == [1.0, 0, 0, 0]
    squares = [0.25, 0.09, 0.0225, 0.0025]
    sharper = [square / sum(squares) for square in squares]
    assert frequencies(draws(2000, temperature=0.5)) == pytest.approx(sharper, abs=0.04)


def test_samples_depend_on_the_seed_and_have_the_models_probabilities() -> None:
    assert draws(50, seed=4) == draws(50, seed=4) != draws(50, seed=5)
    for one in draws(50, processors=[TopK(1)], temperature=0.2):
        assert one.token_log_probabilities == pytest.approx([math.log(0.5), 0.0])


def test_invalid_sampling_options_are_errors() -> None:
    with pytest.raises(RegardError, match="temperature 0"):
        draws(1, temperature=0.0)
    for wrong in ({"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}, {"temperature": 0.001}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            DecodingConfig.model_validate({"temperature": 1.0, **wrong})
