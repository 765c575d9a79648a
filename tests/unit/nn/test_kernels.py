"""The kernels for a GPU against plain float64. They run where there is one: ``pytest tests/unit/test_kernels.py``."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

if not torch.cuda.is_available():
    pytest.skip("Triton kernels need a GPU", allow_module_level=True)

from regard.nn.attention import Attention, KeyValue, Mask
from regard.nn.kernels.decode_attention import decode_attention
from regard.nn.kernels.layer_norm import layer_norm
from regard.nn.kernels.packed_attention import packed_attention_kernel
from regard.nn.positions import AttentionPosition
from regard.nn.sparse_attention import Window
from regard.recipe import make_recipe

SOURCES, TARGETS = [5, 30, 7, 12, 1, 50, 130], [7, 22, 9, 20, 3, 44, 99]
SCALE = 0.2


def spans(lengths: list[int], of: list[int], room: int) -> tuple[Tensor, Tensor]:
    """For each place of the texts of these lengths, where its partner's text begins and ends; twice, for two rows."""
    ends = np.cumsum(of)
    found = []
    for bound in (ends - of, ends):
        each = np.pad(np.repeat(bound, lengths), (0, room - sum(lengths))).astype(np.int32)
        found.append(torch.tensor(each, device="cuda").expand(2, -1).contiguous())
    return found[0], found[1]


def vectors(words: int, width: int) -> Tensor:
    """Heads side by side, as linear maps leave them."""
    return torch.randn(2, words, 3, width, device="cuda").transpose(1, 2).requires_grad_()


def test_attention_in_texts_is_attention_under_a_mask() -> None:
    torch.manual_seed(0)
    S, T = sum(SOURCES) + 5, sum(TARGETS) + 9
    low, high = spans(TARGETS, SOURCES, T)
    first, last = spans(SOURCES, TARGETS, S)
    query, key, value = vectors(T, 32), vectors(S, 32), vectors(S, 16)
    seed = torch.tensor([7], dtype=torch.int32, device="cuda")
    out, _ = packed_attention_kernel(query, key, value, low, high, first, last, seed, SCALE, 0.0)
    above = torch.randn_like(out)
    got = torch.autograd.grad(out, (query, key, value), above)

    q, k, v = (x.detach().double().requires_grad_() for x in (query, key, value))
    place = torch.arange(S, device="cuda")
    seen = ((place >= low[:, :, None]) & (place < high[:, :, None]))[:, None]
    scores = (q @ k.transpose(-1, -2) * SCALE).masked_fill(~seen, -1e30)
    right = (scores.softmax(-1) * seen) @ v
    wanted = torch.autograd.grad(right, (q, k, v), above.double())
    torch.testing.assert_close(out.double(), right, atol=2e-6, rtol=0)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=0)


def test_dropout_of_the_weights_takes_its_share_and_the_way_back_finds_the_same_ones() -> None:
    """With values of one, each output is the sum of the weights left; its slope by a value is the weight."""
    torch.manual_seed(0)
    T = sum(TARGETS)
    low, high = spans(TARGETS, TARGETS, T)
    query, key = vectors(T, 32), vectors(T, 32)
    value = torch.ones(2, T, 3, 16, device="cuda").transpose(1, 2).requires_grad_()
    seed = torch.tensor([7], dtype=torch.int32, device="cuda")
    out, _ = packed_attention_kernel(query, key, value, low, high, low, high, seed, SCALE, 0.3)
    assert abs(float(out.detach().mean()) - 1) < 0.05
    assert float(out.detach().std()) > 0.05
    (of_value,) = torch.autograd.grad(out.sum(), (value,))
    torch.testing.assert_close(of_value.sum(), out.sum(), rtol=1e-4, atol=0)


@pytest.mark.filterwarnings("ignore")  # of torch, about what its own compiler does
@pytest.mark.parametrize(("words", "d_model"), [(33, 512), (7, 48), (5000, 20)])
def test_the_way_back_through_a_norm(words: int, width: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(2, words, width, device="cuda") * 2 + 1).requires_grad_()
    gain, bias = (torch.randn(width, device="cuda").requires_grad_() for _ in range(2))
    above = torch.randn(2, words, width, device="cuda").bfloat16()
    normed = torch.compile(layer_norm, fullgraph=True)(x, gain, bias, 1e-5)
    got = torch.autograd.grad(normed, (x, gain, bias), above)
    exact = [part.detach().double().requires_grad_() for part in (x, gain, bias)]
    right = F.layer_norm(exact[0], (width,), exact[1], exact[2], 1e-5)
    torch.testing.assert_close(normed.double(), right, atol=0.05, rtol=0.01)  # bfloat16
    for ours, theirs in zip(got, torch.autograd.grad(right, exact, above.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("queries", "keys", "d_model"), [(5, 40, 64), (1, 7, 24), (4, 64, 16)])
@pytest.mark.parametrize("hides", ["nothing", "of each sentence", "of each query", "of all alike"])
def test_attention_of_a_few_queries(queries: int, keys: int, width: int, hides: str) -> None:
    torch.manual_seed(0)
    query = torch.randn(3, queries, 2, width, device="cuda").transpose(1, 2) / width**0.5
    key, value = torch.randn(2, 3, 2, keys, width, device="cuda")
    shapes = {
        "of each sentence": (3, 1, 1, keys),
        "of each query": (3, 1, queries, keys),
        "of all alike": (1, 1, 1, keys),
    }
    bias = None
    if hides in shapes:
        bias = torch.where(torch.rand(shapes[hides], device="cuda") < 0.5, -torch.inf, 0.0)
        bias[..., -1] = 0.0  # something is seen
    scores = query.double() @ key.double().mT + (0.0 if bias is None else bias.double())
    wanted = (scores.softmax(-1) @ value.double()).transpose(1, 2).flatten(2)
    found = decode_attention(query, key, value, bias)
    torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_is_attention_under_its_mask(causal: bool) -> None:
    torch.manual_seed(0)
    recipe = make_recipe(
        {
            "data": {"train": {"pairs": "x"}},
            "model": {"d_model": 96, "heads": 3, "dropout": 0.0, "attention": {"window_size": 20}},
        },
        "window",
    )
    window = Window(recipe.model, "encoder").cuda()
    attend = Attention(recipe.model, AttentionPosition(recipe.model)).cuda()
    query, key, value = vectors(150, 32), vectors(150, 32), vectors(150, 32)
    real = torch.arange(150, device="cuda") < torch.tensor([150, 97], device="cuda")[:, None]
    mask = Mask(real, causal)
    fast = window(attend, query, KeyValue(key, value), mask)
    above = torch.randn_like(fast) * real[:, None, :, None]
    got = torch.autograd.grad(fast, (query, key, value), above)
    exact = [part.detach().double().requires_grad_() for part in (query, key, value)]
    right = window.show(attend, exact[0], KeyValue(*exact[1:]), mask).output
    wanted = torch.autograd.grad(right, exact, above.double())
    hidden = ~real[:, None, :, None]
    for ours, theirs in zip((fast, *got), (right, *wanted), strict=True):
        both = (x.double().masked_fill(hidden, 0.0) for x in (ours, theirs))
        torch.testing.assert_close(*both, atol=2e-5, rtol=0)
