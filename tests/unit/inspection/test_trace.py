"""A trace shows what the model computed."""

import base64
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.data.special_tokens import BOS, EOS
from regard.errors import RegardError
from regard.inference.engine import Request
from regard.inspection import trace as trace_module
from regard.inspection.hooks import SITES, Head, attentions, mute_heads, observe
from regard.inspection.trace import CANDIDATES, Token, Trace, group_words, trace
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.recipe import DecodingOptions
from regard.tasks import Translator

TEXT = "ein Hund dog"


@pytest.fixture(scope="module")
def model(finished_run: Path) -> Translator:
    return Translator.load(finished_run, "cpu")


@pytest.fixture(scope="module")
def translator(make_run: Callable[..., Path]) -> Translator:
    """A model whose translations differ from text to text."""
    return Translator.load(make_run(model={"output_bias": True}), "cpu")


@pytest.fixture(scope="module")
def traced(model: Translator) -> Trace:
    return trace(model, TEXT, beam=3, length_penalty=0.6)


def _path(traced: Trace, node: int) -> list[int]:
    """The tokens from the root to a node, without BOS."""
    nodes = {one.id: one for one in traced.beam}
    tokens, at = [], nodes[node]
    while at.parent is not None:
        tokens.append(at.token)
        at = nodes[at.parent]
    return tokens[::-1]


def test_the_translation_is_that_of_search(model: Translator, traced: Trace) -> None:
    ((best, *_),) = model.search([TEXT], beam=3, length_penalty=0.6)
    assert traced.translation == best.text
    assert [token.text for token in traced.outputs[: len(best.tokens)]] == best.tokens
    logs = [math.log(probability) for probability in traced.probabilities]
    assert logs == pytest.approx(best.token_log_probabilities, abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beam": 1},
        {"beam": 4, "length_penalty": 1.2, "length_normalization": "transformers"},
        {"beam": 4, "length_normalization": "ctranslate2", "max_length": 5},
        {"extra_length": 3},
        {"temperature": 1.3, "seed": 4},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": 2},
        {"mbr": 6, "seed": 3},
        {"no_repeat_ngram": 2},
        {"temperature": 1.0, "no_repeat_ngram": 2},
        {"beam": 4, "beam_groups": 2, "diversity_penalty": 0.8},
        {"coverage_penalty": 0.3},
        {"protect": ("numbers",)},
        {"protect": ("placeholders", "numbers"), "constrained_beam": 6},
    ],
    ids=str,
)
@pytest.mark.parametrize("prefix", ["", "Der"])
def test_every_decoding_option_gives_the_translation_of_translate(
    translator: Translator, options: DecodingOptions, prefix: str
) -> None:
    for text in ("The dog {name} saw 27 cats.", "The cat was hungry."):
        prefixes = [prefix] if prefix else None
        ((best, *_),) = translator.search([text], prefixes=prefixes, **options)
        found = trace(translator, text, prefix=prefix, **options)
        assert found.translation == best.text
        outputs = [token.id for token in found.outputs]
        assert found.translation.startswith(prefix)
        finished = {node.id for node in found.beam if node.state == "finished"}
        assert bool(finished) >= (outputs[-1] == EOS)
        assert outputs in [_path(found, node.id) for node in found.beam]


def test_rows_are_queries_and_sum_to_one(traced: Trace) -> None:
    S, T = len(traced.source), len(traced.inputs)
    assert traced.encoder.shape == (2, 2, S, S)
    assert traced.decoder.shape == (2, 2, T, T)
    assert traced.cross_attention.shape == (2, 2, T, S)
    for weights in (traced.encoder, traced.decoder, traced.cross_attention):
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert not traced.decoder[..., *np.triu_indices(T, 1)].any()


def test_the_output_of_a_row_is_the_input_of_the_next(traced: Trace) -> None:
    assert traced.source[-1].id == EOS
    assert traced.inputs[0].id == BOS
    assert traced.inputs[0].special
    assert traced.inputs[1:] == traced.outputs[:-1]


def test_candidates_are_the_most_probable(traced: Trace) -> None:
    assert len(traced.candidates) == len(traced.outputs)
    for row, token, probability in zip(
        traced.candidates, traced.outputs, traced.probabilities, strict=True
    ):
        assert len(row) <= CANDIDATES
        values = [one.probability for one in row]
        assert values == sorted(values, reverse=True)
        known = {one.token.id: one.probability for one in row}
        assert known.get(token.id, probability) == pytest.approx(probability)


def test_the_beam_contains_the_path_of_the_translation(traced: Trace) -> None:
    nodes = {node.id: node for node in traced.beam}
    assert list(nodes) == list(range(len(nodes)))
    assert (nodes[0].parent, nodes[0].token) == (None, BOS)
    for node in traced.beam[1:]:
        assert node.parent is not None
        parent = nodes[node.parent]
        assert parent.state == "kept"
        assert node.total == pytest.approx(parent.total + node.log_probability, abs=1e-5)
    outputs = [token.id for token in traced.outputs]
    last = "finished" if outputs[-1] == EOS else "kept"
    paths = [_path(traced, node.id) for node in traced.beam if node.state == last]
    assert outputs in paths or outputs[:-1] in paths
    assert {node.token for node in traced.beam} == set(traced.tokens)


def test_no_step_keeps_more_hypotheses_than_the_beam_size(traced: Trace) -> None:
    depth: dict[int, int] = {0: 0}
    active: dict[int, int] = {}
    for node in traced.beam[1:]:
        assert node.parent is not None
        depth[node.id] = depth[node.parent] + 1
        active[depth[node.id]] = active.get(depth[node.id], 0) + (node.state == "kept")
    assert max(active.values()) == 3


def test_a_prefix_is_kept(model: Translator) -> None:
    assert trace(model, TEXT, prefix="a dog").translation.startswith("a dog")


def test_attention_is_no_longer_recorded_afterwards(model: Translator, traced: Trace) -> None:
    parts = [part for part in model.network.modules() if isinstance(part, MultiHeadAttention)]
    assert parts
    assert all(part.observer is None for part in parts)


def test_json_holds_the_exact_values(traced: Trace) -> None:
    plain = traced.to_json()
    for name in ("encoder", "decoder", "cross_attention"):
        data = np.frombuffer(base64.b64decode(plain[name]["data"]), "<f4")
        assert np.array_equal(data.reshape(plain[name]["shape"]), getattr(traced, name))
    assert plain["outputs"][-1] == traced.outputs[-1]._asdict()
    assert torch.tensor(plain["probabilities"]).shape == (len(traced.outputs),)


# ---------------------------------------------------------------------------------------------
# Projections


@pytest.mark.parametrize("site", SITES)
def test_projections_give_the_weights(traced: Trace, site: str) -> None:
    projections, weights = traced.projections[site], getattr(traced, site)  # type: ignore[index]
    query, key = (
        np.stack(array).astype(np.float64) for array in (projections.query, projections.key)
    )
    scores = query @ key.swapaxes(-1, -2) * projections.scale
    if site == "decoder":
        scores[..., *np.triu_indices(scores.shape[-1], 1)] = -np.inf
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(powers / powers.sum(-1, keepdims=True), weights, atol=1e-6)


def test_each_head_has_its_rows_of_w_o(model: Translator, traced: Trace) -> None:
    for site, layers in attentions(model).items():
        for layer, part in enumerate(layers):
            whole = traced.projections[site].output[layer].reshape(-1, part.output.out_features)
            assert np.array_equal(whole, part.output.weight.detach().T.numpy())


# ---------------------------------------------------------------------------------------------
# Attention of beam nodes


def test_the_attention_of_a_node_is_that_of_its_prefix(model: Translator, traced: Trace) -> None:
    assert set(traced.node_attention) == {node.parent for node in traced.beam[1:]}
    source = [token.id for token in traced.source]
    for parent, row in traced.node_attention.items():
        with torch.inference_mode():
            observed = observe(model, Request(source[:-1]), [BOS, *_path(traced, parent)])
        np.testing.assert_allclose(row, observed.weights["cross_attention"][:, :, -1], atol=1e-5)
    assert traced.nodes.shape == (2, 2, len(traced.node_attention), len(source))


# ---------------------------------------------------------------------------------------------
# Occlusion


def test_occlusion_leaves_out_one_word_at_a_time(model: Translator, traced: Trace) -> None:
    assert traced.occlusion is not None
    assert traced.occlusion.words == [[0], [1], [2]]
    outputs = [token.id for token in traced.outputs]
    inputs = torch.tensor([[token.id for token in traced.inputs]])
    for word, probabilities in zip(
        traced.occlusion.words, traced.occlusion.probabilities, strict=True
    ):
        rest = [token.id for i, token in enumerate(traced.source) if i not in word]
        with torch.inference_mode():
            expected = model.network(torch.tensor([rest]), inputs)[0].softmax(-1)
        np.testing.assert_allclose(probabilities, expected[range(len(outputs)), outputs], atol=1e-5)


def test_occlusion_in_several_batches_is_the_same(
    model: Translator, traced: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.inspection.hooks.MAX_OCCLUSION_LOGITS", 1)
    again = trace(model, TEXT, beam=3, length_penalty=0.6).occlusion
    assert again is not None
    assert traced.occlusion is not None
    np.testing.assert_allclose(again.probabilities, traced.occlusion.probabilities, atol=1e-6)


def test_a_long_text_has_no_occlusion(model: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trace_module.OCCLUSION_WORK, "cpu", 1)
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
def test_tokens_are_grouped_into_words(pieces: list[str], words: list[list[int]]) -> None:
    tokens = [Token(9, piece, False) for piece in pieces]
    assert group_words([*tokens, Token(EOS, "</s>", True)]) == words


# ---------------------------------------------------------------------------------------------
# Muted heads, forced tokens, sampling


def test_muting_a_head_equals_zeroing_its_rows_of_w_o(
    model: Translator, finished_run: Path
) -> None:
    other = Translator.load(finished_run, "cpu")
    d_v = model.recipe.model.d_v
    with torch.no_grad():
        attentions(other)["cross_attention"][0].output.weight[:, d_v : 2 * d_v] = 0
    other.engine.packed = None  # it holds the weights as they were
    expected = trace(other, TEXT, beam=2)
    found = trace(model, TEXT, beam=2, mute=[Head("cross_attention", 0, 1)])
    assert found.outputs == expected.outputs
    np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=1e-5)
    np.testing.assert_allclose(found.decoder, expected.decoder, atol=1e-5)
    assert found.probabilities != trace(model, TEXT, beam=2).probabilities
    assert found.to_json()["muted"] == ["cross_attention.0.1"]


def test_muted_heads_are_muted_with_placeholders_too(translator: Translator) -> None:
    heads = [Head(site, layer, head) for site in SITES for layer in (0, 1) for head in (0, 1)]
    text = "The dog {name} saw a cat."
    muted = trace(translator, text, protect=("placeholders",), mute=heads)
    with mute_heads(translator, heads):
        packed, translator.engine.packed = translator.engine.packed, None
        expected = translator.translate([text], protect=("placeholders",))
        translator.engine.packed = packed
    assert [muted.translation] == expected


def test_muting_ends_with_its_block_even_after_an_error(model: Translator) -> None:
    parts = [part for layers in attentions(model).values() for part in layers]
    heads = [Head("encoder", 0, 0), Head("encoder", 0, 1), Head("decoder", 1, 1)]
    with mute_heads(model, heads):
        assert parts[0].gate is not None
        assert parts[0].gate.tolist() == [0, 0]
    with pytest.raises(RegardError, match="there are 2 heads"):
        trace(model, TEXT, mute=[Head("cross_attention", 0, 0), Head("cross_attention", 0, 9)])
    with pytest.raises(RegardError, match="layer 7"):
        trace(model, TEXT, mute=[Head("cross_attention", 7, 0)])
    assert all(part.gate is None for part in parts)


def test_tokens_can_be_forced_before_a_prefix(model: Translator) -> None:
    free = trace(model, TEXT, beam=2)
    others = (one.token for one in free.candidates[0] if one.token != free.outputs[0])
    second = next(token.id for token in others if not token.special)
    (more,) = model.tokenizer.target.encode(["dog"])
    found = trace(model, TEXT, beam=2, forced=[second], prefix="dog")
    assert [token.id for token in found.outputs][: 1 + len(more)] == [second, *more]
    assert found.options["forced"] == 1 + len(more)
    for wrong in (EOS, model.tokenizer.target.size, -1):
        with pytest.raises(RegardError, match="forced token"):
            trace(model, TEXT, forced=[wrong])


def test_sampling_depends_on_the_seed(model: Translator) -> None:
    sampled = trace(model, TEXT, temperature=2.0, seed=5)
    assert sampled.outputs == trace(model, TEXT, temperature=2.0, seed=5).outputs
    assert sampled.outputs != trace(model, TEXT, temperature=2.0, seed=6).outputs
    path = [node.token for node in sampled.beam]
    assert path == [BOS, *(token.id for token in sampled.outputs)]
    assert [node.parent for node in sampled.beam[1:]] == list(range(len(sampled.outputs)))
    assert np.array_equal(sampled.nodes, sampled.cross_attention)
    with pytest.raises(RegardError, match="temperature"):
        trace(model, TEXT, temperature=1e-9)


def test_head_names_are_parsed() -> None:
    assert str(Head.parse("encoder.1.0")) == "encoder.1.0"
    for wrong in ("encoder", "nowhere.1.1", "cross_attention.1.x", "cross_attention.-1.0"):
        with pytest.raises(RegardError, match=r"cross_attention\.0\.1"):
            Head.parse(wrong)


# ---------------------------------------------------------------------------------------------
# JSON


def test_large_arrays_in_a_file_are_quantized_or_omitted(
    traced: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert traced.to_json("file") == traced.to_json()
    for name in ("MAX_FLOAT_BYTES", "MAX_NODE_BYTES", "MAX_PROJECTION_BYTES"):
        monkeypatch.setattr(trace_module, name, 0)
    plain = traced.to_json("file")
    for site in SITES:
        packed = plain[site]
        roots = np.frombuffer(base64.b64decode(packed["data"]), np.uint8) / 255
        weights = (roots**2 * packed["max"]).reshape(packed["shape"])
        np.testing.assert_allclose(weights, getattr(traced, site), atol=0.004)
        arrays = plain["projections"][site]
        assert all(arrays[name]["data"] is None for name in ("query", "key", "value", "output"))
    assert plain["nodes"]["data"] is None
    assert traced.to_json("minimal")["cross_attention"]["data"] is None


def test_a_model_without_attention_has_no_layers(
    model: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.network, "attentions", dict)
    plain = json.loads(json.dumps(trace(model, TEXT).to_json()))
    assert all(plain[site]["shape"] == [0, 0, 0, 0] for site in (*SITES, "nodes"))
    assert plain["projections"] == {}
    assert plain["coverage"] == {"max": [], "sum": []}


def test_compressed_keys_are_numbered(traced: Trace) -> None:
    narrow = replace(traced, encoder=traced.encoder[..., :2], compressed={"encoder"})
    assert [token.text for token in narrow.columns("encoder")] == ["1", "2"]
    assert narrow.columns("cross_attention") == traced.source
