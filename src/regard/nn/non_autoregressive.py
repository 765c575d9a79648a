"""A Transformer that says all words at once (Gu et al. 2018), or in a few rounds (Ghazvininejad et al. 2019).

    source ids -> encoder -> memory -> how many words?
    the words known, MASK at the others -> decoder, in which every word sees every other -> logits at each place

The decoder reads at each place what it is to say there: no BOS, nothing shifted.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from regard import recipe
from regard.data.special_tokens import EOS, MASK, PAD
from regard.nn.layers import initialize
from regard.nn.transformer import DecoderState, Memory, Transformer
from regard.recipe import Registry

UNLIKELY = 0.01
"""a length at most so many times as likely as the likeliest is no candidate: words alone would not tell it is wrong"""


LENGTHS: Registry[Callable[[recipe.Model], "Length"]] = Registry("model.non_autoregressive.length")
_SECTION = "model.non_autoregressive"


class Length(nn.Module, ABC):
    """How many places the decoder has for the words of a translation."""

    predicts_eos: bool
    """whether EOS is said like a word, and what follows it is cut off"""

    @abstractmethod
    def places(
        self, source: Int[Tensor, "B S"], wanted: Int[Tensor, "B T"]
    ) -> Int[Tensor, "B places"]:
        """What must be said at each place; wanted is text and EOS, a row without EOS stays empty."""

    @abstractmethod
    def loss(self, memory: Memory, words: Int[Tensor, "B places"]) -> Float[Tensor, ""]:
        """To be added to the mean loss of the words."""

    @abstractmethod
    def choose(
        self, memory: Memory, limits: Int[Tensor, "B"], count: int
    ) -> Int[Tensor, "B candidates"]:
        """The count likeliest lengths up to the limit, likeliest first; 0 where there are fewer."""


@LENGTHS.register(
    "predicted", options=[f"{_SECTION}.max_length_difference", f"{_SECTION}.length_loss_weight"]
)
class Predicted(Length):
    """How many words more or fewer than the source has: a class of its own for each, from the mean encoder state."""

    predicts_eos = False

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()
        self.weight = section.non_autoregressive.length_loss_weight
        self.farthest = section.non_autoregressive.max_length_difference
        self.classes = nn.Linear(section.d_model, 2 * self.farthest + 1)

    def forward(self, memory: Memory) -> Float[Tensor, "B classes"]:
        """Logits; the one in the middle is that of as many words as the source has."""
        real = memory.real[..., None].to(memory.states.dtype)
        mean = (memory.states * real).sum(1) / real.sum(1)
        logits: Float[Tensor, "B classes"] = self.classes(mean)
        return logits

    def places(
        self, source: Int[Tensor, "B S"], wanted: Int[Tensor, "B T"]
    ) -> Int[Tensor, "B places"]:
        # The last place of the longest row is its EOS.
        return wanted.masked_fill(wanted == EOS, PAD)[:, : max(1, wanted.shape[1] - 1)]

    def loss(self, memory: Memory, words: Int[Tensor, "B places"]) -> Float[Tensor, ""]:
        lengths = (words != PAD).sum(1)
        difference = (lengths - _words(memory.real)).clamp(-self.farthest, self.farthest)
        each = F.cross_entropy(self(memory), difference + self.farthest, reduction="none")
        # A row without a word counts for nothing: it stands for a process that has nothing to learn.
        there = lengths > 0
        return self.weight * (each * there).sum() / there.sum().clamp(min=1)

    def choose(
        self, memory: Memory, limits: Int[Tensor, "B"], count: int
    ) -> Int[Tensor, "B candidates"]:
        logits = self(memory).float()
        difference = torch.arange(-self.farthest, self.farthest + 1, device=logits.device)
        lengths = _words(memory.real)[:, None] + difference
        possible = (lengths >= 1) & (lengths <= limits[:, None])
        best = logits.masked_fill(~possible, -torch.inf).topk(min(count, logits.shape[1]))
        # Where none is possible the limit lies far below the source: as long as it allows.
        chosen = lengths.gather(1, best.indices).minimum(limits[:, None])
        return chosen.masked_fill(best.values < best.values[:, :1] + math.log(UNLIKELY), 0)


@LENGTHS.register("eos", options=[f"{_SECTION}.extra_positions"])
class UntilEOS(Length):
    """Some more places than the source has words. EOS fills what the words leave, and all after it is cut."""

    predicts_eos = True

    def __init__(self, section: recipe.Model) -> None:
        super().__init__()
        self.spare = section.non_autoregressive.extra_positions

    def places(
        self, source: Int[Tensor, "B S"], wanted: Int[Tensor, "B T"]
    ) -> Int[Tensor, "B places"]:
        lengths = (wanted != PAD).sum(1)
        # A target that finds no room is learned all the same, in as many places as it needs.
        count = torch.maximum(_words(source != PAD) + self.spare, lengths).masked_fill(
            lengths == 0, 0
        )
        width = max(source.shape[1] - 1 + self.spare, wanted.shape[1])
        words = F.pad(wanted, (0, width - wanted.shape[1]), value=PAD)
        left = torch.arange(width, device=words.device) < count[:, None]
        return words.masked_fill((words == PAD) & left, EOS)

    def loss(self, memory: Memory, words: Int[Tensor, "B places"]) -> Float[Tensor, ""]:
        return memory.states.new_zeros(())

    def choose(
        self, memory: Memory, limits: Int[Tensor, "B"], count: int
    ) -> Int[Tensor, "B candidates"]:
        return torch.minimum(_words(memory.real) + self.spare, limits)[:, None]


def _words(real: Bool[Tensor, "B S"]) -> Int[Tensor, "B"]:
    """How many words the source has; its EOS is none."""
    return real.sum(1) - 1


@dataclass(frozen=True)
class NonAutoregressiveState:
    """What every round needs to know of the sources, computed once."""

    memory: Memory
    decoder: DecoderState


class NonAutoregressiveTransformer(Transformer):
    """Attention in both stacks, and all words of the target said at once."""

    def __init__(self, section: recipe.Model, source_size: int, target_size: int) -> None:
        super().__init__(section, source_size, target_size)
        self.length = LENGTHS[section.non_autoregressive.length](section)
        initialize(self.length)

    def decode(self, target: Int[Tensor, "B T"], memory: Memory) -> Float[Tensor, "B T d"]:
        """The state at each place; MASK stands where the word is not known."""
        return self.decoder.read(target, self.decoder.start(memory), causal=False)

    def start(self, memory: Memory) -> NonAutoregressiveState:  # type: ignore[override]
        return NonAutoregressiveState(memory, self.decoder.start(memory))

    def reading(self, said: Sequence[int]) -> list[int]:
        """Nothing but the places, as in the first round."""
        return [MASK] * max(1, len(said))

    def choose_lengths(
        self,
        state: NonAutoregressiveState,
        limits: Sequence[int],
        count: int,
        length: int | None = None,
    ) -> Int[Tensor, "B candidates"]:
        """The candidate lengths of each sentence, or the given length for all of them."""
        device = state.memory.states.device
        if length is not None:
            return torch.full((len(limits), 1), length, device=device)
        return self.length.choose(state.memory, torch.tensor(limits, device=device), count)

    def fill(
        self, read: Int[Tensor, "R T"], hidden: Bool[Tensor, "R T"], state: NonAutoregressiveState
    ) -> Float[Tensor, "places V"]:
        """The logits at the hidden places, row after row; the words at the others are known already."""
        return self.project(self.decoder.read(read, state.decoder, causal=False)[hidden])

    def step(self, tokens: Int[Tensor, "R"], state: NonAutoregressiveState) -> NoReturn:  # type: ignore[override]
        raise NotImplementedError("this network says all words at once: fill")
