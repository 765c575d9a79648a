"""Dropout: each value is zeroed with probability p, the others are divided by 1 - p (section 5.4 of the paper).

Dropout of whole tokens (word dropout) and the token masks of masked language models are here too.
"""

import threading
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.data.special_tokens import MASK, PAD, SPECIAL_TOKENS

DropoutKernel = Callable[[Tensor, float], Tensor]


class ThreadRandom(threading.local):
    """The random numbers of a thread, where several threads compute at the same time (``ThreadedTrainStep``).

    Otherwise they would share torch's generator, and the numbers of each thread would depend on the order in which
    they ask for them.
    """

    generator: torch.Generator | None = None
    """None: torch's generator"""


thread_random = ThreadRandom()


class Dropout(nn.Dropout):
    """torch's dropout. With a seed, the mask is a hash of seed and index, which compiles into the kernels around it.

    On a GPU, torch's random numbers cost more than the layers around them, and the mask is stored for the backward
    pass. A hash takes a few integer operations and is computed again in the backward pass.
    """

    seed: Int[Tensor, "1"] | None = None
    """set by ``attach_dropout_seeds``; its owner draws a new value before each step"""
    kernel: DropoutKernel | None = None
    """a faster implementation: values and p in, values out; set on an instance for training on a CPU"""

    def forward(self, input: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        if not self.training or self.p == 0:
            return input
        if self.kernel is not None:
            return self.kernel(input, self.p)
        if self.seed is None:
            return super().forward(input)
        return torch.where(keep_mask(input.shape, self.p, self.seed), input / (1 - self.p), 0.0)


LOWBIAS32 = ((16, 0x7FEB352D), (15, 0x046CA68B))
"""rounds of Wellons' lowbias32, with the second multiplier cut to 31 bits: torch's int32 is signed"""


def keep_mask(shape: torch.Size, p: float, seed: Int[Tensor, "1"]) -> Bool[Tensor, "*shape"]:
    """The dropout mask: False with probability p, as a hash of seed and index."""
    index = torch.arange(shape.numel(), dtype=torch.int32, device=seed.device)
    x = mix_bits(index ^ seed, LOWBIAS32) & 0x7FFFFFFF
    return (x >= int(p * 2**31)).view(shape)


def attach_dropout_seeds(
    layers: Sequence[nn.Module], device: torch.device
) -> Int[Tensor, "dropouts 4"]:
    """Give every dropout of these layers a seed. All seeds are in one tensor, each in an aligned row of its own."""
    dropouts = [
        module for layer in layers for module in layer.modules() if isinstance(module, Dropout)
    ]
    seeds = torch.zeros(len(dropouts), 4, dtype=torch.int32, device=device)
    for dropout, seed in zip(dropouts, seeds, strict=True):
        dropout.seed = seed[:1]
    return seeds


def mix_bits(x: Int[Tensor, "*shape"], rounds: Sequence[tuple[int, int]]) -> Int[Tensor, "*shape"]:
    """Mix the bits of 32-bit integers: xor with a right shift, multiply, repeat (a multiply-xorshift hash).

    rounds: shift and multiplier of each round. int32 tensors wrap around by themselves; int64 tensors hold values
    below 2^32 and are truncated to 32 bits. The Triton kernels have their own copy (``triton_kernels.keep_mask``),
    because a kernel cannot call a function on tensors.
    """
    for shift, multiplier in rounds:
        x = (x ^ (x >> shift)) * multiplier
        if x.dtype == torch.int64:
            x = x & 0xFFFFFFFF
    return x ^ (x >> 16)


# ---------------------------------------------------------------------------------------------
# Token masking: BERT's masked language model (Devlin et al. 2019), mask-predict, word dropout, and cutoff


MASKED, REPLACED = 0.8, 0.1
"""fractions of the selected tokens that become MASK and a random token; the rest stay unchanged"""


def mask_tokens(
    source: Int[Tensor, "B S"],
    tokens: Int[Tensor, "B S"],
    vocab_size: int,
    generator: torch.Generator | None = None,
) -> tuple[Int[Tensor, "B S"], Int[Tensor, "B S"]]:
    """The input and the labels of masked language modelling. The labels are PAD where nothing is predicted.

    tokens: the source, with PAD where no token may be selected. Of n tokens 15% are selected, rounded, but at least
    one. Of these, 80% become MASK, 10% a random entry of the vocabulary, and 10% stay unchanged, so that the encoder
    must represent every token it reads.
    """
    generator = generator or thread_random.generator
    device = torch.device("cpu") if generator is not None else source.device
    order, fate = torch.rand(2, *source.shape, generator=generator, device=device).to(source.device)
    random = torch.randint(
        len(SPECIAL_TOKENS), vocab_size, source.shape, generator=generator, device=device
    )
    selectable = tokens != PAD
    total = selectable.sum(1, keepdim=True)
    count = ((3 * total + 10) // 20).clamp(min=1).minimum(total)
    selected = rank_within(order, selectable) < count
    masked = selected & (fate < MASKED)
    replaced = selected & (fate >= MASKED) & (fate < MASKED + REPLACED)
    inputs = source.masked_fill(masked, MASK).where(~replaced, random.to(source.device))
    return inputs, tokens.masked_fill(~selected, PAD)


def random_token_mask(
    non_pad: Bool[Tensor, "B T"], generator: torch.Generator | None = None
) -> Bool[Tensor, "B T"]:
    """Which tokens to mask for mask-predict: between 1 and all tokens of each row, every number equally likely."""
    generator = generator or thread_random.generator
    fraction = torch.rand(len(non_pad), device=non_pad.device, generator=generator)
    count = 1 + (fraction * non_pad.sum(1)).long()
    order = torch.rand(non_pad.shape, device=non_pad.device, generator=generator)
    return (rank_within(order, non_pad) < count[:, None]) & non_pad


def rank_within(order: Tensor, selectable: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """The rank of each value of its row, among values in [0, 1); positions that are not selectable come last."""
    return order.masked_fill(~selectable, 2.0).argsort(1).argsort(1)


def drop_tokens(
    ids: Int[Tensor, "B S"], probability: float, special_tokens: int = len(SPECIAL_TOKENS)
) -> Int[Tensor, "B S"]:
    """Word dropout: each token becomes MASK with this probability. Ids below ``special_tokens`` stay."""
    random = torch.rand(ids.shape, device=ids.device, generator=thread_random.generator)
    return ids.masked_fill((random < probability) & (ids >= special_tokens), MASK)


def kept_tokens(
    ids: Int[Tensor, "B S"], probability: float, special_tokens: int
) -> Bool[Tensor, "B S"]:
    """Token cutoff for SimCut (Gao et al. 2022): False with this probability at tokens of the second half of the rows.

    The first half is the same batch without cutoff. Ids below ``special_tokens`` are kept.
    """
    random = torch.rand(ids.shape, device=ids.device, generator=thread_random.generator)
    cut = (random < probability) & (ids >= special_tokens)
    cut[: len(ids) // 2] = False
    return ~cut
