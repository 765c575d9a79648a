"""torch.nn.Transformer, as in PyTorch's tutorial "Language Translation with nn.Transformer": import and export.

The tutorial's network is ``transformer`` (an nn.Transformer), ``src_tok_emb.embedding`` and ``tgt_tok_emb.embedding``
(nn.Embedding, times sqrt(d)), sinusoidal positions, and ``generator`` (an nn.Linear). A state dict holds neither the
number of heads nor the vocabulary, so an import takes them from another run (``--like``).
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
from regard.interop.base import (
    MAX_POSITIONS,
    TORCH,
    TORCH_NAMES,
    copy_state,
    write_json,
    write_tokenizer,
)
from regard.interop.verification import (
    SampleBatch,
    compare,
    our_activations,
    record_stages,
    sample_batch,
    stages,
)
from regard.nn.network import named_weights
from regard.nn.positions import sinusoids
from regard.nn.transformer import Transformer
from regard.recipe import ModelConfig, Recipe, make_recipe
from regard.storage.atomic_files import atomic_folder, write_tensors
from regard.storage.run_dir import RunDir
from regard.tasks import Translator

EMBEDDINGS = {
    "encoder.embedding.weight": "src_tok_emb.embedding.weight",
    "decoder.embedding.weight": "tgt_tok_emb.embedding.weight",
    "projection.weight": "generator.weight",
    "projection.bias": "generator.bias",
}
IN_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
"""the thirds of in_proj, in order"""


class TutorialNetwork(nn.Module):
    """The network of the tutorial, built from PyTorch's own modules, for verification."""

    def __init__(self, config: ModelConfig, source: int, target: int) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about fast paths it cannot use
            self.transformer = nn.Transformer(**arguments(config))
        self.src_tok_emb = nn.ModuleDict({"embedding": nn.Embedding(source, config.d_model)})
        self.tgt_tok_emb = nn.ModuleDict({"embedding": nn.Embedding(target, config.d_model)})
        self.generator = nn.Linear(config.d_model, target)
        self.positions = sinusoids(MAX_POSITIONS, config.d_model)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.src_tok_emb["embedding"](source) * math.sqrt(self.positions.shape[1])
        y = self.tgt_tok_emb["embedding"](target) * math.sqrt(self.positions.shape[1])
        padding, length = source == PAD, target.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)
        states = self.transformer(
            x + self.positions[: x.shape[1]],
            y + self.positions[:length],
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        logits: Tensor = self.generator(states)
        return logits


def arguments(config: ModelConfig) -> dict[str, Any]:
    """The arguments of nn.Transformer."""
    return {
        "d_model": config.d_model,
        "nhead": config.heads,
        "num_encoder_layers": config.encoder_layers,
        "num_decoder_layers": config.decoder_layers,
        "dim_feedforward": config.d_ff,
        "activation": config.activation,
        "norm_first": config.norm_order == "pre",
        "dropout": config.dropout,
        "batch_first": True,
    }


# ---------------------------------------------------------------------------------------------
# Import


def import_torch(file: Path, out: Path, like: Path | None) -> list[str]:
    """Convert a state dict in safetensors format into a run folder; recipe and tokenizer are those of ``like``."""
    if like is None:
        raise RegardError(
            "--from torch needs --like RUN: a state dict holds neither the number of heads nor the vocabulary"
        )
    run = RunDir(like)
    tokenizer = run.tokenizer(run.recipe())
    theirs = _read(file)
    recipe = _recipe(run.recipe())
    TORCH.check(recipe, str(like))
    network = Translator.build(recipe, tokenizer)
    assert isinstance(network, Transformer)
    copy_state(network, _our_weights(theirs, recipe.model), str(file))
    batch = sample_batch(recipe, tokenizer)
    tutorial = TutorialNetwork(recipe.model, tokenizer.source.size, tokenizer.target.size)
    copy_state(tutorial, theirs, str(file))
    activations = our_activations(network, batch), _their_activations(tutorial, batch)
    verification = compare(str(file), *activations, batch)
    with atomic_folder(out) as partial:
        new = RunDir(partial)
        new.write_recipe(recipe)
        tokenizer.save(partial)
        new.write_weights(named_weights(network))
        new.write_card(
            {"imported_from": f"{file.resolve()} (torch)", "verification": str(verification)}
        )
    return [str(verification), f"{out}: imported; try  regard translate {out}"]


def _recipe(like: Recipe) -> Recipe:
    """The recipe of another run, with what nn.Transformer always has: biases, final norms, three embeddings."""
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
        state = load_file(file)
    except FileNotFoundError:
        raise RegardError(f"{file}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise RegardError(
            f"{file}: not a safetensors file ({error}); write one with "
            "safetensors.torch.save_file(model.state_dict(), …)"
        ) from None
    weights = {name: value for name, value in state.items() if "positional_encoding" not in name}
    if "generator.weight" not in weights:
        raise RegardError(
            f"{file}: generator.weight is missing; besides transformer.* a model needs "
            f"{', '.join(EMBEDDINGS.values())}, as in PyTorch's tutorial"
        )
    return {name: value.float() for name, value in weights.items()}


def _our_weights(theirs: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Their weights under our names, with in_proj split into query, key and value."""
    split: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        if "in_proj_" in name:
            prefix, _, kind = name.rpartition("in_proj_")
            for projection, third in zip(IN_PROJECTIONS, tensor.chunk(3), strict=True):
                split[f"{prefix}{projection}.{kind}"] = third
        else:
            split[name] = tensor
    names = [(weight.ours, weight.theirs) for weight in TORCH_NAMES.weights(config)]
    names += EMBEDDINGS.items()
    if missing := [name for _, name in names if name not in split]:
        raise RegardError(f"the weight {missing[0]} is missing from the state dict")
    return {ours: split[theirs_name] for ours, theirs_name in names}


# ---------------------------------------------------------------------------------------------
# Export


def export_torch(folder: Path, out: Path) -> list[str]:
    """Convert a run into the tutorial's state dict, with the arguments of nn.Transformer in config.json."""
    model = Translator.load(folder, "cpu")
    TORCH.check(model.recipe, str(folder))
    network, config = model.network, model.recipe.model
    assert isinstance(network, Transformer)
    sizes = model.tokenizer.source.size, model.tokenizer.target.size
    tutorial = TutorialNetwork(config, *sizes)
    copy_state(tutorial, _their_weights(network, config), str(folder))
    batch = sample_batch(model.recipe, model.tokenizer)
    with atomic_folder(out) as partial:
        write_tensors(partial / "model.safetensors", tutorial.state_dict(), {})
        written = TutorialNetwork(config, *sizes)
        copy_state(written, _read(partial), str(out))
        activations = our_activations(network, batch), _their_activations(written, batch)
        verification = compare(str(folder), *activations, batch)
        write_tokenizer(partial, model.tokenizer)
        write_json(partial / "config.json", arguments(config))
    return [
        str(verification),
        f"{out}: weights of torch.nn.Transformer(**config.json) and of the tutorial's embeddings",
    ]


def _their_weights(network: Transformer, config: ModelConfig) -> dict[str, Tensor]:
    """Our weights under their names, with query, key and value joined to in_proj; a bias we do not have is zero."""
    ours = network.state_dict()
    split: dict[str, Tensor] = {}
    for weight in TORCH_NAMES.weights(config):
        split[weight.theirs] = (
            ours[weight.ours] if weight.ours in ours else _zero_bias(ours, weight.ours)
        )
    weights: dict[str, Tensor] = {}
    for name, tensor in split.items():
        if name.rpartition(".")[0].endswith("q_proj"):
            prefix, _, kind = name.rpartition("q_proj.")
            thirds = [split[f"{prefix}{projection}.{kind}"] for projection in IN_PROJECTIONS]
            weights[f"{prefix}in_proj_{kind}"] = torch.cat(thirds)
        elif not name.rpartition(".")[0].endswith(IN_PROJECTIONS):
            weights[name] = tensor
    embeddings = {theirs: ours[name] for name, theirs in EMBEDDINGS.items() if name in ours}
    bias = torch.zeros(len(network.projection.weight))
    return {**weights, "generator.bias": bias, **embeddings}


def _zero_bias(ours: Mapping[str, Tensor], bias: str) -> Tensor:
    weight = ours[bias.removesuffix("bias") + "weight"]
    return weight.new_zeros(len(weight))


# ---------------------------------------------------------------------------------------------
# Verification


def _their_activations(tutorial: TutorialNetwork, batch: SampleBatch) -> dict[str, Tensor]:
    """The activations of the tutorial's network in float64, stage by stage; the logits last."""
    exact = tutorial.double().eval()
    exact.positions = exact.positions.double()
    encoder, decoder = exact.transformer.encoder, exact.transformer.decoder
    points = stages("encoder", list(encoder.layers), encoder.norm)
    points += stages("decoder", list(decoder.layers), decoder.norm)
    # With gradients, because PyTorch's fused path omits padding and calls no hooks.
    with record_stages(points) as recorded, torch.enable_grad():
        recorded["logits"] = exact(batch.source, batch.target).detach()
    return recorded
