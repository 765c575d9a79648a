"""The batches of training: how processes share them."""

from typing import Any, cast

import numpy as np
import pytest
import torch

from regard.inference.precision import unsupported_reason
from regard.recipe import PRESETS, make_recipe
from regard.training.data_loader import TrainingDataLoader, unpackable_choices
from regard.training.distributed import ProcessGroup, share_size
from tests.unit.training.test_packed_batches import dataset_of

CPU = torch.device("cpu")


def test_gpu_processes_pack_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every label of a batch is in a packed row of exactly one process, and all rows have one shape."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    dataset = dataset_of([(3, 4), (7, 5), (2, 2), (6, 9), (4, 4), (8, 8), (200, 100)] * 9)
    sections = {"data": {"train": {"pairs": "x"}}, "training": {"batching": "packed"}}
    shapes, counts = set(), []
    for rank in range(3):
        no_data, no_encoder = cast(Any, None), cast(Any, None)
        loader = TrainingDataLoader(
            make_recipe(sections, "test"), no_data, no_encoder, ProcessGroup(rank, 3, CPU)
        )
        loader.packs_on_gpu = loader.balances_tokens = True
        loader.packed_size = cast(Any, None)
        loader.packed_share_size = share_size(
            [np.arange(7)], dataset.source_lengths, dataset.target_lengths, 3
        )
        batches = loader.collate(dataset, np.arange(63), micro_batches=1)
        assert len(batches) > 1, "a share that is too large for one row"
        shapes |= {(batch.source.shape, batch.target.shape) for batch in batches}
        counts.append(sum(batch.tokens for batch in batches))
        few = loader.collate(dataset, np.arange(1), micro_batches=1)
        assert len(few) == (rank == 0), "no row is left for the other processes"
    assert len(shapes) == 1
    assert sum(counts) == int(dataset.target_lengths.sum()) + 63


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_supports_packed_rows_and_packed_weights(preset: str) -> None:
    """Otherwise it would be trained and used in a slower way, which only a line of the output tells."""
    sections = {"data": {"train": {"pairs": "x"}}, "model": {"preset": preset}}
    recipe = make_recipe(sections, "test")
    assert unpackable_choices(recipe) == []
    assert unsupported_reason(recipe.model) is None
