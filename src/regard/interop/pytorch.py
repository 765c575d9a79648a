"""torch.nn.Transformer, as in the tutorial "Language Translation with nn.Transformer": state dicts in and out.

The tutorial's network is ``transformer`` (an nn.Transformer), ``src_tok_emb.embedding`` and ``tgt_tok_emb.embedding``
(nn.Embedding, times sqrt(d)), sinusoidal positions, and ``generator`` (an nn.Linear). A state dict knows neither the
number of heads nor the vocabulary, so a run is needed that the weights are *like*.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.data.special_tokens import PAD
from regard.errors import RegardError
from regard.interop.files import POSITIONS, ids_by_piece, whole, write_json, write_models
from regard.interop.supported import TORCH
from regard.interop.verification import Inputs, compare, inputs, our_side, stages, watched
from regard.interop.weight_names import TORCH as NAMES, fill
from regard.nn.positions import sinusoids
from regard.nn.state_dict import named_weights
from regard.nn.transformer import Transformer
from regard.recipe import Model, Recipe, make_recipe
from regard.storage.run_dir import RunDir, write_tensors
from regard.tasks import Translator

EMBEDDINGS = {
    "encoder.embedding.weight": "src_tok_emb.embedding.weight",
    "decoder.embedding.weight": "tgt_tok_emb.embedding.weight",
    "projection.weight": "generator.weight",
    "projection.bias": "generator.bias",
}
THIRDS = ("q_proj", "k_proj", "v_proj")
"""of in_proj, from top to bottom"""


class Tutorial(nn.Module):
    """The network of the tutorial, for the proof: torch's own modules and nothing of ours."""

    def __init__(self, section: Model, source: int, target: int) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells when it cannot take a short cut
            self.transformer = nn.Transformer(**arguments(section))
        self.src_tok_emb = nn.ModuleDict({"embedding": nn.Embedding(source, section.d_model)})
        self.tgt_tok_emb = nn.ModuleDict({"embedding": nn.Embedding(target, section.d_model)})
        self.generator = nn.Linear(section.d_model, target)
        self.positions = sinusoids(POSITIONS, section.d_model)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.src_tok_emb["embedding"](source) * math.sqrt(self.positions.shape[1])
        y = self.tgt_tok_emb["embedding"](target) * math.sqrt(self.positions.shape[1])
        padding, length = source == PAD, target.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        states = self.transformer(
            x + self.positions[: x.shape[1]],
            y + self.positions[:length],
            tgt_mask=future,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        logits: Tensor = self.generator(states)
        return logits


def arguments(section: Model) -> dict[str, Any]:
    """What nn.Transformer is made with."""
    return {
        "d_model": section.d_model,
        "nhead": section.heads,
        "num_encoder_layers": section.encoder_layers,
        "num_decoder_layers": section.decoder_layers,
        "dim_feedforward": section.d_ff,
        "activation": section.activation,
        "norm_first": section.norm_order == "before",
        "dropout": section.dropout,
        "batch_first": True,
    }


# Import


def import_torch(file: Path, out: Path, like: Path | None) -> list[str]:
    """A state dict, in safetensors, to a run folder with the recipe and the tokenizer of another."""
    if like is None:
        raise RegardError(
            "--from torch needs --like RUN: a state dict knows neither its heads nor its vocabulary"
        )
    run = RunDir(like)
    tokenizer = run.tokenizer(run.recipe())
    theirs = _read(file)
    recipe = _recipe(run.recipe())
    TORCH.check(recipe, str(like))
    network = Translator.build(recipe, tokenizer)
    assert isinstance(network, Transformer)
    fill(network, _our_weights(theirs, recipe.model), str(file))
    given = inputs(recipe, tokenizer)
    tutorial = Tutorial(recipe.model, tokenizer.source.size, tokenizer.target.size)
    fill(tutorial, theirs, str(file))
    proof = compare(str(file), our_side(network, given), _their_side(tutorial, given), given)
    with whole(out) as partial:
        new = RunDir(partial)
        new.write_recipe(recipe)
        tokenizer.save(partial)
        new.write_weights(named_weights(network))
        new.write_card({"imported_from": f"{file.resolve()} (torch)", "proof": str(proof)})
    return [str(proof), f"{out}: a model as if it were trained here; try  regard translate {out}"]


def _recipe(like: Recipe) -> Recipe:
    """The recipe of the other run, with what torch always has: biases, closing norms, three embeddings."""
    values = like.model_dump(mode="json")
    values["model"] |= {"final_norm": True, "output_bias": True}
    values["model"] |= {"tie_embeddings": False, "tie_output": False}
    values["model"]["attention"] |= {"bias": True}
    return make_recipe(values, "the recipe of --like")


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = path / "model.safetensors" if path.is_dir() else path
    try:
        found = load_file(file)
    except FileNotFoundError:
        raise RegardError(f"{file}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise RegardError(
            f"{file}: not a safetensors file ({error}); write one with "
            "safetensors.torch.save_file(model.state_dict(), …)"
        ) from None
    kept = {name: value for name, value in found.items() if "positional_encoding" not in name}
    if "generator.weight" not in kept:
        raise RegardError(
            f"{file}: no generator.weight; beside transformer.* a model needs "
            f"{', '.join(EMBEDDINGS.values())}, as in torch's tutorial"
        )
    return {name: value.float() for name, value in kept.items()}


def _our_weights(theirs: Mapping[str, Tensor], section: Model) -> dict[str, Tensor]:
    apart: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        if "in_proj_" in name:
            stem, _, kind = name.rpartition("in_proj_")
            for third, part in zip(THIRDS, tensor.chunk(3), strict=True):
                apart[f"{stem}{third}.{kind}"] = part
        else:
            apart[name] = tensor
    pairs = [(weight.ours, weight.theirs) for weight in NAMES.weights(section)]
    wanted = [*pairs, *EMBEDDINGS.items()]
    if missing := [name for _, name in wanted if name not in apart]:
        raise RegardError(f"the state dict has no {missing[0]}")
    return {ours: apart[name] for ours, name in wanted}


# Export


def export_torch(folder: Path, out: Path) -> list[str]:
    """A run folder to the tutorial's state dict, with the arguments of nn.Transformer beside it."""
    model = Translator.load(folder, "cpu")
    TORCH.check(model.recipe, str(folder))
    network, section = model.network, model.recipe.model
    assert isinstance(network, Transformer)
    sizes = model.tokenizer.source.size, model.tokenizer.target.size
    tutorial = Tutorial(section, *sizes)
    fill(tutorial, _their_weights(network, section), str(folder))
    given = inputs(model.recipe, model.tokenizer)
    with whole(out) as partial:
        write_tensors(partial / "model.safetensors", tutorial.state_dict(), {})
        back = Tutorial(section, *sizes)
        fill(back, _read(partial), str(out))
        proof = compare(str(folder), our_side(network, given), _their_side(back, given), given)
        write_models(partial, model.tokenizer)
        write_json(partial / "vocab.source.json", ids_by_piece(model.tokenizer.source))
        write_json(partial / "vocab.target.json", ids_by_piece(model.tokenizer.target))
        write_json(partial / "config.json", arguments(section))
    return [str(proof), f"{out}: torch.nn.Transformer(**config.json) and the tutorial's embeddings"]


def _their_weights(network: Transformer, section: Model) -> dict[str, Tensor]:
    ours = network.state_dict()
    apart: dict[str, Tensor] = {}
    for weight in NAMES.weights(section):
        apart[weight.theirs] = (
            ours[weight.ours] if weight.ours in ours else _zero(ours, weight.ours)
        )
    found: dict[str, Tensor] = {}
    for name, tensor in apart.items():
        if name.rpartition(".")[0].endswith("q_proj"):
            stem, _, kind = name.rpartition("q_proj.")
            thirds = [apart[f"{stem}{third}.{kind}"] for third in THIRDS]
            found[f"{stem}in_proj_{kind}"] = torch.cat(thirds)
        elif not name.rpartition(".")[0].endswith(THIRDS):
            found[name] = tensor
    embeddings = {theirs: ours[name] for name, theirs in EMBEDDINGS.items() if name in ours}
    bias = torch.zeros(len(network.projection.weight))
    return {**found, "generator.bias": bias, **embeddings}


def _zero(ours: Mapping[str, Tensor], bias: str) -> Tensor:
    """A bias we do not have."""
    weight = ours[bias.removesuffix("bias") + "weight"]
    return weight.new_zeros(len(weight))


# Both sides


def _their_side(tutorial: Tutorial, given: Inputs) -> dict[str, Tensor]:
    exact = tutorial.double().eval()
    exact.positions = exact.positions.double()
    encoder, decoder = exact.transformer.encoder, exact.transformer.decoder
    places = stages("encoder", list(encoder.layers), encoder.norm)
    places += stages("decoder", list(decoder.layers), decoder.norm)
    # With gradients: else torch takes a fused path, which leaves out padding and shows no layers.
    with watched(places) as seen, torch.enable_grad():
        seen["logits"] = exact(given.source, given.target).detach()
    return seen
