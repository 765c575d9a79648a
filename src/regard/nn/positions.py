"""Positions: attention alone does not know the order of the words (section 3.5 of the paper).

A position may act in two places: on the embeddings, before the first layer, and inside every self-attention. The
dictionary at the end says for each name what stands where.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard import recipe
from regard.errors import RegardError
from regard.recipe import FORMATS, Registry

Start = int | Int[Tensor, "B 1"] | Int[Tensor, "B T"]
"""the position of the first word: one for all rows, or one for each; or what each word adds to its place in the row"""


class Tree(NamedTuple):
    """Where the words of a batch stand in their dependency trees."""

    depth: Int[Tensor, "B S"]
    """branches between the word and the root; EOS is the root, at depth 0"""
    distance: Int[Tensor, "B S S"]
    """branches between query and key; positive where the key hangs below the query, negative where it stands above,
    else by the order of the text"""


class Span(NamedTuple):
    """For each place of a row where a text begins, and one past where it ends."""

    start: Int[Tensor, "B T"]
    end: Int[Tensor, "B T"]


class Packing(NamedTuple):
    """Where the texts of packed rows stand: end to end, without padding between them.

    At a place after the last text, a span begins and ends right there: it is empty.
    """

    source: Span
    """for each source token its own text"""
    target: Span
    """for each target token its own text"""
    read: Span
    """for each target token the source of its text"""
    written: Span
    """for each source token the target of its text"""


PositionInfo = Tree | Packing | None
"""where the words of a batch stand, if not simply one text to a row"""


# On the embeddings


class NoPosition(nn.Module):
    """Nothing is added: to such a model a sentence is a bag of words, unless attention tells it the order."""

    longest: int | None = None

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()

    def forward(
        self, x: Float[Tensor, "B T d"], start: Start = 0, tree: Tree | None = None
    ) -> Float[Tensor, "B T d"]:
        return x


class Index(NoPosition):
    """Adds the number of the position to every feature; at long lengths it swamps the word."""

    def forward(
        self, x: Float[Tensor, "B T d"], start: Start = 0, tree: Tree | None = None
    ) -> Float[Tensor, "B T d"]:
        return x + places(x, start)[..., None].to(x.dtype)


def sinusoids(length: int, width: int) -> Float[Tensor, "T d"]:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(the same).

    Computed in float64, so that far positions are as true as near ones.
    """
    angle = angles(length, width)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).float()


def angles(length: int, width: int) -> Float[Tensor, "T half"]:
    """pos / 10000^(2i/d), in float64."""
    position = torch.arange(length, dtype=torch.float64)[:, None]
    frequency = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return position * frequency


def turns(length: int, width: int) -> Float[Tensor, "T half 2"]:
    """Cosine and sine of each angle, in float64."""
    angle = angles(length, width)
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


class SinusoidalTable:
    """A table over positions that grows when a longer text comes.

    No buffer: it is neither saved nor shared, but computed where and when it is needed.
    """

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self.make = make
        self.table = make(512)

    def __call__(self, end: int, device: torch.device) -> Tensor:
        """The rows of all positions before end, and perhaps more."""
        table = self.table  # another thread may exchange it meanwhile
        if end > len(table) or table.device != device:
            with torch.inference_mode(False):  # who learns is to use it, too
                table = self.table = self.make(max(len(table), 2 * end)).to(device)
        return table


class Sinusoidal(NoPosition):
    """Adds fixed waves: fast ones in the first features, slow ones in the last. It has no longest length."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__(section)
        self.waves = SinusoidalTable(lambda length: sinusoids(length, section.d_model))

    def forward(
        self, x: Float[Tensor, "B T d"], start: Start = 0, tree: Tree | None = None
    ) -> Float[Tensor, "B T d"]:
        place = places(x, start)
        return x + self.waves(end(x, start), x.device)[place].to(x.dtype)


class SinusoidalInTree(Sinusoidal):
    """Adds tanh(U PE(place) + V PE(depth)): waves over the text and waves over the tree (Wang et al. 2019)."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__(section)
        self.place = nn.Linear(section.d_model, section.d_model, bias=False)
        self.depth = nn.Linear(section.d_model, section.d_model, bias=False)

    def forward(
        self, x: Float[Tensor, "B T d"], start: Start = 0, tree: Tree | None = None
    ) -> Float[Tensor, "B T d"]:
        if tree is None:
            raise RegardError(
                "a model with position: tree needs the parse of every text it reads; give parses"
            )
        deepest = 1 + int(tree.depth.max())
        waves = self.waves(max(end(x, start), deepest), x.device).to(x.dtype)
        place, depth = waves[places(x, start)], waves[tree.depth]
        both: Float[Tensor, "B T d"] = self.place(place) + self.depth(depth)
        return x + both.tanh()


class Learned(NoPosition):
    """Adds a learned vector for each position up to a longest length; beyond it there is nothing to add."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__(section)
        self.longest = section.max_length
        self.vectors = nn.Parameter(torch.empty(section.max_length, section.d_model))
        nn.init.normal_(self.vectors, std=section.d_model**-0.5)

    def forward(
        self, x: Float[Tensor, "B T d"], start: Start = 0, tree: Tree | None = None
    ) -> Float[Tensor, "B T d"]:
        if end(x, start) > len(self.vectors):
            raise RegardError(
                f"a text of {end(x, start)} tokens is longer than the {len(self.vectors)} learned "
                "positions (model.max_length); cut it, or train with position: sinusoidal"
            )
        return x + self.vectors[places(x, start)]


def places(x: Float[Tensor, "B T *d"], start: Start) -> Int[Tensor, "#B T"]:
    # Padding in front of a text, where nobody looks, would stand before the first position.
    return (torch.arange(x.shape[1], device=x.device) + start).view(-1, x.shape[1]).clamp(min=0)


def end(x: Float[Tensor, "B T *d"], start: Start) -> int:
    """One past the last position, or a bound on it."""
    if isinstance(start, int):
        return x.shape[1] + start
    packed = start.shape[1] > 1  # no text is longer than its row
    return x.shape[1] + (0 if packed else int(start.max()))


# Inside self-attention


class AttentionPosition(nn.Module):
    """What a position has to say when a query meets a key; here nothing."""

    in_scores = False
    """whether ``score`` and ``value`` are to be asked"""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()

    def turn(self, x: Float[Tensor, "B h T dk"], start: int) -> Float[Tensor, "B h T dk"]:
        """Queries and keys, before they are compared; start is the position of the first."""
        return x

    def score(
        self, query: Float[Tensor, "B h Q dk"], distance: Int[Tensor, "#B Q K"] | None
    ) -> Float[Tensor, "B h Q K"]:
        """Added to q.k, before the scale."""
        raise NotImplementedError

    def value(
        self, weights: Float[Tensor, "B h Q K"], distance: Int[Tensor, "#B Q K"] | None
    ) -> Float[Tensor, "B h Q dv"]:
        """Added to the weighted sum of the values."""
        raise NotImplementedError


class Rotary(AttentionPosition):
    """Turns each pair of features of queries and keys by an angle that grows with the position (Su et al. 2021).

    A product of two such vectors depends on their distance alone.
    """

    def __init__(self, section: recipe.Model) -> None:
        super().__init__(section)
        self.waves = SinusoidalTable(lambda length: turns(length, section.d_k))

    def turn(self, x: Float[Tensor, "B h T dk"], start: int) -> Float[Tensor, "B h T dk"]:
        return self.turn_at(x, slice(start, start + x.shape[2]))

    def turn_at(self, x: Float[Tensor, "*B T dk"], places: slice) -> Float[Tensor, "*B T dk"]:
        """The same at these places; one place serves all vectors."""
        cos, sin = self.waves(places.stop, x.device)[places].to(x.dtype).unbind(-1)
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
        return turned.flatten(-2)


class Relative(AttentionPosition):
    """Learned vectors for the distance, clipped, added to keys and to values (Shaw et al. 2018).

    e_ij = q_i.(k_j + a_ij), and the output is the sum of w_ij (v_j + b_ij); one set of vectors for all heads.
    """

    in_scores = True

    def __init__(self, section: recipe.Model) -> None:
        super().__init__(section)
        self.farthest = section.max_distance
        self.keys = nn.Parameter(torch.empty(2 * self.farthest + 1, section.d_k))
        self.values = nn.Parameter(torch.empty(2 * self.farthest + 1, section.d_v))
        nn.init.normal_(self.keys, std=section.d_k**-0.5)
        nn.init.normal_(self.values, std=section.d_v**-0.5)

    def which(self, distance: Int[Tensor, "#B Q K"]) -> Int[Tensor, "#B 1 Q K"]:
        """The vector of each distance."""
        return (distance.clamp(-self.farthest, self.farthest) + self.farthest)[:, None]

    def score(
        self, query: Float[Tensor, "B h Q dk"], distance: Int[Tensor, "#B Q K"] | None
    ) -> Float[Tensor, "B h Q K"]:
        assert distance is not None
        # There are far fewer different distances than keys: multiply once for each, then spread out.
        products = query @ self.keys.T
        which = self.which(distance).expand(*products.shape[:3], -1)
        return products.gather(-1, which)

    def value(
        self, weights: Float[Tensor, "B h Q K"], distance: Int[Tensor, "#B Q K"] | None
    ) -> Float[Tensor, "B h Q dv"]:
        assert distance is not None
        # The weights of all keys at one distance are summed before they meet its vector.
        sums = weights.new_zeros(*weights.shape[:3], len(self.values))
        sums = sums.scatter_add(-1, self.which(distance).expand(*weights.shape), weights)
        return sums @ self.values.to(sums.dtype)


def reach(network: nn.Module, end: int, device: torch.device) -> list[Tensor]:
    """Let all tables over positions go so far. The tables: who holds them may go on reading them, though a longer
    text make others."""
    parts = [part for part in network.modules() if isinstance(part, (Sinusoidal, Rotary))]
    return [part.waves(end, device) for part in parts]


def first_line(component: type) -> str:
    """The summary of a component: the first line of its docstring."""
    return (component.__doc__ or "").split("\n")[0]


class PositionSpec(NamedTuple):
    """Where a position acts, and how."""

    embedding: type[NoPosition] = NoPosition
    attention: type[AttentionPosition] = AttentionPosition
    target: str | None = None
    """what the target has instead, if something else"""

    def on(self, place: recipe.AttentionSite) -> "PositionSpec":
        return self if place == "encoder" or self.target is None else POSITIONS[self.target]


POSITIONS: Registry[PositionSpec] = Registry("model.position")
_ADDED = ("ctranslate2", "onnx")
"""formats that hold the positions as a table to add"""

POSITIONS.register("none", summary="no positions at all", packed=True, fused=True, formats=_ADDED)(
    PositionSpec()
)
POSITIONS.register("index", summary=first_line(Index), packed=True, fused=True, formats=_ADDED)(
    PositionSpec(embedding=Index)
)
POSITIONS.register(
    "sinusoidal", summary=first_line(Sinusoidal), packed=True, fused=True, formats=FORMATS
)(PositionSpec(embedding=Sinusoidal))
POSITIONS.register(
    "learned",
    summary=first_line(Learned),
    options=["model.max_length"],
    fused=True,
    formats=_ADDED,
)(PositionSpec(embedding=Learned))
POSITIONS.register("rotary", summary=first_line(Rotary), packed=True, fused=True)(
    PositionSpec(attention=Rotary)
)
POSITIONS.register("relative", summary=first_line(Relative), options=["model.max_distance"])(
    PositionSpec(attention=Relative)
)
POSITIONS.register("tree", summary=first_line(SinusoidalInTree), options=["model.max_distance"])(
    PositionSpec(embedding=SinusoidalInTree, attention=Relative, target="sinusoidal")
)
