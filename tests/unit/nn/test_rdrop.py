"""R-Drop: the loss against its formula written out, the gradient against autograd, both in float64."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional as F

from regard.data.corpus import Pair
from regard.data.special_tokens import MASK, PAD, SPECIAL_TOKENS
from regard.data.tokenizer import Tokenizer
from regard.nn import loss as module
from regard.nn.loss import LABEL_SMOOTHINGS, LabelLoss, Seq2SeqLoss, TrainingLoss, cross_entropy
from regard.recipe import Recipe, Smoothing, make_recipe
from regard.tasks import build_network


def example(seed: int, bias: bool = False) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    numbers = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers, dtype=torch.float64).requires_grad_()

    wanted = torch.randint(0, 11, (2, 3), generator=numbers)  # PAD among them
    wanted[0, 0] = PAD
    return draw(4, 3, 6), draw(11, 6), draw(11) if bias else None, wanted


def softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    powers = np.exp(logits - logits.max())
    return np.asarray(powers / powers.sum())


@given(
    alpha=st.floats(0.1, 10),
    epsilon=st.sampled_from([0.0, 0.1]),
    over=st.sampled_from(["all", "others"]),
    seed=st.integers(0, 1000),
)
def test_the_loss_is_half_of_the_papers(
    alpha: float, epsilon: float, over: Smoothing, seed: int
) -> None:
    states, projection, _, wanted = example(seed)
    found = cross_entropy(states, projection, wanted, epsilon, over, rdrop=alpha)
    rows, weight = states.detach().numpy(), projection.detach().numpy()
    spread, papers = LABEL_SMOOTHINGS[over](epsilon, 11), 0.0
    for row, column in np.argwhere(wanted.numpy() != PAD):
        p = softmax(rows[row, column] @ weight.T)
        q = softmax(rows[row + 2, column] @ weight.T)
        label = np.full(11, spread / 11)
        label[wanted[row, column]] += 1 - spread
        divergence = (p * np.log(p / q)).sum() + (q * np.log(q / p)).sum()
        papers += -(label * np.log(p)).sum() - (label * np.log(q)).sum() + alpha * divergence / 2
    assert found.item() == pytest.approx(papers / 2, rel=1e-11)


def by_torch(
    states: Tensor, projection: Tensor, bias: Tensor | None, wanted: Tensor, alpha: float
) -> Tensor:
    """The same by torch's own functions, for autograd to go back through."""
    real = wanted != PAD
    p, q = (F.linear(half, projection, bias)[real].log_softmax(-1) for half in states.chunk(2))
    nll = sum(
        F.cross_entropy(x, wanted[real], label_smoothing=0.1, reduction="sum") for x in (p, q)
    )
    apart = F.kl_div(q, p, log_target=True, reduction="sum")
    back = F.kl_div(p, q, log_target=True, reduction="sum")
    return nll / 2 + alpha * (apart + back) / 4


@pytest.mark.parametrize("at_once", [1, 50, 10**6])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_autograds_however_it_is_cut(
    monkeypatch: pytest.MonkeyPatch, at_once: int, bias: bool
) -> None:
    monkeypatch.setitem(module.LOGITS_AT_ONCE, "cpu", at_once)
    states, projection, offset, wanted = example(1, bias)
    leaves = [leaf for leaf in (states, projection, offset) if leaf is not None]
    ours = cross_entropy(states, projection, wanted, 0.1, bias=offset, rdrop=5.0)
    theirs = by_torch(states, projection, offset, wanted, 5.0)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    for mine, other in zip(
        torch.autograd.grad(ours / 3, leaves), torch.autograd.grad(theirs / 3, leaves), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_two_passes_that_agree_cost_what_one_does() -> None:
    states, projection, _, wanted = example(2)
    one = cross_entropy(states[:2], projection, wanted, 0.1)
    two = cross_entropy(states[:2].repeat(2, 1, 1), projection, wanted, 0.1, rdrop=7.0)
    torch.testing.assert_close(two, one, rtol=1e-12, atol=0)


# In the objectives


def recipe_of(task: str, **training: float) -> Recipe:
    model = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "heads": 2, "d_ff": 32}
    values = {
        "task": task,
        "data": {"train": {"pairs": "p.tsv"}},
        "tokenizer": {"kind": "word", "vocab_size": 40},
        "model": {**model, "dropout": 0.3},
        "training": training,
    }
    return make_recipe(values, "test")


def goal_of(task: str, kind: type[TrainingLoss], **training: float) -> TrainingLoss:
    recipe = recipe_of(task, **training)
    pairs = [Pair("a b c d", "x" if task == "classify" else "x y x z")] * 5
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: pairs, recipe.has_labels)
    torch.manual_seed(1)
    return kind(build_network(recipe, tokenizer), recipe.training)


SOURCE = torch.tensor([[5, 6, 7, 2], [8, 2, 0, 0]])
TARGET = torch.tensor([[1, 5, 6], [1, 7, 0]])
WANTED = torch.tensor([[5, 6, 2], [7, 2, 0]])
KINDS = {
    "translate": (Seq2SeqLoss, TARGET, WANTED),
    "tag": (LabelLoss, TARGET[:, :0], torch.tensor([[5, 6, 5, 0], [6, 0, 0, 0]])),
    "classify": (LabelLoss, TARGET[:, :0], torch.tensor([[5], [5]])),
}


@pytest.mark.parametrize("task", KINDS)
def test_a_batch_passes_twice_with_other_dropout_and_once_in_validation(task: str) -> None:
    kind, target, wanted = KINDS[task]
    goal, plain = (goal_of(task, kind, rdrop=alpha, label_smoothing=0.1) for alpha in (5.0, 0.0))
    torch.manual_seed(3)
    loss = goal.train()(SOURCE, target, wanted)
    torch.manual_seed(3)
    both = [torch.cat([rows, rows]) for rows in (SOURCE, target, wanted)]
    mean = plain.train()(*both) / 2
    # The same two passes: what R-Drop adds is their divergence, which is above nought.
    assert loss.item() > mean.item() + 0.01
    loss.backward()
    assert all(weight.grad is not None for weight in goal.parameters())
    inputs = SOURCE, target, wanted
    assert torch.equal(goal.eval()(*inputs), plain.eval()(*inputs))


def test_words_are_hidden_on_both_sides_in_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    goal = goal_of("translate", Seq2SeqLoss, word_dropout=0.5, target_word_dropout=0.3)
    goal.marks = 6  # as if 5 were a language
    seen: dict[str, Tensor] = {}
    encode, decode = goal.network.encode, goal.network.decode
    monkeypatch.setattr(
        goal.network, "encode", lambda ids, tree: encode(seen.setdefault("source", ids), tree)
    )
    monkeypatch.setattr(
        goal.network, "decode", lambda ids, memory: decode(seen.setdefault("target", ids), memory)
    )
    source, target = SOURCE.repeat(500, 1), TARGET.repeat(500, 1)
    goal.train()(source, target, WANTED.repeat(500, 1))
    for side, given_, marks, share in (("source", source, 6, 0.5), ("target", target, 5, 0.3)):
        words = given_ >= marks
        assert torch.equal(seen[side][~words], given_[~words])
        hidden = seen[side][words] == MASK
        assert torch.equal(seen[side][words][~hidden], given_[words][~hidden])
        assert hidden.double().mean().item() == pytest.approx(share, abs=0.05)
    assert len(SPECIAL_TOKENS) == 5
    seen.clear()
    goal.eval()(source, target, WANTED.repeat(500, 1))
    assert torch.equal(seen["source"], source)
    assert torch.equal(seen["target"], target)
