"""An exported run, opened in captum, inseq and TransformerLens, gives the attention and the attributions of Regard.

The packages are optional; tests of those that are missing are skipped. Install TransformerLens last
(``pip install captum inseq``, then ``pip install 'transformer-lens>=4'``): inseq pins an old typeguard, with which pip
would take TransformerLens 1. Both work with typeguard 4, although pip warns. Passed with captum 0.9.0, inseq 0.7.1 and
TransformerLens 4.3.0.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.inspection.attribution import TokenChoice, _Difference
from regard.inspection.hooks import Observation, observe
from regard.inspection.teacher_forcing import ForcedTranslation, force
from regard.interop.huggingface import export_huggingface
from regard.tasks import Translator

transformers = pytest.importorskip("transformers", reason="needs pip install 'regard[interop]'")
pytestmark = pytest.mark.filterwarnings("ignore")

TEXT, TRANSLATION = "The dog was tired.", "Der Hund war müde."
POSITION = 2
"""of the explained token"""
FOIL = 300
TOLERANCE = 1e-4


class Exported(NamedTuple):
    """A run, and the same model in Hugging Face's format."""

    model: Translator
    folder: Path
    forced: ForcedTranslation
    observed: Observation

    @property
    def ids(self) -> tuple[Tensor, Tensor]:
        """What encoder and decoder of MarianMT read."""
        marian = transformers.MarianMTModel.from_pretrained(self.folder)
        source, inputs = self.forced.batch(self.model)
        start = torch.full_like(inputs[:, :1], marian.config.decoder_start_token_id)
        return source, torch.cat([start, inputs[:, 1:]], 1)


@pytest.fixture(scope="module")
def exported(make_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Exported:
    run = make_run(decoding={"max_length": 12}, model={"output_bias": True})
    folder = tmp_path_factory.mktemp("exported") / "marian"
    export_huggingface(run, folder)
    model = Translator.load(run, "cpu")
    forced = force(model, TEXT, TRANSLATION)
    with torch.inference_mode():
        observed = observe(model, forced.request, [token.id for token in forced.inputs])
    return Exported(model, folder, forced, observed)


def differences(exported: Exported) -> _Difference:
    """Regard's own gradients, for the token at ``POSITION`` against ``FOIL``."""
    token = exported.forced.outputs[POSITION].id
    return _Difference(exported.model, exported.forced, TokenChoice(POSITION, token, FOIL))


def test_captum_finds_the_same_gradients(exported: Exported) -> None:
    captum = pytest.importorskip("captum.attr", reason="captum is not installed")
    marian = transformers.MarianMTModel.from_pretrained(exported.folder).eval()
    ours, (source, inputs) = differences(exported), exported.ids
    token = exported.forced.outputs[POSITION].id
    embed, scale = marian.get_input_embeddings(), marian.config.d_model**0.5
    # MarianMT scales the embeddings of its decoder, but not those of its encoder. It has the sines of positions before
    # the cosines, so the export reorders all features.
    vectors = embed(source).detach() * scale, embed(inputs).detach()
    width = vectors[0].shape[-1]
    order = [*range(0, width, 2), *range(1, width, 2)]
    neutral = ours.neutral[0][..., order], ours.neutral[1][..., order] / scale

    def difference(source_vectors: Tensor, input_vectors: Tensor) -> Tensor:
        logits = marian(
            inputs_embeds=source_vectors, decoder_inputs_embeds=input_vectors, use_cache=False
        ).logits[:, POSITION]
        return logits[:, token] - logits[:, FOIL]  # type: ignore[no-any-return]

    assert float(difference(*vectors).detach()) == pytest.approx(ours.value, abs=TOLERANCE)
    found = captum.InputXGradient(difference).attribute(vectors)
    shares = torch.cat([one.sum(-1)[0] for one in found]).detach().numpy()
    assert np.allclose(shares, ours.gradient_x_input(), atol=TOLERANCE)
    integrated = captum.IntegratedGradients(difference, multiply_by_inputs=True).attribute(
        vectors, baselines=neutral, n_steps=64, method="gausslegendre"
    )
    shares = torch.cat([one.sum(-1)[0] for one in integrated]).detach().numpy()
    assert np.allclose(shares, ours._integrate(64), atol=TOLERANCE)


def load_inseq(exported: Exported, method: str) -> Any:
    """The exported model in inseq. MarianMT scales the embeddings that its decoder gets; inseq expects it not to."""
    inseq = pytest.importorskip("inseq", reason="inseq is not installed")
    model = inseq.load_model(str(exported.folder), method, device="cpu")
    model.model.get_decoder().embed_scale = 1.0
    return model


def test_inseq_finds_the_same_attention_and_gradients(exported: Exported) -> None:
    inseq = pytest.importorskip("inseq", reason="inseq is not installed")
    token = exported.forced.outputs[POSITION].id

    def logit_difference(args: Any) -> Tensor:
        logits = args.forward_output.logits[:, -1]
        return logits[:, token] - logits[:, FOIL]  # type: ignore[no-any-return]

    inseq.register_step_function(logit_difference, "logit_difference", overwrite=True)
    attention = load_inseq(exported, "attention")
    found = attention.attribute(TEXT, TRANSLATION, show_progress=False).sequence_attributions[0]
    weights = found.source_attributions.numpy()  # [source, target, layer, head]
    expected = exported.observed.weights["cross_attention"].transpose(3, 2, 0, 1)
    assert np.allclose(weights, expected[:, : weights.shape[1]], atol=TOLERANCE)
    gradients = load_inseq(exported, "input_x_gradient")
    found = gradients.attribute(
        TEXT,
        TRANSLATION,
        attributed_fn="logit_difference",
        attribute_target=True,
        show_progress=False,
    ).sequence_attributions[0]
    ours = differences(exported).gradient_x_input()
    source = found.source_attributions[:, POSITION].sum(-1).numpy()
    assert np.allclose(source, ours[: len(source)], atol=TOLERANCE)
    target = found.target_attributions[: POSITION + 1, POSITION].sum(-1).numpy()
    assert np.allclose(target, ours[len(source) :][: POSITION + 1], atol=TOLERANCE)


def test_transformer_lens_finds_the_same_attention(exported: Exported) -> None:
    bridge = pytest.importorskip(
        "transformer_lens.model_bridge", reason="transformer_lens 4 is not installed"
    )
    lens = bridge.TransformerBridge.boot_transformers(str(exported.folder), device="cpu")
    source, inputs = exported.ids
    _, cache = lens.run_with_cache(source, decoder_input=inputs)
    for site, stack, name in (
        ("encoder", "encoder_blocks", "attn"),
        ("decoder", "decoder_blocks", "self_attn"),
        ("cross_attention", "decoder_blocks", "cross_attn"),
    ):
        for layer, expected in enumerate(exported.observed.weights[site]):  # type: ignore[index]
            found = cache[f"{stack}.{layer}.{name}.hook_pattern"][0]
            assert np.allclose(found.detach().numpy(), expected, atol=TOLERANCE), (site, layer)
