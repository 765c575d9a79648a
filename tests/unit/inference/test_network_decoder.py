"""What a network must have for decoding; tests/unit/tasks and tests/unit/decoding decode with it."""

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from regard.errors import RegardError
from regard.inference.network_decoder import record_cross_attention
from regard.nn.transformer import Transformer
from regard.recipe import Recipe


def test_coverage_needs_attention_to_tokens(small_recipe: Callable[..., Recipe]) -> None:
    """The keys of Linformer are sums over the source."""
    attention = {"cross_attention": "linformer", "linformer_k": 4}
    recipe = small_recipe(model={"attention": attention, "max_length": 300})
    with ExitStack() as recording, pytest.raises(RegardError, match=r"^coverage_penalty: "):
        record_cross_attention(Transformer(recipe.model, 20, 20), recording)
    with ExitStack() as recording:
        record_cross_attention(Transformer(small_recipe().model, 20, 20), recording)
