"""Dual conditional cross-entropy."""

from pathlib import Path

import numpy as np
import pytest
import torch

from regard.data.pairs import Pair
from regard.data.token_dataset import TokenDataset, write_dataset
from regard.tasks import Translator
from regard.training.pair_scoring import dual_score, target_entropies


def test_the_formula() -> None:
    forward, backward = np.array([1.0, 2.0, 0.0]), np.array([1.0, 4.0, 0.0])
    assert dual_score(forward, backward) == pytest.approx(np.exp([-1.0, -5.0, 0.0]))


def test_entropies_are_those_of_single_pairs(finished_run: Path, tmp_path: Path) -> None:
    """Padding and the order of batches do not matter."""
    model = Translator.load(finished_run)
    pairs = [
        Pair("The dog sleeps.", "Der Hund schläft."),
        Pair("A cat.", "Eine Katze, die rennt."),
        Pair("x", ""),
    ]
    entropies = []
    for number, some in enumerate([pairs, *([pair] for pair in pairs)]):
        path = tmp_path / f"{number}.arrow"
        write_dataset(path, some, model.tokenizer, None)
        entropies.append(target_entropies(model, TokenDataset(path)))
    assert np.concatenate(entropies[1:]) == pytest.approx(entropies[0], rel=1e-4)
    assert torch.is_grad_enabled()
