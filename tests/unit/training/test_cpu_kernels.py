"""The native kernels for training on a CPU, against formulas in float64."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from regard.data.batching import collate, pack_evenly
from regard.data.special_tokens import PAD
from regard.nn.attention_mask import AttentionSpans
from regard.nn.dropout import Dropout
from regard.nn.loss import chunk_loss
from regard.nn.positions import RowSpan
from regard.nn.transformer import causal_spans
from regard.training.cpu_kernels import (
    attach_cpu_kernels,
    dropout,
    has_cpu_kernels,
    native_chunk_loss,
    packed_attention,
)
from regard.training.optimizers import OPTIMIZERS
from regard.training.train_step import StepScalars, TrainStep
from tests.unit.training.test_packed_batches import VOCABULARY, dataset_of, loss_fn_of, recipe_of

pytestmark = pytest.mark.skipif(not has_cpu_kernels(), reason="no native library")
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


# ---------------------------------------------------------------------------------------------
# Dropout


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_keeps_the_expected_fraction_and_the_backward_pass_has_the_same_mask(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(1)
    x = torch.rand(300, 333).to(dtype).add_(1).requires_grad_()
    y = dropout(x, 0.3)
    torch.autograd.backward(y.sum())
    kept = y != 0
    assert abs(float(kept.float().mean()) - 0.7) < 4 * (0.21 / x.numel()) ** 0.5
    torch.testing.assert_close(y[kept], x[kept] / 0.7, rtol=DTYPES[dtype], atol=0.0)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, kept.to(dtype) / 0.7, rtol=DTYPES[dtype], atol=0.0)
    rows = kept.float()
    assert float((rows[:-1] * rows[1:]).mean()) == pytest.approx(0.49, abs=0.01)  # independent


def test_dropout_follows_from_the_seed_and_not_from_the_number_of_threads() -> None:
    x, results = torch.ones(1000, 301), []
    threads = torch.get_num_threads()
    for count in (1, 3, 3):
        torch.set_num_threads(count)
        torch.manual_seed(5)
        results.append(dropout(x, 0.1))
    torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[1], results[2])
    assert not torch.equal(results[2], dropout(x, 0.1)), "another call has another mask"


# ---------------------------------------------------------------------------------------------
# Attention


def spans_of(queries: list[int], keys: list[int], padding: int) -> AttentionSpans:
    """Query texts of these lengths attend to key texts of these lengths; then padding."""
    ends = np.cumsum(keys)
    total = sum(queries) + padding
    start, end = np.zeros(total, np.int32), np.zeros(total, np.int32)
    start[: sum(queries)] = np.repeat(ends - keys, queries)
    end[: sum(queries)] = np.repeat(ends, queries)
    one, two = torch.from_numpy(start)[None], torch.from_numpy(end)[None]
    none = torch.zeros(1, sum(keys) + padding, dtype=torch.int32)
    return AttentionSpans(one, two, none, none)


def reference(
    query: Tensor, key: Tensor, value: Tensor, spans: AttentionSpans, scale: float
) -> Tensor:
    """The formula in float64; 0 where a query attends to nothing."""
    index = torch.arange(key.shape[2])
    start, end = spans.key_start[:, None, :, None], spans.key_end[:, None, :, None]
    allowed = (index >= start) & (index < end)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~allowed, -1e300)
    return (scores.softmax(-1) * allowed) @ value


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@settings(deadline=None, max_examples=8)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5),
    st.sampled_from([4, 16, 20, 64]),
    st.integers(0, 3),
)
def test_attention_equals_the_formula(
    dtype: torch.dtype, causal: bool, texts: list[tuple[int, int]], width: int, padding: int
) -> None:
    queries = [query for query, _ in texts]
    keys = queries if causal else [key for _, key in texts]
    spans = spans_of(queries, keys, padding)
    if causal:
        spans = causal_spans(RowSpan(spans.key_start, spans.key_end))
    torch.manual_seed(0)
    sizes = sum(queries) + padding, sum(keys) + padding, sum(keys) + padding
    # Heads side by side, as a linear layer gives them.
    inputs = [
        torch.randn(1, size, 2, width).to(dtype).transpose(1, 2).requires_grad_() for size in sizes
    ]
    exact = [one.detach().double().requires_grad_() for one in inputs]
    output = packed_attention(inputs[0], inputs[1], inputs[2], spans, 0.3, 0.0)
    expected = reference(exact[0], exact[1], exact[2], spans, 0.3)
    torch.testing.assert_close(output.double(), expected, rtol=0.0, atol=DTYPES[dtype])
    gradient = torch.randn_like(output)
    gradient[:, :, sum(queries) :] = 0
    torch.autograd.backward(output, gradient)
    torch.autograd.backward(expected, gradient.double())
    for one, other in zip(inputs, exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(
            one.grad.double(), other.grad, rtol=DTYPES[dtype], atol=4 * DTYPES[dtype]
        )


def test_attention_drops_weights_and_its_gradient_belongs_to_the_same_mask() -> None:
    """With values that are unit vectors, the output is the row of dropped weights."""
    length, p = 30, 0.4
    spans = spans_of([length] * 4, [length] * 4, 0)
    torch.manual_seed(3)
    query, key = (torch.randn(1, 2, 4 * length, 16) for _ in range(2))
    value = torch.eye(length).repeat(4, 1).expand(1, 2, -1, -1).clone().requires_grad_()
    exact = reference(query.double(), key.double(), value.double(), spans, 0.25)
    output = packed_attention(query, key, value, spans, 0.25, p)
    kept = output != 0
    assert float(kept.float().mean()) == pytest.approx(1 - p, abs=0.02)
    torch.testing.assert_close(output[kept].double(), exact[kept] / (1 - p), rtol=1e-4, atol=1e-5)
    torch.autograd.backward(output, torch.ones_like(output))
    assert value.grad is not None
    by_key = output.detach().view(1, 2, 4, length, length).sum(3).flatten(2)
    torch.testing.assert_close(value.grad[..., 0], by_key, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------
# Cross-entropy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rdrop", [0.0, 3.0])
@pytest.mark.parametrize("classes", [48, 101])
def test_the_loss_equals_the_one_in_torch(dtype: torch.dtype, rdrop: float, classes: int) -> None:
    torch.manual_seed(0)
    labels = torch.randint(1, classes, (20,))
    labels[7] = PAD
    logits = (3 * torch.randn(40 if rdrop else 20, classes)).to(dtype)
    exact, exact_gradient = chunk_loss(logits.double(), labels, 0.1, rdrop, 0.0, True)
    loss, gradient = native_chunk_loss(logits.clone(), labels, 0.1, rdrop, 0.0, True)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=0.0, atol=DTYPES[dtype])
    assert not gradient[7].any()


@pytest.mark.parametrize("simcut", [0.0, 2.0])
@pytest.mark.parametrize("teacher_weight", [0.0, 0.5])
def test_simcut_and_teachers_have_the_loss_of_torch(simcut: float, teacher_weight: float) -> None:
    torch.manual_seed(0)
    labels, logits = torch.randint(1, 48, (20,)), torch.randn(40 if simcut else 20, 48)
    soft = (torch.randn(20, 48).softmax(-1), teacher_weight) if teacher_weight else ()
    exact, exact_gradient = chunk_loss(logits.double(), labels, 0.1, 0.0, simcut, True, *soft)
    loss, gradient = native_chunk_loss(logits.clone(), labels, 0.1, 0.0, simcut, True, *soft)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=0.0, atol=1e-5)


# ---------------------------------------------------------------------------------------------
# The whole step


@pytest.mark.parametrize("settings", [{}, {"rdrop": 2.0}])
def test_a_packed_step_equals_a_padded_step_without_kernels(settings: dict[str, Any]) -> None:
    """The gradients of packed rows with kernels, in two parts, are those of one padded batch in float64."""
    dataset = dataset_of([(9, 5), (3, 30), (20, 7), (1, 1), (12, 12)])
    recipe = recipe_of(dropout=0.0)
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update=settings)})
    rows = np.arange(5)
    native, exact = loss_fn_of(recipe), loss_fn_of(recipe).double()
    attach_cpu_kernels(native)
    parts = pack_evenly(dataset, rows, 48)
    assert len(parts) == 2
    for part in parts:
        native(part.source, part.target, part.labels, part.position_info).backward()
    batch = collate(dataset, rows)
    exact(batch.source, batch.target, batch.labels).backward()
    pairs = zip(native.network.parameters(), exact.network.parameters(), strict=True)
    for one, other in pairs:
        assert one.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-3, atol=1e-4)


def test_bf16_steps_learn_like_fp32_steps() -> None:
    dataset = dataset_of([(6, 6)] * 40)
    losses = {}
    for precision in ("fp32", "bf16"):
        recipe = recipe_of(dropout=0.1)
        training = recipe.training.model_copy(update={"precision": precision})
        loss_fn = loss_fn_of(recipe)
        attach_cpu_kernels(loss_fn)
        assert all(one.kernel is not None for one in loss_fn.modules() if isinstance(one, Dropout))
        optimizer = OPTIMIZERS["adam"](loss_fn, training)
        step = TrainStep(loss_fn, optimizer, training, torch.device("cpu"))
        parts = pack_evenly(dataset, np.arange(40), 4096)
        for number in range(30):
            torch.manual_seed(number)
            losses[precision] = float(step(parts, StepScalars(1 / 280, 0.003)))
    start = cast(float, np.log(VOCABULARY))
    assert losses["fp32"] < 0.9 * start
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.03)
