"""R-Drop, SimCut and soft targets: loss against formula, gradient against autograd, in float64; word dropout."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional as F

from regard.data.pairs import Pair
from regard.data.special_tokens import MASK, PAD, SPECIAL_TOKENS
from regard.data.tokenizer import Tokenizer
from regard.nn import loss as module
from regard.nn.layers import Embedding
from regard.nn.loss import LABEL_SMOOTHINGS, LabelLoss, Seq2SeqLoss, TrainingLoss, cross_entropy
from regard.recipe import Recipe, make_recipe
from regard.tasks import TASKS, build_network


def example(seed: int, bias: bool = False) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    labels = torch.randint(0, 11, (2, 3), generator=generator)  # including PAD
    labels[0, 0] = PAD
    return draw(4, 3, 6), draw(11, 6), draw(11) if bias else None, labels


def softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    exponentials = np.exp(logits - logits.max())
    return np.asarray(exponentials / exponentials.sum())


@given(
    alpha=st.floats(0.1, 10),
    epsilon=st.sampled_from([0.0, 0.1]),
    over=st.sampled_from(["all", "others"]),
    seed=st.integers(0, 1000),
)
def test_the_loss_is_half_of_the_papers(alpha: float, epsilon: float, over: str, seed: int) -> None:
    states, projection, _, labels = example(seed)
    found = cross_entropy(states, projection, labels, epsilon, over, rdrop=alpha)
    rows, weight = states.detach().numpy(), projection.detach().numpy()
    spread, papers = LABEL_SMOOTHINGS[over](epsilon, 11), 0.0
    for row, column in np.argwhere(labels.numpy() != PAD):
        p = softmax(rows[row, column] @ weight.T)
        q = softmax(rows[row + 2, column] @ weight.T)
        label = np.full(11, spread / 11)
        label[labels[row, column]] += 1 - spread
        divergence = (p * np.log(p / q)).sum() + (q * np.log(q / p)).sum()
        papers += -(label * np.log(p)).sum() - (label * np.log(q)).sum() + alpha * divergence / 2
    assert found.item() == pytest.approx(papers / 2, rel=1e-11)


def by_torch(
    states: Tensor,
    projection: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    rdrop: float = 0.0,
    simcut: float = 0.0,
) -> Tensor:
    """The same with torch's own functions, for autograd."""
    non_pad = labels != PAD
    p, q = (F.linear(half, projection, bias)[non_pad].log_softmax(-1) for half in states.chunk(2))
    if simcut:
        correct = F.cross_entropy(p, labels[non_pad], label_smoothing=0.1, reduction="sum")
        return correct + simcut * F.kl_div(q, p, log_target=True, reduction="sum")
    nll = sum(
        F.cross_entropy(x, labels[non_pad], label_smoothing=0.1, reduction="sum") for x in (p, q)
    )
    kl_pq = F.kl_div(q, p, log_target=True, reduction="sum")
    kl_qp = F.kl_div(p, q, log_target=True, reduction="sum")
    return nll / 2 + rdrop * (kl_pq + kl_qp) / 4


@pytest.mark.parametrize("max_logits", [1, 50, 10**6])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rdrop", "simcut"), [(5.0, 0.0), (0.0, 3.0)])
def test_gradients_are_those_of_autograd_with_any_chunk_size(
    monkeypatch: pytest.MonkeyPatch, max_logits: int, bias: bool, rdrop: float, simcut: float
) -> None:
    monkeypatch.setitem(module.MAX_LOGITS, "cpu", max_logits)
    states, projection, offset, labels = example(1, bias)
    leaves = [leaf for leaf in (states, projection, offset) if leaf is not None]
    ours = cross_entropy(states, projection, labels, 0.1, bias=offset, rdrop=rdrop, simcut=simcut)
    theirs = by_torch(states, projection, offset, labels, rdrop, simcut)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    for mine, other in zip(
        torch.autograd.grad(ours / 3, leaves), torch.autograd.grad(theirs / 3, leaves), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("rdrop", "simcut"), [(0.0, 0.0), (5.0, 0.0), (0.0, 3.0)])
@pytest.mark.parametrize("max_logits", [1, 10**6])
def test_a_teacher_is_learned_besides_the_labels(
    monkeypatch: pytest.MonkeyPatch, rdrop: float, simcut: float, max_logits: int
) -> None:
    """The loss and its gradient by autograd: (1 - w) CE + w (KL(t|p) + the entropy of t), for each labelled pass."""
    monkeypatch.setitem(module.MAX_LOGITS, "cpu", max_logits)
    states, projection, _, labels = example(4)
    states = states if rdrop or simcut else states[:2].detach().requires_grad_()
    teacher, weight = torch.randn(6, 11, dtype=torch.float64).softmax(-1), 0.3
    ours = cross_entropy(
        states,
        projection,
        labels,
        0.1,
        rdrop=rdrop,
        simcut=simcut,
        soft_targets=lambda tokens: teacher[tokens],
        teacher_weight=weight,
    )
    non_pad = (labels != PAD).flatten()
    passes = [half.flatten(0, 1)[non_pad] @ projection.T for half in states.chunk(len(states) // 2)]
    labels, soft = labels.flatten()[non_pad], teacher[non_pad]
    labelled = passes if rdrop else passes[:1]
    theirs = torch.zeros((), dtype=torch.float64)
    for logits in labelled:
        hard = F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="sum")
        entropy = -(soft * soft.log()).sum()
        divergence = F.kl_div(logits.log_softmax(-1), soft, reduction="sum")
        both = (1 - weight) * hard + weight * (divergence + entropy)
        theirs = theirs + both / len(labelled)
    if rdrop or simcut:
        p, q = (logits.log_softmax(-1) for logits in passes)
        kl_pq = F.kl_div(q, p, log_target=True, reduction="sum")
        kl_qp = F.kl_div(p, q, log_target=True, reduction="sum")
        theirs = theirs + (rdrop * (kl_pq + kl_qp) / 4 if rdrop else simcut * kl_pq)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    leaves = [states, projection]
    for mine, other in zip(
        torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("rdrop", "simcut"), [(7.0, 0.0), (0.0, 7.0)])
def test_two_equal_passes_have_the_loss_of_one(rdrop: float, simcut: float) -> None:
    states, projection, _, labels = example(2)
    one = cross_entropy(states[:2], projection, labels, 0.1)
    twice = states[:2].repeat(2, 1, 1)
    two = cross_entropy(twice, projection, labels, 0.1, rdrop=rdrop, simcut=simcut)
    torch.testing.assert_close(two, one, rtol=1e-12, atol=0)


# In training losses


def recipe_of(task: str, **training: float) -> Recipe:
    model = {"encoder_layers": 1, "d_model": 16, "heads": 2, "d_ff": 32}
    if task == "translation":
        model["decoder_layers"] = 1
    values = {
        "task": task,
        "data": {"train": {"pairs": "p.tsv"}},
        "tokenizer": {"kind": "word", "vocab_size": 40},
        "model": {**model, "dropout": 0.3},
        "training": training,
    }
    return make_recipe(values, "test")


def loss_of(task: str, kind: type[TrainingLoss], **training: float) -> TrainingLoss:
    recipe = recipe_of(task, **training)
    pairs = [Pair("a b c d", "x" if task == "classification" else "x y x z")] * 5
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: pairs, TASKS[task].has_labels)
    torch.manual_seed(1)
    return kind(build_network(recipe, tokenizer), recipe.training)


SOURCE = torch.tensor([[5, 6, 7, 2], [8, 2, 0, 0]])
TARGET = torch.tensor([[1, 5, 6], [1, 7, 0]])
LABELS = torch.tensor([[5, 6, 2], [7, 2, 0]])
KINDS = {
    "translation": (Seq2SeqLoss, TARGET, LABELS),
    "tagging": (LabelLoss, TARGET[:, :0], torch.tensor([[5, 6, 5, 0], [6, 0, 0, 0]])),
    "classification": (LabelLoss, TARGET[:, :0], torch.tensor([[5], [5]])),
}


@pytest.mark.parametrize("task", KINDS)
def test_a_batch_runs_twice_with_different_dropout_but_once_in_validation(task: str) -> None:
    kind, target, labels = KINDS[task]
    loss_fn, plain = (loss_of(task, kind, rdrop=alpha, label_smoothing=0.1) for alpha in (5.0, 0.0))
    torch.manual_seed(3)
    loss = loss_fn.train()(SOURCE, target, labels)
    torch.manual_seed(3)
    both = [torch.cat([rows, rows]) for rows in (SOURCE, target, labels)]
    mean = plain.train()(*both) / 2
    # The same two passes: R-Drop adds their divergence, which is positive.
    assert loss.item() > mean.item() + 0.01
    loss.backward()
    assert all(weight.grad is not None for weight in loss_fn.parameters())
    inputs = SOURCE, target, labels
    assert torch.equal(loss_fn.eval()(*inputs), plain.eval()(*inputs))


@pytest.mark.parametrize("task", KINDS)
def test_simcut_compares_a_pass_with_one_whose_tokens_are_cut(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss by hand: CE of the first rows, and KL between them and the rows with zero embeddings."""
    monkeypatch.setattr(module, "CUTOFF", 0.4)
    kind, target, labels = KINDS[task]
    # A batch of 40 copies of the rows, so that some tokens are cut.
    source, target, labels = (rows.repeat(40, 1) for rows in (SOURCE, target, labels))
    loss_fn = loss_of(task, kind, simcut=3.0, label_smoothing=0.1).double().train()
    network = loss_fn.network
    for part in network.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    embedded: list[tuple[Tensor, Tensor]] = []

    def record(embedding: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        embedded.append((inputs[0], output))

    for part in network.modules():
        if isinstance(part, Embedding):
            part.register_forward_hook(record)
    states: list[Tensor] = []
    compute_loss = loss_fn.loss

    def record_states(found: Tensor, labels: Tensor, *_: object) -> Tensor:
        states.append(found)
        return compute_loss(found, labels)

    monkeypatch.setattr(loss_fn, "loss", record_states)
    torch.manual_seed(3)
    loss = loss_fn(source, target, labels)
    weight = network.projection.weight
    assert loss.item() == pytest.approx(
        by_torch(states[0], weight, None, labels, simcut=3.0).item(), rel=1e-11
    )
    assert len(embedded) == (2 if task == "translation" else 1)
    for ids, vectors in embedded:
        cut = (vectors == 0).all(-1)
        first, second = cut.chunk(2)
        ordinary = ids.chunk(2)[0] >= len(SPECIAL_TOKENS)
        assert not first.any()
        assert not second[~ordinary].any()
        assert second[ordinary].double().mean().item() == pytest.approx(0.4, abs=0.08)
    embedded.clear()
    loss_fn.eval()(source, target, labels)
    assert len(embedded[0][0]) == len(source)
    assert not any((vectors == 0).all(-1).any() for _, vectors in embedded)


def test_simcut_does_not_cut_language_tags() -> None:
    loss_fn = loss_of("translation", Seq2SeqLoss, simcut=3.0)
    other = Seq2SeqLoss(loss_fn.network, loss_fn.settings, special_tokens=7)
    (embedding,) = {part for part in other.network.modules() if isinstance(part, Embedding)}
    embedding.train().cutoff = 0.999
    vectors = embedding(torch.tensor([[5, 6, 7, 8]] * 2))
    assert (vectors == 0).all(-1).tolist() == [[False] * 4, [False, False, True, True]]


def test_word_dropout_applies_to_source_and_target_in_training_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loss_fn = loss_of("translation", Seq2SeqLoss, word_dropout=0.5, target_word_dropout=0.3)
    loss_fn.special_tokens = 6  # as if 5 were the tag of a language
    inputs_seen: dict[str, Tensor] = {}
    encode, decode = loss_fn.network.encode, loss_fn.network.decode
    monkeypatch.setattr(
        loss_fn.network,
        "encode",
        lambda source_ids, tree: encode(inputs_seen.setdefault("source", source_ids), tree),
    )
    monkeypatch.setattr(
        loss_fn.network,
        "decode",
        lambda ids, memory: decode(inputs_seen.setdefault("target", ids), memory),
    )
    source, target = SOURCE.repeat(500, 1), TARGET.repeat(500, 1)
    loss_fn.train()(source, target, LABELS.repeat(500, 1))
    for side, ids, special_tokens, probability in (
        ("source", source, 6, 0.5),
        ("target", target, 5, 0.3),
    ):
        tokens = ids >= special_tokens
        assert torch.equal(inputs_seen[side][~tokens], ids[~tokens])
        masked = inputs_seen[side][tokens] == MASK
        assert torch.equal(inputs_seen[side][tokens][~masked], ids[tokens][~masked])
        assert masked.double().mean().item() == pytest.approx(probability, abs=0.05)
    assert len(SPECIAL_TOKENS) == 5
    inputs_seen.clear()
    loss_fn.eval()(source, target, LABELS.repeat(500, 1))
    assert torch.equal(inputs_seen["source"], source)
    assert torch.equal(inputs_seen["target"], target)
