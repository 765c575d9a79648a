"""R-Drop: the loss against its formula, the gradient against autograd, both in float64; and word dropout."""

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
    states: Tensor, projection: Tensor, bias: Tensor | None, labels: Tensor, alpha: float
) -> Tensor:
    """The same with torch's own functions, for autograd."""
    non_pad = labels != PAD
    p, q = (F.linear(half, projection, bias)[non_pad].log_softmax(-1) for half in states.chunk(2))
    nll = sum(
        F.cross_entropy(x, labels[non_pad], label_smoothing=0.1, reduction="sum") for x in (p, q)
    )
    kl_pq = F.kl_div(q, p, log_target=True, reduction="sum")
    kl_qp = F.kl_div(p, q, log_target=True, reduction="sum")
    return nll / 2 + alpha * (kl_pq + kl_qp) / 4


@pytest.mark.parametrize("max_logits", [1, 50, 10**6])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_autograd_with_any_chunk_size(
    monkeypatch: pytest.MonkeyPatch, max_logits: int, bias: bool
) -> None:
    monkeypatch.setitem(module.MAX_LOGITS, "cpu", max_logits)
    states, projection, offset, labels = example(1, bias)
    leaves = [leaf for leaf in (states, projection, offset) if leaf is not None]
    ours = cross_entropy(states, projection, labels, 0.1, bias=offset, rdrop=5.0)
    theirs = by_torch(states, projection, offset, labels, 5.0)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    for mine, other in zip(
        torch.autograd.grad(ours / 3, leaves), torch.autograd.grad(theirs / 3, leaves), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_two_equal_passes_have_the_loss_of_one() -> None:
    states, projection, _, labels = example(2)
    one = cross_entropy(states[:2], projection, labels, 0.1)
    two = cross_entropy(states[:2].repeat(2, 1, 1), projection, labels, 0.1, rdrop=7.0)
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
WANTED = torch.tensor([[5, 6, 2], [7, 2, 0]])
KINDS = {
    "translation": (Seq2SeqLoss, TARGET, WANTED),
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
    loss_fn.train()(source, target, WANTED.repeat(500, 1))
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
    loss_fn.eval()(source, target, WANTED.repeat(500, 1))
    assert torch.equal(inputs_seen["source"], source)
    assert torch.equal(inputs_seen["target"], target)
