"""Logits processors: no repeated n-grams, repetition and coverage penalty, diverse beam groups, their combination."""

from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from regard.decoding.beam_search import beam_search
from regard.decoding.constraints import Constraints, WordBoundaries
from regard.decoding.greedy_and_sampling import greedy, sample
from regard.decoding.length_penalty_and_stopping import gnmt_length_penalty
from regard.decoding.options_and_logits_processors import (
    CoveragePenalty,
    DecodingContext,
    DiverseBeamGroups,
    LogitsProcessorList,
    NoRepeatNgram,
    RepetitionPenalty,
    TopK,
    TopP,
)
from regard.recipe import DecodingConfig
from tests.unit.decoding.mock_model import (
    BOS,
    EOS,
    MockStep,
    Prefix,
    exhaustive,
    initial_state,
    log_probabilities,
    random_model,
    search,
)


def test_shapes_are_checked_although_the_module_does_not_need_torch() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        TopK(1).truncate_distribution(torch.zeros(2, 3, 4))


def test_options_turn_on_their_processors() -> None:
    assert DecodingConfig().logits_processors == []
    assert DecodingConfig(beam=1, length_penalty=1.0).logits_processors == []
    assert DecodingConfig(no_repeat_ngram=2).logits_processors == [NoRepeatNgram]
    decoding = DecodingConfig(temperature=1.0, top_p=0.5, repetition_penalty=2.0)
    assert decoding.logits_processors == [RepetitionPenalty, TopP]
    # A recipe may sample, and a call may search.
    decoding = DecodingConfig(temperature=0, top_k=5, top_p=0.5, repetition_penalty=2.0)
    assert decoding.logits_processors == [RepetitionPenalty]


def test_sampling_excludes_the_options_that_need_a_search() -> None:
    needs_search = {"coverage_penalty": 0.2, "beam_groups": 5, "protect": ("numbers",)}
    for option, value in needs_search.items():
        assert DecodingConfig.model_validate({option: value}).beam == 5
        for cause, reason in (("temperature", "turns on sampling"), ("mbr", "draws samples")):
            with pytest.raises(ValueError, match=f"{cause} {reason}, .* combined with {option} "):
                DecodingConfig.model_validate({option: value, cause: 1})
    two = {"coverage_penalty": 0.2, "beam_groups": 5, "temperature": 1.0}
    with pytest.raises(ValueError, match="combined with coverage_penalty and beam_groups"):
        DecodingConfig.model_validate(two)
    # The other options of search are ignored.
    assert DecodingConfig(temperature=1.0, beam=4, length_penalty=1.0).is_sampling


def test_at_most_one_processor_may_select() -> None:
    anywhere = torch.ones(4, dtype=torch.bool)
    constraints = Constraints([[]], WordBoundaries(anywhere, anywhere), EOS)
    groups = DiverseBeamGroups(2, 0.5)
    for allowed in ([], [NoRepeatNgram(2), constraints], [groups, NoRepeatNgram(2)]):
        LogitsProcessorList(allowed)
    with pytest.raises(
        AssertionError, match="Constraints and DiverseBeamGroups cannot be combined"
    ):
        LogitsProcessorList([constraints, NoRepeatNgram(2), groups])


# NoRepeatNgram


def repeats(tokens: Sequence[int], n: int) -> bool:
    ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(ngrams)) < len(ngrams)


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 3))
def test_no_ngram_occurs_twice(seed: int, n: int) -> None:
    model = random_model(seed, 4, spread=3.0)
    ((best,),) = search(model, [NoRepeatNgram(n)], max_lengths=[3], beam=200)
    allowed = [one for one in exhaustive(model, 4, 3, 0.6, (BOS,)) if not repeats(one[1], n)]
    assert tuple(best.tokens) == allowed[0][1]
    for decode in (greedy, partial(sample, seeds=[seed])):
        (one,) = decode(
            MockStep(model),
            initial_state(1),
            max_lengths=[12],
            bos=BOS,
            eos=EOS,
            suppressed=[BOS],
            processors=[NoRepeatNgram(n)],
        )
        assert not repeats(one.tokens, n)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_first_possible_repetition_is_forbidden(n: int) -> None:
    """The model always prefers token 2. The n-gram 2 … 2 is complete after n tokens, so token n + 1 must differ."""
    (one,) = greedy(
        MockStep(lambda sentence, prefix: [0.0, 0.0, 9.0, 5.0]),
        initial_state(1),
        max_lengths=[n + 1],
        bos=BOS,
        eos=EOS,
        suppressed=[BOS],
        processors=[NoRepeatNgram(n)],
    )
    assert one.tokens == [*[2] * n, 3]


# RepetitionPenalty


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), penalty=st.sampled_from([0.5, 1.3, 3.0]))
def test_repeated_tokens_are_penalized_once_each(seed: int, penalty: float) -> None:
    """The best of all sequences, scored independently; a token counts as repeated however often it occurred."""

    def score(tokens: Prefix) -> float:
        each = log_probabilities(model, 0, (*tokens, EOS))
        factors = [penalty if one in tokens[:i] else 1.0 for i, one in enumerate((*tokens, EOS))]
        total = sum(factor * value for factor, value in zip(factors, each, strict=True))
        return total / gnmt_length_penalty(len(tokens) + 1, 0.6)

    model = random_model(seed, 4, spread=3.0)
    every = [(score(tokens), tokens) for _, tokens in exhaustive(model, 4, 4, 0.6, (BOS,))]
    ((best,),) = search(model, [RepetitionPenalty(penalty)], max_lengths=[4], beam=200)
    expected_score, expected_tokens = max(every)
    assert tuple(best.tokens) == expected_tokens
    assert best.score == pytest.approx(expected_score)


def test_a_repetition_penalty_ends_a_loop() -> None:
    """The model always prefers token 2, with log-probability -0.02, to token 3, with -4.02."""
    for penalty, expected in ((1.0, [2, 2, 2]), (100.0, [2, 2, 2]), (300.0, [2, 3, 2])):
        (one,) = greedy(
            MockStep(lambda sentence, prefix: [-9.0, -9.0, 9.0, 5.0]),
            initial_state(1),
            max_lengths=[3],
            bos=BOS,
            eos=EOS,
            suppressed=[BOS],
            processors=[RepetitionPenalty(penalty)],
        )
        assert one.tokens == expected, penalty


# CoveragePenalty


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_coverage_is_added_to_the_score_as_in_the_paper(beta: float) -> None:
    model, S = random_model(3, 5), 4
    rows = np.random.default_rng(0).dirichlet([0.3] * S, size=100)

    class AttendingStep(MockStep):
        """Its attention depends on the whole prefix; the last source token is padding."""

        def __call__(self, last, state):  # type: ignore[no-untyped-def]
            logits, state = super().__call__(last, state)
            self.attention = torch.tensor(
                np.array([rows[hash(prefix) % 100] for _, prefix in state.rows]),
                dtype=torch.float32,
            )[None]
            return logits, state

    step = AttendingStep(model)
    source_mask = torch.tensor([[True] * (S - 1) + [False]])
    coverage = CoveragePenalty(beta, source_mask, lambda: step.attention)
    (found,) = beam_search(
        step,
        initial_state(1),
        max_lengths=[3],
        bos=BOS,
        eos=EOS,
        beam=300,
        length_penalty=0.6,
        nbest=20,
        suppressed=[BOS],
        processors=[coverage],
    )

    def expected(score: float, tokens: Prefix) -> float:
        inputs = (BOS, *tokens)
        total = sum(rows[hash(inputs[: i + 1]) % 100] for i in range(len(inputs)))
        return float(score + beta * np.log(np.minimum(np.asarray(total)[: S - 1], 1)).sum())

    every = [(expected(*one), one[1]) for one in exhaustive(model, 5, 3, 0.6, (BOS,))]
    best = sorted(every, reverse=True)[:20]
    assert [tuple(one.tokens) for one in found] == [tokens for _, tokens in best]
    assert [one.score for one in found] == pytest.approx([score for score, _ in best], abs=1e-4)


# DiverseBeamGroups


def test_groups_are_those_of_the_options() -> None:
    decoding = DecodingConfig(beam=6, beam_groups=3, diversity_penalty=0.7)

    def record_cross_attention() -> NoReturn:
        raise AssertionError("groups need no attention")

    mask = torch.ones(1, 3, dtype=torch.bool)
    context = DecodingContext(mask, record_cross_attention, EOS)
    groups = DiverseBeamGroups.from_options(decoding, context)
    assert (groups.groups, groups.penalty) == (3, 0.7)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6), groups=st.integers(1, 4), penalty=st.sampled_from([0.0, 0.7, 50.0])
)
def test_groups_of_one_avoid_the_tokens_of_earlier_groups(
    seed: int, groups: int, penalty: float
) -> None:
    """Each group is greedy search, written out token by token."""
    model, V, max_length = random_model(seed, 7), 7, 5
    outputs: list[list[int]] = [[] for _ in range(groups)]
    endings: set[tuple[int, ...]] = set()
    for _ in range(max_length + 1):
        cost = np.zeros(V)
        for own in outputs:
            logits = torch.tensor(model(0, tuple(own))).log_softmax(-1).double().numpy()
            logits[BOS] = -np.inf
            order = np.argsort(-(logits - cost), kind="stable")
            if order[0] == EOS:
                endings.add(tuple(own))
            own.append(int(order[0] if order[0] != EOS else order[1]))
            cost[own[-1]] += penalty
    (found,) = search(
        model,
        [DiverseBeamGroups(groups, penalty)],
        max_lengths=[max_length],
        beam=groups,
        nbest=groups,
    )
    ended = [tuple(one.tokens) for one in found if one.finished]
    cut = [tuple(one.tokens) for one in found if not one.finished]
    assert set(ended) <= endings
    assert set(cut) <= {tuple(own[:max_length]) for own in outputs}
    first = {one[:1] for one in map(tuple, outputs)}
    assert len(first) == groups or penalty < 50.0
    for one in found:
        total = one.log_probability
        assert one.score == pytest.approx(
            total / gnmt_length_penalty(len(one.token_log_probabilities), 0.6)
        )


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), beam=st.integers(1, 4))
def test_one_group_is_plain_beam_search(seed: int, beam: int) -> None:
    plain = search(random_model(seed, 7), [], 2, beam=beam, nbest=beam)
    assert (
        search(random_model(seed, 7), [DiverseBeamGroups(1, 5.0)], 2, beam=beam, nbest=beam)
        == plain
    )


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), groups=st.integers(1, 4), nbest=st.integers(1, 4))
def test_groups_return_as_many_hypotheses_as_were_finished_and_requested(
    seed: int, groups: int, nbest: int
) -> None:
    """Even if one group finished several and another none. The penalty separates the groups from the first token on."""
    ended: list[int] = []
    (found,) = search(
        random_model(seed, 7),
        [DiverseBeamGroups(groups, 50.0)],
        beam=groups,
        nbest=min(nbest, groups),
        observer=lambda step: ended.append(int(step.finished.sum())),
    )
    finished = min(ended[0], 1) + sum(
        ended[1:]
    )  # in the first step all groups have the same hypothesis
    if groups > 1 and finished:
        assert len(found) == min(nbest, groups, finished)
    assert len({tuple(one.tokens) for one in found}) == len(found)
