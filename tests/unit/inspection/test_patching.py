"""Activation patching, in float64: a place that carries everything has an effect of 1."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.errors import RegardError
from regard.inspection.head_ablation import mean_ablated
from regard.inspection.hooks import attentions
from regard.inspection.patching import (
    PatchMap,
    break_choice,
    contrast,
    contrasts,
    find_carriers,
    patch,
    patch_contrast,
    patch_heads,
)
from regard.inspection.teacher_forcing import check_supported, edit_stream, residual_streams
from regard.tasks import Translator

TEXT, OTHER = "The dog was tired.", "The cat was tired."
TRANSLATIONS = ("Gestern war der Hund müde.", "Gestern war die Katze müde.")


@pytest.fixture(scope="module")
def model(make_run: Callable[..., Path]) -> Translator:
    words = {"kind": "word", "vocab_size": 420}
    model = Translator.load(make_run(tokenizer=words, decoding={"max_length": 8}), "cpu")
    model.network.double()
    model.engine.packed = None  # it is float32
    return model


@pytest.fixture(scope="module")
def found(model: Translator) -> PatchMap:
    return patch_contrast(model, contrast(model, TEXT, OTHER, TRANSLATIONS))


def test_the_embedding_of_the_only_different_word_carries_everything(found: PatchMap) -> None:
    different = [first != second for first, second in found.labels["encoder"]]
    assert sum(different) == 1
    expected = np.array(different, float)
    np.testing.assert_allclose(found.effects["encoder"][0], expected, atol=1e-6)
    # The translations have been the same so far, and the choice is made at the last position.
    np.testing.assert_allclose(found.effects["decoder"][0], 0, atol=1e-6)
    np.testing.assert_allclose(
        found.effects["decoder"][-1], np.eye(found.position + 1)[-1], atol=1e-6
    )


def test_one_place_by_hand(model: Translator, found: PatchMap) -> None:
    network = check_supported(model)
    between = contrast(model, TEXT, OTHER, TRANSLATIONS)
    clean, corrupt = between.reads

    def odds(read: object = corrupt) -> float:
        logits = network(*read.batch(model))[0, -1]  # type: ignore[attr-defined]
        return float(logits[between.choice[0]] - logits[between.choice[1]])

    with torch.inference_mode():
        with residual_streams(network.encoder) as streams:
            assert found.differences == pytest.approx((odds(clean), odds(corrupt)))
        with residual_streams(network.encoder) as streams:
            odds(clean)

        def edit(stream: torch.Tensor) -> torch.Tensor:
            stream = stream.clone()
            stream[0, 2] = streams[1][0, 2]
            return stream

        with edit_stream(network.encoder, 1, edit):
            patched = odds()
    before, after = found.differences
    effect = (patched - after) / (before - after)
    assert found.effects["encoder"][1, 2] == pytest.approx(effect, rel=1e-5, abs=1e-6)


def test_a_head_by_hand(model: Translator) -> None:
    network = check_supported(model)
    between = contrast(model, TEXT, OTHER, TRANSLATIONS)
    effects = patch_heads(model, between)
    assert effects["cross_attention"].shape == (2, 2, len(between.reads[0].inputs))
    module = attentions(model)["cross_attention"][1].output
    inputs: list[torch.Tensor] = []
    with torch.inference_mode():
        handle = module.register_forward_pre_hook(lambda _, one: inputs.append(one[0]))
        logits = [network(*read.batch(model))[0, -1] for read in between.reads]
        handle.remove()
        mixed = inputs[1].clone()
        mixed[0, -1, 8:] = inputs[0][0, -1, 8:]  # head 1
        handle = module.register_forward_pre_hook(lambda _, __: mixed)
        logits.append(network(*between.reads[1].batch(model))[0, -1])
        handle.remove()
    first, second = between.choice
    before, after, patched = (float(one[first] - one[second]) for one in logits)
    effect = (patched - after) / (before - after)
    assert effects["cross_attention"][1, 1, -1] == pytest.approx(effect, rel=1e-5, abs=1e-6)


def test_the_best_place_is_the_largest_that_is_not_trivial(found: PatchMap) -> None:
    stack, depth, position = found.best()
    assert depth > 0
    largest = max(
        found.effects["encoder"][1:].max(), found.effects["decoder"][1:, :-1].max(initial=-9)
    )
    assert found.effects[stack][depth, position] > largest - 0.02


def test_carriers_are_ranked_and_break_choices(model: Translator) -> None:
    olds = ("The dog was old.", "The cat was old.")
    texts = ("Gestern war der Hund alt.", "Gestern war die Katze alt.")
    compared = [contrast(model, TEXT, OTHER, TRANSLATIONS), contrast(model, *olds, texts)]
    carriers = find_carriers(model, compared)
    effects = [one.effect for one in carriers]
    assert effects == sorted(effects, reverse=True)
    # A token that both sentences have once: the mean of its effects.
    first, second = (patch_heads(model, one) for one in compared)
    bos = next(
        one for one in carriers if one.place[:2] == ("decoder", 1) and one.token.text == "<s>"
    )
    _, layer, head, _ = bos.place
    effects = [float(one["decoder"][layer, head, 0]) for one in (first, second)]
    assert bos.effect == pytest.approx(np.mean(effects), abs=1e-6)
    ablated = break_choice(model, compared, carriers, share=2.0, most=3)
    assert len(ablated.carriers) == 3
    assert list(ablated.means) == [one.place for one in carriers[:3]]
    assert 0 <= ablated.broken <= 1
    with mean_ablated(model, ablated.means):
        model.generate([TEXT], plain=True)


def test_sentences_that_cannot_be_compared(model: Translator) -> None:
    with pytest.raises(RegardError, match=r"same number of tokens: 'The dog was tired\.' has"):
        patch(model, TEXT, "The dog was very, very tired.")
    with pytest.raises(RegardError, match="both have the same translation"):
        patch(model, TEXT, TEXT)
    with pytest.raises(RegardError, match="none of the pairs can be compared"):
        contrasts(model, [(TEXT, TEXT)])


def test_json_and_notebook(found: PatchMap) -> None:
    json = found.to_json()
    assert json["effects"]["encoder"]["shape"] == list(found.effects["encoder"].shape)
    assert len(json["labels"]["encoder"]) == found.effects["encoder"].shape[1]
    assert found._repr_html_().count("<table>") == 2
