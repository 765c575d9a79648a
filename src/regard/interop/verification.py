"""Every conversion proves itself: both sides read the same texts, and are compared layer by layer.

Two networks in torch are compared in float64, where the same function agrees to some 1e-12 and another does not. An
engine that shows only its results is compared by them, in float32; if they differ, networks cut after a layer, each
with one layer more, go the same way, and the first that differs names its layer.
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

from regard.data.corpus import Pair, read_pairs
from regard.data.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS
from regard.data.tokenizer import Tokenizer
from regard.demo.grammar import generate
from regard.errors import RegardError
from regard.nn.transformer import Transformer
from regard.recipe import Recipe

REAL, RANDOM = 16, 8
"""texts of each kind"""
LONGEST = 48
"""tokens of a text that are looked at"""
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4}
"""of the largest value of a layer, at least of 1"""


class Inputs(NamedTuple):
    """What both sides read, in our ids."""

    source: Int[Tensor, "B S"]
    """EOS closes each row, padding follows"""
    target: Int[Tensor, "B T"]
    """BOS opens each row, padding follows"""
    pairs: list[Pair]
    """the real texts"""

    @property
    def source_real(self) -> Bool[Tensor, "B S"]:
        return self.source != PAD

    @property
    def target_real(self) -> Bool[Tensor, "B T"]:
        return self.target != PAD


def inputs(recipe: Recipe, tokenizer: Tokenizer) -> Inputs:
    """Real texts, of the training data if they are at hand, else of the built-in grammar; and random ids."""
    pairs = _pairs(recipe)
    generator = torch.Generator().manual_seed(1)

    def random(size: int, length: int) -> list[int]:
        ids: list[int] = torch.randint(
            len(SPECIAL_TOKENS), size, (length,), generator=generator
        ).tolist()
        return ids

    longest = LONGEST
    if recipe.model.position == "learned":
        longest = min(longest, recipe.model.max_length - 1)
    lengths = [1 + 3 * row % longest for row in range(RANDOM)]
    sources = tokenizer.source.encode([pair.source for pair in pairs])
    targets = tokenizer.target.encode([pair.target for pair in pairs])
    sources += [random(tokenizer.source.size, length) for length in lengths]
    targets += [random(tokenizer.target.size, length) for length in reversed(lengths)]
    return Inputs(
        _padded([[*row[:longest], EOS] for row in sources]),
        _padded([[BOS, *row[:longest]] for row in targets]),
        pairs,
    )


def _pairs(recipe: Recipe) -> list[Pair]:
    try:
        return list(islice(read_pairs(recipe.data.train, recipe.data, "data.train"), REAL))
    except RegardError:
        return list(generate("test", REAL))


def _padded(rows: Sequence[list[int]]) -> Int[Tensor, "B T"]:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)


# Two networks in torch


class Stage(NamedTuple):
    """A place where two networks can be compared."""

    name: str
    module: nn.Module
    before: bool = False
    """what goes into the module, not what comes out of it"""


def stages(side: str, layers: Sequence[nn.Module], last: nn.Module | None = None) -> list[Stage]:
    """Where one of the two stacks can be looked at, from bottom to top."""
    found = [Stage(f"{side} embedding and position", layers[0], before=True)]
    found += [Stage(f"{side} layer {number}", layer) for number, layer in enumerate(layers, 1)]
    return found if last is None else [*found, Stage(f"{side} closing norm", last)]


def our_stages(network: Transformer) -> list[Stage]:
    found = []
    for side, stack in (("encoder", network.encoder), ("decoder", network.decoder)):
        last = stack.norm if any(True for _ in stack.norm.parameters()) else None
        found += stages(side, list(stack.layers), last)
    return found


@contextmanager
def watched(places: Sequence[Stage]) -> Iterator[dict[str, Tensor]]:
    """What passes each stage during the with-block."""
    seen: dict[str, Tensor] = {}
    hooks = []
    for stage in places:

        def came_out(
            module: nn.Module, given: object, made: object, name: str = stage.name
        ) -> None:
            seen[name] = _first(made)

        def goes_in(module: nn.Module, given: object, name: str = stage.name) -> None:
            seen[name] = _first(given)

        hook = stage.module.register_forward_pre_hook if stage.before else None
        hooks.append(hook(goes_in) if hook else stage.module.register_forward_hook(came_out))
    try:
        yield seen
    finally:
        for handle in hooks:
            handle.remove()


def _first(value: object) -> Tensor:
    value = value[0] if isinstance(value, tuple) else value
    assert isinstance(value, Tensor)
    return value.detach()


@torch.no_grad()
def our_side(network: Transformer, given: Inputs) -> dict[str, Tensor]:
    """What our network makes of the inputs, in float64, stage by stage; the logits last."""
    exact = copy.deepcopy(network).double().eval()
    with watched(our_stages(exact)) as seen:
        seen["logits"] = exact(given.source, given.target)
    return seen


@dataclass(frozen=True)
class Verification:
    """What was compared, and how far apart it was at most."""

    texts: int
    stages: int
    largest: float

    def __str__(self) -> str:
        where = "layer by layer" if self.stages > 1 else "by results"
        return f"proved {where} on {self.texts} real and random texts: differs by {self.largest:.1e} at most"


def compare(
    what: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], given: Inputs
) -> Verification:
    """Hold all stages of two networks against each other, from the first to the last."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    largest = 0.0
    for name, value in ours.items():
        real = given.source_real if name.startswith("encoder") else given.target_real
        found, allowed = difference(value[real], theirs[name][real])
        if not found <= allowed:
            raise mismatch(what, name, found, allowed)
        largest = max(largest, found)
    return Verification(len(given.source), len(ours), largest)


def difference(ours: Float[Tensor, "*n"], theirs: Float[Tensor, "*n"]) -> tuple[float, float]:
    """How far two results are apart, and how far they may be. What never comes on both sides is the same."""
    both = ~((ours < -1e3) & (theirs < -1e3))
    scale = max(1.0, float(ours[both].abs().max()))
    return float((ours - theirs)[both].abs().max()), TOLERANCE[ours.dtype] * scale


def mismatch(what: str, where: str, found: float, allowed: float) -> RegardError:
    return RegardError(
        f"{what}: not the same function: {where} differs by {found:.2g} (allowed: {allowed:.1g}), "
        "so nothing was written"
    )


# An engine that shows only its results

Outside = Callable[[Transformer], Float[Tensor, "*n"]]
"""our network to what the engine makes of it and of the inputs"""


def verify_by_outputs(
    what: str, network: Transformer, given: Inputs, ours: Outside, theirs: Outside
) -> Verification:
    found, allowed = difference(ours(network), theirs(network))
    if found <= allowed:
        return Verification(len(given.source), 1, found)
    for name, smaller in cuts(network):
        less, allowed_there = difference(ours(smaller), theirs(smaller))
        if not less <= allowed_there:
            raise mismatch(what, name, less, allowed_there)
    raise mismatch(what, "the whole", found, allowed)


def cuts(network: Transformer) -> Iterator[tuple[str, Transformer]]:
    """The network with fewer layers, one more each time, and the name of what came last."""
    encoder, decoder = len(network.encoder.layers), len(network.decoder.layers)
    yield "the embeddings, encoder layer 1 or decoder layer 1", _cut(network, 1, 1)
    for count in range(2, encoder + 1):
        yield f"encoder layer {count}", _cut(network, count, 1)
    for count in range(2, decoder + 1):
        yield f"decoder layer {count}", _cut(network, encoder, count)


def _cut(network: Transformer, encoder: int, decoder: int) -> Transformer:
    smaller = copy.deepcopy(network)
    smaller.encoder.layers = smaller.encoder.layers[:encoder]
    smaller.decoder.layers = smaller.decoder.layers[:decoder]
    return smaller
