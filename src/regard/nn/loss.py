"""What is made small: cross-entropy with smoothed labels (section 5.4 of the paper), and R-Drop on top of it.

The logits of a batch are by far its largest tensor: 8,192 tokens times 32,000 entries are a gigabyte, and torch would
keep several copies. So projection and loss are one function here that goes through the tokens in portions and computes
the gradient on the way: the logits never exist all at once.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard import recipe
from regard.data.batching import PackingTensors, TreeTensors
from regard.data.special_tokens import MASK, PAD, SPECIAL_TOKENS
from regard.nn.encoder_heads import EncoderForMaskedLM, EncoderForTokenClassification
from regard.nn.network import Network
from regard.nn.non_autoregressive import NonAutoregressiveTransformer
from regard.nn.positions import Packing, Span, Tree
from regard.nn.token_masking import drop_words, hide
from regard.recipe import Registry

LABEL_SMOOTHINGS: Registry[Callable[[float, int], float]] = Registry(
    "training.label_smoothing_over"
)


@LABEL_SMOOTHINGS.register("all")
def smooth_over_all(epsilon: float, classes: int) -> float:
    """Over all K classes, as torch does: the correct class keeps 1 - eps + eps / K."""
    return epsilon


@LABEL_SMOOTHINGS.register("others")
def smooth_over_others(epsilon: float, classes: int) -> float:
    """Over the K - 1 other classes: the correct class keeps 1 - eps. Equal to ``all`` with eps K / (K - 1)."""
    return epsilon * classes / (classes - 1)


LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**27}
"""numbers, on each kind of device; small enough for the processor's cache, large enough to fill a GPU"""


Portion = Callable[[Tensor, Tensor, float, float, bool], tuple[Tensor, Tensor]]
"""``portion_loss``, or a compilation of it"""


class TrainingLoss(nn.Module):
    """A network with what is labels of it: a batch in, the summed loss out."""

    def __init__(
        self, network: nn.Module, training: recipe.Training, marks: int = len(SPECIAL_TOKENS)
    ) -> None:
        super().__init__()
        self.network: Any = network
        self.settings = training
        self.of_portion: Portion = portion_loss
        self.marks = marks
        """ids of the source below this stand for no text and are never hidden"""

    def loss(self, states: Float[Tensor, "R T d"], labels: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
        """Cross-entropy of what the states are projected to; smoothing and R-Drop are for training only."""
        settings, projection = self.settings, self.network.projection
        smoothing = settings.label_smoothing if self.training else 0.0
        return cross_entropy(
            states,
            projection.weight,
            labels,
            smoothing,
            settings.label_smoothing_over,
            projection.bias,
            settings.rdrop if self.training else 0.0,
            self.of_portion,
        )

    def passes(self, rows: Tensor) -> Tensor:
        """The rows as they go through the network: with R-Drop each twice, all of them and then all again."""
        twice = self.training and self.settings.rdrop
        return torch.cat([rows, rows]) if twice else rows

    def shown(self, source: Int[Tensor, "R S"]) -> Int[Tensor, "R S"]:
        """The source with some words hidden, in training."""
        share = self.settings.word_dropout if self.training else 0.0
        return drop_words(source, share, self.marks) if share else source


class Seq2SeqLoss(TrainingLoss):
    """Source, target and labels tokens in: the next word at each place."""

    network: Network

    def forward(
        self,
        source: Int[Tensor, "B S"],
        target: Int[Tensor, "B T"],
        labels: Int[Tensor, "B T"],
        position_info: TreeTensors | PackingTensors | None = None,
    ) -> Float[Tensor, ""]:
        position_info = position_info and tuple(map(self.passes, position_info))
        memory = self.remember(self.shown(self.passes(source)), position_info)
        read = self.passes(target)
        if self.training and self.settings.target_word_dropout:
            read = drop_words(read, self.settings.target_word_dropout)
        return self.loss(self.network.decode(read, memory), labels)

    def remember(
        self, source: Int[Tensor, "B S"], position_info: TreeTensors | PackingTensors | None
    ) -> Any:
        """What the network remembers of the source."""
        return self.network.encode(source, None if position_info is None else where(position_info))


def where(position_info: TreeTensors | PackingTensors) -> Tree | Packing:
    """Trees are two tensors, packed rows four pairs of them."""
    if len(position_info) == 2:
        return Tree(*(part.long() for part in position_info))
    return Packing(*(Span(*position_info[first : first + 2]) for first in range(0, 8, 2)))


class LabelLoss(TrainingLoss):
    """A labeller or classifier: the labels labels, PAD where there is none."""

    network: EncoderForTokenClassification

    def forward(
        self, source: Int[Tensor, "B S"], target: Int[Tensor, "B none"], labels: Int[Tensor, "B P"]
    ) -> Float[Tensor, ""]:
        return self.loss(self.network.states(self.shown(self.passes(source))), labels)


class MaskedLMLoss(TrainingLoss):
    """BERT's masked words: other ones each step, but in validation always the same."""

    network: EncoderForMaskedLM

    def forward(
        self, source: Int[Tensor, "B S"], target: Int[Tensor, "B none"], labels: Int[Tensor, "B S"]
    ) -> Float[Tensor, ""]:
        fixed = None if self.training else torch.Generator().manual_seed(0)
        shown, hidden = hide(source, labels, len(self.network.projection.weight), fixed)
        there = hidden != PAD  # one in seven: the others need no logits
        return self.loss(self.network.states(shown)[there][None], hidden[there][None])


class MaskPredictLoss(Seq2SeqLoss):
    """Some words of each target are hidden, and to be guessed from the others (Ghazvininejad et al. 2019).

    The loss is the mean over the hidden words and, in training, that of the length; times the tokens of the batch, so
    that it is summed and divided like any other.
    """

    network: NonAutoregressiveTransformer

    def forward(
        self,
        source: Int[Tensor, "B S"],
        target: Int[Tensor, "B T"],
        labels: Int[Tensor, "B T"],
        position_info: TreeTensors | PackingTensors | None = None,
    ) -> Float[Tensor, ""]:
        length = self.network.length
        words = length.places(source, labels)
        hidden = hide_words(words != PAD, self._chance(words.device))
        memory = self.remember(source, position_info)
        states = self.network.decode(words.masked_fill(hidden, MASK), memory)
        guessed, right = states[hidden][None], words[hidden][None]
        mean = self.loss(guessed, right) / max(1, right.numel())
        if self.training:
            mean = mean + length.loss(memory, words)
        return mean * (labels != PAD).sum()

    def _chance(self, device: torch.device) -> torch.Generator | None:
        """In training what is hidden follows from the seed of the step; in validation it is always the same."""
        return None if self.training else torch.Generator(device).manual_seed(1)


def hide_words(
    real: Bool[Tensor, "B T"], chance: torch.Generator | None = None
) -> Bool[Tensor, "B T"]:
    """Hide 1 to all of the words of each row: every number as likely, and every word."""
    shares = torch.rand(len(real), device=real.device, generator=chance)
    count = 1 + (shares * real.sum(1)).long()
    draw = torch.rand(real.shape, device=real.device, generator=chance)
    rank = draw.masked_fill(~real, 2.0).argsort(1).argsort(1)
    return (rank < count[:, None]) & real


def cross_entropy(
    states: Float[Tensor, "R T d"],
    projection: Float[Tensor, "V d"],
    labels: Int[Tensor, "B T"],
    smoothing: float = 0.0,
    over: str = "all",
    bias: Float[Tensor, " V"] | None = None,
    rdrop: float = 0.0,
    of_portion: Portion | None = None,
) -> Float[Tensor, ""]:
    """The sum over all real tokens; divide by their number for the mean. Padding counts nothing.

    With rdrop the states are those of two passes, the one after the other, and the loss of a token is

        1/2 (CE(p) + CE(q)) + rdrop/4 (KL(p|q) + KL(q|p)),

    half of what Liang et al. (2021) have, so that it is as large as without: rdrop is their alpha.
    """
    epsilon = LABEL_SMOOTHINGS[over](smoothing, len(projection))
    passes = 2 if rdrop else 1
    assert len(states) == passes * len(labels)
    loss: Tensor = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        states.reshape(passes, -1, states.shape[-1]),
        projection,
        bias,
        labels.flatten(),
        epsilon,
        rdrop,
        of_portion or portion_loss,
        torch.is_grad_enabled(),
    )
    return loss


class _ProjectedCrossEntropy(torch.autograd.Function):
    """Loss and gradient of softmax(states projection^T + bias), portion by portion.

    A portion holds the same tokens of every pass, so that what the passes say of them is at hand together.
    """

    @staticmethod
    def forward(
        context: Any,
        states: Float[Tensor, "P N d"],
        projection: Float[Tensor, "V d"],
        bias: Float[Tensor, " V"] | None,
        labels: Int[Tensor, "N"],
        epsilon: float,
        rdrop: float,
        of_portion: Portion,
        learning: bool,
    ) -> Float[Tensor, ""]:
        kind = _number_format(states)
        rows, weight = states.to(kind), projection.to(kind)
        loss = torch.zeros((), dtype=_sum_format(states), device=states.device)
        passes, tokens, _ = states.shape
        state_gradient = torch.empty_like(states if learning else states[:0])
        weight_gradient = torch.zeros_like(projection if learning else projection[:0])
        bias_gradient = None if bias is None else torch.zeros_like(bias)
        for part in _portions(tokens, passes * len(projection), states.device):
            some = rows[:, part].flatten(0, 1)
            logits = some @ weight.T
            if bias is not None:
                logits += bias
            total, gradient = of_portion(logits, labels[part], epsilon, rdrop, learning)
            loss += total
            if learning:
                if bias_gradient is not None:
                    bias_gradient += gradient.sum(0)
                below = (gradient @ weight).to(states.dtype)
                state_gradient[:, part] = below.view(passes, -1, states.shape[-1])
                weight_gradient += (gradient.T @ some).to(projection.dtype)
        context.save_for_backward(state_gradient, weight_gradient, bias_gradient)
        return loss

    @staticmethod
    def backward(context: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        of_states, of_weight, of_bias = context.saved_tensors
        of_bias = None if of_bias is None else of_bias * above[0]
        return of_states * above[0], of_weight * above[0], of_bias, *[None] * 5


def portion_loss(
    logits: Float[Tensor, "m V"],
    labels: Int[Tensor, "n"],
    epsilon: float,
    rdrop: float,
    learning: bool,
) -> tuple[Float[Tensor, ""], Float[Tensor, "m V"]]:
    """The loss of a portion, and its gradient in the format of the logits. With rdrop there are two passes, m = 2n."""
    logs = logits.to(_sum_format(logits)).log_softmax(-1)
    if not rdrop:
        loss, gradient = smoothed_loss(logs, labels, epsilon, learning)
    else:
        differ, away = difference(logs, labels)
        loss, gradient = smoothed_loss(logs, labels.repeat(2), epsilon, learning)
        loss = 0.5 * loss + 0.25 * rdrop * differ
        gradient = 0.5 * gradient + 0.25 * rdrop * away if learning else gradient
    return loss, gradient.to(logits.dtype)


def difference(
    logs: Float[Tensor, "m V"], labels: Int[Tensor, "n"]
) -> tuple[Float[Tensor, ""], Float[Tensor, "m V"]]:
    """How far two passes differ, summed over the real tokens, and its gradient.

    With r = log p - log q, and with a and b the logits behind p and q, D = KL(p|q) + KL(q|p) = sum (p - q) r has

        dD/da = p (r - KL(p|q)) + p - q,    dD/db = q (-r - KL(q|p)) + q - p.
    """
    first, second = logs.chunk(2)
    ratio = first - second
    real = (labels != PAD).to(logs.dtype)[:, None]
    p, q = first.exp(), second.exp()
    apart, back = (p * ratio).sum(-1, keepdim=True), -(q * ratio).sum(-1, keepdim=True)
    between = p - q
    gradient = torch.cat([p * (ratio - apart) + between, -q * (ratio + back) - between])
    return ((apart + back) * real).sum(), gradient * real.repeat(2, 1)


def smoothed_loss(
    logs: Float[Tensor, "n V"], labels: Int[Tensor, "n"], epsilon: float, learning: bool
) -> tuple[Float[Tensor, ""], Float[Tensor, "n V"]]:
    """From log-probabilities, which it may overwrite: softmax minus the smoothed target, nothing at padding."""
    classes = logs.shape[1]
    real = (labels != PAD).to(logs.dtype)
    index = labels[:, None]
    right = logs.gather(1, index)[:, 0]
    spread = logs.mean(-1) if epsilon else right
    loss = -(((1 - epsilon) * right + epsilon * spread) * real).sum()
    if not learning:
        return loss, logs
    # a comparison melts into the pass over the logits, a scatter would not
    if torch.compiler.is_compiling():
        is_right = torch.arange(classes, device=logs.device) == index
        return loss, (logs.exp() - epsilon / classes - (1 - epsilon) * is_right) * real[:, None]
    gradient = logs.exp_()
    gradient -= epsilon / classes
    gradient.scatter_add_(1, index, gradient.new_full(index.shape, epsilon - 1))
    return loss, gradient.mul_(real[:, None])


def smoothed_target(epsilon: float, classes: int, over: str) -> tuple[float, float]:
    """What the right class and each other one are labels to be, read off the gradient itself."""
    logits = torch.zeros(1, classes, dtype=torch.float64)
    labels = torch.tensor([classes - 1])
    kept = LABEL_SMOOTHINGS[over](epsilon, classes)
    _, gradient = portion_loss(logits, labels, kept, 0.0, learning=True)
    target = logits.softmax(-1) - gradient
    return float(target[0, -1]), float(target[0, 0])


def _portions(rows: int, classes: int, device: torch.device) -> Iterator[slice]:
    """Equal ones as far as they can be: for each size the loss may have to be compiled."""
    count = -(-rows * classes // LOGITS_AT_ONCE[device.type])
    step = max(1, -(-rows // max(1, count)))
    return (slice(start, start + step) for start in range(0, rows, step))


def _number_format(states: Tensor) -> torch.dtype:
    """The format of matrix products: what autocast says, for a function that autocast cannot see into."""
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


def _sum_format(states: Tensor) -> torch.dtype:
    return torch.float64 if states.dtype == torch.float64 else torch.float32
