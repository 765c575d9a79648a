"""The packed network computes what the plain one computes: the same logits and the same translations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from regard.data.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS
from regard.decoding.beam_search import beam_search
from regard.decoding.greedy_and_sampling import greedy
from regard.errors import RegardError
from regard.inference.beam_kv_cache import SLOT_INCREMENT
from regard.inference.packed_transformer import (
    LARGE_BATCH,
    PackedTransformer,
    add_residual,
    dot_product_attention,
)
from regard.inference.precision import pack_network, select_precision, unsupported_reason
from regard.inference.quantization import BF16Linear, FP32Linear, Int8Embedding, Int8Linear
from regard.nn.architectures import ARCHITECTURES
from regard.nn.kv_cache import KeyValue
from regard.nn.transformer import Transformer
from regard.recipe import ModelConfig, Precision, make_recipe
from regard.tasks import Translator

V = 23
SOURCE = torch.tensor([[*range(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + 4), EOS]])
CPU = torch.device("cpu")
SHAPES: list[dict[str, Any]] = [
    {},
    {"norm_order": "pre"},
    {"activation": "swiglu", "norm": "rms", "norm_order": "pre"},
    {"activation": "gelu", "norm": "batch", "attention": {"bias": True}, "output_bias": True},
    {"norm": "none", "position": "learned", "max_length": 300, "tie_output": False},
    {"attention": {"score": "dot_product"}, "position": "none", "final_norm": True},
    {"position": "rotary"},
]


def section(**model: Any) -> ModelConfig:
    """The model section of a recipe for a small network."""
    sizes = {"d_model": 16, "heads": 2, "encoder_layers": 2, "decoder_layers": 2, "d_ff": 24}
    if model.get("architecture") == "lstm":
        sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    values = {"data": {"train": {"pairs": ["x.tsv"]}}, "model": {**sizes, **model}}
    return make_recipe(values, "test").model


def network(seed: int = 1, **model: Any) -> Transformer:
    """A network with random weights, biases and gains."""
    options = section(**model)
    torch.manual_seed(seed)
    made = ARCHITECTURES[options.architecture](options, V, V)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:  # biases start at 0 and gains at 1, which would hide errors
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        if options.norm == "batch":  # without statistics, rounding errors grow from layer to layer
            for _ in range(50):
                made(*torch.randint(len(SPECIAL_TOKENS), V, (2, 16, 8)))
    return made.eval()  # type: ignore[return-value]


def sources(generator: torch.Generator, count: int, longest: int) -> Tensor:
    """Random sources, each with EOS and padding after it."""
    rows = torch.full((count, longest + 1), PAD)
    for row in rows:
        length = int(torch.randint(1, longest + 1, (), generator=generator))
        row[:length] = torch.randint(len(SPECIAL_TOKENS), V, (length,), generator=generator)
        row[length] = EOS
    return rows[:, : int((rows != PAD).sum(1).max())]


@pytest.mark.parametrize("model", SHAPES, ids=str)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(1, 5), beams=st.integers(1, 4))
@torch.inference_mode()
def test_every_step_gives_the_logits_of_the_plain_network(
    model: dict[str, Any], seed: int, count: int, beams: int
) -> None:
    """Whatever the reordering of the beam, with sentences that end and cache slots that are reused."""
    plain = network(**model)
    packed = pack_network(plain, "fp32")
    draw = torch.Generator().manual_seed(seed)
    source = sources(draw, count, 6)
    plain_state = plain.start(plain.encode(source))
    packed_state = packed.start(packed.encode(source))
    width = 1
    for step in range(20):
        tokens = torch.randint(len(SPECIAL_TOKENS), V, (count * width,), generator=draw)
        expected, plain_state = plain.step(tokens, plain_state)
        logits, packed_state = packed.step(tokens, packed_state)
        error = float((logits - expected).abs().max())
        assert error <= 1e-5 * max(1.0, float(expected.abs().max()))
        keep = torch.rand(count, generator=draw) > 0.1 if step % 5 == 4 else torch.ones(count) > 0
        kept = keep.nonzero().flatten()
        rows = kept[:, None] * width + torch.randint(width, (len(kept), beams), generator=draw)
        plain_state, packed_state = plain_state.select(rows), packed_state.select(rows)
        count, width = len(kept), beams
        if not count:
            break


@torch.inference_mode()
def test_a_wide_beam_fills_more_slots_in_a_step_than_the_cache_grows_by_at_least() -> None:
    plain = network()
    packed = pack_network(plain, "fp32")
    state, plain_state = packed.start(packed.encode(SOURCE)), plain.start(plain.encode(SOURCE))
    beams = 2 * SLOT_INCREMENT + 3
    tokens = torch.full((1,), BOS)
    for _ in range(4):
        expected, plain_state = plain.step(tokens, plain_state)
        logits, state = packed.step(tokens, state)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        rows = torch.arange(beams)[None] % len(tokens)
        plain_state, state = plain_state.select(rows), state.select(rows)
        tokens = len(SPECIAL_TOKENS) + torch.arange(beams) % (V - len(SPECIAL_TOKENS))


@pytest.mark.parametrize("beam", [1, 5])
@torch.inference_mode()
def test_search_finds_the_same_translations(beam: int) -> None:
    plain = network()
    packed = pack_network(plain, "fp32")
    batch = sources(torch.Generator().manual_seed(1), 20, 9)

    def search(model: Any) -> list[list[int]]:
        options: dict[str, Any] = {"max_lengths": range(5, 25), "bos": BOS, "eos": EOS}
        state = model.start(model.encode(batch))
        if beam == 1:
            return [best.tokens for best in greedy(model.step, state, **options)]
        found = beam_search(model.step, state, beam=beam, length_penalty=0.6, **options)
        return [best.tokens for best, *_ in found]

    assert search(packed) == search(plain)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.02), ("int8", 0.05)])
@torch.inference_mode()
def test_lower_precision_is_close_and_smaller(precision: Precision, tolerance: float) -> None:
    plain = network(d_model=64, heads=4, d_ff=256)
    fp32 = pack_network(plain, "fp32")
    packed = pack_network(plain, select_precision(precision, CPU))
    assert packed.bytes <= fp32.bytes * {"bf16": 0.5, "int8": 1 / 3}[precision]
    batch = sources(torch.Generator().manual_seed(1), 8, 9)
    tokens = torch.arange(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + 8)
    expected, _ = plain.step(tokens, plain.start(plain.encode(batch)))
    logits, _ = packed.step(tokens, packed.start(packed.encode(batch)))
    assert 0 < (logits - expected).norm() / expected.norm() < tolerance


def test_a_residual_has_the_wider_type_and_is_added_in_place_if_the_types_are_equal() -> None:
    x = torch.full((2, 3), 1.001)
    same, narrow = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bfloat16)
    assert add_residual(x, narrow).dtype == torch.float32
    torch.testing.assert_close(add_residual(x, narrow), x + 1)
    assert add_residual(x, same) is same
    torch.testing.assert_close(same, x + 1)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 40), width=st.integers(1, 70), out=st.integers(1, 70), relu=st.booleans()
)
def test_packed_linear_maps_multiply(rows: int, width: int, out: int, relu: bool) -> None:
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=draw)
    weight, bias = torch.randn(out, width, generator=draw), torch.randn(out, generator=draw)
    expected = (x.double() @ weight.double().T + bias).float()
    expected = expected.relu() if relu else expected
    # The effect of rounding x and the weights, from their largest values.
    size = width * float(x.abs().max()) * float(weight.abs().max()) + float(bias.abs().max())
    for kind, error in ((FP32Linear, 1e-6), (BF16Linear, 2**-7), (Int8Linear, 2 / 127)):
        y = kind(weight, bias, relu)(x)
        assert float((y - expected).abs().max()) <= error * size


def test_int8_embeddings_are_off_by_at_most_half_a_step() -> None:
    weight = torch.randn(30, 8)
    found = Int8Embedding(weight, 2.0)(torch.arange(30))
    step = 2 * weight.abs().amax(1, keepdim=True) / 127
    assert bool(((found - 2 * weight).abs() <= 0.5 * step + 1e-6).all())


def test_weights_of_zero_stay_zero() -> None:
    assert not Int8Linear(torch.zeros(3, 4), None)(torch.randn(2, 4)).any()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"architecture": "lstm"}, "model.architecture: lstm"),
        ({"attention": {"encoder": "window"}}, "model.attention.encoder: window"),
        ({"position": "relative"}, "model.position: relative"),
        ({"attention": {"score": "additive"}}, "model.attention.score: additive"),
        ({"attention": {"key_value_heads": 1}}, "model.attention.key_value_heads"),
        ({"d_v": 4}, "model.d_k differs from model.d_v"),
        ({}, None),
    ],
    ids=str,
)
def test_the_reason_why_a_model_cannot_be_packed_is_named(
    model: dict[str, Any], reason: str | None
) -> None:
    assert unsupported_reason(section(**model)) == reason


def test_auto_is_the_fastest_supported_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_precision("auto", CPU) == "int8"
    monkeypatch.setattr(type(torch.backends.quantized), "supported_engines", ["qnnpack"])
    assert select_precision("auto", CPU) != "int8"
    with pytest.raises(
        RegardError, match="precision int8: not supported by this machine's cpu; use fp32"
    ):
        select_precision("int8", CPU)


def test_torch_does_not_check_for_overrides_while_decoding(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check takes longer than many a product."""
    enabled = []
    step = PackedTransformer.step

    def recording(self: PackedTransformer, *arguments: Any) -> Any:
        enabled.append(torch._C._is_torch_function_enabled())
        return step(self, *arguments)

    model = Translator.load(finished_run, "cpu", select_precision("auto", CPU), threads=1)
    monkeypatch.setattr(PackedTransformer, "step", recording)
    model.translate(["ein Hund"])
    assert enabled
    assert not any(enabled)
    assert torch._C._is_torch_function_enabled()


@pytest.mark.parametrize("sentences", [2, LARGE_BATCH])
def test_attention_of_many_sentences_on_a_cpu(sentences: int) -> None:
    """The kernel for large batches is for GPUs only."""
    torch.manual_seed(1)
    query, key, value = torch.randn(3, sentences, 2, 3, 4)
    output = dot_product_attention(query[:, :, :1], KeyValue(key, value), None)
    weights = (query[:, :, :1] @ key.transpose(2, 3)).softmax(-1)
    torch.testing.assert_close(output, (weights @ value).transpose(1, 2).reshape(sentences, -1))
