"""The prepared network is the plain one: the same logits, the same translations, whatever the beam does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from regard.data.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS
from regard.decoding.beam_search import beam_search, top
from regard.decoding.greedy_and_sampling import greedy
from regard.errors import RegardError
from regard.inference.packed_transformer import PackedTransformer
from regard.inference.precision import pack_network as prepare, select_precision, unsupported_reason
from regard.inference.quantization import BF16Linear, FP32Linear, Int8Embedding, Int8Linear
from regard.nn.architectures import ARCHITECTURES
from regard.nn.transformer import Transformer
from regard.recipe import Precision, make_recipe
from regard.tasks import Translator

V = 23
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


def network(seed: int = 1, **model: Any) -> Transformer:
    sizes = {"d_model": 16, "heads": 2, "encoder_layers": 2, "decoder_layers": 2, "d_ff": 24}
    if model.get("architecture") == "recurrent":
        sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    values = {"data": {"train": {"pairs": ["x.tsv"]}}, "model": {**sizes, **model}}
    section = make_recipe(values, "test").model
    torch.manual_seed(seed)
    made = ARCHITECTURES[section.architecture](section, V, V)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:  # biases begin at zero, gains at one: nothing to see
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        if (
            section.norm == "batch"
        ):  # as it was built it norms nothing, and rounding errors grow from layer to layer
            for _ in range(50):
                made(*torch.randint(len(SPECIAL_TOKENS), V, (2, 16, 8)))
    return made.eval()  # type: ignore[return-value]


def sources(generator: torch.Generator, count: int, longest: int) -> Tensor:
    """EncodedPair with padding after EOS."""
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
    """Through any reordering of the beam, sentences that leave, and slots that are cleared away."""
    plain = network(**model)
    fast = prepare(plain, "fp32")
    draw = torch.Generator().manual_seed(seed)
    source = sources(draw, count, 6)
    theirs, ours = plain.start(plain.encode(source)), fast.start(fast.encode(source))
    now = 1
    for step in range(20):
        tokens = torch.randint(len(SPECIAL_TOKENS), V, (count * now,), generator=draw)
        right, theirs = plain.step(tokens, theirs)
        found, ours = fast.step(tokens, ours)
        assert float((found - right).abs().max()) <= 1e-5 * max(1.0, float(right.abs().max()))
        stays = torch.rand(count, generator=draw) > 0.1 if step % 5 == 4 else torch.ones(count) > 0
        kept = stays.nonzero().flatten()
        rows = kept[:, None] * now + torch.randint(now, (len(kept), beams), generator=draw)
        theirs, ours = theirs.select(rows), ours.select(rows)
        count, now = len(kept), beams
        if not count:
            break


@pytest.mark.parametrize("beam", [1, 5])
@torch.inference_mode()
def test_search_finds_the_same_translations(beam: int) -> None:
    plain = network()
    fast = prepare(plain, "fp32")
    batch = sources(torch.Generator().manual_seed(1), 20, 9)

    def found(one: Any) -> list[list[int]]:
        asked: dict[str, Any] = {"limits": range(5, 25), "start": BOS, "end": EOS}
        state = one.start(one.encode(batch))
        if beam == 1:
            return [best.tokens for best in greedy(one.step, state, **asked)]
        some = beam_search(one.step, state, beam=beam, alpha=0.6, **asked)
        return [best.tokens for best, *_ in some]

    assert found(fast) == found(plain)


@pytest.mark.parametrize(("precision", "apart"), [("bf16", 0.02), ("int8", 0.05)])
@torch.inference_mode()
def test_fewer_bits_stay_close_and_take_less(precision: Precision, apart: float) -> None:
    plain = network(width=64, heads=4, feedforward=256)
    single, fast = prepare(plain, "fp32"), prepare(plain, select_precision(precision, CPU))
    assert fast.bytes <= single.bytes * {"bf16": 0.5, "int8": 1 / 3}[precision]
    batch = sources(torch.Generator().manual_seed(1), 8, 9)
    tokens = torch.arange(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + 8)
    right, _ = plain.step(tokens, plain.start(plain.encode(batch)))
    found, _ = fast.step(tokens, fast.start(fast.encode(batch)))
    assert 0 < (found - right).norm() / right.norm() < apart


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 40), width=st.integers(1, 70), out=st.integers(1, 70), relu=st.booleans()
)
def test_packed_maps_multiply(rows: int, width: int, out: int, relu: bool) -> None:
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=draw)
    weight, bias = torch.randn(out, width, generator=draw), torch.randn(out, generator=draw)
    right = (x.double() @ weight.double().T + bias).float()
    right = right.relu() if relu else right
    # What rounding can do: to x and to the weights, by their largest numbers.
    size = width * float(x.abs().max()) * float(weight.abs().max()) + float(bias.abs().max())
    for kind, error in ((FP32Linear, 1e-6), (BF16Linear, 2**-7), (Int8Linear, 2 / 127)):
        found = kind(weight, bias, relu)(x)
        assert float((found - right).abs().max()) <= error * size


def test_embeddings_of_eight_bits_are_off_by_half_a_step_at_most() -> None:
    weight = torch.randn(30, 8)
    found = Int8Embedding(weight, 2.0)(torch.arange(30))
    step = 2 * weight.abs().amax(1, keepdim=True) / 127
    assert bool(((found - 2 * weight).abs() <= 0.5 * step + 1e-6).all())


def test_weights_of_zero_stay_zero() -> None:
    assert not Int8Linear(torch.zeros(3, 4), None)(torch.randn(2, 4)).any()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), V=st.integers(1, 3000), count=st.integers(1, 10))
def test_top_is_topk(seed: int, V: int, count: int) -> None:
    x = torch.randn(2, 3, V, generator=torch.Generator().manual_seed(seed))
    right = x.topk(min(count, V))
    values, places = top(x, count)
    assert torch.equal(values, right.values)
    assert torch.equal(places, right.indices)


def test_top_with_hardly_anything_allowed() -> None:
    x = torch.full((1, 2000), -torch.inf)
    x[0, 1999], x[0, 5] = 1.0, 2.0
    values, places = top(x, 4)
    assert places[0, :2].tolist() == [5, 1999]
    assert values[0, 2:].tolist() == [-torch.inf] * 2
    assert len({*places[0].tolist()}) == 4


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({"architecture": "lstm"}, "architecture recurrent"),
        ({"attention": {"encoder": "window"}}, "attention pattern window"),
        ({"position": "relative"}, "relative positions"),
        ({"attention": {"score": "additive"}}, "its way to score or weight"),
        ({"attention": {"key_value_heads": 1}}, "key_value_heads"),
        ({"d_v": 4}, "d_k that is not d_v"),
        ({}, None),
    ],
    ids=str,
)
def test_what_cannot_be_prepared_is_named(model: dict[str, Any], why: str | None) -> None:
    assert unsupported_reason(network(**model)) == why


def test_auto_is_the_fastest_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_precision("auto", CPU) == "int8"
    monkeypatch.setattr(type(torch.backends.quantized), "supported_engines", ["qnnpack"])
    assert select_precision("auto", CPU) != "int8"
    with pytest.raises(RegardError, match="precision int8: not on this machine's cpu; it has fp32"):
        select_precision("int8", CPU)


def test_while_it_searches_no_packed_weight_is_asked_whether_it_overrides_torch(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking costs more than many a product."""
    asked = []
    step = PackedTransformer.step

    def watched(self: PackedTransformer, *arguments: Any) -> Any:
        asked.append(torch._C._is_torch_function_enabled())
        return step(self, *arguments)

    model = Translator.load(finished_run, "cpu", select_precision("auto", CPU), threads=1)
    monkeypatch.setattr(PackedTransformer, "step", watched)
    model.translate(["ein Hund"])
    assert asked
    assert not any(asked)
    assert torch._C._is_torch_function_enabled()
