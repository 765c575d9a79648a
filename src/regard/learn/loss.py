"""What is made small: cross-entropy with smoothed labels (section 5.4 of the paper).

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
from regard.marks import MASK, PAD
from regard.nn.encoder_only import Guesser, Labeller
from regard.nn.masking import drop_words, hide
from regard.nn.network import Network
from regard.nn.parallel import Parallel
from regard.nn.positions import Packing, Span, Tree
from regard.text.batches import PackingTensors, TreeTensors

SMOOTHINGS: dict[recipe.Smoothing, Callable[[float, int], float]] = {
    # Over all K classes, the right one too: it keeps 1 - eps + eps/K. This is torch's convention.
    "all": lambda epsilon, classes: epsilon,
    # Over the K - 1 others: the right one keeps 1 - eps. The same family with eps' = eps K / (K - 1).
    "others": lambda epsilon, classes: epsilon * classes / (classes - 1),
}

LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**27}
"""numbers, on each kind of device; small enough for the processor's cache, large enough to fill a GPU"""


Portion = Callable[
    [Float[Tensor, "n V"], Int[Tensor, "n"], float, bool], tuple[Tensor, Float[Tensor, "n V"]]
]
"""The loss of some logits, and its gradient."""


class Goal(nn.Module):
    """A network with what is wanted of it: a batch in, the summed loss out."""

    def __init__(self, network: nn.Module, training: recipe.Training) -> None:
        super().__init__()
        self.network: Any = network
        self.settings = training
        self.of_portion: Portion = smoothed_loss

    def loss(self, states: Float[Tensor, "B T d"], wanted: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
        """Cross-entropy of what the states are projected to; labels are smoothed in training only."""
        smoothing = self.settings.label_smoothing if self.training else 0.0
        projection, over = self.network.projection, self.settings.smoothing_over
        return cross_entropy(
            *(states, projection.weight, wanted, smoothing, over, projection.bias, self.of_portion)
        )


class Objective(Goal):
    """Source, target and wanted tokens in: the next word at each place."""

    network: Network

    def forward(
        self,
        source: Int[Tensor, "B S"],
        target: Int[Tensor, "B T"],
        wanted: Int[Tensor, "B T"],
        places: TreeTensors | PackingTensors | None = None,
    ) -> Float[Tensor, ""]:
        return self.loss(self.network.decode(target, self.remember(source, places)), wanted)

    def remember(
        self, source: Int[Tensor, "B S"], places: TreeTensors | PackingTensors | None
    ) -> Any:
        """What the network remembers of the source."""
        return self.network.encode(source, None if places is None else where(places))


def where(places: TreeTensors | PackingTensors) -> Tree | Packing:
    """Trees are two tensors, packed rows four pairs of them."""
    if len(places) == 2:
        return Tree(*(part.long() for part in places))
    return Packing(*(Span(*places[first : first + 2]) for first in range(0, 8, 2)))


class LabelObjective(Goal):
    """A labeller or classifier: the wanted labels, PAD where there is none."""

    network: Labeller

    def forward(
        self, source: Int[Tensor, "B S"], target: Int[Tensor, "B none"], wanted: Int[Tensor, "B P"]
    ) -> Float[Tensor, ""]:
        dropped = self.settings.word_dropout if self.training else 0.0
        shown = drop_words(source, dropped) if dropped else source
        return self.loss(self.network.states(shown), wanted)


class MaskObjective(Goal):
    """BERT's masked words: other ones each step, but in validation always the same."""

    network: Guesser

    def forward(
        self, source: Int[Tensor, "B S"], target: Int[Tensor, "B none"], wanted: Int[Tensor, "B S"]
    ) -> Float[Tensor, ""]:
        fixed = None if self.training else torch.Generator().manual_seed(0)
        shown, hidden = hide(source, wanted, len(self.network.projection.weight), fixed)
        there = hidden != PAD  # one in seven: the others need no logits
        return self.loss(self.network.states(shown)[there][None], hidden[there][None])


class HiddenWords(Objective):
    """Some words of each target are hidden, and to be guessed from the others (Ghazvininejad et al. 2019).

    The loss is the mean over the hidden words and, in training, that of the length; times the tokens of the batch, so
    that it is summed and divided like any other.
    """

    network: Parallel

    def forward(
        self,
        source: Int[Tensor, "B S"],
        target: Int[Tensor, "B T"],
        wanted: Int[Tensor, "B T"],
        places: TreeTensors | PackingTensors | None = None,
    ) -> Float[Tensor, ""]:
        length = self.network.length
        words = length.places(source, wanted)
        hidden = hide_words(words != PAD, self._chance(words.device))
        memory = self.remember(source, places)
        states = self.network.decode(words.masked_fill(hidden, MASK), memory)
        guessed, right = states[hidden][None], words[hidden][None]
        mean = self.loss(guessed, right) / max(1, right.numel())
        if self.training:
            mean = mean + length.loss(memory, words)
        return mean * (wanted != PAD).sum()

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


def translation(network: Network, training: recipe.Training) -> nn.Module:
    """What is wanted of a translator: the next word, or, if it says all at once, the hidden ones."""
    kind = HiddenWords if isinstance(network, Parallel) else Objective
    return kind(network, training)


OBJECTIVES: dict[recipe.Task, Callable[[Any, recipe.Training], nn.Module]] = {
    "translate": translation,
    "tag": LabelObjective,
    "classify": LabelObjective,
    "mask": MaskObjective,
    "continue": Objective,
}


def cross_entropy(
    states: Float[Tensor, "B T d"],
    projection: Float[Tensor, "V d"],
    wanted: Int[Tensor, "B T"],
    smoothing: float = 0.0,
    over: recipe.Smoothing = "all",
    bias: Float[Tensor, " V"] | None = None,
    of_portion: Portion | None = None,
) -> Float[Tensor, ""]:
    """The sum over all real tokens; divide by their number for the mean. Padding counts nothing."""
    epsilon = SMOOTHINGS[over](smoothing, len(projection))
    loss: Tensor = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        *(states.flatten(0, 1), projection, bias, wanted.flatten(), epsilon),
        *(of_portion or smoothed_loss, torch.is_grad_enabled()),
    )
    return loss


class _ProjectedCrossEntropy(torch.autograd.Function):
    """Loss and gradient of softmax(states projection^T + bias), portion by portion."""

    @staticmethod
    def forward(
        context: Any,
        states: Float[Tensor, "N d"],
        projection: Float[Tensor, "V d"],
        bias: Float[Tensor, " V"] | None,
        wanted: Int[Tensor, "N"],
        epsilon: float,
        of_portion: Portion,
        learning: bool,
    ) -> Float[Tensor, ""]:
        kind = _number_format(states)
        rows, weight = states.to(kind), projection.to(kind)
        loss = torch.zeros((), dtype=_sum_format(states), device=states.device)
        state_gradient = torch.empty_like(states if learning else states[:0])
        weight_gradient = torch.zeros_like(projection if learning else projection[:0])
        bias_gradient = None if bias is None else torch.zeros_like(bias)
        for part in _portions(len(states), len(projection), states.device):
            logits = rows[part] @ weight.T
            if bias is not None:
                logits += bias
            total, gradient = of_portion(logits, wanted[part], epsilon, learning)
            loss += total
            if learning:
                if bias_gradient is not None:
                    bias_gradient += gradient.sum(0)
                state_gradient[part] = (gradient @ weight).to(states.dtype)
                weight_gradient += (gradient.T @ rows[part]).to(projection.dtype)
        context.save_for_backward(state_gradient, weight_gradient, bias_gradient)
        return loss

    @staticmethod
    def backward(context: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        of_states, of_weight, of_bias = context.saved_tensors
        of_bias = None if of_bias is None else of_bias * above[0]
        return of_states * above[0], of_weight * above[0], of_bias, None, None, None, None


def smoothed_loss(
    logits: Float[Tensor, "n V"], wanted: Int[Tensor, "n"], epsilon: float, learning: bool
) -> tuple[Float[Tensor, ""], Float[Tensor, "n V"]]:
    """The loss of a portion, and its gradient: softmax minus the smoothed target, nothing at padding."""
    classes = logits.shape[1]
    real = (wanted != PAD).to(_sum_format(logits))
    index = wanted[:, None]
    log_probabilities = logits.to(_sum_format(logits)).log_softmax(-1)
    right = log_probabilities.gather(1, index)[:, 0]
    spread = log_probabilities.mean(-1) if epsilon else right
    loss = -(((1 - epsilon) * right + epsilon * spread) * real).sum()
    if not learning:
        return loss, logits
    gradient = log_probabilities.exp_()
    gradient -= epsilon / classes
    gradient.scatter_add_(1, index, gradient.new_full(index.shape, epsilon - 1))
    return loss, gradient.mul_(real[:, None]).to(logits.dtype)


def fused_loss(
    logits: Float[Tensor, "n V"], wanted: Int[Tensor, "n"], epsilon: float, learning: bool
) -> tuple[Float[Tensor, ""], Float[Tensor, "n V"]]:
    """The same, written for a compiler: two passes over the logits, and none in a wider format through memory."""
    assert learning
    numbers = logits.float()
    real = wanted != PAD
    log_sum = numbers.logsumexp(-1)
    right = numbers.gather(1, wanted[:, None])[:, 0]
    loss = log_sum - (1 - epsilon) * right - epsilon * numbers.mean(-1)
    classes = torch.arange(logits.shape[1], device=logits.device)
    target = epsilon / logits.shape[1] + (1 - epsilon) * (classes == wanted[:, None])
    gradient = ((numbers - log_sum[:, None]).exp() - target) * real[:, None]
    return (loss * real).sum(), gradient.to(logits.dtype)


def smoothed_target(epsilon: float, classes: int, over: recipe.Smoothing) -> tuple[float, float]:
    """What the right class and each other one are wanted to be, read off the gradient itself."""
    logits = torch.zeros(1, classes, dtype=torch.float64)
    wanted = torch.tensor([classes - 1])
    kept = SMOOTHINGS[over](epsilon, classes)
    _, gradient = smoothed_loss(logits.clone(), wanted, kept, learning=True)
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
