"""Lexical constraints: every phrase is generated, whatever the model."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, example, given, settings, strategies as st

from regard.decoding.constraints import Constraints, WordBoundaries, _fallback
from regard.decoding.hypothesis import Phrase, Tokenization, tokens_needed
from regard.decoding.length_penalty_and_stopping import LENGTH_NORMALIZATIONS
from regard.decoding.options_and_logits_processors import LogitsProcessor, NoRepeatNgram
from tests.unit.decoding.mock_model import (
    BOS,
    EOS,
    exhaustive,
    log_probabilities,
    random_model,
    search,
)


def count_occurrences(tokens: Sequence[int], phrase: Phrase, boundaries: WordBoundaries) -> int:
    """The largest number of non-overlapping occurrences, by dynamic programming: another way than the search's own."""
    begins_word, ends_word = boundaries.begins_word.tolist(), boundaries.ends_word.tolist()
    row = (BOS, *tokens, EOS)
    counts = [0] * len(row)  # in the row up to each position
    for end in range(1, len(row)):
        starts = [
            end - len(one.tokens)
            for one in phrase.tokenizations
            if len(one.tokens) < end
            and row[end - len(one.tokens) : end] == one.tokens
            and (not one.boundary_before or ends_word[row[end - len(one.tokens) - 1]])
            and (not one.boundary_after or begins_word[row[end]])
        ]
        counts[end] = max([counts[end - 1], *(counts[start] + 1 for start in starts)])
    return counts[-1]


@st.composite
def constrained(draw: st.DrawFn) -> tuple[int, WordBoundaries, list[list[Phrase]]]:
    V = draw(st.integers(4, 7))
    begins_word = draw(st.lists(st.booleans(), min_size=V, max_size=V))
    ends_word = draw(st.lists(st.booleans(), min_size=V, max_size=V))
    begins_word[EOS] = begins_word[2] = ends_word[BOS] = True
    token = st.integers(2, V - 1)
    tokens = st.lists(token, min_size=1, max_size=4).map(tuple)
    tokenizations = st.lists(
        st.builds(Tokenization, tokens, st.booleans(), st.booleans()), max_size=1
    )
    anywhere = st.builds(Tokenization, tokens, st.just(False), st.booleans())
    phrase = st.builds(
        lambda one, more, times, free: Phrase((one, *more), times, free),
        anywhere,
        tokenizations,
        st.integers(1, 2),
        st.booleans(),
    )
    batch = draw(st.lists(st.lists(phrase, max_size=3), min_size=1, max_size=3))
    return V, WordBoundaries(torch.tensor(begins_word), torch.tensor(ends_word)), batch


@settings(max_examples=50)
@given(
    seed=st.integers(0, 10**6),
    case=constrained(),
    beam=st.integers(1, 4),
    extra=st.integers(0, 3),
    prefix=st.lists(st.integers(2, 3), max_size=2),
    n=st.sampled_from([0, 0, 1, 2]),
    length_normalization=st.sampled_from(sorted(LENGTH_NORMALIZATIONS)),
    length_penalty=st.sampled_from([0.0, 1.0]),
)
def test_every_phrase_is_generated_as_often_as_required(
    seed: int,
    case: tuple[int, WordBoundaries, list[list[Phrase]]],
    beam: int,
    extra: int,
    prefix: list[int],
    n: int,
    length_normalization: str,
    length_penalty: float,
) -> None:
    V, boundaries, batch = case
    processors: list[LogitsProcessor] = [
        Constraints(batch, boundaries, EOS),
        *([NoRepeatNgram(n)] if n else []),
    ]
    found = search(
        random_model(seed, V, spread=4.0),
        processors,
        len(batch),
        max_lengths=[len(prefix) + tokens_needed(phrases) + extra for phrases in batch],
        beam=beam,
        length_penalty=length_penalty,
        length_normalization=LENGTH_NORMALIZATIONS[length_normalization],
        nbest=beam,
        prefixes=[prefix] * len(batch),
    )
    for hypotheses, phrases in zip(found, batch, strict=True):
        assert hypotheses
        for one in hypotheses:
            assert one.tokens[: len(prefix)] == prefix
            assert len(set(map(tuple, [one.tokens for one in hypotheses]))) == len(hypotheses)
            assert all(
                count_occurrences(one.tokens, phrase, boundaries) >= phrase.times
                for phrase in phrases
            )


@pytest.mark.parametrize(("ends_word", "expected"), [(True, 1), (False, 0)])
def test_a_tokenization_begins_again_only_at_a_word_boundary(
    ends_word: bool, expected: int
) -> None:
    """After 2 3 2 and a mismatch, the last 2 is a new beginning if 3 ends a word."""
    tokenization = Tokenization((2, 3, 2, 4), boundary_before=True)
    every = [True, True, True, ends_word, True]
    assert _fallback(tokenization, every) == [0, 0, 0, expected, 0]
    assert _fallback(tokenization._replace(boundary_before=False), every) == [0, 0, 0, 1, 0]


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    beam=st.integers(1, 4),
    length_normalization=st.sampled_from(sorted(LENGTH_NORMALIZATIONS)),
)
def test_without_phrases_it_is_plain_beam_search(
    seed: int, beam: int, length_normalization: str
) -> None:
    assume(
        not LENGTH_NORMALIZATIONS[length_normalization].cuts_at_limit
    )  # constraints are not cut at the limit
    anywhere = torch.ones(6, dtype=torch.bool)
    constraints = Constraints([[], []], WordBoundaries(anywhere, anywhere), EOS)
    options = {
        "beam": beam,
        "nbest": beam,
        "length_normalization": LENGTH_NORMALIZATIONS[length_normalization],
    }
    assert search(random_model(seed, 6), [constraints], 2, **options) == search(
        random_model(seed, 6), [], 2, **options
    )


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    tokens=st.lists(st.integers(2, 3), min_size=1, max_size=2),
    length_penalty=st.sampled_from([0.0, 0.6]),
)
def test_a_beam_as_large_as_the_space_finds_the_best_output_with_the_phrase(
    seed: int, tokens: list[int], length_penalty: float
) -> None:
    anywhere = torch.ones(4, dtype=torch.bool)
    phrase = Phrase((Tokenization(tuple(tokens)),))
    boundaries = WordBoundaries(anywhere, anywhere)
    constraints = Constraints([[phrase]], boundaries, EOS)
    model = random_model(seed, 4)
    ((best,),) = search(
        model, [constraints], max_lengths=[3], beam=200, length_penalty=length_penalty
    )
    every = exhaustive(model, 4, 3, length_penalty, suppressed=(BOS,))
    score, expected = next(one for one in every if count_occurrences(one[1], phrase, boundaries))
    assert tuple(best.tokens) == expected
    assert best.score == pytest.approx(score, abs=1e-5)


@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), tokens=st.lists(st.integers(2, 5), min_size=1, max_size=3))
@example(seed=3755, tokens=[3, 2])  # 3 3 2: the phrase begins again with its own first token
def test_free_phrases_cost_as_much_as_the_most_probable_token(seed: int, tokens: list[int]) -> None:
    anywhere = torch.ones(6, dtype=torch.bool)
    phrase = Phrase((Tokenization(tuple(tokens)),), free=True)
    constraints = Constraints([[phrase]], WordBoundaries(anywhere, anywhere), EOS)
    model = random_model(seed, 6)
    ((best,),) = search(model, [constraints], max_lengths=[4], length_penalty=0.0, beam=300)
    output = tuple(best.tokens)
    each = log_probabilities(model, 0, (*output, EOS)[: len(best.token_log_probabilities)])
    assert best.token_log_probabilities == pytest.approx(each, abs=1e-4)
    starts = [i for i in range(len(output)) if output[i : i + len(tokens)] == tuple(tokens)]
    # Of several occurrences, the first one is free.
    total = sum(each)
    for position in range(starts[0], starts[0] + len(tokens)):
        logits = torch.tensor(model(0, output[:position])).log_softmax(-1)
        logits[[BOS, EOS]] = -torch.inf
        total += float(logits.max()) - each[position]
    assert best.score == pytest.approx(total, abs=1e-4)
