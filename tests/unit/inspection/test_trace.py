"""What the page is told is what the model did."""

import base64
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from regard import trace as contract, tracing
from regard.data.special_tokens import BOS, EOS
from regard.errors import RegardError
from regard.inference.engine import Asked
from regard.inspection.hooks import PLACES, Head, attentions, muting, observe
from regard.inspection.trace import CANDIDATES, Token, Trace, trace, words_of
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.tasks import Translator

TEXT = "ein Hund dog"


@pytest.fixture(scope="module")
def model(finished_run: Path) -> Translator:
    return Translator.load(finished_run, "cpu")


@pytest.fixture(scope="module")
def traced(model: Translator) -> Trace:
    return trace(model, TEXT, beam=3, alpha=0.6)


def test_it_is_the_translation_of_the_model(model: Translator, traced: Trace) -> None:
    ((best, *_),) = model.search([TEXT], beam=3, alpha=0.6)
    assert traced.translation == best.text
    assert [token.text for token in traced.said[: len(best.tokens)]] == best.tokens
    logs = [math.log(probability) for probability in traced.probabilities]
    assert logs == pytest.approx(best.token_log_probabilities, abs=1e-4)


def test_rows_are_queries_and_sum_to_one(traced: Trace) -> None:
    S, T = len(traced.source), len(traced.read)
    assert traced.encoder.shape == (2, 2, S, S)
    assert traced.decoder.shape == (2, 2, T, T)
    assert traced.cross_attention.shape == (2, 2, T, S)
    for weights in (traced.encoder, traced.decoder, traced.cross_attention):
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert not traced.decoder[..., *np.triu_indices(T, 1)].any()


def test_rows_read_one_token_and_say_the_next(traced: Trace) -> None:
    assert traced.source[-1].id == EOS
    assert traced.read[0].id == BOS
    assert traced.read[0].special
    assert traced.read[1:] == traced.said[:-1]


def test_candidates_are_the_most_probable(traced: Trace) -> None:
    assert len(traced.candidates) == len(traced.said)
    for row, token, probability in zip(
        traced.candidates, traced.said, traced.probabilities, strict=True
    ):
        assert len(row) <= CANDIDATES
        values = [one.probability for one in row]
        assert values == sorted(values, reverse=True)
        known = {one.token.id: one.probability for one in row}
        assert known.get(token.id, probability) == pytest.approx(probability)


def test_the_tree_holds_the_way_to_the_translation(traced: Trace) -> None:
    nodes = {node.id: node for node in traced.beam}
    assert list(nodes) == list(range(len(nodes)))
    assert (nodes[0].parent, nodes[0].token) == (None, BOS)
    for node in traced.beam[1:]:
        assert node.parent is not None
        parent = nodes[node.parent]
        assert parent.state == "kept"
        assert node.total == pytest.approx(parent.total + node.log_probability, abs=1e-5)
    said = [token.id for token in traced.said]
    last = "finished" if said[-1] == EOS else "kept"
    ways = []
    for node in traced.beam:
        way, at = [], node
        while at.parent is not None:
            way.append(at.token)
            at = nodes[at.parent]
        if node.state == last:
            ways.append(way[::-1])
    assert said in ways or said[:-1] in ways
    assert {node.token for node in traced.beam} == set(traced.tokens)


def test_at_each_step_no_more_go_on_than_the_beam_is_wide(traced: Trace) -> None:
    depth: dict[int, int] = {0: 0}
    kept: dict[int, int] = {}
    for node in traced.beam[1:]:
        assert node.parent is not None
        depth[node.id] = depth[node.parent] + 1
        kept[depth[node.id]] = kept.get(depth[node.id], 0) + (node.state == "kept")
    assert max(kept.values()) == 3


def test_a_prefix_is_kept(model: Translator) -> None:
    assert trace(model, TEXT, prefix="a dog").translation.startswith("a dog")


def test_nothing_of_the_watching_stays(model: Translator, traced: Trace) -> None:
    parts = [part for part in model.network.modules() if isinstance(part, MultiHeadAttention)]
    assert parts
    assert all(part.watch is None for part in parts)


def test_json_holds_the_very_numbers(traced: Trace) -> None:
    plain = traced.to_json()
    for name in ("encoder", "decoder", "cross_attention"):
        data = np.frombuffer(base64.b64decode(plain[name]["data"]), "<f4")
        assert np.array_equal(data.reshape(plain[name]["shape"]), getattr(traced, name))
    assert plain["said"][-1] == traced.said[-1]._asdict()
    assert torch.tensor(plain["probabilities"]).shape == (len(traced.said),)


# ---------------------------------------------------------------------------------------------
# What the weights are made of


@pytest.mark.parametrize("place", PLACES)
def test_parts_give_the_weights(traced: Trace, place: str) -> None:
    parts, weights = traced.parts[place], getattr(traced, place)  # type: ignore[index]
    query, key = (np.stack(part).astype(np.float64) for part in (parts.query, parts.key))
    scores = query @ key.swapaxes(-1, -2) * parts.scale
    if place == "decoder":
        scores[..., *np.triu_indices(scores.shape[-1], 1)] = -np.inf
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(powers / powers.sum(-1, keepdims=True), weights, atol=1e-6)


def test_each_head_has_its_rows_of_w_o(model: Translator, traced: Trace) -> None:
    for place, layers in attentions(model).items():
        for layer, part in enumerate(layers):
            whole = traced.parts[place].output[layer].reshape(-1, part.output.out_features)
            assert np.array_equal(whole, part.output.weight.detach().T.numpy())


# ---------------------------------------------------------------------------------------------
# The tree's attention


def test_a_node_looked_where_its_prefix_looks(model: Translator, traced: Trace) -> None:
    nodes = {node.id: node for node in traced.beam}
    assert set(traced.rows) == {node.parent for node in traced.beam[1:]}
    source = [token.id for token in traced.source]
    for parent, row in traced.rows.items():
        way, at = [], nodes[parent]
        while at.parent is not None:
            way.append(at.token)
            at = nodes[at.parent]
        with torch.inference_mode():
            seen = observe(model, Asked(source[:-1]), [BOS, *way[::-1]])
        np.testing.assert_allclose(row, seen.weights["cross_attention"][:, :, -1], atol=1e-5)
    assert traced.nodes.shape == (2, 2, len(traced.rows), len(source))


# ---------------------------------------------------------------------------------------------
# Occlusion


def test_occlusion_is_leaving_out_one_word_at_a_time(model: Translator, traced: Trace) -> None:
    assert traced.occlusion is not None
    assert traced.occlusion.words == [[0], [1], [2]]
    said = [token.id for token in traced.said]
    read = torch.tensor([[token.id for token in traced.read]])
    for word, probabilities in zip(
        traced.occlusion.words, traced.occlusion.probabilities, strict=True
    ):
        left = [token.id for i, token in enumerate(traced.source) if i not in word]
        with torch.inference_mode():
            alone = model.network(torch.tensor([left]), read)[0].softmax(-1)
        np.testing.assert_allclose(probabilities, alone[range(len(said)), said], atol=1e-5)


def test_occlusion_in_portions_is_the_same(
    model: Translator, traced: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.inspection.hooks.LOGITS_AT_ONCE", 1)
    again = trace(model, TEXT, beam=3, alpha=0.6).occlusion
    assert again is not None
    assert traced.occlusion is not None
    np.testing.assert_allclose(again.probabilities, traced.occlusion.probabilities, atol=1e-6)


def test_a_sentence_too_long_for_occlusion_has_none(
    model: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tracing.OCCLUSION_WORK, "cpu", 1)
    assert trace(model, TEXT).occlusion is None


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (["▁The", "▁dog", "▁sleep", "s", "."], [[0], [1], [2, 3], [4]]),
        (["▁did", "n", "'", "t", "▁", "go"], [[0, 1, 2, 3], [4, 5]]),
        (["▁我们", "吃", "饭"], [[0], [1], [2]]),
        (["▁𠮷", "野"], [[0], [1]]),
        ([], []),
    ],
)
def test_pieces_of_a_word_stay_together(pieces: list[str], words: list[list[int]]) -> None:
    tokens = [Token(9, piece, False) for piece in pieces]
    assert words_of([*tokens, Token(EOS, "</s>", True)]) == words


# ---------------------------------------------------------------------------------------------
# Interfering


def test_a_muted_head_is_one_whose_w_o_is_zero(model: Translator, finished_run: Path) -> None:
    other = Translator.load(finished_run, "cpu")
    width = model.recipe.model.d_v
    with torch.no_grad():
        attentions(other)["cross_attention"][0].output.weight[:, width : 2 * width] = 0
    expected = trace(other, TEXT, beam=2)
    found = trace(model, TEXT, beam=2, mute=[Head("cross_attention", 0, 1)])
    assert found.said == expected.said
    np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=1e-5)
    np.testing.assert_allclose(found.decoder, expected.decoder, atol=1e-5)
    assert found.probabilities != trace(model, TEXT, beam=2).probabilities
    assert found.to_json()["muted"] == ["cross_attention.0.1"]


def test_muting_ends_with_its_block_whatever_happens(model: Translator) -> None:
    parts = [part for layers in attentions(model).values() for part in layers]
    heads = [Head("encoder", 0, 0), Head("encoder", 0, 1), Head("decoder", 1, 1)]
    with muting(model, heads):
        assert parts[0].gate is not None
        assert parts[0].gate.tolist() == [0, 0]
    with pytest.raises(RegardError, match="there are 2"):
        trace(model, TEXT, mute=[Head("cross_attention", 0, 0), Head("cross_attention", 0, 9)])
    with pytest.raises(RegardError, match="layer 7"):
        trace(model, TEXT, mute=[Head("cross_attention", 7, 0)])
    assert all(part.gate is None for part in parts)


def test_tokens_can_be_forced_and_then_a_text(model: Translator) -> None:
    free = trace(model, TEXT, beam=2)
    others = (one.token for one in free.candidates[0] if one.token != free.said[0])
    second = next(token.id for token in others if not token.special)
    (more,) = model.tokenizer.target.encode(["dog"])
    found = trace(model, TEXT, beam=2, forced=[second], prefix="dog")
    assert [token.id for token in found.said][: 1 + len(more)] == [second, *more]
    assert found.options["forced"] == 1 + len(more)
    for wrong in (EOS, model.tokenizer.target.size, -1):
        with pytest.raises(RegardError, match="forced token"):
            trace(model, TEXT, forced=[wrong])


def test_a_temperature_draws(model: Translator) -> None:
    drawn = trace(model, TEXT, temperature=2.0, seed=5)
    assert drawn.said == trace(model, TEXT, temperature=2.0, seed=5).said
    assert drawn.said != trace(model, TEXT, temperature=2.0, seed=6).said
    way = [node.token for node in drawn.beam]
    assert way == [BOS, *(token.id for token in drawn.said)]
    assert [node.parent for node in drawn.beam[1:]] == list(range(len(drawn.said)))
    assert np.array_equal(drawn.nodes, drawn.cross_attention)
    with pytest.raises(RegardError, match="temperature"):
        trace(model, TEXT, temperature=1e-9)


def test_heads_are_named_as_they_are_asked_for() -> None:
    assert str(Head.named("encoder.1.0")) == "encoder.1.0"
    for wrong in ("encoder", "nowhere.1.1", "cross_attention.1.x", "cross.-1.0"):
        with pytest.raises(RegardError, match=r"cross\.0\.1"):
            Head.named(wrong)


# ---------------------------------------------------------------------------------------------
# Forms


def test_what_does_not_fit_into_a_file_is_rounded_or_left_out(
    traced: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert traced.to_json("file") == traced.to_json()
    for name in ("WHOLE_BYTES", "NODES_BYTES", "PARTS_BYTES"):
        monkeypatch.setattr(contract, name, 0)
    plain = traced.to_json("file")
    for place in PLACES:
        packed = plain[place]
        roots = np.frombuffer(base64.b64decode(packed["data"]), np.uint8) / 255
        weights = (roots**2 * packed["greatest"]).reshape(packed["shape"])
        np.testing.assert_allclose(weights, getattr(traced, place), atol=0.004)
        parts = plain["parts"][place]
        assert all(parts[name]["data"] is None for name in ("query", "key", "value", "output"))
    assert plain["nodes"]["data"] is None
    assert traced.to_json("apart")["cross_attention"]["data"] is None


def test_a_model_without_attention_has_no_layers(
    model: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.network, "attentions", dict)
    plain = json.loads(json.dumps(trace(model, TEXT).to_json()))
    assert all(plain[place]["shape"] == [0, 0, 0, 0] for place in (*PLACES, "nodes"))
    assert plain["parts"] == {}
    assert plain["coverage"] == {"most": [], "whole": []}


def test_columns_that_are_no_tokens_are_numbered(traced: Trace) -> None:
    narrow = replace(traced, encoder=traced.encoder[..., :2], mixed={"encoder"})
    assert [token.text for token in narrow.columns("encoder")] == ["1", "2"]
    assert narrow.columns("cross_attention") == traced.source
