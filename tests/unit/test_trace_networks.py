"""Whatever a network is made of, a sentence can be seen to pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from regard.look import page
from regard.model import Translator, build
from regard.probe import PLACES
from regard.recipe import Recipe
from regard.text.corpus import Pair
from regard.text.tokenizer import Tokenizer
from regard.tracing import trace

TEXT = "ein Hund bellt laut"
NETWORKS: dict[str, dict[str, Any]] = {
    "recurrent": {"architecture": "recurrent", "feedforward": 2048},
    "convolution": {"architecture": "convolution", "feedforward": 2048},
    "decoder": {"architecture": "decoder", "encoder_layers": 6},
    "linformer": {"attention": {"encoder": "linformer", "memory": "linformer", "rows": 5}},
    "bigbird": {"attention": {"encoder": "bigbird", "decoder": "window", "block": 2, "reach": 2}},
    "additive": {"attention": {"score": "additive"}},
    "relu": {"attention": {"weighting": "relu"}},
    "relative": {"position": "relative"},
    "rotary, shared keys": {"position": "rotary", "attention": {"key_value_heads": 1}},
}

SHORT: dict[str, Any] = {
    "tokenizer": {"kind": "words", "size": 60},
    "search": {"extra_length": 3},
}


def opened(recipe: Recipe) -> Translator:
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: [Pair(TEXT, "a dog barks loudly")] * 5)
    torch.manual_seed(1)
    return Translator(recipe, tokenizer, build(recipe, tokenizer).eval(), torch.device("cpu"))


@pytest.mark.parametrize("name", NETWORKS)
def test_every_row_and_column_has_its_name(name: str, small_recipe: Callable[..., Recipe]) -> None:
    model = opened(small_recipe(model=NETWORKS[name], **SHORT))
    traced = trace(model, TEXT, beam=2)
    rows = {"encoder": traced.source, "decoder": traced.read, "cross": traced.read}
    for place in PLACES:
        weights = traced.weights(place)
        if weights.size:
            assert weights.shape[2:] == (len(rows[place]), len(traced.columns(place)))
    words = [token.text for token in traced.columns("cross")]
    assert (words == ["1", "2", "3", "4", "5"]) == (name == "linformer")
    assert len(page(traced)) > 10_000
    assert trace(model, TEXT, temperature=1.0, seed=2).beam


def test_a_decoder_alone_looks_at_source_and_target(small_recipe: Callable[..., Recipe]) -> None:
    section = {"architecture": "decoder", "encoder_layers": 6}
    model = opened(small_recipe(model=section, **SHORT))
    traced = trace(model, TEXT, beam=2)
    assert traced.columns("decoder") == [*traced.source, *traced.read]
    assert not traced.encoder.size
    assert not traced.cross.size
