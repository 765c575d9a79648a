"""Verification: every conversion is checked before it is written. Both models read the same texts and are compared.

Two networks in PyTorch are compared layer by layer in float64: equal functions agree to about 1e-12. An engine that
shows only its outputs is compared by them, in float32. If the outputs differ, truncated networks are compared, each
with one layer more than the one before; the first one that differs shows which layer is wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from regard.data.corpus import read_pairs
from regard.data.pairs import Pair
from regard.data.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS
from regard.data.tokenizer import Tokenizer
from regard.demo.corpus import generate
from regard.errors import RegardError
from regard.nn.transformer import Transformer
from regard.recipe import Recipe

TEXTS, RANDOM_ROWS = 16, 8
"""pairs of real text, and rows of random ids"""
MAX_TOKENS = 48
"""tokens of a text that are used"""
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4}
"""relative to the largest value of a layer, or to 1 if that is larger"""


# ---------------------------------------------------------------------------------------------
# What both models read


class SampleBatch(NamedTuple):
    """The batch that both models read, in our ids."""

    source: Int[Tensor, "B S"]
    """rows end with EOS, then padding"""
    target: Int[Tensor, "B T"]
    """rows begin with BOS and end with padding"""
    pairs: list[Pair]
    """the real texts"""

    @property
    def source_mask(self) -> Bool[Tensor, "B S"]:
        """True for tokens, False for padding."""
        return self.source != PAD

    @property
    def target_mask(self) -> Bool[Tensor, "B T"]:
        return self.target != PAD


def sample_batch(recipe: Recipe, tokenizer: Tokenizer, texts: int = TEXTS) -> SampleBatch:
    """Real texts, from the training data if available, else from the built-in grammar; and random ids."""
    pairs = _pairs(recipe, texts)
    generator = torch.Generator().manual_seed(1)

    def random_ids(size: int, length: int) -> list[int]:
        ids: list[int] = torch.randint(
            len(SPECIAL_TOKENS), size, (length,), generator=generator
        ).tolist()
        return ids

    max_tokens = MAX_TOKENS
    if recipe.model.position == "learned":
        max_tokens = min(max_tokens, recipe.model.max_length - 1)
    lengths = [1 + 3 * row % max_tokens for row in range(RANDOM_ROWS)]
    sources = tokenizer.source.encode([pair.source for pair in pairs])
    targets = tokenizer.target.encode([pair.target for pair in pairs])
    sources += [random_ids(tokenizer.source.size, length) for length in lengths]
    targets += [random_ids(tokenizer.target.size, length) for length in reversed(lengths)]
    return SampleBatch(
        _padded([[*row[:max_tokens], EOS] for row in sources]),
        _padded([[BOS, *row[:max_tokens]] for row in targets]),
        pairs,
    )


def _pairs(recipe: Recipe, count: int) -> list[Pair]:
    try:
        return list(islice(read_pairs(recipe.data.train, recipe.data, "data.train"), count))
    except RegardError:
        return list(generate("test", count))


def _padded(rows: Sequence[list[int]]) -> Int[Tensor, "B T"]:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)


# ---------------------------------------------------------------------------------------------
# Two networks in PyTorch, layer by layer


class Stage(NamedTuple):
    """A point at which two networks are compared."""

    name: str
    module: nn.Module
    is_input: bool = False
    """the input of the module, not its output"""


def stages(
    stack: str, layers: Sequence[nn.Module], final_norm: nn.Module | None = None
) -> list[Stage]:
    """The points of one stack, encoder or decoder, from bottom to top."""
    points = [Stage(f"{stack} embedding and position", layers[0], is_input=True)]
    points += [Stage(f"{stack} layer {number}", layer) for number, layer in enumerate(layers, 1)]
    return points if final_norm is None else [*points, Stage(f"{stack} final norm", final_norm)]


def our_stages(network: Transformer) -> list[Stage]:
    points = []
    for name, stack in (("encoder", network.encoder), ("decoder", network.decoder)):
        final_norm = stack.norm if any(True for _ in stack.norm.parameters()) else None
        points += stages(name, list(stack.layers), final_norm)
    return points


@contextmanager
def record_stages(points: Sequence[Stage]) -> Iterator[dict[str, Tensor]]:
    """The tensors at each point during the with-block, by name."""
    recorded: dict[str, Tensor] = {}
    hooks = []
    for stage in points:

        def after(module: nn.Module, args: object, output: object, name: str = stage.name) -> None:
            recorded[name] = _first(output)

        def before(module: nn.Module, args: object, name: str = stage.name) -> None:
            recorded[name] = _first(args)

        if stage.is_input:
            hooks.append(stage.module.register_forward_pre_hook(before))
        else:
            hooks.append(stage.module.register_forward_hook(after))
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()


def _first(value: object) -> Tensor:
    value = value[0] if isinstance(value, tuple) else value
    assert isinstance(value, Tensor)
    return value.detach()


@torch.no_grad()
def our_activations(network: Transformer, batch: SampleBatch) -> dict[str, Tensor]:
    """The activations of our network in float64, stage by stage; the logits last."""
    exact = copy.deepcopy(network).double().eval()
    with record_stages(our_stages(exact)) as recorded:
        recorded["logits"] = exact(batch.source, batch.target)
    return recorded


@dataclass(frozen=True)
class Verification:
    """What was compared, and the largest difference."""

    texts: int
    stages: int
    largest: float

    def __str__(self) -> str:
        where = "layer by layer" if self.stages > 1 else "by outputs"
        return (
            f"verified {where} on {self.texts} texts: the largest difference is {self.largest:.1e}"
        )


def compare(
    what: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], batch: SampleBatch
) -> Verification:
    """Compare all stages of two networks, in order. what: the model's name in errors."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    largest = 0.0
    for name, value in ours.items():
        mask = batch.source_mask if name.startswith("encoder") else batch.target_mask
        largest_difference, allowed = difference(value[mask], theirs[name][mask])
        if not largest_difference <= allowed:
            raise mismatch(what, name, largest_difference, allowed)
        largest = max(largest, largest_difference)
    return Verification(len(batch.source), len(ours), largest)


def difference(ours: Float[Tensor, "*n"], theirs: Float[Tensor, "*n"]) -> tuple[float, float]:
    """The largest difference of two results, and the largest allowed. Logits masked on both sides count as equal."""
    unmasked = ~((ours < -1e3) & (theirs < -1e3))
    scale = max(1.0, float(ours[unmasked].abs().max()))
    return float((ours - theirs)[unmasked].abs().max()), TOLERANCE[ours.dtype] * scale


def mismatch(what: str, where: str, observed: float, allowed: float) -> RegardError:
    return RegardError(
        f"{what}: the two models differ: {where} differs by {observed:.2g} (allowed: {allowed:.1g}); "
        "nothing was written"
    )


# ---------------------------------------------------------------------------------------------
# An engine that shows only its outputs

Outputs = Callable[[Transformer], Float[Tensor, "*n"]]
"""The outputs for the test batch of an engine with the weights of a network."""


def verify_by_outputs(
    what: str, network: Transformer, batch: SampleBatch, ours: Outputs, theirs: Outputs
) -> Verification:
    """Compare the outputs of the network with those of the engine; if they differ, name the first layer that does."""
    observed, allowed = difference(ours(network), theirs(network))
    if observed <= allowed:
        return Verification(len(batch.source), 1, observed)
    for name, truncated in truncated_networks(network):
        observed_there, allowed_there = difference(ours(truncated), theirs(truncated))
        if not observed_there <= allowed_there:
            raise mismatch(what, name, observed_there, allowed_there)
    raise mismatch(what, "the whole network", observed, allowed)


def truncated_networks(network: Transformer) -> Iterator[tuple[str, Transformer]]:
    """The network with fewer layers, each time with one more, and the name of the layer that was added."""
    encoder, decoder = len(network.encoder.layers), len(network.decoder.layers)
    yield "the embeddings, encoder layer 1 or decoder layer 1", _truncated(network, 1, 1)
    for count in range(2, encoder + 1):
        yield f"encoder layer {count}", _truncated(network, count, 1)
    for count in range(2, decoder + 1):
        yield f"decoder layer {count}", _truncated(network, encoder, count)


def _truncated(network: Transformer, encoder: int, decoder: int) -> Transformer:
    smaller = copy.deepcopy(network)
    smaller.encoder.layers = smaller.encoder.layers[:encoder]
    smaller.decoder.layers = smaller.decoder.layers[:decoder]
    return smaller
