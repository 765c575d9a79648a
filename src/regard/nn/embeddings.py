"""Ids to vectors, and vectors to logits (section 3.4 of the paper)."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F


class Embedding(nn.Module):
    """Ids to vectors, times sqrt(d), so that positions do not drown the words."""

    def __init__(self, size: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, width))
        nn.init.normal_(self.weight, std=width**-0.5)
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None
        """of the logits, where this is the projection"""

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T d"]:
        return F.embedding(ids, self.weight) * math.sqrt(self.weight.shape[1])
