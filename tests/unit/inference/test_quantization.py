"""In int8 what a row of a packed map gives does not depend on the rows beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from regard.data.special_tokens import BOS, EOS, SPECIAL_TOKENS
from regard.decoding.beam_search import beam_search
from regard.decoding.greedy_and_sampling import greedy
from regard.errors import RegardError
from regard.inference.precision import pack_network as prepare
from regard.inference.quantization import Int8Linear
from regard.nn.architectures import ARCHITECTURES
from regard.recipe import Precision, make_recipe

V = 40


def settled(weight: Tensor, bias: Tensor, seen: Tensor, relu: bool = False) -> Int8Linear:
    one = Int8Linear(weight, bias, relu)
    one(seen)
    one.settle(1.0)
    return one


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(2, 30), width=st.integers(1, 70), out=st.integers(1, 70), relu=st.booleans()
)
def test_a_row_alone_gives_what_it_gives_among_others(
    rows: int, width: int, out: int, relu: bool
) -> None:
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=draw)
    weight, bias = torch.randn(out, width, generator=draw), torch.randn(out, generator=draw)
    one = settled(weight, bias, x, relu)
    together = one(x)
    right = x.double() @ weight.double().T + bias
    right = right.relu() if relu else right
    size = width * float(x.abs().max()) * float(weight.abs().max()) + float(bias.abs().max())
    assert float((together - right).abs().max()) <= 2 / 127 * size
    for row, found in zip(x, together, strict=True):
        assert torch.equal(one(row[None])[0], found)


def test_an_input_out_of_range_counts_as_its_border() -> None:
    one = settled(torch.eye(2), torch.zeros(2), torch.tensor([[-1.0, 3.0]]))
    found = one(torch.tensor([[-9.0, 1.0], [0.0, 99.0], [-1.0, 3.0]]))
    right = torch.tensor([[-1.0, 1.0], [0.0, 3.0], [-1.0, 3.0]])
    assert float((found - right).abs().max()) < 0.02


@torch.inference_mode()
def test_with_packed_maps_a_sentence_alone_is_translated_as_among_others() -> None:
    sizes = {"d_model": 32, "heads": 2, "encoder_layers": 2, "decoder_layers": 2, "d_ff": 64}
    section = make_recipe({"data": {"train": {"pairs": ["x.tsv"]}}, "model": sizes}, "test").model
    torch.manual_seed(1)
    network: Any = ARCHITECTURES[section.architecture](section, V, V).eval()
    fast = prepare(network, "int8")
    source = torch.randint(len(SPECIAL_TOKENS), V, (6, 9))
    source[:, -1] = EOS

    def found(batch: Tensor, beam: int) -> list[tuple[list[int], float]]:
        asked: dict[str, Any] = {"limits": [12] * len(batch), "start": BOS, "end": EOS}
        state = fast.start(fast.encode(batch))
        if beam == 1:
            best = greedy(fast.step, state, **asked)
        else:
            best = [one for one, *_ in beam_search(fast.step, state, beam=beam, alpha=0.6, **asked)]
        return [(one.tokens, round(one.score, 4)) for one in best]

    for beam in (1, 4):
        alone = [found(row[None], beam)[0] for row in source]
        assert found(source, beam) == alone
        assert len({str(tokens) for tokens, _ in alone}) > 1, "a test of little"


@torch.inference_mode()
@pytest.mark.parametrize("norm_order", ["before", "after"])
def test_a_word_much_larger_than_others_stays_what_it_is(norm_order: str) -> None:
    """Where no norm stands before the first layer, a range found on other words would cut it off."""
    sizes = {"preset": "tiny", "norm_order": norm_order, "dropout": 0.0}
    section = make_recipe({"data": {"train": {"pairs": ["x.tsv"]}}, "model": sizes}, "test").model
    torch.manual_seed(0)
    network: Any = ARCHITECTURES[section.architecture](section, 1000, 1000).eval()
    network.encoder.embedding.weight[777] *= 5
    source = torch.randint(len(SPECIAL_TOKENS), 1000, (50, 12))
    source[:, 3], source[:, -1] = 777, EOS

    def logits(precision: Precision) -> Tensor:
        fast = prepare(network, precision)
        said, _ = fast.step(torch.full((50,), BOS), fast.start(fast.encode(source)))
        return said

    right = logits("fp32")
    assert float((logits("int8") - right).norm() / right.norm()) < 0.06


def test_without_norms_ranges_are_found_anew_and_numbers_without_bounds_are_refused() -> None:
    sizes = {"preset": "tiny", "norm": "none", "encoder_layers": 1, "decoder_layers": 1}
    section = make_recipe({"data": {"train": {"pairs": ["x.tsv"]}}, "model": sizes}, "test").model
    network: Any = ARCHITECTURES[section.architecture](section, V, V).eval()
    maps = [one for one in prepare(network, "int8").weights if isinstance(one, Int8Linear)]
    assert maps
    assert all(one.multiply == one._seeing for one in maps)
    with pytest.raises(RegardError, match="grow beyond all bounds; take fp32"):
        maps[0](torch.full((1, section.d_model), torch.inf))
