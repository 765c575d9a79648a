"""The whole network: against torch's Transformer, and decoding step by step against all positions at once."""

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from jaxtyping import TypeCheckError
from torch import Tensor, nn

from regard.data.special_tokens import PAD
from regard.nn.kv_cache import KVCache
from regard.nn.layers import FeedForward
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.transformer import DecoderState, Transformer
from regard.recipe import Recipe, make_recipe

SmallRecipe = Callable[..., Recipe]
V = 23
NORM_ORDERS = ["post", "pre"]


def transformer(recipe: Recipe, seed: int = 1, source: int = V, target: int = V) -> Transformer:
    """In eval mode, with random biases and norms, so that a test fails if one of them is not used."""
    torch.manual_seed(seed)
    network = Transformer(recipe.model, source, target).eval()
    with torch.no_grad():
        for weight in network.parameters():
            if weight.dim() == 1:
                weight.normal_()
    return network


def ids(*shape: int, size: int = V) -> Tensor:
    return torch.randint(PAD + 1, size, shape)


# Shapes


def test_shapes_from_ids_to_logits(small_recipe: SmallRecipe) -> None:
    section = {"d_model": 4, "heads": 1, "d_ff": 16, "encoder_layers": 1, "decoder_layers": 1}
    network = transformer(small_recipe(model=section), source=1000, target=1000)
    layer: Any = network.decoder.layers[0]
    shapes: dict[str, tuple[int, ...]] = {}

    def record(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _module, _inputs, output: shapes.__setitem__(name, tuple(output.shape))

    for name, part in {
        "embedding": network.decoder.embedding,
        "attention": layer.attention,
        "inner": layer.feed_forward.inner,
        "d_ff": layer.feed_forward,
    }.items():
        part.register_forward_hook(record(name))
    logits = network(ids(1, 3, size=1000), ids(1, 2, size=1000))
    assert shapes == {
        "embedding": (1, 2, 4),
        "attention": (1, 2, 4),
        "inner": (1, 2, 16),
        "d_ff": (1, 2, 4),
    }
    assert logits.shape == (1, 2, 1000)
    assert network.projection.weight is network.decoder.embedding.weight
    probabilities = logits[0, -1].softmax(dim=0)
    assert probabilities.detach().sum().item() == pytest.approx(1, abs=1e-6)
    assert 0 <= int(probabilities.argmax()) < 1000


@pytest.mark.skipif(torch.cuda.is_available(), reason="conftest.py: not with a GPU")
def test_shapes_are_checked_in_tests(small_recipe: SmallRecipe) -> None:
    network = transformer(small_recipe())
    with pytest.raises(TypeCheckError):
        network(ids(2, 3), ids(3, 3))


# Against torch's Transformer


def copy_linear(mine: nn.Linear, other: nn.Linear) -> None:
    other.weight.copy_(mine.weight)
    other.bias.copy_(mine.bias)


def copy_attention(mine: MultiHeadAttention, other: nn.MultiheadAttention) -> None:
    packed = (mine.query, mine.key, mine.value)
    assert other.in_proj_weight is not None
    other.in_proj_weight.copy_(torch.cat([part.weight for part in packed]))
    other.in_proj_bias.copy_(torch.cat([part.bias for part in packed]))
    copy_linear(mine.output, other.out_proj)


def copy_feed_forward(mine: FeedForward, other: Any) -> None:
    copy_linear(mine.inner, other.linear1)
    copy_linear(mine.outer, other.linear2)


@torch.no_grad()
def torch_transformer(mine: Transformer, recipe: Recipe) -> nn.Transformer:
    """torch's Transformer with our weights."""
    section = recipe.model
    pre_norm = section.norm_order == "pre"
    sizes: dict[str, Any] = {"batch_first": True, "norm_first": pre_norm, "dtype": torch.float64}
    widths = (section.d_model, section.heads, section.d_ff, 0.0)
    # The paper has no norm after the last layer, but torch adds one by default.
    norms = [
        nn.LayerNorm(section.d_model, dtype=torch.float64) if pre_norm else None for _ in range(2)
    ]
    other = nn.Transformer(
        section.d_model,
        section.heads,
        custom_encoder=nn.TransformerEncoder(
            nn.TransformerEncoderLayer(*widths, **sizes),
            section.encoder_layers,
            norms[0],
            enable_nested_tensor=False,
        ),
        custom_decoder=nn.TransformerDecoder(
            nn.TransformerDecoderLayer(*widths, **sizes), section.decoder_layers, norms[1]
        ),
        batch_first=True,
    ).eval()
    for layer, copy in zip(mine.encoder.layers, other.encoder.layers, strict=True):
        _copy_encoder_layer(layer, copy)
    for layer, copy in zip(mine.decoder.layers, other.decoder.layers, strict=True):
        _copy_decoder_layer(layer, copy)
    if pre_norm:
        copy_linear(_any(mine.encoder.norm), _any(other.encoder.norm))
        copy_linear(_any(mine.decoder.norm), _any(other.decoder.norm))
    return other


def _any(module: Any) -> Any:
    return module


def _copy_encoder_layer(mine: Any, other: Any) -> None:
    copy_attention(mine.attention, other.self_attn)
    copy_feed_forward(mine.feed_forward, other)
    copy_linear(mine.attention_residual.norm, other.norm1)
    copy_linear(mine.feed_forward_residual.norm, other.norm2)


def _copy_decoder_layer(mine: Any, other: Any) -> None:
    copy_attention(mine.attention, other.self_attn)
    copy_attention(mine.cross_attention, other.multihead_attn)
    copy_feed_forward(mine.feed_forward, other)
    copy_linear(mine.attention_residual.norm, other.norm1)
    copy_linear(mine.cross_attention_residual.norm, other.norm2)
    copy_linear(mine.feed_forward_residual.norm, other.norm3)


def embedded(weight: Tensor, tokens: Tensor) -> Tensor:
    """Embedding times sqrt(d) plus sinusoids, in NumPy."""
    table = weight.detach().numpy()
    width, length = table.shape[1], tokens.shape[1]
    angle = np.arange(length)[:, None] / 10000 ** (np.arange(0, width, 2) / width)
    table_of_positions = np.zeros((length, width))
    table_of_positions[:, 0::2], table_of_positions[:, 1::2] = np.sin(angle), np.cos(angle)
    return torch.from_numpy(table[tokens.numpy()] * np.sqrt(width) + table_of_positions)


@pytest.mark.parametrize("norm_order", NORM_ORDERS)
def test_equals_torchs_transformer(small_recipe: SmallRecipe, norm_order: str) -> None:
    recipe = small_recipe(model={"norm_order": norm_order, "attention": {"bias": True}})
    mine = transformer(recipe).double()
    other = torch_transformer(mine, recipe)
    source, target = ids(3, 9), ids(3, 7)
    source[1, 5:] = source[2, 1:] = PAD
    target[0, 4:] = PAD
    padding = source == PAD
    found = mine(source, target)
    weight = mine.decoder.embedding.weight
    states = other(
        embedded(weight, source),
        embedded(weight, target),
        tgt_mask=torch.ones(7, 7, dtype=torch.bool).triu(1),
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )
    # Everything is float64 but our sinusoids, which are stored in float32.
    torch.testing.assert_close(found, states @ weight.T, rtol=0, atol=1e-5)
    assert found.detach().std().item() > 0.1


# Padding and order


@pytest.mark.parametrize("norm_order", NORM_ORDERS)
def test_padding_does_not_change_the_logits(small_recipe: SmallRecipe, norm_order: str) -> None:
    network = transformer(small_recipe(model={"norm_order": norm_order}))
    lengths = [(1, 4), (6, 1), (9, 7), (3, 3)]
    pairs = [(ids(1, s), ids(1, t)) for s, t in lengths]
    source, target = torch.full((4, 12), PAD), torch.full((4, 10), PAD)
    for row, (one, two) in enumerate(pairs):
        source[row, : one.shape[1]], target[row, : two.shape[1]] = one[0], two[0]
    together = network(source, target)
    for row, (one, two) in enumerate(pairs):
        alone = network(one, two)[0]
        torch.testing.assert_close(together[row, : two.shape[1]], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [5, 40])
def test_later_target_tokens_do_not_change_earlier_logits(
    small_recipe: SmallRecipe, length: int
) -> None:
    network = transformer(small_recipe())
    source, target = ids(3, 6), ids(3, length)
    before = network(source, target)
    for changed in range(1, length):
        other = target.clone()
        other[:, changed:] = ids(3, length - changed)
        other[:, changed] = target[:, changed] % (V - 1) + 1  # another token, not PAD
        after = network(source, other)
        assert torch.equal(before[:, :changed], after[:, :changed])
        assert not torch.equal(before[:, changed], after[:, changed])


def test_every_target_position_depends_on_every_source_token(small_recipe: SmallRecipe) -> None:
    network = transformer(small_recipe())
    source, target = ids(1, 6), ids(1, 4)
    before = network(source, target)
    for changed in range(6):
        other = source.clone()
        other[0, changed] = source[0, changed] % (V - 1) + 1
        moved = (network(other, target) - before).abs().amax(dim=-1)
        assert bool((moved > 1e-6).all())


# Step by step


@settings(max_examples=25)
@given(
    norm_order=st.sampled_from(NORM_ORDERS),
    position=st.sampled_from(["sinusoidal", "learned"]),
    random=st.randoms(use_true_random=False),
    sentences=st.integers(1, 4),
)
def test_decoding_step_by_step_equals_all_positions_at_once(
    small_recipe: SmallRecipe,
    norm_order: str,
    position: str,
    random: Random,
    sentences: int,
) -> None:
    model = {"norm_order": norm_order, "position": position, "d_k": 3, "d_v": 5}
    network = transformer(small_recipe(model=model))
    source = torch.tensor([[random.randrange(1, V) for _ in range(6)] for _ in range(sentences)])
    for row in range(sentences):
        source[row, random.randint(1, 6) :] = PAD
    with torch.inference_mode():
        state = network.start(network.encode(source))
        rows: list[tuple[int, list[int]]] = [(sentence, []) for sentence in range(sentences)]
        for _ in range(6):
            tokens = [random.randrange(1, V) for _ in rows]
            rows = [(s, [*prefix, token]) for (s, prefix), token in zip(rows, tokens, strict=True)]
            logits, state = network.step(torch.tensor(tokens), state)
            expected = network(source[[s for s, _ in rows]], torch.tensor([p for _, p in rows]))
            torch.testing.assert_close(logits, expected[:, -1], rtol=0, atol=1e-5)
            # Like beam search: keep any rows of a sentence, in any order; some sentences are finished.
            active = sorted({s for s, _ in rows})
            remaining = sorted(random.sample(active, random.randint(1, len(active))))
            beams = random.randint(1, 3)
            own = {s: [row for row, (owner, _) in enumerate(rows) if owner == s] for s in remaining}
            chosen = [random.choices(own[s], k=beams) for s in remaining]
            state = state.select(torch.tensor(chosen))
            rows = [rows[row] for line in chosen for row in line]


def test_a_step_does_not_change_the_previous_state(small_recipe: SmallRecipe) -> None:
    network = transformer(small_recipe())
    _, state = network.step(ids(2), network.start(network.encode(ids(2, 5))))
    token = ids(2)
    first, _ = network.step(token, state)
    network.step(ids(2), state)
    again, _ = network.step(token, state)
    assert torch.equal(first, again)


def test_cross_attention_keys_and_values_are_computed_once_per_sentence(
    small_recipe: SmallRecipe,
) -> None:
    network = transformer(small_recipe())
    calls: list[tuple[int, ...]] = []
    for layer in network.decoder.layers:
        attention: Any = layer.cross_attention
        for part in (attention.key, attention.value):
            part.register_forward_hook(lambda _, inputs, __: calls.append(tuple(inputs[0].shape)))
    state: DecoderState = network.start(network.encode(ids(3, 5)))
    _, state = network.step(ids(3), state)
    state = state.select(torch.arange(3)[:, None].expand(3, 4))
    for _ in range(3):
        _, state = network.step(ids(12), state)
    assert calls == [(3, 5, 16)] * 4  # two layers, keys and values
    for memory, cache in zip(state.cross_kv, state.caches, strict=True):
        assert memory.key.shape[0] == memory.value.shape[0] == 3
        assert isinstance(cache, KVCache)
        assert cache.kv is not None
        assert cache.kv.key.shape == (12, 2, 4, 8)
    assert state.length == 4
    fewer = state.select(torch.tensor([[4, 5], [11, 8]]))
    assert torch.equal(fewer.cross_kv[0].key, state.cross_kv[0].key[[1, 2]])


# Tied weights and numbers of weights


def count(network: nn.Module) -> int:
    return sum(weight.numel() for weight in network.parameters())


def expected_count(model: Any, source: int, target: int) -> int:
    """The number of weights by formula."""
    d, f, h = model.d_model, model.d_ff, model.heads
    inner = 2 * h * model.d_k + h * model.d_v
    attention = d * inner + h * model.d_v * d
    if model.attention.bias:
        attention += inner + d
    feedforward = d * f + f + f * d + d
    encoder = attention + feedforward + 2 * 2 * d
    decoder = 2 * attention + feedforward + 3 * 2 * d
    embeddings = target + (0 if model.tie_embeddings else source)
    embeddings += 0 if model.tie_output else target
    ends = 2 * 2 * d if model.norm_order == "pre" else 0
    positions = 2 * model.max_length * d if model.position == "learned" else 0
    layers = model.encoder_layers * encoder + model.decoder_layers * decoder
    return int(layers + embeddings * d + ends + positions)


def test_each_pair_of_tied_weights_can_be_untied(small_recipe: SmallRecipe) -> None:
    for embeddings in (True, False):
        for output in (True, False):
            model = {"tie_embeddings": embeddings, "tie_output": output}
            network = Transformer(small_recipe(model=model).model, V, V)
            assert (
                network.encoder.embedding.weight is network.decoder.embedding.weight
            ) == embeddings
            assert (network.projection.weight is network.decoder.embedding.weight) == output
            assert count(network) == expected_count(small_recipe(model=model).model, V, V)


@pytest.mark.parametrize(
    "model",
    [
        {"attention": {"bias": True}},
        {"norm_order": "pre", "encoder_layers": 3, "decoder_layers": 1},
        {"d_k": 3, "d_v": 7},
        {"position": "learned", "max_length": 300},
        {"tie_embeddings": False},
    ],
    ids=str,
)
def test_number_of_weights(small_recipe: SmallRecipe, model: dict[str, Any]) -> None:
    source = V if "tie_embeddings" not in model else 2 * V
    section = small_recipe(model=model).model
    assert count(Transformer(section, source, V)) == expected_count(section, source, V)


def test_number_of_weights_of_the_papers_models() -> None:
    numbers = {}
    for preset in ("base", "big"):
        recipe = make_recipe(
            {"data": {"train": {"pairs": "x"}}, "model": {"preset": preset}}, "test"
        )
        with torch.device("meta"):
            numbers[preset] = count(Transformer(recipe.model, 37000, 37000))
    # d = 512, f = 2048: attention 4 d^2 = 1,048,576; feed-forward 2 d f + f + d = 2,099,712; norm 1,024.
    encoder, decoder = 1_048_576 + 2_099_712 + 2 * 1_024, 2 * 1_048_576 + 2_099_712 + 3 * 1_024
    assert numbers["base"] == 6 * (encoder + decoder) + 37_000 * 512 == 63_045_632
    # d = 1024, f = 4096: attention 4,194,304; feed-forward 8,393,728; norm 2,048.
    encoder, decoder = 4_194_304 + 8_393_728 + 2 * 2_048, 2 * 4_194_304 + 8_393_728 + 3 * 2_048
    assert numbers["big"] == 6 * (encoder + decoder) + 37_000 * 1_024 == 214_171_648


def test_embeddings_have_unit_variance_after_scaling(small_recipe: SmallRecipe) -> None:
    network = transformer(small_recipe(model={"d_model": 128}), source=500, target=500)
    vectors = network.decoder.embedding(ids(10, 50, size=500))
    assert vectors.detach().std().item() == pytest.approx(1, rel=0.05)
    token = torch.tensor([[7]])
    expected = network.decoder.embedding.weight[7] * 128**0.5
    torch.testing.assert_close(network.decoder.embedding(token)[0, 0], expected)
