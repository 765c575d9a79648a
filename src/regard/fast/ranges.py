"""How large the inputs of the maps of int8 become: tried once, on words drawn at random."""

from __future__ import annotations

import torch

from regard.fast.linear import Eight
from regard.fast.network import Fast
from regard.marks import END, MARKS, START
from regard.nn.transformer import Transformer

SENTENCES, WORDS = 16, 20
SEED = 1
MARGIN = 1.25
"""how much larger than any that was seen an input may be before it is cut off"""


@torch.inference_mode()
def settle(fast: Fast, network: Transformer) -> None:
    """Let all maps of int8 see what comes their way, then keep to it.

    Norms make the inputs of most maps alike whatever the words say, so any words serve. On multi30k a ten-thousandth
    of the inputs lie outside the ranges found without a margin.
    """
    maps = [weight for weight in fast.weights if isinstance(weight, Eight)]
    if not maps:
        return
    draw = torch.Generator().manual_seed(SEED)
    words = WORDS if network.longest is None else min(WORDS, network.longest)

    def drawn(size: int) -> torch.Tensor:
        return torch.randint(min(len(MARKS), size - 1), size, (SENTENCES, words), generator=draw)

    source = drawn(network.encoder.embedding.weight.shape[0])
    target = drawn(network.decoder.embedding.weight.shape[0])
    source[:, -1], target[:, 0] = END, START
    state = fast.start(fast.encode(source))
    for tokens in target.unbind(1):
        _, state = fast.step(tokens, state)
    for one in maps:
        one.settle(MARGIN)
