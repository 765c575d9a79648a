"""Positions as other formats have them: what is added to the words, in a table."""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.nn.transformer import Decoder, Encoder

POSITIONS = 1024
"""of such a table; sinusoids have no end with us"""


@torch.no_grad()
def table(stack: Encoder | Decoder) -> Float[Tensor, "T d"]:
    nothing = torch.zeros(1, stack.position.longest or POSITIONS, stack.embedding.weight.shape[1])
    added: Tensor = stack.position(nothing)
    return added[0]
