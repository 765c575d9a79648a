"""How large the inputs of the maps of int8 become: tried once, on words drawn at random."""

from __future__ import annotations

import math
from typing import cast

import torch

from regard.fast.linear import Eight
from regard.fast.network import Fast
from regard.marks import END, MARKS, START
from regard.nn.norms import NoNorm
from regard.nn.transformer import Decoder, Encoder, Transformer

SENTENCES, WORDS = 16, 20
SEED = 1
FAR = 512
"""words: by then positions without end have been as large as they become"""
MARGIN = 1.25
"""how much larger than any that was seen an input may be before it is cut off"""


@torch.inference_mode()
def settle(fast: Fast, network: Transformer) -> None:
    """Let all maps of int8 see what comes their way, then keep to it.

    Norms make the inputs of most maps alike whatever the words say, so any words serve. On multi30k a ten-thousandth
    of the inputs lie outside the ranges found without a margin. Where no norm stands before the first layer, it is
    shown how large any word can be; a network without norms goes on finding its ranges anew.
    """
    maps = [weight for weight in fast.weights if isinstance(weight, Eight)]
    stacks: tuple[Encoder | Decoder, ...] = network.encoder, network.decoder
    if not maps or isinstance(network.encoder.layers[0].attention_residual.norm, NoNorm):
        return
    draw = torch.Generator().manual_seed(SEED)
    words = WORDS if network.longest is None else min(WORDS, network.longest)

    def drawn(stack: Encoder | Decoder) -> torch.Tensor:
        """Words at random, every fourth one of those with the largest embeddings."""
        weight = stack.embedding.weight
        size = len(weight)
        rows = torch.randint(min(len(MARKS), size - 1), size, (SENTENCES, words), generator=draw)
        some = rows[:, 1::4]
        order = weight.abs().amax(1).argsort(descending=True)
        some.copy_(order[torch.arange(some.numel()) % size].view_as(some))
        return rows

    source, target = map(drawn, stacks)
    source[:, -1], target[:, 0] = END, START
    state = fast.start(fast.encode(source))
    for tokens in target.unbind(1):
        _, state = fast.step(tokens, state)
    for stack, first in zip(stacks, (fast.encoder[0], fast.decoder[0]), strict=True):
        if not first.attention.before:
            most = largest(stack)
            cast(Eight, first.attention.joined).see(-most, most)
    for one in maps:
        one.settle(MARGIN)


def largest(stack: Encoder | Decoder) -> float:
    """No number of any word at any place is larger."""
    weight, position = stack.embedding.weight, stack.position
    places = position(weight.new_zeros(1, position.longest or FAR, weight.shape[1]))
    return float(weight.abs().max() * math.sqrt(weight.shape[1]) + places.abs().max())
