"""The attention mask: padding, causal attention, packed rows, and queries that may attend to nothing."""

import torch

from regard.nn.attention_mask import AttentionMask, AttentionSpans, unmask_empty_rows


def test_mask_truth_table() -> None:
    non_pad = torch.tensor([[True, True, False], [True, False, False]])
    cpu = torch.device("cpu")
    assert AttentionMask().matrix(3, 3, cpu) is None
    padding = AttentionMask(non_pad).matrix(3, 3, cpu)
    causal = AttentionMask(causal=True).matrix(3, 3, cpu)
    both = AttentionMask(non_pad, causal=True).matrix(3, 3, cpu)
    assert padding is not None
    assert causal is not None
    assert both is not None
    assert padding.tolist() == [[[[True, True, False]]], [[[True, False, False]]]]
    lower = [[True, False, False], [True, True, False], [True, True, True]]
    assert causal.tolist() == [[lower]]
    assert both.tolist() == [
        [[[True, False, False], [True, True, False], [True, True, False]]],
        [[[True, False, False], [True, False, False], [True, False, False]]],
    ]
    # With fewer queries than keys, the queries are the last positions.
    newest = AttentionMask(causal=True).matrix(2, 3, cpu)
    assert newest is not None
    assert newest.tolist() == [[[[True, True, False], [True, True, True]]]]
    assert AttentionMask(causal=True).matrix(1, 3, cpu) is None


def test_spans_of_a_packed_row() -> None:
    """Two sentences of 2 and 3 tokens in one row; causal attention stays within a sentence."""
    start, end = torch.tensor([[0, 0, 2, 2, 2]]), torch.tensor([[2, 2, 5, 5, 5]])
    position = torch.arange(5)[None]
    spans = AttentionSpans(start, position + 1, position, end)
    matrix = AttentionMask(spans=spans).matrix(5, 5, torch.device("cpu"))
    assert matrix is not None
    assert matrix.int().tolist() == [
        [[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]]
    ]


def test_a_query_that_may_attend_to_nothing_attends_to_everything() -> None:
    allowed = torch.tensor([[[[False, False], [True, False]]]])
    assert unmask_empty_rows(allowed).tolist() == [[[[True, True], [True, False]]]]
