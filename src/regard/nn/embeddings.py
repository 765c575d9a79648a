"""Token embeddings, which are also the output projection when the two are tied (section 3.4 of the paper)."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F


class Embedding(nn.Module):
    """Token ids to vectors, times sqrt(d_model): without the factor, positions would dominate the embeddings."""

    def __init__(self, vocab_size: int, d_model: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        nn.init.normal_(self.weight, std=d_model**-0.5)
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None
        """bias of the logits, if the weight is also the output projection"""

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T d"]:
        return F.embedding(ids, self.weight) * math.sqrt(self.weight.shape[1])
