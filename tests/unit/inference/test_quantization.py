"""int8: calibrated ranges, and outputs that do not depend on the other rows of the batch."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn import functional as F

from regard.data.special_tokens import BOS, EOS, SPECIAL_TOKENS
from regard.decoding.beam_search import beam_search
from regard.decoding.greedy_and_sampling import greedy
from regard.errors import RegardError
from regard.inference.precision import pack_network
from regard.inference.quantization import FP32Linear, Int8Linear, largest_input
from regard.nn.architectures import ARCHITECTURES
from regard.recipe import Precision, make_recipe

V = 40


def calibrated(weight: Tensor, bias: Tensor, x: Tensor, relu: bool = False) -> Int8Linear:
    """A map whose input range is that of x."""
    linear = Int8Linear(weight, bias, relu)
    linear(x)
    linear.freeze(1.0)
    return linear


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(2, 30), width=st.integers(1, 70), out=st.integers(1, 70), relu=st.booleans()
)
def test_the_output_of_a_row_does_not_depend_on_other_rows(
    rows: int, width: int, out: int, relu: bool
) -> None:
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=draw)
    weight, bias = torch.randn(out, width, generator=draw), torch.randn(out, generator=draw)
    linear = calibrated(weight, bias, x, relu)
    together = linear(x)
    expected = x.double() @ weight.double().T + bias
    expected = expected.relu() if relu else expected
    size = width * float(x.abs().max()) * float(weight.abs().max()) + float(bias.abs().max())
    assert float((together - expected).abs().max()) <= 2 / 127 * size
    for row, output in zip(x, together, strict=True):
        assert torch.equal(linear(row[None])[0], output)


def test_inputs_outside_the_range_are_clipped() -> None:
    linear = calibrated(torch.eye(2), torch.zeros(2), torch.tensor([[-1.0, 3.0]]))
    output = linear(torch.tensor([[-9.0, 1.0], [0.0, 99.0], [-1.0, 3.0]]))
    expected = torch.tensor([[-1.0, 1.0], [0.0, 3.0], [-1.0, 3.0]])
    assert float((output - expected).abs().max()) < 0.02


@torch.inference_mode()
def test_a_translation_does_not_depend_on_the_other_sentences() -> None:
    sizes = {"d_model": 32, "heads": 2, "encoder_layers": 2, "decoder_layers": 2, "d_ff": 64}
    section = make_recipe({"data": {"train": {"pairs": ["x.tsv"]}}, "model": sizes}, "test").model
    torch.manual_seed(1)
    network: Any = ARCHITECTURES[section.architecture](section, V, V).eval()
    packed = pack_network(network, "int8")
    source = torch.randint(len(SPECIAL_TOKENS), V, (6, 9))
    source[:, -1] = EOS

    def search(batch: Tensor, beam: int) -> list[tuple[list[int], float]]:
        options: dict[str, Any] = {"max_lengths": [12] * len(batch), "bos": BOS, "eos": EOS}
        state = packed.start(packed.encode(batch))
        if beam == 1:
            best = greedy(packed.step, state, **options)
        else:
            found = beam_search(packed.step, state, beam=beam, length_penalty=0.6, **options)
            best = [first for first, *_ in found]
        return [(one.tokens, round(one.score, 4)) for one in best]

    for beam in (1, 4):
        alone = [search(row[None], beam)[0] for row in source]
        assert search(source, beam) == alone
        assert len({str(tokens) for tokens, _ in alone}) > 1, (
            "all translations are equal: the test shows nothing"
        )


@torch.inference_mode()
@pytest.mark.parametrize("norm_order", ["pre", "post"])
def test_a_token_with_a_large_embedding_is_not_clipped(norm_order: str) -> None:
    """Without a norm before the first layer, a range found on other tokens would clip it."""
    sizes = {"preset": "tiny", "norm_order": norm_order, "dropout": 0.0}
    section = make_recipe({"data": {"train": {"pairs": ["x.tsv"]}}, "model": sizes}, "test").model
    torch.manual_seed(0)
    network: Any = ARCHITECTURES[section.architecture](section, 1000, 1000).eval()
    network.encoder.embedding.weight[777] *= 5
    source = torch.randint(len(SPECIAL_TOKENS), 1000, (50, 12))
    source[:, 3], source[:, -1] = 777, EOS

    def logits(precision: Precision) -> Tensor:
        packed = pack_network(network, precision)
        output, _ = packed.step(torch.full((50,), BOS), packed.start(packed.encode(source)))
        return output

    expected = logits("fp32")
    assert float((logits("int8") - expected).norm() / expected.norm()) < 0.06


@torch.no_grad()
@pytest.mark.parametrize("order", ["post", "pre"])
def test_without_a_norm_before_it_the_first_map_accepts_the_largest_input(order: str) -> None:
    sizes = {"preset": "tiny", "norm_order": order, "encoder_layers": 1, "decoder_layers": 1}
    section = make_recipe({"data": {"train": {"pairs": ["x.tsv"]}}, "model": sizes}, "test").model
    torch.manual_seed(1)
    network: Any = ARCHITECTURES[section.architecture](section, V, V).eval()
    packed = pack_network(network, "int8")
    for stack, layers in ((network.encoder, packed.encoder), (network.decoder, packed.decoder)):
        first: Any = layers[0].self_attention.qkv
        bound = largest_input(stack)
        if order == "post":
            assert (first.min, first.max) == (-bound, bound)
        else:
            assert -bound < first.min < first.max < bound


def test_without_norms_ranges_are_dynamic_and_infinite_activations_are_errors() -> None:
    sizes = {"preset": "tiny", "norm": "none", "encoder_layers": 1, "decoder_layers": 1}
    section = make_recipe({"data": {"train": {"pairs": ["x.tsv"]}}, "model": sizes}, "test").model
    network: Any = ARCHITECTURES[section.architecture](section, V, V).eval()
    maps = [one for one in pack_network(network, "int8").weights if isinstance(one, Int8Linear)]
    assert maps
    assert all(one.multiply == one._multiply_and_observe for one in maps)
    with pytest.raises(RegardError, match="infinite or NaN; use fp32"):
        maps[0](torch.full((1, section.d_model), torch.inf))


# Unbounded positions: model.position: index adds the position itself, so the first layer's inputs have no bound


def copying_network(steps: int) -> Any:
    """A network trained to copy up to 4 tokens, with ``position: index`` and post-norm."""
    sizes = {"d_model": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "d_ff": 64}
    options = {**sizes, "position": "index", "norm_order": "post", "dropout": 0.0}
    values = {"data": {"train": {"pairs": ["x.tsv"]}}, "model": options}
    section = make_recipe(values, "test").model
    torch.manual_seed(1)
    network: Any = ARCHITECTURES[section.architecture](section, COPY_V, COPY_V)
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    draw = torch.Generator().manual_seed(0)
    for step in range(steps):
        tokens = random_tokens(32, 2 + step % 3, draw)
        bos, eos = torch.full((32, 1), BOS), torch.full((32, 1), EOS)
        source, target = torch.cat([tokens, eos], 1), torch.cat([bos, tokens], 1)
        loss = F.cross_entropy(network(source, target).flatten(0, 1), source.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return network.eval()


COPY_V = 12


def random_tokens(sentences: int, length: int, draw: torch.Generator) -> Tensor:
    return torch.randint(len(SPECIAL_TOKENS), COPY_V, (sentences, length), generator=draw)


def test_int8_translates_like_fp32_with_index_positions() -> None:
    """Calibration for position 512 left hardly any of the 8 bits for the tokens: int8 copied nothing."""
    network = copying_network(130)
    draw = torch.Generator().manual_seed(5)
    sources = [random_tokens(40, length, draw) for length in range(2, 5)]

    @torch.inference_mode()
    def outputs(precision: Precision) -> list[list[int]]:
        packed, found = pack_network(network, precision), []
        for tokens in sources:
            source = torch.cat([tokens, torch.full((40, 1), EOS)], 1)
            state = packed.start(packed.encode(source))
            found += beam_search(
                packed.step,
                state,
                max_lengths=[8] * 40,
                bos=BOS,
                eos=EOS,
                beam=4,
                length_penalty=0.6,
            )
        return [best.tokens for best, *_ in found]

    copies = [row for tokens in sources for row in tokens.tolist()]
    fp32, int8 = outputs("fp32"), outputs("int8")
    correct_fp32, correct_int8 = (sum(map(operator.eq, found, copies)) for found in (fp32, int8))
    assert correct_fp32 > 0.4 * len(copies)
    assert correct_int8 > 0.9 * correct_fp32
    assert sum(map(operator.eq, int8, fp32)) > 0.9 * len(fp32)


@torch.inference_mode()
def test_int8_is_accurate_at_late_index_positions() -> None:
    """At positions that calibration did not see, nothing is clipped."""
    sizes = {"d_model": 32, "heads": 2, "encoder_layers": 2, "decoder_layers": 2, "d_ff": 64}
    values = {
        "data": {"train": {"pairs": ["x.tsv"]}},
        "model": {**sizes, "position": "index", "norm_order": "post"},
    }
    section = make_recipe(values, "test").model
    torch.manual_seed(1)
    network: Any = ARCHITECTURES[section.architecture](section, V, V).eval()
    source = torch.randint(len(SPECIAL_TOKENS), V, (4, 100))
    source[:, -1] = EOS
    target = torch.randint(len(SPECIAL_TOKENS), V, (4, 100))

    def last_logits(precision: Precision) -> Tensor:
        packed = pack_network(network, precision)
        state = packed.start(packed.encode(source))
        for tokens in target.unbind(1):
            logits, state = packed.step(tokens, state)
        return logits

    expected = last_logits("fp32")
    assert float((last_logits("int8") - expected).norm() / expected.norm()) < 0.05


def test_only_unbounded_inputs_are_kept_in_float32() -> None:
    for position, norm_order, count in [
        ("sinusoidal", "post", 0),
        ("index", "pre", 0),
        ("index", "post", 4),  # queries, keys and values, and the output, of each first layer
    ]:
        sizes = {"preset": "tiny", "position": position, "norm_order": norm_order}
        values = {"data": {"train": {"pairs": ["x.tsv"]}}, "model": sizes}
        section = make_recipe(values, "test").model
        network: Any = ARCHITECTURES[section.architecture](section, V, V).eval()
        weights = pack_network(network, "int8").weights
        assert sum(isinstance(one, FP32Linear) for one in weights) == count
