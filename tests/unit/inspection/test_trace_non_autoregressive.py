"""Traces of non-autoregressive models, and of models that read dependency trees."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from regard.data.dependency_trees import ParsedSentence
from regard.data.pairs import Pair
from regard.data.special_tokens import EOS, MASK
from regard.data.tokenizer import Tokenizer
from regard.decoding.mask_predict import Iteration
from regard.errors import RegardError
from regard.inspection.alignment import align
from regard.inspection.hooks import Head
from regard.inspection.html_page import page
from regard.inspection.trace import trace
from regard.recipe import Recipe
from regard.tasks import Translator, build_network

TEXT = "ein Hund bellt laut"
PARSE = ParsedSentence(TEXT.split(), ["X"] * 4, [2, 3, 0, 3])
Make = Callable[..., Recipe]


def build(recipe: Recipe) -> Translator:
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: [Pair(TEXT, "a dog barks loudly")] * 5)
    torch.manual_seed(1)
    return Translator(
        recipe, tokenizer, build_network(recipe, tokenizer).eval(), torch.device("cpu")
    )


def non_autoregressive(small_recipe: Make, length: str) -> Translator:
    section = {"architecture": "non_autoregressive", "non_autoregressive": {"length": length}}
    return build(small_recipe(model=section, tokenizer={"kind": "word", "vocab_size": 60}))


@pytest.fixture
def tree(small_recipe: Make) -> Translator:
    # Built by hand: a recipe with tree positions needs files of parses.
    recipe = small_recipe(tokenizer={"kind": "word", "vocab_size": 60})
    section = recipe.model.model_copy(update={"position": "tree"})
    return build(recipe.model_copy(update={"model": section}))


@pytest.mark.parametrize("length", ["predicted", "eos"])
def test_iterations_are_those_of_mask_predict(small_recipe: Make, length: str) -> None:
    model = non_autoregressive(small_recipe, length)
    traced = trace(model, TEXT, iterations=3)
    decoding = model.decoding_for({"iterations": 3})
    steps: list[Iteration] = []
    ((best,),) = model.engine.generate([model.request(TEXT)], decoding, observer=steps.append)
    decoded = [[row[: len(traced.inputs)] for row in step.inputs.tolist()] for step in steps]
    for one, rows in zip(traced.iterations, decoded, strict=True):
        assert [token.id for token in one.inputs] in rows
    last = [token.id for token in traced.iterations[-1].inputs]
    outputs = [token.id for token in traced.outputs]
    assert outputs[: len(best.tokens)] == best.tokens
    assert (traced.inputs, traced.outputs) == traced.iterations[-1]
    assert MASK in last, "the last iteration predicts something"
    assert set(last) != {MASK}, "and knows something"
    assert (EOS in outputs) <= (length == "eos")
    assert traced.translation == model.translate([TEXT], iterations=3)[0]
    assert traced.beam == []
    # The probability of a token is that of the iteration that predicted it, as in mask-predict itself.
    expected = best.token_log_probabilities
    np.testing.assert_allclose(np.log(traced.probabilities[: len(expected)]), expected, atol=1e-5)
    for position, row in enumerate(traced.candidates):
        assert row[0].probability >= traced.probabilities[position] - 1e-7


def test_attention_is_bidirectional_and_that_of_the_last_iteration(small_recipe: Make) -> None:
    model = non_autoregressive(small_recipe, "predicted")
    found = trace(model, TEXT, iterations=2, length=5)
    assert found.decoder.shape == (2, 2, 5, 5)
    assert found.cross_attention.shape == (2, 2, 5, len(found.source))
    np.testing.assert_allclose(found.decoder.sum(-1), 1, atol=1e-5)
    assert (found.decoder[..., 0, 1:] > 0).all(), "the first position attends to those after it"
    part = model.network.attentions()["cross_attention"][1]
    muted = trace(model, TEXT, iterations=2, length=5, mute=[Head("cross_attention", 1, 0)])
    assert part.gate is None
    assert muted.muted == [Head("cross_attention", 1, 0)]
    assert not np.allclose(muted.probabilities, found.probabilities)


def test_occlusion_uses_the_iteration_that_predicted_the_token(small_recipe: Make) -> None:
    model = non_autoregressive(small_recipe, "predicted")
    found = trace(model, TEXT, iterations=2, length=4)
    assert found.occlusion is not None
    (first,) = found.occlusion.words[:1]
    source = [token.id for position, token in enumerate(found.source) if position not in first]
    for position, output in enumerate(found.outputs):
        masked = [one for one in found.iterations if one.inputs[position].id == MASK]
        inputs = torch.tensor([[token.id for token in masked[-1].inputs]])
        with torch.no_grad():
            probabilities = model.network(torch.tensor([source]), inputs)[0].softmax(-1)
        expected = probabilities[position, output.id].item()
        assert found.occlusion.probabilities[0, position] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"beam": 2}, {"length_penalty": 0.5}, {"prefix": "a"}, {"forced": [7]}, {"temperature": 1.0}],
)
def test_options_of_beam_search_are_refused(small_recipe: Make, options: dict[str, Any]) -> None:
    with pytest.raises(RegardError, match=f"{next(iter(options))} .* a non-autoregressive model"):
        trace(non_autoregressive(small_recipe, "predicted"), TEXT, **options)


def test_iterations_are_refused_by_an_autoregressive_model(tree: Translator) -> None:
    with pytest.raises(RegardError, match="iterations 3: no effect on an autoregressive model"):
        trace(tree, TEXT, iterations=3, parse=PARSE)


def test_an_alignment_has_a_row_for_each_word(small_recipe: Make) -> None:
    found = align(non_autoregressive(small_recipe, "predicted"), TEXT, "a dog barks")
    assert found is not None
    assert found.shape == (3, 4)


# ---------------------------------------------------------------------------------------------
# Dependency trees


def test_the_dependency_tree_is_used_throughout(tree: Translator) -> None:
    found = trace(tree, TEXT, beam=2, parse=PARSE)
    ((best,),) = tree.search([TEXT], beam=2, parses=[PARSE])
    assert found.translation == best.text
    expected = best.token_log_probabilities
    np.testing.assert_allclose(np.log(found.probabilities), expected, atol=1e-5)
    other = trace(tree, TEXT, beam=2, parse=PARSE._replace(heads=[0, 1, 2, 3]))
    assert not np.allclose(other.encoder, found.encoder)
    assert len(page(replace(found, text="x"))) > 10_000


def test_occlusion_keeps_the_rest_of_the_dependency_tree(tree: Translator) -> None:
    found = trace(tree, TEXT, beam=1, parse=PARSE)
    assert found.occlusion is not None
    # Without the second word, which the first still depends on.
    request = tree.request(TEXT, PARSE)
    assert request.tree is not None
    without = request._replace(
        source=[i for position, i in enumerate(request.source) if position != 1],
        tree=request.tree._replace(words=[1, 3, 4]),
    )
    inputs = torch.tensor([[token.id for token in found.inputs]])
    with torch.no_grad():
        source = torch.tensor([[*without.source, EOS]])
        trees = tree.engine.trees([without])
        probabilities = tree.network(source, inputs, trees)[0].softmax(-1)
    outputs = [token.id for token in found.outputs]
    np.testing.assert_allclose(
        found.occlusion.probabilities[1], probabilities[range(len(outputs)), outputs], atol=1e-6
    )


def test_a_missing_or_wrong_parse_is_refused(tree: Translator) -> None:
    with pytest.raises(RegardError, match="it needs the parse of every text"):
        trace(tree, TEXT)
    with pytest.raises(RegardError, match="the parse does not match the text"):
        trace(tree, "ein Hund", parse=PARSE)
