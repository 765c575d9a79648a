"""The decoder-only Transformer: padding, decoding step by step, causality."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.data.special_tokens import BOS, EOS, PAD
from regard.nn.language_model import DecoderOnlyTransformer
from regard.recipe import Recipe

SmallRecipe = Callable[..., Recipe]
V = 19
KINDS: dict[str, dict[str, Any]] = {
    "sinusoidal": {},
    "none": {"position": "none"},
    "index": {"position": "index"},
    "learned": {"position": "learned", "max_length": 1024},
    "rotary": {"position": "rotary"},
    "relative": {"position": "relative", "max_distance": 2},
    "window": {"position": "rotary", "attention": {"decoder": "window", "window_size": 2}},
    "pre-norm": {"norm_order": "pre"},
    "relu weights": {"attention": {"weighting": "relu"}},
}


def decoder(small_recipe: SmallRecipe, section: dict[str, Any]) -> DecoderOnlyTransformer:
    torch.manual_seed(1)
    sizes = {"encoder_layers": 6}  # the default of the preset: any other value would be refused
    recipe = small_recipe(model={"architecture": "decoder_only", **sizes, **section})
    return DecoderOnlyTransformer(recipe.model, V, V).double().eval()


def batch() -> tuple[list[list[int]], Tensor, Tensor]:
    """Three sources of different lengths, padded, and targets."""
    rows = [[7, 8, 9, 10, 11, EOS], [5, EOS], [6, 12, EOS]]
    source = torch.tensor([[*row, *[PAD] * (6 - len(row))] for row in rows])
    target = torch.tensor([[BOS, 5, 6, 7], [BOS, 8, 9, 10], [BOS, 9, 11, 5]])
    return rows, source, target


@pytest.mark.parametrize("kind", KINDS)
def test_padding_does_not_change_the_logits(kind: str, small_recipe: SmallRecipe) -> None:
    network = decoder(small_recipe, KINDS[kind])
    rows, source, target = batch()
    together = network(source, target)
    for row, ids in enumerate(rows):
        alone = network(torch.tensor([ids]), target[row : row + 1])
        torch.testing.assert_close(together[row], alone[0])


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_step_by_step_equals_all_positions_at_once(
    kind: str, small_recipe: SmallRecipe
) -> None:
    network = decoder(small_recipe, KINDS[kind])
    _, source, target = batch()
    expected = network(source, target)
    state = network.start(network.encode(source))
    for t in range(target.shape[1]):
        logits, state = network.step(target[:, t], state)
        torch.testing.assert_close(logits, expected[:, t])


def test_rows_of_a_state_can_be_selected(small_recipe: SmallRecipe) -> None:
    network = decoder(small_recipe, {})
    _, source, target = batch()
    _, state = network.step(target[:, 0], network.start(network.encode(source)))
    rows = torch.tensor([[0, 0], [2, 2]])  # two beams for each of two sentences
    chosen, _ = network.step(target[[0, 0, 2, 2], 1], state.select(rows))
    torch.testing.assert_close(chosen, network(source, target)[[0, 0, 2, 2], 1])


def test_it_works_without_a_source(small_recipe: SmallRecipe) -> None:
    network = decoder(small_recipe, {})
    _, source, target = batch()
    nothing = target[:, :0]
    expected = network(nothing, target)
    state = network.start(network.encode(nothing))
    for t in range(target.shape[1]):
        logits, state = network.step(target[:, t], state)
        torch.testing.assert_close(logits, expected[:, t])
    # A token has the same effect in the source and in the target.
    whole = torch.cat([source[:1], target[:1]], dim=1)
    torch.testing.assert_close(
        network(source[:1], target[:1])[0], network(whole[:, :0], whole)[0, source.shape[1] :]
    )


def test_later_tokens_do_not_change_earlier_logits(small_recipe: SmallRecipe) -> None:
    network = decoder(small_recipe, {})
    _, source, target = batch()
    other = target.clone()
    other[:, 2] = 13
    before, after = network(source, target), network(source, other)
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2:], after[:, 2:])


def test_it_has_only_decoder_attention(small_recipe: SmallRecipe) -> None:
    found = decoder(small_recipe, {}).attentions()
    assert {site: len(modules) for site, modules in found.items()} == {
        "encoder": 0,
        "decoder": 2,
        "cross_attention": 0,
    }
