"""What processors a search: constraints, the guard against repetition, coverage, diversity."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from test_search import (
    BOS,
    EOS,
    Mock,
    Model,
    Prefix,
    begin,
    exhaustive,
    hashed,
    log_probabilities,
)

from regard.decoding.beam_search import beam_search
from regard.decoding.constraints import Constraints, Phrase, Spelling, WordBoundaries, tokens_needed
from regard.decoding.greedy_and_sampling import greedy, sample
from regard.decoding.hypotheses import Hypothesis, gnmt_length_penalty
from regard.decoding.length_penalty import LENGTH_NORMALIZATIONS
from regard.decoding.logits_processors import (
    CoveragePenalty,
    DiverseBeamGroups,
    LogitsProcessor,
    NoRepeatNgram,
)


def search(
    model: Model, processors: Sequence[LogitsProcessor], sentences: int = 1, **options: object
) -> list[list[Hypothesis]]:
    usual = {"limits": [6] * sentences, "beam": 3, "length_penalty": 0.6, **options}
    step, state = Mock(model), begin(sentences)
    return beam_search(
        step, state, start=BOS, end=EOS, banned=[BOS], processors=processors, **usual
    )  # type: ignore[arg-type]


# Constraints


def times_said(tokens: Sequence[int], phrase: Phrase, borders: WordBoundaries) -> int:
    """The most places where it stands, none of them inside another; found in another way than the search's own."""
    opens, closes = borders.opens.tolist(), borders.closes.tolist()
    row = (BOS, *tokens, EOS)
    most = [0] * len(row)  # in the row up to each place
    for end in range(1, len(row)):
        starts = [
            end - len(one.tokens)
            for one in phrase.spellings
            if len(one.tokens) < end
            and row[end - len(one.tokens) : end] == one.tokens
            and (not one.after_border or closes[row[end - len(one.tokens) - 1]])
            and (not one.before_border or opens[row[end]])
        ]
        most[end] = max([most[end - 1], *(most[start] + 1 for start in starts)])
    return most[-1]


@st.composite
def constrained(draw: st.DrawFn) -> tuple[int, WordBoundaries, list[list[Phrase]]]:
    V = draw(st.integers(4, 7))
    opens = draw(st.lists(st.booleans(), min_size=V, max_size=V))
    closes = draw(st.lists(st.booleans(), min_size=V, max_size=V))
    opens[EOS] = opens[2] = closes[BOS] = True
    token = st.integers(2, V - 1)
    tokens = st.lists(token, min_size=1, max_size=4).map(tuple)
    spellings = st.lists(st.builds(Spelling, tokens, st.booleans(), st.booleans()), max_size=1)
    free = st.builds(Spelling, tokens, st.just(False), st.booleans())
    phrase = st.builds(
        lambda one, more, times, let_off: Phrase((one, *more), times, let_off),
        free,
        spellings,
        st.integers(1, 2),
        st.booleans(),
    )
    batch = draw(st.lists(st.lists(phrase, max_size=3), min_size=1, max_size=3))
    return V, WordBoundaries(torch.tensor(opens), torch.tensor(closes)), batch


@settings(max_examples=50)
@given(
    seed=st.integers(0, 10**6),
    case=constrained(),
    beam=st.integers(1, 4),
    room=st.integers(0, 3),
    prefix=st.lists(st.integers(2, 3), max_size=2),
    n=st.sampled_from([0, 0, 1, 2]),
    length_normalization=st.sampled_from(sorted(LENGTH_NORMALIZATIONS)),
    length_penalty=st.sampled_from([0.0, 1.0]),
)
def test_every_phrase_is_said_as_often_as_asked_whatever_the_model(
    seed: int,
    case: tuple[int, WordBoundaries, list[list[Phrase]]],
    beam: int,
    room: int,
    prefix: list[int],
    n: int,
    length_normalization: str,
    length_penalty: float,
) -> None:
    V, borders, batch = case
    processors: list[LogitsProcessor] = [
        Constraints(batch, borders, EOS),
        *([NoRepeatNgram(n)] if n else []),
    ]
    found = search(
        hashed(seed, V, spread=4.0),
        processors,
        len(batch),
        limits=[len(prefix) + tokens_needed(phrases) + room for phrases in batch],
        beam=beam,
        length_penalty=length_penalty,
        length_normalization=LENGTH_NORMALIZATIONS[length_normalization],  # type: ignore[index]
        nbest=beam,
        prefixes=[prefix] * len(batch),
    )
    for hypotheses, phrases in zip(found, batch, strict=True):
        assert hypotheses
        for one in hypotheses:
            assert one.tokens[: len(prefix)] == prefix
            assert len(set(map(tuple, [one.tokens for one in hypotheses]))) == len(hypotheses)
            assert all(
                times_said(one.tokens, phrase, borders) >= phrase.times for phrase in phrases
            )


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    beam=st.integers(1, 4),
    length_normalization=st.sampled_from(sorted(LENGTH_NORMALIZATIONS)),
)
def test_without_phrases_it_is_plain_beam_search(
    seed: int, beam: int, length_normalization: str
) -> None:
    assume(not LENGTH_NORMALIZATIONS[length_normalization].cuts_at_limit)  # type: ignore[index]  # a guide may still want more there
    anywhere = torch.ones(6, dtype=torch.bool)
    guide = Constraints([[], []], WordBoundaries(anywhere, anywhere), EOS)
    options = {
        "beam": beam,
        "nbest": beam,
        "length_normalization": LENGTH_NORMALIZATIONS[length_normalization],
    }  # type: ignore[index]
    assert search(hashed(seed, 6), [guide], 2, **options) == search(
        hashed(seed, 6), [], 2, **options
    )


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    tokens=st.lists(st.integers(2, 3), min_size=1, max_size=2),
    length_penalty=st.sampled_from([0.0, 0.6]),
)
def test_a_beam_as_large_as_the_space_finds_the_best_that_says_the_phrase(
    seed: int, tokens: list[int], length_penalty: float
) -> None:
    anywhere = torch.ones(4, dtype=torch.bool)
    phrase = Phrase((Spelling(tuple(tokens)),))
    borders = WordBoundaries(anywhere, anywhere)
    guide = Constraints([[phrase]], borders, EOS)
    model = hashed(seed, 4)
    ((best,),) = search(model, [guide], limits=[3], beam=200, length_penalty=length_penalty)
    every = exhaustive(model, 4, 3, length_penalty, banned=(BOS,))
    score, wanted = next(one for one in every if times_said(one[1], phrase, borders))
    assert tuple(best.tokens) == wanted
    assert best.score == pytest.approx(score, abs=1e-5)


@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), tokens=st.lists(st.integers(2, 5), min_size=1, max_size=2))
def test_what_is_free_counts_as_the_likeliest_and_log_probabilities_stay_the_models(
    seed: int, tokens: list[int]
) -> None:
    anywhere = torch.ones(6, dtype=torch.bool)
    phrase = Phrase((Spelling(tuple(tokens)),), free=True)
    guide = Constraints([[phrase]], WordBoundaries(anywhere, anywhere), EOS)
    model = hashed(seed, 6)
    ((best,),) = search(model, [guide], limits=[4], length_penalty=0.0, beam=300)
    said = tuple(best.tokens)
    each = log_probabilities(model, 0, (*said, EOS)[: len(best.token_log_probabilities)])
    assert best.token_log_probabilities == pytest.approx(each, abs=1e-4)
    starts = [i for i in range(len(said)) if said[i : i + len(tokens)] == tuple(tokens)]
    # Of several places the first is the phrase that was asked for.
    ranked = sum(each)
    for place in range(starts[0], starts[0] + len(tokens)):
        logits = torch.tensor(model(0, said[:place])).log_softmax(-1)
        logits[[BOS, EOS]] = -torch.inf
        ranked += float(logits.max()) - each[place]
    assert best.score == pytest.approx(ranked, abs=1e-4)


# Repetition


def repeats(tokens: Sequence[int], n: int) -> bool:
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) < len(grams)


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 3))
def test_no_n_tokens_come_twice(seed: int, n: int) -> None:
    model = hashed(seed, 4, spread=3.0)
    ((best,),) = search(model, [NoRepeatNgram(n)], limits=[3], beam=200)
    allowed = [one for one in exhaustive(model, 4, 3, 0.6, (BOS,)) if not repeats(one[1], n)]
    assert tuple(best.tokens) == allowed[0][1]
    for one_by_one in (greedy, partial(sample, seeds=[seed])):
        (one,) = one_by_one(
            Mock(model),
            begin(1),
            limits=[12],
            start=BOS,
            end=EOS,
            banned=[BOS],
            processors=[NoRepeatNgram(n)],
        )
        assert not repeats(one.tokens, n)


# CoveragePenalty


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_coverage_is_added_to_the_score_as_in_the_paper(beta: float) -> None:
    model, S = hashed(3, 5), 4
    rows = np.random.default_rng(0).dirichlet([0.3] * S, size=100)

    class Watched(Mock):
        """Looks where the whole text before it says; the last source word is padding."""

        def __call__(self, last, state):  # type: ignore[no-untyped-def]
            logits, state = super().__call__(last, state)
            self.looked = torch.tensor(
                np.array([rows[hash(prefix) % 100] for _, prefix in state.rows]),
                dtype=torch.float32,
            )[None]
            return logits, state

    step = Watched(model)
    words = torch.tensor([[True] * (S - 1) + [False]])
    guide = CoveragePenalty(beta, words, lambda: step.looked)
    options = {"start": BOS, "end": EOS, "banned": [BOS], "beam": 300, "length_penalty": 0.6}
    (found,) = beam_search(step, begin(1), limits=[3], nbest=20, processors=[guide], **options)  # type: ignore[arg-type]

    def wanted(score: float, tokens: Prefix) -> float:
        said = (BOS, *tokens)
        got = sum(rows[hash(said[: i + 1]) % 100] for i in range(len(said)))
        return float(score + beta * np.log(np.minimum(np.asarray(got)[: S - 1], 1)).sum())

    every = [(wanted(*one), one[1]) for one in exhaustive(model, 5, 3, 0.6, (BOS,))]
    best = sorted(every, reverse=True)[:20]
    assert [tuple(one.tokens) for one in found] == [tokens for _, tokens in best]
    assert [one.score for one in found] == pytest.approx([score for score, _ in best], abs=1e-4)


# DiverseBeamGroups


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6), groups=st.integers(1, 4), penalty=st.sampled_from([0.0, 0.7, 50.0])
)
def test_groups_of_one_avoid_what_the_groups_before_them_said(
    seed: int, groups: int, penalty: float
) -> None:
    """Each group is greedy; written out word by word."""
    model, V, limit = hashed(seed, 7), 7, 5
    said: list[list[int]] = [[] for _ in range(groups)]
    open_ends: dict[tuple[int, ...], float] = {}
    for _ in range(limit + 1):
        taken = np.zeros(V)
        for own in said:
            logits = torch.tensor(model(0, tuple(own))).log_softmax(-1).double().numpy()
            logits[BOS] = -np.inf
            order = np.argsort(-(logits - taken), kind="stable")
            if order[0] == EOS:
                open_ends.setdefault(tuple(own), 0.0)
            own.append(int(order[0] if order[0] != EOS else order[1]))
            taken[own[-1]] += penalty
    (found,) = search(
        model, [DiverseBeamGroups(groups, penalty)], limits=[limit], beam=groups, nbest=groups
    )
    ended = [tuple(one.tokens) for one in found if one.finished]
    cut = [tuple(one.tokens) for one in found if not one.finished]
    assert set(ended) <= set(open_ends)
    assert set(cut) <= {tuple(own[:limit]) for own in said}
    first = {one[:1] for one in map(tuple, said)}
    assert len(first) == groups or penalty < 50.0
    for one in found:
        total = one.log_probability
        assert one.score == pytest.approx(
            total / gnmt_length_penalty(len(one.token_log_probabilities), 0.6)
        )


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), beam=st.integers(1, 4))
def test_one_group_is_plain_beam_search(seed: int, beam: int) -> None:
    plain = search(hashed(seed, 7), [], 2, beam=beam, nbest=beam)
    assert search(hashed(seed, 7), [DiverseBeamGroups(1, 5.0)], 2, beam=beam, nbest=beam) == plain


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), groups=st.integers(1, 4), nbest=st.integers(1, 4))
def test_of_groups_as_many_are_given_as_were_finished_and_asked_for(
    seed: int, groups: int, nbest: int
) -> None:
    """Even if one group finished several and another none. The penalty keeps groups apart from the first word on."""
    ended: list[int] = []
    (found,) = search(
        hashed(seed, 7),
        [DiverseBeamGroups(groups, 50.0)],
        beam=groups,
        nbest=min(nbest, groups),
        observer=lambda looked: ended.append(int(looked.ended.sum())),
    )
    finished = min(ended[0], 1) + sum(ended[1:])  # at first all groups stand at the same place
    if groups > 1 and finished:
        assert len(found) == min(nbest, groups, finished)
    assert len({tuple(one.tokens) for one in found}) == len(found)
