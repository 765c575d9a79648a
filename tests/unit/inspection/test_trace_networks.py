"""Traces of every architecture and every kind of attention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from regard.data.pairs import Pair
from regard.data.tokenizer import Tokenizer
from regard.inspection.hooks import SITES
from regard.inspection.html_page import page
from regard.inspection.trace import trace
from regard.recipe import Recipe
from regard.tasks import Translator, build_network

TEXT = "ein Hund bellt laut"
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "lstm": {"architecture": "lstm", "d_ff": 2048},
    "convolution": {"architecture": "convolution", "d_ff": 2048},
    "decoder_only": {"architecture": "decoder_only", "encoder_layers": 6},
    "linformer": {
        "attention": {"encoder": "linformer", "cross_attention": "linformer", "linformer_k": 5}
    },
    "bigbird": {
        "attention": {"encoder": "bigbird", "decoder": "window", "block_size": 2, "window_size": 2}
    },
    "additive": {"attention": {"score": "additive"}},
    "relu": {"attention": {"weighting": "relu"}},
    "relative": {"position": "relative"},
    "rotary with multi-query attention": {
        "position": "rotary",
        "attention": {"key_value_heads": 1},
    },
}

SHORT: dict[str, Any] = {
    "tokenizer": {"kind": "word", "vocab_size": 60},
    "decoding": {"extra_length": 3},
}


def build(recipe: Recipe) -> Translator:
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: [Pair(TEXT, "a dog barks loudly")] * 5)
    torch.manual_seed(1)
    return Translator(
        recipe, tokenizer, build_network(recipe, tokenizer).eval(), torch.device("cpu")
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_row_and_column_has_a_label(name: str, small_recipe: Callable[..., Recipe]) -> None:
    model = build(small_recipe(model=ARCHITECTURES[name], **SHORT))
    traced = trace(model, TEXT, beam=2)
    rows = {"encoder": traced.source, "decoder": traced.inputs, "cross_attention": traced.inputs}
    for site in SITES:
        weights = traced.weights(site)
        if weights.size:
            assert weights.shape[2:] == (len(rows[site]), len(traced.columns(site)))
    keys = [token.text for token in traced.columns("cross_attention")]
    assert (keys == ["1", "2", "3", "4", "5"]) == (name == "linformer")
    assert len(page(traced)) > 10_000
    assert trace(model, TEXT, temperature=1.0, seed=2).beam


def test_a_decoder_only_model_attends_to_source_and_target(
    small_recipe: Callable[..., Recipe],
) -> None:
    section = {"architecture": "decoder_only", "encoder_layers": 6}
    model = build(small_recipe(model=section, **SHORT))
    traced = trace(model, TEXT, beam=2)
    assert traced.columns("decoder") == [*traced.source, *traced.inputs]
    assert not traced.encoder.size
    assert not traced.cross_attention.size
