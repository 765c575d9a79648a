"""A Transformer that predicts all target tokens at once (Gu et al. 2018), or in a few iterations: mask-predict.

    source ids -> encoder -> encoder_output -> target length
    known tokens, MASK at the others -> decoder without a causal mask -> logits at each position

The decoder reads at each position the token it predicts there, or MASK: there is no BOS and no shift. Mask-predict
(Ghazvininejad et al. 2019) is in ``decoding/mask_predict.py``.
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
from regard.nn.transformer import DecoderState, EncoderOutput, Transformer
from regard.recipe import Registry

MIN_LENGTH_RATIO = 0.01
"""A length is a candidate only if its probability is larger than this fraction of the largest: token probabilities
alone would not show that such a length is wrong."""

# Target length


LENGTHS: Registry[Callable[[recipe.ModelConfig], "Length"]] = Registry(
    "model.non_autoregressive.length"
)
_SECTION = "model.non_autoregressive"


class Length(nn.Module, ABC):
    """Determines the number of decoder positions of a translation."""

    predicts_eos: bool
    """whether EOS is predicted like any token, and everything after it is dropped"""

    @abstractmethod
    def position_labels(
        self, source: Int[Tensor, "B S"], labels: Int[Tensor, "B T"]
    ) -> Int[Tensor, "B positions"]:
        """The token to predict at each decoder position. labels: text and EOS; a row without EOS stays empty."""

    @abstractmethod
    def loss(
        self, encoder_output: EncoderOutput, position_labels: Int[Tensor, "B positions"]
    ) -> Float[Tensor, ""]:
        """The length loss, to be added to the mean loss of the tokens."""

    @abstractmethod
    def candidates(
        self, encoder_output: EncoderOutput, limits: Int[Tensor, "B"], count: int
    ) -> Int[Tensor, "B candidates"]:
        """The ``count`` most probable lengths up to the limit, most probable first; 0 if there are fewer."""


@LENGTHS.register(
    "predicted", options=[f"{_SECTION}.max_length_difference", f"{_SECTION}.length_loss_weight"]
)
class Predicted(Length):
    """A classifier on the mean encoder state predicts the difference between target and source length."""

    predicts_eos = False

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__()
        self.weight = config.non_autoregressive.length_loss_weight
        self.max_difference = config.non_autoregressive.max_length_difference
        self.classifier = nn.Linear(config.d_model, 2 * self.max_difference + 1)

    def forward(self, encoder_output: EncoderOutput) -> Float[Tensor, "B classes"]:
        """The logits of all differences, from -max_difference to max_difference."""
        non_pad = encoder_output.non_pad[..., None].to(encoder_output.states.dtype)
        mean = (encoder_output.states * non_pad).sum(1) / non_pad.sum(1)
        logits: Float[Tensor, "B classes"] = self.classifier(mean)
        return logits

    def position_labels(
        self, source: Int[Tensor, "B S"], labels: Int[Tensor, "B T"]
    ) -> Int[Tensor, "B positions"]:
        # The last position of the longest row is its EOS.
        return labels.masked_fill(labels == EOS, PAD)[:, : max(1, labels.shape[1] - 1)]

    def loss(
        self, encoder_output: EncoderOutput, position_labels: Int[Tensor, "B positions"]
    ) -> Float[Tensor, ""]:
        lengths = (position_labels != PAD).sum(1)
        difference = lengths - _source_lengths(encoder_output.non_pad)
        label = difference.clamp(-self.max_difference, self.max_difference) + self.max_difference
        losses = F.cross_entropy(self(encoder_output), label, reduction="none")
        # Rows without tokens do not count: they belong to a process that has no rows in this batch.
        counted = lengths > 0
        return self.weight * (losses * counted).sum() / counted.sum().clamp(min=1)

    def candidates(
        self, encoder_output: EncoderOutput, limits: Int[Tensor, "B"], count: int
    ) -> Int[Tensor, "B candidates"]:
        logits = self(encoder_output).float()
        difference = torch.arange(
            -self.max_difference, self.max_difference + 1, device=logits.device
        )
        lengths = _source_lengths(encoder_output.non_pad)[:, None] + difference
        possible = (lengths >= 1) & (lengths <= limits[:, None])
        most_probable = logits.masked_fill(~possible, -torch.inf).topk(min(count, logits.shape[1]))
        # If no length is possible, the limit is far below the source length: use the limit.
        chosen = lengths.gather(1, most_probable.indices).minimum(limits[:, None])
        unlikely = most_probable.values < most_probable.values[:, :1] + math.log(MIN_LENGTH_RATIO)
        return chosen.masked_fill(unlikely, 0)


# There is one candidate length.
@LENGTHS.register("eos", options=[f"{_SECTION}.extra_positions"], ignores=["decoding.length_beam"])
class UntilEOS(Length):
    """The source length plus some extra positions; the translation ends at the first predicted EOS."""

    predicts_eos = True

    def __init__(self, config: recipe.ModelConfig) -> None:
        super().__init__()
        self.extra = config.non_autoregressive.extra_positions

    def position_labels(
        self, source: Int[Tensor, "B S"], labels: Int[Tensor, "B T"]
    ) -> Int[Tensor, "B positions"]:
        lengths = (labels != PAD).sum(1)
        # In training, a target that does not fit gets as many positions as it needs.
        count = torch.maximum(_source_lengths(source != PAD) + self.extra, lengths)
        count = count.masked_fill(lengths == 0, 0)
        width = max(source.shape[1] - 1 + self.extra, labels.shape[1])
        tokens = F.pad(labels, (0, width - labels.shape[1]), value=PAD)
        inside = torch.arange(width, device=tokens.device) < count[:, None]
        return tokens.masked_fill((tokens == PAD) & inside, EOS)

    def loss(
        self, encoder_output: EncoderOutput, position_labels: Int[Tensor, "B positions"]
    ) -> Float[Tensor, ""]:
        return encoder_output.states.new_zeros(())

    def candidates(
        self, encoder_output: EncoderOutput, limits: Int[Tensor, "B"], count: int
    ) -> Int[Tensor, "B candidates"]:
        return torch.minimum(_source_lengths(encoder_output.non_pad) + self.extra, limits)[:, None]


def _source_lengths(non_pad: Bool[Tensor, "B S"]) -> Int[Tensor, "B"]:
    """The number of source tokens, without EOS."""
    return non_pad.sum(1) - 1


# The network


@dataclass(frozen=True)
class NonAutoregressiveState:
    """What every iteration needs of the sources, computed once."""

    encoder_output: EncoderOutput
    decoder: DecoderState


class NonAutoregressiveTransformer(Transformer):
    """A Transformer whose decoder has no causal mask and predicts all target tokens at once."""

    def __init__(self, config: recipe.ModelConfig, source_vocab: int, target_vocab: int) -> None:
        super().__init__(config, source_vocab, target_vocab)
        self.length = LENGTHS[config.non_autoregressive.length](config)
        initialize(self.length)

    def decode(
        self, target: Int[Tensor, "B T"], encoder_output: EncoderOutput
    ) -> Float[Tensor, "B T d"]:
        """The state at each position; unknown tokens of the target are MASK."""
        states: Float[Tensor, "B T d"] = self.decoder(target, encoder_output, causal=False)
        return states

    def start(self, encoder_output: EncoderOutput) -> NonAutoregressiveState:  # type: ignore[override]
        return NonAutoregressiveState(encoder_output, self.decoder.start(encoder_output))

    def decoder_input(self, output: Sequence[int]) -> list[int]:
        """MASK at every position, as in the first iteration."""
        return [MASK] * max(1, len(output))

    def choose_lengths(
        self,
        state: NonAutoregressiveState,
        limits: Sequence[int],
        count: int,
        length: int | None = None,
    ) -> Int[Tensor, "B candidates"]:
        """The candidate lengths of each sentence, or the given length for all of them."""
        device = state.encoder_output.states.device
        if length is not None:
            return torch.full((len(limits), 1), length, device=device)
        limit = torch.tensor(limits, device=device)
        return self.length.candidates(state.encoder_output, limit, count)

    def predict_masked(
        self, target: Int[Tensor, "R T"], masked: Bool[Tensor, "R T"], state: NonAutoregressiveState
    ) -> Float[Tensor, "masked V"]:
        """The logits at the masked positions, row by row."""
        return self.project(self.decoder.decode_padded(target, state.decoder, causal=False)[masked])

    def step(self, tokens: Int[Tensor, "R"], state: NonAutoregressiveState) -> NoReturn:  # type: ignore[override]
        raise NotImplementedError("a non-autoregressive network has no steps: use predict_masked")
