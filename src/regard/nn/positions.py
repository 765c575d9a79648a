"""Positions: attention alone does not know the order of the words (section 3.5 of the paper)."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard import recipe
from regard.errors import RegardError


def sinusoids(length: int, width: int) -> Float[Tensor, "T d"]:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(the same).

    Computed in float64, so that far positions are as true as near ones.
    """
    position = torch.arange(length, dtype=torch.float64)[:, None]
    frequency = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = position * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).float()


class Sinusoidal(nn.Module):
    """Adds fixed waves: fast ones in the first features, slow ones in the last. It has no longest length."""

    longest = None

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()
        self.width = section.width
        # No buffer: it is neither saved nor shared, but computed where and when it is needed.
        self.waves = sinusoids(512, section.width)

    def forward(self, x: Float[Tensor, "B T d"], start: int = 0) -> Float[Tensor, "B T d"]:
        end = start + x.shape[1]
        if end > len(self.waves):
            self.waves = sinusoids(2 * end, self.width)
        self.waves = self.waves.to(x.device)
        return x + self.waves[start:end]


class Learned(nn.Module):
    """Adds a learned vector for each position up to a longest length; beyond it there is nothing to add."""

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()
        self.longest = section.max_length
        self.vectors = nn.Parameter(torch.empty(section.max_length, section.width))
        nn.init.normal_(self.vectors, std=section.width**-0.5)

    def forward(self, x: Float[Tensor, "B T d"], start: int = 0) -> Float[Tensor, "B T d"]:
        end = start + x.shape[1]
        if end > len(self.vectors):
            raise RegardError(
                f"a text of {end} tokens is longer than the {len(self.vectors)} learned positions "
                "(model.max_length); cut it, or train with position: sinusoidal"
            )
        return x + self.vectors[start:end]


POSITIONS: dict[recipe.Position, type[Sinusoidal] | type[Learned]] = {
    "sinusoidal": Sinusoidal,
    "learned": Learned,
}
