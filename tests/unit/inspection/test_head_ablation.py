"""What a head is worth and what it does."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sacrebleu.metrics.bleu import BLEU

from regard.errors import RegardError
from regard.inspection import head_ablation
from regard.inspection.head_ablation import (
    HEAD_NAMES,
    HeadOutput,
    ablate_heads,
    all_heads,
    bleu_counts,
    bleu_of,
    describe_heads,
    mean_ablated,
    mean_outputs,
)
from regard.inspection.hooks import Head, Observation, attentions, mute_heads
from regard.inspection.teacher_forcing import force
from regard.nn.multi_head_attention import record_attention
from regard.tasks import Translator

SOURCES = ["The dog was tired.", "The cat was hungry.", "It was too wide."]
REFERENCES = ["Der Hund war müde.", "Die Katze war hungrig.", "Sie war zu breit."]


@pytest.fixture(scope="module")
def model(make_run: Callable[..., Path]) -> Translator:
    return Translator.load(make_run(decoding={"max_length": 8}, model={"output_bias": True}), "cpu")


@pytest.mark.parametrize("site", ["encoder", "decoder", "cross_attention"])
def test_a_mean_of_zero_mutes_the_head(model: Translator, site: str) -> None:
    place = HeadOutput(site, 1, 0)  # type: ignore[arg-type]
    zero = {place: torch.zeros(8)}
    batch = force(model, SOURCES[0], REFERENCES[0]).batch(model)
    with torch.inference_mode():
        whole = model.network(*batch)
        with mean_ablated(model, zero):
            ablated = model.network(*batch)
            translations = model.generate(SOURCES, plain=True, beam=2)
        with mute_heads(model, [Head(*place[:3])]):
            torch.testing.assert_close(model.network(*batch), ablated)
            muted = model.generate(SOURCES, plain=True, beam=2)
        assert not torch.equal(whole, ablated)
        torch.testing.assert_close(model.network(*batch), whole)
    for ours, theirs in zip(translations, muted, strict=True):
        assert [one.translation for one in ours] == [one.translation for one in theirs]


def test_the_mean_is_over_all_positions_or_over_one_token(model: Translator) -> None:
    forced = [force(model, *pair) for pair in zip(SOURCES, REFERENCES, strict=True)]
    module = attentions(model)["encoder"][1]
    rows: list[torch.Tensor] = []
    ids: list[int] = []
    with torch.inference_mode():
        for one in forced:
            with record_attention([module]) as recorded:
                model.network(*one.batch(model))
            rows += list(recorded[module].output[0, 1])
            ids += [token.id for token in one.source]
    token = forced[0].source[-1].id
    everywhere, at_token = HeadOutput("encoder", 1, 1), HeadOutput("encoder", 1, 1, token)
    means = mean_outputs(model, [everywhere, at_token], forced)
    torch.testing.assert_close(means[everywhere], torch.stack(rows).mean(0))
    some = [row for row, i in zip(rows, ids, strict=True) if i == token]
    torch.testing.assert_close(means[at_token], torch.stack(some).mean(0))
    with pytest.raises(RegardError, match="token 99999: does not occur in any of the sentences"):
        mean_outputs(model, [HeadOutput("encoder", 0, 0, 99999)], forced)


def test_a_head_is_ablated_at_one_token_only(model: Translator) -> None:
    """Also in beam search, where the rows of a sentence are queries side by side."""
    forced = force(model, SOURCES[0], REFERENCES[0])
    token = forced.inputs[1].id
    place = HeadOutput("cross_attention", 1, 0, token)
    with torch.inference_mode():
        whole = model.network(*forced.batch(model))[0]
        with mean_ablated(model, {place: torch.full((8,), 3.0)}):
            ablated = model.network(*forced.batch(model))[0]
            model.generate(SOURCES, plain=True, beam=3)
    changed = (whole - ablated).abs().amax(-1) > 1e-4
    # The last layer: only this position changes.
    assert changed.tolist() == [one.id == token for one in forced.inputs]


def test_the_table(model: Translator) -> None:
    heads = [Head("cross_attention", 0, 1), Head("encoder", 1, 0)]
    table = ablate_heads(model, SOURCES, REFERENCES, correct=lambda i, text: i == 0, heads=heads)
    assert [one.head for one in table.effects] == heads
    for one in table.effects:
        assert one.log_probability.low <= one.log_probability.value <= one.log_probability.high
        assert one.correct == (0, 0, 0)  # the same sentence is correct before and after
    forced = [force(model, *pair) for pair in zip(SOURCES, REFERENCES, strict=True)]
    with torch.inference_mode():
        places = [HeadOutput(*heads[0])]
        before = [model.network(*one.batch(model))[0].log_softmax(-1) for one in forced]
        with mean_ablated(model, mean_outputs(model, places, forced)):
            after = [model.network(*one.batch(model))[0].log_softmax(-1) for one in forced]
    ids = [[token.id for token in one.outputs] for one in forced]
    sums = [
        sum(float(one[range(len(i)), i].sum()) for one, i in zip(side, ids, strict=True))
        for side in (before, after)
    ]
    expected = (sums[1] - sums[0]) / sum(map(len, ids))
    assert table.effects[0].log_probability.value == pytest.approx(expected, rel=1e-2)
    assert table.to_json()["heads"][0]["head"] == "cross_attention.0.1"
    assert "cross_attention.0.1" in table._repr_html_()
    with pytest.raises(RegardError, match="1 sources and 0 references"):
        ablate_heads(model, ["a"], [])


def test_sentences_that_do_not_test_correctness_are_left_out(model: Translator) -> None:
    def correct(number: int, text: str) -> bool | None:
        return (True, None, False)[number]

    head = [Head("encoder", 0, 0)]
    table = ablate_heads(model, SOURCES, REFERENCES, correct=correct, heads=head, tested="pronouns")
    assert table.correct == (1, 2)
    assert table.to_json()["correct"] == [1, 2]
    title, _, _, columns, _ = str(table).splitlines()
    assert title.endswith("and 1 of 2 pronouns correct with all")
    assert columns.endswith("correct pronouns, points")


def test_the_table_is_printed_with_the_most_important_head_first(model: Translator) -> None:
    done: list[tuple[int, int]] = []
    table = ablate_heads(model, SOURCES, REFERENCES, progress=lambda *counts: done.append(counts))
    heads = [one.head for one in table.effects]
    assert heads == all_heads(model)
    assert done == [(number, len(heads)) for number in range(1, len(heads) + 1)]
    title, names, _, head, *rows = str(table).splitlines()
    assert title == f"Without each head: 3 sentences, BLEU {table.bleu:.1f} with all"
    assert names == HEAD_NAMES
    assert head.split() == ["head", "what", "it", "does", "BLEU", "log-probability"]
    worst = min(table.effects, key=lambda one: one.log_probability.value)
    assert rows[0].startswith(str(worst.head))
    assert rows[0].endswith(str(worst.log_probability))
    assert len(rows) == len(heads)


def test_bleu_is_that_of_sacrebleu() -> None:
    texts = ["Der Hund war sehr müde heute.", "Die Katze war hungrig.", "Nein."]
    expected = BLEU().corpus_score(texts, [REFERENCES]).score
    assert bleu_of(bleu_counts(texts, REFERENCES).sum(0)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("site", "offset", "name"),
    [
        ("encoder", -1, "previous token"),
        ("encoder", 0, "same token"),
        ("encoder", 1, "next token"),
        ("decoder", -1, "previous token"),
    ],
)
def test_heads_are_named_by_what_they_do(
    model: Translator, monkeypatch: pytest.MonkeyPatch, site: str, offset: int, name: str
) -> None:
    """One head attends to a neighbour with 0.8 of its attention, the other evenly."""

    def observed(model: Translator, request: object, inputs: list[int]) -> Observation:
        sizes = {"encoder": len(request.source) + 1, "decoder": len(inputs)}  # type: ignore[attr-defined]
        weights = {}
        for each in ("encoder", "decoder", "cross_attention"):
            Q = sizes["encoder" if each == "encoder" else "decoder"]
            K = sizes["decoder" if each == "decoder" else "encoder"]
            array = np.full((2, 2, Q, K), 0.2 / K, np.float32)
            if each == site:
                array[1, 0] += 0.8 * np.eye(Q, K, offset)
            weights[each] = array
        return Observation(torch.zeros(1), weights, {}, set())  # type: ignore[arg-type]

    monkeypatch.setattr(head_ablation, "observe", observed)
    forced = [force(model, *pair) for pair in zip(SOURCES, REFERENCES, strict=True)]
    found = describe_heads(model, forced)
    best = found[Head(site, 1, 0)]  # type: ignore[arg-type]
    assert best.name == name
    assert best.share == pytest.approx(0.8, abs=0.1)
    assert found[Head(site, 0, 0)].name == "mixed"  # type: ignore[arg-type]


def test_coreference_is_measured_at_the_given_positions(model: Translator) -> None:
    forced = [force(model, SOURCES[0], REFERENCES[0])]
    links = [{"cross_attention": [(2, 1)]}]
    found = describe_heads(model, forced, links)  # type: ignore[arg-type]
    with torch.inference_mode():
        module = attentions(model)["cross_attention"][0]
        with record_attention([module]) as recorded:
            model.network(*forced[0].batch(model))
    weight = float(recorded[module].weights[0, 1, 2, 1])
    shares = found[Head("cross_attention", 0, 1)].shares
    assert shares["coreference"] == pytest.approx(weight, rel=1e-5)
