"""The GPU kernels against plain float64. On a machine with a GPU: ``pytest tests/unit/nn/test_triton_kernels.py``."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

if not torch.cuda.is_available():
    pytest.skip("Triton kernels need a GPU", allow_module_level=True)

from regard.nn.attention import Attention
from regard.nn.attention_mask import AttentionMask
from regard.nn.attention_patterns import SlidingWindow
from regard.nn.kv_cache import KeyValue
from regard.nn.positions import AttentionPosition
from regard.nn.triton_kernels import (
    add_layer_norm,
    decode_attention,
    layer_norm,
    packed_attention_kernel,
)
from regard.recipe import make_recipe

SOURCES, TARGETS = [5, 30, 7, 12, 1, 50, 130], [7, 22, 9, 20, 3, 44, 99]
SCALE = 0.2


def spans(lengths: list[int], others: list[int], size: int) -> tuple[Tensor, Tensor]:
    """For each position of texts of these lengths, start and end of the text it attends to; the same for two rows."""
    ends = np.cumsum(others)
    found = []
    for bound in (ends - others, ends):
        each = np.pad(np.repeat(bound, lengths), (0, size - sum(lengths))).astype(np.int32)
        found.append(torch.tensor(each, device="cuda").expand(2, -1).contiguous())
    return found[0], found[1]


def vectors(tokens: int, width: int) -> Tensor:
    """Random vectors with the heads side by side in memory, as linear layers return them."""
    return torch.randn(2, tokens, 3, width, device="cuda").transpose(1, 2).requires_grad_()


def test_packed_attention_equals_masked_attention() -> None:
    torch.manual_seed(0)
    S, T = sum(SOURCES) + 5, sum(TARGETS) + 9
    key_start, key_end = spans(TARGETS, SOURCES, T)
    query_start, query_end = spans(SOURCES, TARGETS, S)
    query, key, value = vectors(T, 32), vectors(S, 32), vectors(S, 16)
    seed = torch.tensor([7], dtype=torch.int32, device="cuda")
    out, _ = packed_attention_kernel(
        query, key, value, key_start, key_end, query_start, query_end, seed, SCALE, 0.0
    )
    grad_output = torch.randn_like(out)
    got = torch.autograd.grad(out, (query, key, value), grad_output)

    q, k, v = (x.detach().double().requires_grad_() for x in (query, key, value))
    position = torch.arange(S, device="cuda")
    allowed = (position >= key_start[:, :, None]) & (position < key_end[:, :, None])
    allowed = allowed[:, None]
    scores = (q @ k.transpose(-1, -2) * SCALE).masked_fill(~allowed, -1e30)
    right = (scores.softmax(-1) * allowed) @ v
    expected = torch.autograd.grad(right, (q, k, v), grad_output.double())
    torch.testing.assert_close(out.double(), right, atol=2e-6, rtol=0)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=0)


def test_dropout_keeps_the_mean_and_the_backward_pass_uses_the_same_mask() -> None:
    """With all values 1, an output is the sum of the remaining weights, and its gradient by a value is the weight."""
    torch.manual_seed(0)
    T = sum(TARGETS)
    key_start, key_end = spans(TARGETS, TARGETS, T)
    query, key = vectors(T, 32), vectors(T, 32)
    value = torch.ones(2, T, 3, 16, device="cuda").transpose(1, 2).requires_grad_()
    seed = torch.tensor([7], dtype=torch.int32, device="cuda")
    out, _ = packed_attention_kernel(
        query, key, value, key_start, key_end, key_start, key_end, seed, SCALE, 0.3
    )
    assert abs(float(out.detach().mean()) - 1) < 0.05
    assert float(out.detach().std()) > 0.05
    (grad_value,) = torch.autograd.grad(out.sum(), (value,))
    torch.testing.assert_close(grad_value.sum(), out.sum(), rtol=1e-4, atol=0)


@pytest.mark.filterwarnings("ignore")  # torch warns about its own compiler
@pytest.mark.parametrize(("tokens", "width"), [(33, 512), (7, 48), (5000, 20)])
def test_the_backward_pass_of_layer_norm(tokens: int, width: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(2, tokens, width, device="cuda") * 2 + 1).requires_grad_()
    gain, bias = (torch.randn(width, device="cuda").requires_grad_() for _ in range(2))
    grad_output = torch.randn(2, tokens, width, device="cuda").bfloat16()
    normed = torch.compile(layer_norm, fullgraph=True)(x, gain, bias, 1e-5)
    got = torch.autograd.grad(normed, (x, gain, bias), grad_output)
    exact = [part.detach().double().requires_grad_() for part in (x, gain, bias)]
    right = F.layer_norm(exact[0], (width,), exact[1], exact[2], 1e-5)
    torch.testing.assert_close(normed.double(), right, atol=0.05, rtol=0.01)  # bfloat16
    for ours, theirs in zip(
        got, torch.autograd.grad(right, exact, grad_output.double()), strict=True
    ):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("queries", "keys", "width"), [(5, 40, 64), (1, 7, 24), (4, 64, 16)])
@pytest.mark.parametrize("mask", ["none", "per sentence", "per query", "shared"])
def test_decode_attention_equals_the_formula(
    queries: int, keys: int, width: int, mask: str
) -> None:
    torch.manual_seed(0)
    query = torch.randn(3, queries, 2, width, device="cuda").transpose(1, 2) / width**0.5
    key, value = torch.randn(2, 3, 2, keys, width, device="cuda")
    shapes = {
        "per sentence": (3, 1, 1, keys),
        "per query": (3, 1, queries, keys),
        "shared": (1, 1, 1, keys),
    }
    bias = None
    if mask in shapes:
        bias = torch.where(torch.rand(shapes[mask], device="cuda") < 0.5, -torch.inf, 0.0)
        bias[..., -1] = 0.0  # each query attends to at least one key
    scores = query.double() @ key.double().mT + (0.0 if bias is None else bias.double())
    expected = (scores.softmax(-1) @ value.double()).transpose(1, 2).flatten(2)
    found = decode_attention(query, key, value, bias)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("width", [512, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_layer_norm_equals_the_formula(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 33, width, device="cuda").unbind()
    x, y = x.to(dtype) * 3 + 1, y.bfloat16()
    gain, bias = torch.randn(2, width, device="cuda").unbind()
    for added in (None, y):
        total = x.double() if added is None else x.double() + added.double()
        expected = F.layer_norm(total, (width,), gain.double(), bias.double(), 1e-5)
        found = add_layer_norm(x, added, gain, bias, 1e-5)
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=2**-8)


@pytest.mark.parametrize("causal", [False, True])
def test_window_attention_equals_masked_attention(causal: bool) -> None:
    torch.manual_seed(0)
    recipe = make_recipe(
        {
            "data": {"train": {"pairs": "x"}},
            "model": {
                "d_model": 96,
                "heads": 3,
                "dropout": 0.0,
                "attention": {"encoder": "window", "window_size": 20},
            },
        },
        "window",
    )
    window = SlidingWindow(recipe.model, "encoder").cuda()
    attention = Attention(recipe.model, AttentionPosition(recipe.model)).cuda()
    query, key, value = vectors(150, 32), vectors(150, 32), vectors(150, 32)
    non_pad = torch.arange(150, device="cuda") < torch.tensor([150, 97], device="cuda")[:, None]
    mask = AttentionMask(non_pad, causal)
    fast = window(attention, query, KeyValue(key, value), mask)
    grad_output = torch.randn_like(fast) * non_pad[:, None, :, None]
    got = torch.autograd.grad(fast, (query, key, value), grad_output)
    exact = [part.detach().double().requires_grad_() for part in (query, key, value)]
    right = window.attention_with_weights(attention, exact[0], KeyValue(*exact[1:]), mask).output
    expected = torch.autograd.grad(right, exact, grad_output.double())
    padding = ~non_pad[:, None, :, None]
    for ours, theirs in zip((fast, *got), (right, *expected), strict=True):
        both = (x.double().masked_fill(padding, 0.0) for x in (ours, theirs))
        torch.testing.assert_close(*both, atol=2e-5, rtol=0)
