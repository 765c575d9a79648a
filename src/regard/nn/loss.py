"""Training losses: cross-entropy with label smoothing (section 5.4 of the paper), R-Drop, SimCut and soft targets.

Notable: the logits of a batch are by far its largest tensor. 8,192 tokens x 32,000 vocabulary entries are a gigabyte,
and torch would keep several copies. So output projection and loss are one function here. It processes the tokens in
chunks and computes the gradient in the forward pass, so the logits of all tokens never exist at the same time.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard import recipe
from regard.data.batching import PackingTensors, TreeTensors
from regard.data.special_tokens import MASK, PAD, SPECIAL_TOKENS
from regard.nn.dropout import drop_tokens, mask_tokens, random_token_mask
from regard.nn.encoder_heads import EncoderForMaskedLM, EncoderForTokenClassification
from regard.nn.layers import Embedding
from regard.nn.network import Network
from regard.nn.non_autoregressive import NonAutoregressiveTransformer
from regard.nn.norms import BatchNorm, in_several_processes
from regard.nn.positions import Packing, RowSpan, Tree
from regard.recipe import Registry

# Label smoothing


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


# Losses of the tasks


ChunkLoss = Callable[..., tuple[Tensor, Tensor]]
"""``chunk_loss``, or a compiled version of it"""
SoftTargets = Callable[[slice], Tensor]
"""Token numbers to a teacher's probabilities of these tokens, [tokens, V]."""

CUTOFF = 0.05
"""SimCut: the probability that the embedding of a token is zero in the second pass, as in the paper"""


class TrainingLoss(nn.Module):
    """A network with its training loss: a batch in, the summed loss out.

    special_tokens: source ids below this number are special tokens, which word dropout never drops.
    """

    def __init__(
        self,
        network: nn.Module,
        training: recipe.TrainingConfig,
        special_tokens: int = len(SPECIAL_TOKENS),
    ) -> None:
        super().__init__()
        self.network: Any = network
        self.settings = training
        self.special_tokens = special_tokens
        self.chunk_loss: ChunkLoss = chunk_loss
        self.teachers: tuple[Network, ...] = ()
        """the teacher of token-level distillation; in a tuple, so that it is neither a submodule nor trained"""
        self.batch_norms = [module for module in network.modules() if isinstance(module, BatchNorm)]
        if self.batch_norms:
            self.register_forward_pre_hook(_mark_idle_process)
        for module in network.modules() if training.simcut else ():
            if isinstance(module, Embedding):
                module.cutoff, module.special_tokens = CUTOFF, special_tokens

    def loss(
        self,
        states: Float[Tensor, "R T d"],
        labels: Int[Tensor, "B T"],
        soft_targets: SoftTargets | None = None,
    ) -> Float[Tensor, ""]:
        """The cross-entropy of projected states; label smoothing, R-Drop and SimCut in training only."""
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
            settings.simcut if self.training else 0.0,
            self.chunk_loss,
            soft_targets,
            settings.teacher_weight,
        )

    def two_passes(self, rows: Tensor) -> Tensor:
        """The rows of a batch; in training with R-Drop or SimCut, all of them twice.

        Each copy gets another dropout mask. With SimCut, tokens of the second copy are cut by the embedding.
        """
        needs_two_passes = self.training and (self.settings.rdrop or self.settings.simcut)
        return torch.cat([rows, rows]) if needs_two_passes else rows

    def drop_source_tokens(self, source: Int[Tensor, "R S"]) -> Int[Tensor, "R S"]:
        """Word dropout on the source, in training."""
        probability = self.settings.word_dropout if self.training else 0.0
        return drop_tokens(source, probability, self.special_tokens) if probability else source


def _mark_idle_process(loss: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """A forward pre-hook: tell batch norm whether this process has no rows in the batch.

    An idle process gets a copy of a row with all labels PAD, so that it takes part in every collective operation. The
    copy must not count in the batch statistics.
    """
    assert isinstance(loss, TrainingLoss)
    idle = in_several_processes() and not bool((inputs[2] != PAD).any())
    for norm in loss.batch_norms:
        norm.idle = idle


class Seq2SeqLoss(TrainingLoss):
    """Predict the next token at each target position, with teacher forcing."""

    network: Network

    def forward(
        self,
        source: Int[Tensor, "B S"],
        target: Int[Tensor, "B T"],
        labels: Int[Tensor, "B T"],
        position_info: TreeTensors | PackingTensors | None = None,
    ) -> Float[Tensor, ""]:
        soft_targets = self.soft_targets(source, target, position_info)
        position_info = position_info and tuple(map(self.two_passes, position_info))
        source = self.drop_source_tokens(self.two_passes(source))
        encoder_output = self.encode(source, position_info)
        inputs = self.two_passes(target)
        if self.training and self.settings.target_word_dropout:
            inputs = drop_tokens(inputs, self.settings.target_word_dropout)
        return self.loss(self.network.decode(inputs, encoder_output), labels, soft_targets)

    @torch.no_grad()
    def soft_targets(
        self,
        source: Int[Tensor, "B S"],
        target: Int[Tensor, "B T"],
        position_info: TreeTensors | PackingTensors | None,
    ) -> SoftTargets | None:
        """In training with a teacher, its probabilities. It reads every token, without word dropout."""
        if not self.training or not self.teachers:
            return None
        (teacher,) = self.teachers
        info = None if position_info is None else to_position_info(position_info)
        states = teacher.decode(target, teacher.encode(source, info)).flatten(0, 1)
        states = states.to(next(teacher.parameters()).dtype)
        return lambda tokens: teacher.project(states[tokens]).softmax(-1)

    def encode(
        self, source: Int[Tensor, "B S"], position_info: TreeTensors | PackingTensors | None
    ) -> Any:
        """The encoder output."""
        info = None if position_info is None else to_position_info(position_info)
        return self.network.encode(source, info)


def to_position_info(tensors: TreeTensors | PackingTensors) -> Tree | Packing:
    """A tree comes as two tensors, a packing as four pairs of tensors."""
    if len(tensors) == 2:
        return Tree(*(tensor.long() for tensor in tensors))
    return Packing(*(RowSpan(*tensors[start : start + 2]) for start in range(0, 8, 2)))


class LabelLoss(TrainingLoss):
    """Token or sequence classification. Labels are PAD at positions without a label."""

    network: EncoderForTokenClassification

    def forward(
        self, source: Int[Tensor, "B S"], target: Int[Tensor, "B none"], labels: Int[Tensor, "B P"]
    ) -> Float[Tensor, ""]:
        source = self.drop_source_tokens(self.two_passes(source))
        return self.loss(self.network.states(source), labels)


class MaskedLMLoss(TrainingLoss):
    """Masked language modelling: other tokens are masked in each step, but always the same ones in validation."""

    network: EncoderForMaskedLM

    def forward(
        self, source: Int[Tensor, "B S"], target: Int[Tensor, "B none"], labels: Int[Tensor, "B S"]
    ) -> Float[Tensor, ""]:
        generator = None if self.training else torch.Generator().manual_seed(0)
        vocab_size = len(self.network.projection.weight)
        inputs, masked_labels = mask_tokens(source, labels, vocab_size, generator)
        selected = masked_labels != PAD  # about one token in seven: the others need no logits
        states = self.network.states(inputs)[selected]
        return self.loss(states[None], masked_labels[selected][None])


class MaskPredictLoss(Seq2SeqLoss):
    """Some tokens of each target are masked and predicted from the others (Ghazvininejad et al. 2019).

    The loss is the mean over the masked tokens plus, in training, the length loss. It is multiplied by the number of
    labels of the batch, so that the training step can divide it like any other summed loss.
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
        tokens = length.position_labels(source, labels)
        masked = random_token_mask(tokens != PAD, self._generator(tokens.device))
        encoder_output = self.encode(source, position_info)
        states = self.network.decode(tokens.masked_fill(masked, MASK), encoder_output)
        masked_labels = tokens[masked][None]
        mean = self.loss(states[masked][None], masked_labels) / max(1, masked_labels.numel())
        if self.training:
            mean = mean + length.loss(encoder_output, tokens)
        return mean * (labels != PAD).sum()

    def _generator(self, device: torch.device) -> torch.Generator | None:
        """In training the mask follows from the seed of the step; in validation it is always the same."""
        return None if self.training else torch.Generator(device).manual_seed(1)


# Cross-entropy


def cross_entropy(
    states: Float[Tensor, "R T d"],
    projection: Float[Tensor, "V d"],
    labels: Int[Tensor, "B T"],
    smoothing: float = 0.0,
    over: str = "all",
    bias: Float[Tensor, " V"] | None = None,
    rdrop: float = 0.0,
    simcut: float = 0.0,
    chunk_loss_fn: ChunkLoss | None = None,
    soft_targets: SoftTargets | None = None,
    teacher_weight: float = 0.5,
) -> Float[Tensor, ""]:
    """The loss of softmax(states projection^T + bias), summed over all labels that are not PAD.

    With rdrop, the states are those of two passes, one after the other (R = 2 B), and the loss of a token is

        1/2 (CE(p) + CE(q)) + rdrop/4 (KL(p|q) + KL(q|p)),

    which is half the loss of Liang et al. (2021), so that its scale is that of the loss without R-Drop. rdrop is their
    alpha. With simcut, the alpha of Gao et al. (2022), the second pass is the one with cut tokens, and the loss is

        CE(p) + simcut KL(p|q).

    With soft_targets, the probabilities t of a teacher, CE(p) is replaced by

        (1 - teacher_weight) CE(p) - teacher_weight sum t log p,

    whose last term is KL(t|p) plus a constant (Kim and Rush 2016: word-level distillation).
    """
    epsilon = LABEL_SMOOTHINGS[over](smoothing, len(projection))
    passes = 2 if rdrop or simcut else 1
    assert len(states) == passes * len(labels)
    loss: Tensor = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        states.reshape(passes, -1, states.shape[-1]),
        projection,
        bias,
        labels.flatten(),
        epsilon,
        rdrop,
        simcut,
        chunk_loss_fn or chunk_loss,
        soft_targets,
        teacher_weight,
        torch.is_grad_enabled(),
    )
    return loss


class _ProjectedCrossEntropy(torch.autograd.Function):
    """Loss and gradient of softmax(states projection^T + bias), chunk by chunk.

    A chunk holds the same tokens of every pass, so that R-Drop and SimCut can compare them.
    """

    @staticmethod
    def forward(
        context: Any,
        states: Float[Tensor, "passes N d"],
        projection: Float[Tensor, "V d"],
        bias: Float[Tensor, " V"] | None,
        labels: Int[Tensor, "N"],
        epsilon: float,
        rdrop: float,
        simcut: float,
        chunk_loss_fn: ChunkLoss,
        soft_targets: SoftTargets | None,
        teacher_weight: float,
        with_gradient: bool,
    ) -> Float[Tensor, ""]:
        dtype = _product_dtype(states)
        rows, weight = states.to(dtype), projection.to(dtype)
        loss = torch.zeros((), dtype=_sum_dtype(states), device=states.device)
        passes, tokens, _ = states.shape
        grad_states = torch.empty_like(states if with_gradient else states[:0])
        grad_weight = torch.zeros_like(projection if with_gradient else projection[:0])
        grad_bias = None if bias is None else torch.zeros_like(bias)
        for chunk in _chunks(tokens, passes * len(projection), states.device):
            inputs = rows[:, chunk].flatten(0, 1)
            logits = inputs @ weight.T
            if bias is not None:
                logits += bias
            soft = () if soft_targets is None else (soft_targets(chunk), teacher_weight)
            total, grad_logits = chunk_loss_fn(
                logits, labels[chunk], epsilon, rdrop, simcut, with_gradient, *soft
            )
            loss += total
            if with_gradient:
                if grad_bias is not None:
                    grad_bias += grad_logits.sum(0)
                grad_inputs = (grad_logits @ weight).to(states.dtype)
                grad_states[:, chunk] = grad_inputs.view(passes, -1, states.shape[-1])
                grad_weight += (grad_logits.T @ inputs).to(projection.dtype)
        context.save_for_backward(grad_states, grad_weight, grad_bias)
        return loss

    @staticmethod
    def backward(context: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_loss,) = grad_outputs
        grad_states, grad_weight, grad_bias = context.saved_tensors
        grad_bias = None if grad_bias is None else grad_bias * grad_loss
        return grad_states * grad_loss, grad_weight * grad_loss, grad_bias, *[None] * 8


def chunk_loss(
    logits: Float[Tensor, "m V"],
    labels: Int[Tensor, "n"],
    epsilon: float,
    rdrop: float,
    simcut: float,
    with_gradient: bool,
    teacher: Float[Tensor, "n V"] | None = None,
    teacher_weight: float = 0.0,
) -> tuple[Float[Tensor, ""], Float[Tensor, "m V"]]:
    """The loss of a chunk, and its gradient in the data type of the logits.

    With rdrop or simcut there are two passes, m = 2n. teacher: its probabilities.
    """
    soft = teacher, teacher_weight
    log_probs = logits.to(_sum_dtype(logits)).log_softmax(-1)
    if simcut:
        divergence, grad_divergence = kl_divergence(log_probs, labels)
        first_pass = log_probs[: len(labels)]
        loss, gradient = smoothed_cross_entropy(first_pass, labels, epsilon, with_gradient, *soft)
        loss = loss + simcut * divergence
        if with_gradient:
            gradient = torch.cat([gradient, torch.zeros_like(gradient)]) + simcut * grad_divergence
    elif not rdrop:
        loss, gradient = smoothed_cross_entropy(log_probs, labels, epsilon, with_gradient, *soft)
    else:
        divergence, grad_divergence = symmetric_kl(log_probs, labels)
        repeated_teacher = None if teacher is None else teacher.repeat(2, 1)
        loss, gradient = smoothed_cross_entropy(
            log_probs, labels.repeat(2), epsilon, with_gradient, repeated_teacher, teacher_weight
        )
        loss = 0.5 * loss + 0.25 * rdrop * divergence
        if with_gradient:
            gradient = 0.5 * gradient + 0.25 * rdrop * grad_divergence
    return loss, gradient.to(logits.dtype)


def symmetric_kl(
    log_probs: Float[Tensor, "m V"], labels: Int[Tensor, "n"]
) -> tuple[Float[Tensor, ""], Float[Tensor, "m V"]]:
    """KL(p|q) + KL(q|p) of the two passes, summed over all labels that are not PAD, and its gradient.

    With r = log p - log q, and with a and b the logits of p and q, D = KL(p|q) + KL(q|p) = sum (p - q) r has

        dD/da = p (r - KL(p|q)) + p - q,    dD/db = q (-r - KL(q|p)) + q - p.
    """
    log_p, log_q = log_probs.chunk(2)
    ratio = log_p - log_q
    non_pad = (labels != PAD).to(log_probs.dtype)[:, None]
    p, q = log_p.exp(), log_q.exp()
    kl_pq, kl_qp = (p * ratio).sum(-1, keepdim=True), -(q * ratio).sum(-1, keepdim=True)
    difference = p - q
    gradient = torch.cat([p * (ratio - kl_pq) + difference, -q * (ratio + kl_qp) - difference])
    return ((kl_pq + kl_qp) * non_pad).sum(), gradient * non_pad.repeat(2, 1)


def kl_divergence(
    log_probs: Float[Tensor, "m V"], labels: Int[Tensor, "n"]
) -> tuple[Float[Tensor, ""], Float[Tensor, "m V"]]:
    """KL(p|q) of the two passes, summed over all labels that are not PAD, and its gradient.

    The gradient goes through both passes: with r = log p - log q, and with a and b the logits of p and q,

        dKL/da = p (r - KL(p|q)),    dKL/db = q - p.
    """
    log_p, log_q = log_probs.chunk(2)
    ratio = log_p - log_q
    non_pad = (labels != PAD).to(log_probs.dtype)[:, None]
    p, q = log_p.exp(), log_q.exp()
    kl = (p * ratio).sum(-1, keepdim=True)
    gradient = torch.cat([p * (ratio - kl), q - p])
    return (kl * non_pad).sum(), gradient * non_pad.repeat(2, 1)


def smoothed_cross_entropy(
    log_probs: Float[Tensor, "n V"],
    labels: Int[Tensor, "n"],
    epsilon: float,
    with_gradient: bool,
    teacher: Float[Tensor, "n V"] | None = None,
    teacher_weight: float = 0.0,
) -> tuple[Float[Tensor, ""], Float[Tensor, "n V"]]:
    """Cross-entropy with label smoothing, and its gradient: softmax minus the target, 0 at PAD.

    The target is the smoothed label, or its mean with the probabilities of a teacher, weighted by ``teacher_weight``.
    It may overwrite ``log_probs``.
    """
    if teacher is not None:
        return soft_cross_entropy(log_probs, labels, epsilon, teacher, teacher_weight)
    classes = log_probs.shape[1]
    non_pad = (labels != PAD).to(log_probs.dtype)
    index = labels[:, None]
    correct = log_probs.gather(1, index)[:, 0]
    mean = log_probs.mean(-1) if epsilon else correct
    loss = -(((1 - epsilon) * correct + epsilon * mean) * non_pad).sum()
    if not with_gradient:
        return loss, log_probs
    # When compiled, a comparison is fused with the pass over the logits; a scatter is not.
    if torch.compiler.is_compiling():
        is_label = torch.arange(classes, device=log_probs.device) == index
        gradient = log_probs.exp() - epsilon / classes - (1 - epsilon) * is_label
        return loss, gradient * non_pad[:, None]
    gradient = log_probs.exp_()
    gradient -= epsilon / classes
    gradient.scatter_add_(1, index, gradient.new_full(index.shape, epsilon - 1))
    return loss, gradient.mul_(non_pad[:, None])


def soft_cross_entropy(
    log_probs: Float[Tensor, "n V"],
    labels: Int[Tensor, "n"],
    epsilon: float,
    teacher: Float[Tensor, "n V"],
    teacher_weight: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, "n V"]]:
    """The same with a teacher: the target of every class is written out."""
    classes = log_probs.shape[1]
    is_label = torch.arange(classes, device=log_probs.device) == labels[:, None]
    label = is_label.to(log_probs.dtype)
    target = (1 - teacher_weight) * (epsilon / classes + (1 - epsilon) * label)
    target = target + teacher_weight * teacher
    non_pad = (labels != PAD).to(log_probs.dtype)[:, None]
    return -(target * log_probs * non_pad).sum(), (log_probs.exp() - target) * non_pad


def smoothed_target(epsilon: float, classes: int, over: str) -> tuple[float, float]:
    """The target probability of the correct class and of each other class, derived from the gradient."""
    logits = torch.zeros(1, classes, dtype=torch.float64)
    labels = torch.tensor([classes - 1])
    spread = LABEL_SMOOTHINGS[over](epsilon, classes)
    _, gradient = chunk_loss(logits, labels, spread, 0.0, 0.0, with_gradient=True)
    target = logits.softmax(-1) - gradient
    return float(target[0, -1]), float(target[0, 0])


MAX_LOGITS = {"cpu": 2**22, "cuda": 2**27}
"""logits per chunk, by device type: few enough for the cache of a CPU, enough to keep a GPU busy"""


def _chunks(rows: int, classes: int, device: torch.device) -> Iterator[slice]:
    """Slices of nearly equal size: the loss may have to be compiled for each size."""
    count = -(-rows * classes // MAX_LOGITS[device.type])
    step = max(1, -(-rows // max(1, count)))
    return (slice(start, start + step) for start in range(0, rows, step))


def _product_dtype(states: Tensor) -> torch.dtype:
    """The data type of matrix products. Autocast does not apply inside an autograd function, so it is looked up."""
    device_type = states.device.type
    return (
        torch.get_autocast_dtype(device_type)
        if torch.is_autocast_enabled(device_type)
        else states.dtype
    )


def _sum_dtype(states: Tensor) -> torch.dtype:
    return torch.float64 if states.dtype == torch.float64 else torch.float32
