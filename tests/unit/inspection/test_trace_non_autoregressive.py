"""A sentence passes through a model that says all words at once, or through one that is given its tree."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from regard.data.conllu import ParsedSentence
from regard.data.corpus import Pair
from regard.data.special_tokens import EOS, MASK
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.inspection.alignment import align
from regard.inspection.hooks import Head
from regard.inspection.html import page
from regard.inspection.trace import trace
from regard.recipe import Recipe
from regard.tasks import Translator, build_network

TEXT = "ein Hund bellt laut"
PARSE = ParsedSentence(TEXT.split(), ["X"] * 4, [2, 3, 0, 3])
Make = Callable[..., Recipe]


def opened(recipe: Recipe) -> Translator:
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: [Pair(TEXT, "a dog barks loudly")] * 5)
    torch.manual_seed(1)
    return Translator(
        recipe, tokenizer, build_network(recipe, tokenizer).eval(), torch.device("cpu")
    )


def at_once(small_recipe: Make, length: str) -> Translator:
    parallel = {"architecture": "non_autoregressive", "non_autoregressive": {"length": length}}
    return opened(small_recipe(model=parallel, tokenizer={"kind": "word", "vocab_size": 60}))


@pytest.fixture
def tree(small_recipe: Make) -> Translator:
    # Built by hand: a recipe of trees wants files of parses.
    recipe = small_recipe(tokenizer={"kind": "word", "vocab_size": 60})
    section = recipe.model.model_copy(update={"position": "tree"})
    return opened(recipe.model_copy(update={"model": section}))


@pytest.mark.parametrize("length", ["predicted", "cut"])
def test_rounds_are_seen(small_recipe: Make, length: str) -> None:
    model = at_once(small_recipe, length)
    found = trace(model, TEXT, rounds=3)
    filling = model.find_at_once(TEXT, rounds=3)
    assert [[token.id for token in one.read] for one in found.rounds] == filling.read
    assert [[token.id for token in one.said] for one in found.rounds] == filling.said
    assert (found.read, found.said) == found.rounds[-1]
    assert MASK in filling.read[-1], "the last round says something"
    assert set(filling.read[-1]) != {MASK}, "and knows something"
    assert (EOS in filling.said[-1]) <= (length == "cut")
    assert found.translation == model.translate([TEXT], rounds=3)[0]
    assert found.beam == []
    # What each word was worth in the round that said it: the very numbers of the search.
    wanted = filling.hypothesis.token_log_probabilities
    np.testing.assert_allclose(np.log(found.probabilities[: len(wanted)]), wanted, atol=1e-5)
    for place, row in enumerate(found.candidates):
        assert row[0].probability >= found.probabilities[place] - 1e-7


def test_attention_is_that_of_the_last_round_and_looks_both_ways(small_recipe: Make) -> None:
    model = at_once(small_recipe, "predicted")
    found = trace(model, TEXT, rounds=2, length=5)
    assert found.decoder.shape == (2, 2, 5, 5)
    assert found.cross_attention.shape == (2, 2, 5, len(found.source))
    np.testing.assert_allclose(found.decoder.sum(-1), 1, atol=1e-5)
    assert (found.decoder[..., 0, 1:] > 0).all(), "the first place sees those after it"
    part = model.network.attentions()["cross_attention"][1]
    muted = trace(model, TEXT, rounds=2, length=5, mute=[Head("cross_attention", 1, 0)])
    assert part.gate is None
    assert muted.muted == [Head("cross_attention", 1, 0)]
    assert not np.allclose(muted.probabilities, found.probabilities)


def test_a_word_left_out_counts_in_the_round_that_said_it(small_recipe: Make) -> None:
    model = at_once(small_recipe, "predicted")
    found = trace(model, TEXT, rounds=2, length=4)
    assert found.occlusion is not None
    (first,) = found.occlusion.words[:1]
    source = [token.id for place, token in enumerate(found.source) if place not in first]
    for place, said in enumerate(found.said):
        hidden = [one for one in found.rounds if one.read[place].id == MASK]
        read = torch.tensor([[token.id for token in hidden[-1].read]])
        with torch.no_grad():
            shares = model.network(torch.tensor([source]), read)[0].softmax(-1)
        expected = shares[place, said.id].item()
        assert found.occlusion.probabilities[0, place] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"beam": 2}, {"length_penalty": 0.5}, {"prefix": "a"}, {"forced": [7]}, {"temperature": 1.0}],
)
def test_a_beam_is_refused_where_there_is_none(small_recipe: Make, options: dict[str, Any]) -> None:
    with pytest.raises(RegardError, match=f"{next(iter(options))} .*: this model says all words"):
        trace(at_once(small_recipe, "predicted"), TEXT, **options)


def test_rounds_are_refused_where_there_are_none(tree: Translator) -> None:
    with pytest.raises(RegardError, match="rounds 3: this model says one word after another"):
        trace(tree, TEXT, rounds=3, parse=PARSE)


def test_an_alignment_has_a_row_for_each_word(small_recipe: Make) -> None:
    found = align(at_once(small_recipe, "predicted"), TEXT, "a dog barks")
    assert found is not None
    assert found.shape == (3, 4)


# Trees


def test_the_tree_reaches_all_that_is_seen(tree: Translator) -> None:
    found = trace(tree, TEXT, beam=2, parse=PARSE)
    ((best,),) = tree.search([TEXT], beam=2, parses=[PARSE])
    assert found.translation == best.text
    wanted = best.token_log_probabilities
    np.testing.assert_allclose(np.log(found.probabilities), wanted, atol=1e-5)
    other = trace(tree, TEXT, beam=2, parse=PARSE._replace(heads=[0, 1, 2, 3]))
    assert not np.allclose(other.encoder, found.encoder)
    assert len(page(replace(found, text="x"))) > 10_000


def test_a_word_left_out_leaves_the_rest_of_the_tree(tree: Translator) -> None:
    found = trace(tree, TEXT, beam=1, parse=PARSE)
    assert found.occlusion is not None
    # Without its second word, whose place in the tree the first still hangs on.
    asked = tree.asked(TEXT, PARSE)
    assert asked.tree is not None
    left = asked._replace(
        source=[i for place, i in enumerate(asked.source) if place != 1],
        tree=asked.tree._replace(words=[1, 3, 4]),
    )
    read = torch.tensor([[token.id for token in found.read]])
    with torch.no_grad():
        source = torch.tensor([[*left.source, EOS]])
        shares = tree.network(source, read, tree.places([left]))[0].softmax(-1)
    said = [token.id for token in found.said]
    np.testing.assert_allclose(
        found.occlusion.probabilities[1], shares[range(len(said)), said], atol=1e-6
    )


def test_without_its_tree_a_model_says_what_is_missing(tree: Translator) -> None:
    with pytest.raises(RegardError, match="it needs the parse of every text"):
        trace(tree, TEXT)
    with pytest.raises(RegardError, match="the parse is of another text"):
        trace(tree, "ein Hund", parse=PARSE)
