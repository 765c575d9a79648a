"""A translation read again, and hooks on the residual stream."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from regard.errors import RegardError
from regard.inspection.teacher_forcing import (
    check_supported,
    edit_stream,
    find_word,
    force,
    residual_streams,
    token_log_probabilities,
)
from regard.tasks import Translator

TEXT, TRANSLATION = "The dog was tired.", "Der Hund war müde."


@pytest.fixture(scope="module")
def model(make_run: Callable[..., Path]) -> Translator:
    return Translator.load(make_run(decoding={"max_length": 8}, model={"output_bias": True}), "cpu")


def test_the_model_reads_its_own_translation_or_a_given_one(model: Translator) -> None:
    own = force(model, TEXT)
    assert [token.text for token in own.outputs[:-1]] == model.search([TEXT])[0][0].tokens
    given = force(model, TEXT, TRANSLATION)
    assert model.tokenizer.target.decode([[token.id for token in given.outputs]]) == [TRANSLATION]
    assert [token.id for token in given.inputs[1:]] == [token.id for token in given.outputs[:-1]]


def test_the_positions_of_words(model: Translator) -> None:
    forced = force(model, TEXT, TRANSLATION)
    position = find_word(forced, "Hund")
    assert forced.outputs[position].text.startswith("▁H")
    assert find_word(forced, 2) == 2
    with pytest.raises(
        RegardError, match="word 'Katze': not in the translation, which has Der, Hund"
    ):
        find_word(forced, "Katze")
    with pytest.raises(RegardError, match="position 99: the translation has"):
        find_word(forced, 99)


def constant(stream: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda _: stream


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_the_stream_can_be_read_and_changed_at_every_depth(model: Translator, stack: str) -> None:
    network = check_supported(model)
    module = network.encoder if stack == "encoder" else network.decoder
    batch = force(model, TEXT, TRANSLATION).batch(model)
    with torch.inference_mode():
        with residual_streams(module) as streams:
            logits = network(*batch)
        assert sorted(streams) == [0, 1, 2]
        for depth, stream in streams.items():
            # A stream that does not depend on the text: the logits of another text with this stream are the same.
            with edit_stream(module, depth, constant(stream)):
                ids = batch[0] + 1 if stack == "encoder" else batch[0]
                targets = batch[1] if stack == "encoder" else batch[1] + 1
                torch.testing.assert_close(network(ids, targets), logits)
        torch.testing.assert_close(network(*batch), logits)  # nothing stays behind


def test_batches_do_not_change_probabilities(model: Translator) -> None:
    texts = [(TEXT, TRANSLATION), ("It was tired.", "Sie war müde und alt."), (TEXT, "Nein.")]
    forced = [force(model, *pair) for pair in texts]
    with torch.inference_mode():
        together = token_log_probabilities(model, forced)
        for one, values in zip(forced, together, strict=True):
            torch.testing.assert_close(values, token_log_probabilities(model, [one])[0])


def test_other_networks_are_refused(make_run: Callable[..., Path]) -> None:
    model = Translator.load(
        make_run(model={"architecture": "decoder_only", "encoder_layers": 6}), "cpu"
    )
    with pytest.raises(RegardError, match=r"model.architecture decoder_only: lenses need"):
        force(model, TEXT)
    with pytest.raises(RegardError, match="blank"):
        force(Translator.load(make_run(), "cpu"), " ")
