"""The native decoder computes what the packed network computes, and searches as decoding/ does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.data.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS
from regard.decoding.beam_search import beam_search
from regard.decoding.greedy_and_sampling import greedy
from regard.decoding.hypothesis import Hypothesis
from regard.decoding.length_penalty_and_stopping import LENGTH_NORMALIZATIONS
from regard.errors import RegardError
from regard.inference.native_decoder import LENGTH_RULES, NativeDecoder, NativeRequest
from regard.inference.native_library import INSTRUCTION_SETS, native_library
from regard.inference.native_packing import native_weights, unsupported_network
from regard.inference.packed_transformer import PackedTransformer
from regard.inference.precision import pack_network
from regard.inference.quantization import Int8Linear, NativeInt8, quantize_rows
from regard.inference.worker_pool import SharedFlag
from regard.nn.architectures import ARCHITECTURES
from regard.nn.layers import DecoderLayer, EncoderLayer, FeedForward, PreNorm, SwiGLU
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.transformer import Decoder, Encoder, Transformer
from regard.recipe import DecodingConfig, make_recipe

LIBRARY = native_library()
needs_library = pytest.mark.skipif(LIBRARY.functions is None, reason=LIBRARY.reason)
V = 101
SHAPES: list[dict[str, Any]] = [
    {},
    {"norm_order": "pre", "attention": {"bias": True}, "output_bias": True},
    {"activation": "gelu", "norm": "rms", "position": "learned", "max_length": 300},
    {"activation": "swish", "position": "none", "tie_output": False, "final_norm": True},
    {"activation": "swiglu", "d_ff": 56, "norm_order": "pre", "norm": "rms"},
]


@pytest.fixture(params=[*INSTRUCTION_SETS])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """The library with each instruction set that this machine has."""
    functions = LIBRARY.functions
    assert functions is not None
    names: dict[str, bytes] = {"avx2": b"AVX2", "avx512": b"AVX-512 VNNI", "amx": b"AMX"}
    found = functions.regard_initialize(INSTRUCTION_SETS[request.param])
    try:
        if found != names[request.param]:
            pytest.skip(f"this CPU has no {request.param}")
        yield request.param
    finally:
        functions.regard_initialize(INSTRUCTION_SETS["amx"])


def network(seed: int = 1, **model: Any) -> Transformer:
    """A network with random weights, biases and gains, whose predictions are far from uniform."""
    sizes = {"d_model": 32, "heads": 2, "encoder_layers": 2, "decoder_layers": 2, "d_ff": 48}
    values = {"data": {"train": {"pairs": ["x.tsv"]}}, "model": {**sizes, **model}}
    options = make_recipe(values, "test").model
    torch.manual_seed(seed)
    made = ARCHITECTURES[options.architecture](options, V, V)
    assert isinstance(made, Transformer)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:  # biases start at 0 and gains at 1, which would hide errors
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        made.projection.weight.mul_(2.5)
    return made.eval()


def native(plain: Transformer) -> tuple[PackedTransformer, NativeDecoder]:
    packed = pack_network(plain, "int8")
    assert unsupported_network(plain, packed) is None
    return packed, NativeDecoder(native_weights(plain, packed))


def requests(count: int, seed: int = 1) -> list[NativeRequest]:
    draw = np.random.default_rng(seed)
    first = len(SPECIAL_TOKENS)
    rows = [draw.integers(first, V, draw.integers(1, 20)).tolist() for _ in range(count)]
    return [NativeRequest([*row, EOS], len(row) + 3) for row in rows]


def search(
    decoder: NativeDecoder,
    some: list[NativeRequest],
    nbest: int = 1,
    threads: int = 1,
    suppressed: tuple[int, ...] = (PAD, BOS),
    interrupt: SharedFlag | None = None,
    **decoding: Any,
) -> list[list[Hypothesis]] | None:
    flag = interrupt or SharedFlag()
    options = {"nbest": nbest, "start": BOS, "suppressed": suppressed, "threads": threads}
    config = DecodingConfig(**decoding)
    return decoder.search(some, config, interrupt=flag.address, **options)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------
# The same function in float64, written with dense matrices and no cache


def linear64(x: Tensor, linears: list[nn.Linear], packed: Any, scale: float = 1.0) -> Tensor:
    """The quantized map of some linear layers that share their input."""
    assert isinstance(packed, Int8Linear)
    weight = torch.cat([linears[0].weight * scale, *(one.weight for one in linears[1:])])
    bias = torch.zeros(len(weight))
    if linears[0].bias is not None:
        bias = torch.cat([linears[0].bias * scale, *(one.bias for one in linears[1:])])
    integers, scales = quantize_rows(weight)
    rounded = (x / packed.scale).round() + packed.zero_point
    inputs = rounded.clamp(0, packed.kernels.levels) - packed.zero_point
    return inputs @ integers.double().T * scales.double() * packed.scale + bias.double()


def attention64(query: Tensor, key: Tensor, value: Tensor, heads: int, causal: bool) -> Tensor:
    q, k, v = (x.view(len(x), heads, -1).transpose(0, 1) for x in (query, key, value))
    scores = q @ k.transpose(1, 2)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def self_attention64(x: Tensor, attention: MultiHeadAttention, packed: Any, causal: bool) -> Tensor:
    maps, scale = (
        [attention.query, attention.key, attention.value],
        attention.attention.score.scale,
    )
    query, key, value = linear64(x, maps, packed.qkv, scale).chunk(3, dim=1)
    return linear64(
        attention64(query, key, value, attention.heads, causal), [attention.output], packed.output
    )


def cross_attention64(x: Tensor, memory: Tensor, module: MultiHeadAttention, packed: Any) -> Tensor:
    query = linear64(x, [module.query], packed.query, module.attention.score.scale)
    key, value = linear64(memory, [module.key, module.value], packed.key_value).chunk(2, dim=1)
    attended = attention64(query, key, value, module.heads, False)
    return linear64(attended, [module.output], packed.output)


def feed_forward64(x: Tensor, module: Any, packed: Any) -> Tensor:
    if isinstance(module, SwiGLU):
        gate, inner = linear64(x, [module.gate, module.inner], packed.gate_inner).chunk(2, dim=1)
        return linear64(F.silu(gate) * inner, [module.outer], packed.outer)
    assert isinstance(module, FeedForward)
    inner = module.activation(linear64(x, [module.inner], packed.inner))
    return linear64(inner, [module.outer], packed.outer)


def stack64(
    stack: Encoder | Decoder, packed: list[Any], tokens: list[int], memory: Tensor | None
) -> Tensor:
    """The output of an encoder (memory None) or decoder for one sentence."""
    integers, scales = quantize_rows(
        stack.embedding.weight * stack.embedding.weight.shape[1] ** 0.5
    )
    positions = stack.position(torch.zeros(1, len(tokens), integers.shape[1]))[0]
    x = integers[tokens].double() * scales[tokens].double()[:, None] + positions.double()

    def norm64(module: nn.Module, y: Tensor) -> Tensor:
        z: Tensor = module.double()(y[None])[0]
        return z

    def sublayer(residual: Any, y: Tensor, function: Any, *arguments: Any) -> Tensor:
        if isinstance(residual, PreNorm):
            z: Tensor = y + function(norm64(residual.norm, y), *arguments)
            return z
        return norm64(residual.norm, y + function(y, *arguments))

    for layer, own in zip(stack.layers, packed, strict=True):
        assert isinstance(layer, EncoderLayer)
        self_attention = layer.attention, own.self_attention, memory is not None
        x = sublayer(layer.attention_residual, x, self_attention64, *self_attention)
        if isinstance(layer, DecoderLayer):
            cross_attention = memory, layer.cross_attention, own.cross_attention
            x = sublayer(layer.cross_attention_residual, x, cross_attention64, *cross_attention)
        feed_forward = layer.feed_forward, own.feed_forward
        x = sublayer(layer.feed_forward_residual, x, feed_forward64, *feed_forward)
    return norm64(stack.norm, x)


def log_probabilities64(
    plain: Transformer, packed: PackedTransformer, source: list[int], target: list[int]
) -> Tensor:
    """The log-probability of each token of the target."""
    memory = stack64(plain.encoder, packed.encoder, source, None)
    states = stack64(plain.decoder, packed.decoder, [BOS, *target[:-1]], memory)
    logits = linear64(states, [plain.projection], packed.projection)  # type: ignore[list-item]
    return logits.log_softmax(-1)[torch.arange(len(target)), target]


@needs_library
@pytest.mark.parametrize("model", SHAPES, ids=str)
@torch.inference_mode()
def test_log_probabilities_are_those_of_the_formulas_in_float64(
    model: dict[str, Any], instruction_set: str
) -> None:
    plain = network(**model)
    packed, decoder = native(plain)
    some = requests(12)
    found = search(decoder, some, beam=3, nbest=2)
    assert found is not None
    errors = []
    for request, hypotheses in zip(some, found, strict=True):
        for one in hypotheses:
            tokens = [*one.tokens, EOS] if one.finished else one.tokens
            expected = log_probabilities64(plain, packed, [*request.source], tokens)
            errors += (expected - torch.tensor(one.token_log_probabilities)).abs().tolist()
    # Inputs that are nearly halfway between two integers may be rounded to the other one.
    assert np.median(errors) < 8 / packed.projection.kernels.levels  # type: ignore[attr-defined]
    assert np.mean(errors) < 13 / packed.projection.kernels.levels  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------
# The search


def markov_network(seed: int) -> Transformer:
    """A network that predicts from the last token and its position alone, so that rounding hardly matters."""
    plain = network(seed, norm_order="pre", output_bias=True)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if ".output." in name or ".outer." in name:
                parameter.zero_()
        assert plain.projection.bias is not None
        plain.projection.bias[EOS] += 3.0  # some sentences end early, some at the limit
    return plain


@needs_library
@pytest.mark.parametrize("rule", list(LENGTH_NORMALIZATIONS))
@pytest.mark.parametrize("beam", [1, 2, 5])
@pytest.mark.parametrize("length_penalty", [0.0, 0.7])
@torch.inference_mode()
def test_search_finds_what_decoding_finds(rule: str, beam: int, length_penalty: float) -> None:
    some = requests(30)
    longest = max(len(one.source) for one in some)
    rows = torch.tensor([[*one.source, *[PAD] * (longest - len(one.source))] for one in some])
    nbest = min(beam, 3)
    common: dict[str, Any] = {
        "max_lengths": [one.max_length for one in some],
        "bos": BOS,
        "eos": EOS,
        "length_penalty": length_penalty,
        "length_normalization": LENGTH_NORMALIZATIONS[rule],
        "suppressed": (PAD, BOS),
    }
    options: dict[str, Any] = {"length_penalty": length_penalty, "length_normalization": rule}
    pairs = []
    for seed in range(4):
        packed, decoder = native(markov_network(seed))
        found = search(decoder, some, nbest=nbest, beam=beam, **options)
        state = packed.start(packed.encode(rows))
        if beam == 1:
            expected = [[one] for one in greedy(packed.step, state, **common)]
        else:
            expected = beam_search(packed.step, state, beam=beam, nbest=nbest, **common)
        assert found is not None
        assert [len(one) for one in found] == [len(one) for one in expected]
        pairs += [both for x in zip(found, expected, strict=True) for both in zip(*x, strict=True)]
    assert len({len(one.tokens) for one, _ in pairs}) > 3
    same = [(one, other) for one, other in pairs if one.tokens == other.tokens]
    assert len(same) >= 0.97 * len(pairs)
    for one, other in same:
        assert one.finished == other.finished
        assert one.score == pytest.approx(other.score, abs=1e-3)
        assert one.log_probability == pytest.approx(other.log_probability, abs=1e-3)
        assert one.token_log_probabilities == pytest.approx(other.token_log_probabilities, abs=1e-3)


@needs_library
def test_a_translation_does_not_depend_on_other_sentences_or_threads() -> None:
    _, decoder = native(network(norm_order="pre"))
    some = requests(40)
    together = search(decoder, some, beam=4, nbest=4)
    assert search(decoder, some, beam=4, nbest=4, threads=3) == together
    assert search(decoder, some[::-1], beam=4, nbest=4) == together[::-1]  # type: ignore[index]
    for request, expected in zip(some[:5], together, strict=False):  # type: ignore[arg-type]
        assert search(decoder, [request], beam=4, nbest=4, threads=4) == [expected]


@needs_library
def test_limits_and_suppressed_tokens() -> None:
    _, decoder = native(network())
    empty, short = NativeRequest([EOS], 1), NativeRequest([7, 8, EOS], 2)
    for beam in (1, 4):
        found = search(decoder, [empty, short], beam=beam)
        assert found is not None
        assert [len(one.tokens) <= limit for (one,), limit in zip(found, (1, 2), strict=True)]
    allowed = {EOS, 50, 60}
    suppressed = tuple({*range(V)} - allowed)
    found = search(decoder, requests(5), beam=3, nbest=3, suppressed=suppressed)
    assert found is not None
    assert {token for one in found for each in one for token in each.tokens} <= allowed
    for hypotheses in found:
        assert all(a.score >= b.score for a, b in pairwise(hypotheses))
    with pytest.raises(RegardError, match="nbest 3: must be between 1 and beam, 2"):
        search(decoder, [short], beam=2, nbest=3)


@needs_library
def test_an_interrupted_search_returns_nothing() -> None:
    _, decoder = native(network())
    flag = SharedFlag()
    flag.set()
    for threads in (1, 2):
        assert search(decoder, requests(9), beam=2, threads=threads, interrupt=flag) is None
    flag.clear()
    assert search(decoder, requests(9), beam=2, interrupt=flag) is not None


@needs_library
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"position": "rotary"}, "its position is rotary"),
        ({"norm": "batch"}, "its norm is neither layer nor rms"),
        ({"heads": 4}, "d_model 32 or d_k 8 is not a multiple of 16"),
        ({"position": "index"}, "some of its linear maps are not calibrated"),
    ],
)
def test_the_reason_why_a_network_is_not_supported_is_named(
    model: dict[str, Any], reason: str
) -> None:
    plain = network(**model)
    assert unsupported_network(plain, pack_network(plain, "int8")) == reason


@needs_library
def test_parts_that_native_code_does_not_know_are_named() -> None:
    plain = network()
    packed = pack_network(plain, "int8")
    packed.decoder[1].feed_forward.activation = F.tanh  # type: ignore[attr-defined]
    packed.encoder[0].self_attention.sink = 1  # type: ignore[attr-defined]
    reason = "native code does not support sink, this activation"
    assert unsupported_network(plain, packed) == reason


@needs_library
def test_options_that_the_search_does_not_know_are_not_supported() -> None:
    _, decoder = native(network())
    assert decoder.supports(DecodingConfig(beam=1000))
    unknown: list[dict[str, Any]] = [
        {"no_repeat_ngram": 2},
        {"beam_groups": 5},
        {"temperature": 1.0},
        {"mbr": 4},
    ]
    for options in unknown:
        assert not decoder.supports(DecodingConfig(**options))


@needs_library
def test_it_supports_the_length_normalizations_it_knows() -> None:
    _, decoder = native(network())
    for rule in LENGTH_RULES:
        assert decoder.supports(DecodingConfig(length_normalization=rule))
    # Anyone can register another one, see LENGTH_NORMALIZATIONS.
    new = DecodingConfig().model_copy(update={"length_normalization": "new"})
    assert not decoder.supports(new)


# ---------------------------------------------------------------------------------------------
# Linear maps


@needs_library
@pytest.mark.parametrize("inputs", [3, 16, 65, 130])
@pytest.mark.parametrize("outputs", [1, 16, 90])
def test_products_are_exact(inputs: int, outputs: int, instruction_set: str) -> None:
    """With inputs that are multiples of their scale, nothing is rounded but the result."""
    torch.manual_seed(inputs + outputs)
    weight = torch.randint(-127, 128, (outputs, inputs)).to(torch.int8)
    scale, bias = torch.rand(outputs), torch.randn(outputs)
    for relu in (False, True):
        packed = NativeInt8(weight, scale, bias, relu)
        for rows in (1, 4, 7, 17, 50):
            quantized = torch.randint(-5, packed.levels - 5, (rows, inputs))
            found = packed.static(0.5, 5)(quantized * 0.5)
            sums = quantized.double() @ weight.double().T
            expected = sums * 0.5 * scale.double() + bias.double()
            expected = expected.relu() if relu else expected
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
