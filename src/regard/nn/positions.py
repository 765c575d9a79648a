"""Positional encodings (section 3.5 of the paper): attention by itself does not know the order of the tokens.

A positional encoding acts on the embeddings, before the first layer (``NoPosition`` and its subclasses), or inside
every self-attention (``AttentionPosition`` and its subclasses). ``POSITIONS``, at the end, states which name does what.
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
"""the position of the first token, for all rows or for each; or an offset for each token, added to its index"""


class Tree(NamedTuple):
    """The dependency trees of a batch of sources."""

    depth: Int[Tensor, "B S"]
    """number of edges between the token and the root; EOS is the root, at depth 0"""
    distance: Int[Tensor, "B S S"]
    """number of edges between query and key: positive if the key is a descendant of the query, negative if it is an
    ancestor, otherwise signed by the order of the text"""


class RowSpan(NamedTuple):
    """For each position of a row, the first index of a text and one past its last index."""

    start: Int[Tensor, "B T"]
    end: Int[Tensor, "B T"]


class Packing(NamedTuple):
    """Sequence packing: where the texts of packed rows are, which hold many texts end to end without padding.

    At positions after the last text the spans are empty.
    """

    source: RowSpan
    """for each source token, its own text"""
    target: RowSpan
    """for each target token, its own text"""
    source_of_target: RowSpan
    """for each target token, the source of its sentence pair"""
    target_of_source: RowSpan
    """for each source token, the target of its sentence pair"""


PositionInfo = Tree | Packing | None
"""dependency trees, or how rows are packed; None for one plain text per row"""


# Added to the embeddings


class NoPosition(nn.Module):
    """Adds nothing: the model sees a bag of words, unless attention encodes positions."""

    max_length: int | None = None
    """the longest sequence it supports; None if there is no limit"""
    bounded = True
    """whether what it adds has a bound that does not depend on the length; int8 calibration needs one"""

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__()

    def forward(
        self, x: Float[Tensor, "B T d"], start: Start = 0, tree: Tree | None = None
    ) -> Float[Tensor, "B T d"]:
        return x


class Index(NoPosition):
    """Adds the index of the position to every feature; in long texts it dominates the embedding."""

    bounded = False

    def forward(
        self, x: Float[Tensor, "B T d"], start: Start = 0, tree: Tree | None = None
    ) -> Float[Tensor, "B T d"]:
        return x + position_ids(x, start)[..., None].to(x.dtype)


def sinusoids(length: int, width: int) -> Float[Tensor, "T d"]:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d)).

    Computed in float64, so that distant positions are as accurate as near ones.
    """
    angle = angles(length, width)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).float()


def angles(length: int, width: int) -> Float[Tensor, "T half"]:
    """pos / 10000^(2i/d), in float64."""
    position = torch.arange(length, dtype=torch.float64)[:, None]
    frequency = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return position * frequency


def rotation_table(length: int, width: int) -> Float[Tensor, "T half 2"]:
    """Cosine and sine of each angle, in float64."""
    angle = angles(length, width)
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


class SinusoidalTable:
    """A table over positions that grows when a longer text comes.

    It is not a buffer: it is never saved, and is computed on the device that needs it.
    """

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self.make = make
        self.table = make(512)

    def __call__(self, end: int, device: torch.device) -> Tensor:
        """The rows of at least all positions before ``end``."""
        table = self.table  # another thread may replace it at any time
        if end > len(table) or table.device != device:
            with torch.inference_mode(False):  # so that training can use it, too
                table = self.table = self.make(max(len(table), 2 * end)).to(device)
        return table


class Sinusoidal(NoPosition):
    """Adds sines and cosines of the position, from high frequencies to low ones; texts can have any length."""

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__(config)
        self.sinusoids = SinusoidalTable(lambda length: sinusoids(length, config.d_model))

    def forward(
        self, x: Float[Tensor, "B T d"], start: Start = 0, tree: Tree | None = None
    ) -> Float[Tensor, "B T d"]:
        position = position_ids(x, start)
        return x + self.sinusoids(end_position(x, start), x.device)[position].to(x.dtype)


class SinusoidalInTree(Sinusoidal):
    """Adds tanh(U PE(position) + V PE(depth)): position in the text and depth in the tree (Wang et al. 2019)."""

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__(config)
        self.text_projection = nn.Linear(config.d_model, config.d_model, bias=False)
        self.depth_projection = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(
        self, x: Float[Tensor, "B T d"], start: Start = 0, tree: Tree | None = None
    ) -> Float[Tensor, "B T d"]:
        if tree is None:
            raise RegardError("position: tree needs the parse of every text; pass parses")
        rows = max(end_position(x, start), 1 + int(tree.depth.max()))
        table = self.sinusoids(rows, x.device).to(x.dtype)
        position, depth = table[position_ids(x, start)], table[tree.depth]
        projected: Float[Tensor, "B T d"] = self.text_projection(position)
        projected = projected + self.depth_projection(depth)
        return x + projected.tanh()


class Learned(NoPosition):
    """Adds a learned vector for each position, up to ``max_length``; longer texts are an error."""

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__(config)
        self.max_length = config.max_length
        self.embedding = nn.Parameter(torch.empty(config.max_length, config.d_model))
        nn.init.normal_(self.embedding, std=config.d_model**-0.5)

    def forward(
        self, x: Float[Tensor, "B T d"], start: Start = 0, tree: Tree | None = None
    ) -> Float[Tensor, "B T d"]:
        length = end_position(x, start)
        if length > len(self.embedding):
            raise RegardError(
                f"a text of {length} tokens is longer than the {len(self.embedding)} learned positions "
                "(model.max_length); shorten it, or train with position: sinusoidal"
            )
        return x + self.embedding[position_ids(x, start)]


def position_ids(x: Float[Tensor, "B T *d"], start: Start) -> Int[Tensor, "#B T"]:
    """The position of each token, counted from 0."""
    # Padding before a text would have negative positions.
    return (torch.arange(x.shape[1], device=x.device) + start).view(-1, x.shape[1]).clamp(min=0)


def end_position(x: Float[Tensor, "B T *d"], start: Start) -> int:
    """One past the last position, or an upper bound of it."""
    if isinstance(start, int):
        return x.shape[1] + start
    packed = start.shape[1] > 1  # positions in packed rows are smaller than the row is long
    return x.shape[1] + (0 if packed else int(start.max()))


# Inside self-attention


class AttentionPosition(nn.Module):
    """What a positional encoding changes in attention; this base class changes nothing."""

    in_scores = False
    """whether attention must call ``score`` and ``value``"""

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__()

    def rotate(self, x: Float[Tensor, "B h T dk"], start: int) -> Float[Tensor, "B h T dk"]:
        """Applied to queries and keys before they are compared. start: the position of the first one."""
        return x

    def score(
        self, query: Float[Tensor, "B h Q dk"], distance: Int[Tensor, "#B Q K"] | None
    ) -> Float[Tensor, "B h Q K"]:
        """A term to add to Q K^T, before the scale."""
        raise NotImplementedError

    def value(
        self, weights: Float[Tensor, "B h Q K"], distance: Int[Tensor, "#B Q K"] | None
    ) -> Float[Tensor, "B h Q dv"]:
        """A term to add to the weighted sum of the values."""
        raise NotImplementedError


class Rotary(AttentionPosition):
    """Rotary positions (RoPE): rotates pairs of features of queries and keys by position (Su et al. 2021).

    The dot product of a query and a key then depends only on their distance.
    """

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__(config)
        self.rotations = SinusoidalTable(lambda length: rotation_table(length, config.d_k))

    def rotate(self, x: Float[Tensor, "B h T dk"], start: int) -> Float[Tensor, "B h T dk"]:
        return self.rotate_at(x, slice(start, start + x.shape[2]))

    def rotate_at(self, x: Float[Tensor, "*B T dk"], positions: slice) -> Float[Tensor, "*B T dk"]:
        """Rotate vectors at these positions; a slice of one position is used for all vectors."""
        cos, sin = self.rotations(positions.stop, x.device)[positions].to(x.dtype).unbind(-1)
        even, odd = x[..., 0::2], x[..., 1::2]
        rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
        return rotated.flatten(-2)


class Relative(AttentionPosition):
    """Relative positions: a learned vector for each clipped distance, added to keys and values (Shaw et al. 2018).

    e_ij = q_i.(k_j + a_ij), and the output is the sum of w_ij (v_j + b_ij). All heads share the vectors.
    """

    in_scores = True

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__(config)
        self.max_distance = config.max_distance
        self.keys = nn.Parameter(torch.empty(2 * self.max_distance + 1, config.d_k))
        self.values = nn.Parameter(torch.empty(2 * self.max_distance + 1, config.d_v))
        nn.init.normal_(self.keys, std=config.d_k**-0.5)
        nn.init.normal_(self.values, std=config.d_v**-0.5)

    def index(self, distance: Int[Tensor, "#B Q K"]) -> Int[Tensor, "#B 1 Q K"]:
        """The index of the vector of each distance."""
        clipped = distance.clamp(-self.max_distance, self.max_distance)
        return (clipped + self.max_distance)[:, None]

    def score(
        self, query: Float[Tensor, "B h Q dk"], distance: Int[Tensor, "#B Q K"] | None
    ) -> Float[Tensor, "B h Q K"]:
        assert distance is not None
        # There are far fewer distances than keys: multiply once per distance, then gather.
        products = query @ self.keys.T
        index = self.index(distance).expand(*products.shape[:3], -1)
        return products.gather(-1, index)

    def value(
        self, weights: Float[Tensor, "B h Q K"], distance: Int[Tensor, "#B Q K"] | None
    ) -> Float[Tensor, "B h Q dv"]:
        assert distance is not None
        # Sum the weights of all keys at the same distance, then multiply once per distance.
        sums = weights.new_zeros(*weights.shape[:3], len(self.values))
        sums = sums.scatter_add(-1, self.index(distance).expand(*weights.shape), weights)
        return sums @ self.values.to(sums.dtype)


def grow_tables(network: nn.Module, end: int, device: torch.device) -> list[Tensor]:
    """Make all position tables of a network cover the positions before ``end``, and return the tables.

    A caller that keeps them, such as a CUDA graph, can use them even after a longer text has replaced them.
    """
    return [
        module.sinusoids(end, device)
        if isinstance(module, Sinusoidal)
        else module.rotations(end, device)
        for module in network.modules()
        if isinstance(module, (Sinusoidal, Rotary))
    ]


def first_line(component: type) -> str:
    """The summary of a component: the first line of its docstring."""
    return (component.__doc__ or "").split("\n")[0]


class PositionSpec(NamedTuple):
    """A positional encoding: what is added to the embeddings, and what changes in attention."""

    embedding: type[NoPosition] = NoPosition
    attention: type[AttentionPosition] = AttentionPosition
    target: str | None = None
    """the name of the positional encoding of the target, if it differs"""

    @property
    def in_attention(self) -> bool:
        """Whether self-attention itself encodes positions, by the distance between query and key."""
        return self.attention is not AttentionPosition

    def for_site(self, site: recipe.AttentionSite) -> "PositionSpec":
        """The positional encoding of the encoder or the decoder."""
        return self if site == "encoder" or self.target is None else POSITIONS[self.target]


POSITIONS: Registry[PositionSpec] = Registry("model.position")
_TABLE_FORMATS = ("ctranslate2", "onnx", "html")
"""formats that store positions as a table to add to the embeddings"""

POSITIONS.register(
    "none",
    summary="no positional encoding",
    packed_batches=True,
    fast_inference=True,
    formats=_TABLE_FORMATS,
)(PositionSpec())
POSITIONS.register(
    "index",
    summary=first_line(Index),
    packed_batches=True,
    fast_inference=True,
    formats=_TABLE_FORMATS,
)(PositionSpec(embedding=Index))
POSITIONS.register(
    "sinusoidal",
    summary=first_line(Sinusoidal),
    packed_batches=True,
    fast_inference=True,
    formats=FORMATS,
)(PositionSpec(embedding=Sinusoidal))
POSITIONS.register(
    "learned",
    summary=first_line(Learned),
    options=["model.max_length"],
    fast_inference=True,
    formats=_TABLE_FORMATS,
)(PositionSpec(embedding=Learned))
POSITIONS.register(
    "rotary",
    summary=first_line(Rotary),
    packed_batches=True,
    fast_inference=True,
    formats=("html",),
)(PositionSpec(attention=Rotary))
POSITIONS.register(
    "relative", summary=first_line(Relative), options=["model.max_distance"], formats=("html",)
)(PositionSpec(attention=Relative))
POSITIONS.register("tree", summary=first_line(SinusoidalInTree), options=["model.max_distance"])(
    PositionSpec(embedding=SinusoidalInTree, attention=Relative, target="sinusoidal")
)
