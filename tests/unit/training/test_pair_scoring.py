"""Dual conditional cross-entropy."""

import json
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from regard.data.pairs import Pair
from regard.data.token_dataset import TokenDataset, write_dataset
from regard.errors import RegardError
from regard.storage.resumable_output import WHOLE, Shard
from regard.tasks import Translator
from regard.training import pair_scoring as module
from regard.training.pair_scoring import PairScorer, dual_score, target_entropies, write_scores


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


@pytest.mark.parametrize("best_first", [True, False])
@pytest.mark.parametrize("shard", [WHOLE, Shard(1, 2), Shard(2, 2)])
def test_scores_are_resumed(
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    best_first: bool,
    shard: Shard,
) -> None:
    monkeypatch.setattr(module, "CHUNK_PAIRS", 4)
    model = Translator.load(finished_run)
    scorer = PairScorer(model, model)
    pairs = [Pair(f"The dog {n}.\t", f"Der Hund {n * n}.") for n in range(23)]

    def written(name: str) -> bytes:
        write_scores(
            scorer, lambda: pairs, tmp_path / name, {"pairs": "x"}, best_first, shard, False
        )
        return (tmp_path / name).read_bytes()

    whole = written("whole.tsv")
    score, scored = PairScorer.score, list[int]()

    def fail_once(self: PairScorer, some: list[Pair]) -> module.Scores:
        scored.append(len(some))
        if len(scored) == 3:
            raise RegardError("killed")
        return score(self, some)

    monkeypatch.setattr(PairScorer, "score", fail_once)
    with pytest.raises(RegardError, match="killed"):
        written("resumed.tsv")
    assert not (tmp_path / "resumed.tsv").exists()
    assert written("resumed.tsv") == whole
    first, last = shard.bounds(23, 4)
    assert sum(scored) - scored[2] == last - first  # only the chunk that failed is scored twice
    assert whole.startswith(b"score\tsource") == (best_first or shard.number == 1)


def test_models_of_other_pairs_are_not_used(tmp_path: Path) -> None:
    def no_pairs() -> NoReturn:
        raise AssertionError("the pairs are there already")

    stored = {"key": {"pairs": "x", "options": [1]}, "recipes": {"forward": {}}}
    file = tmp_path / "recipes.json"
    file.write_text(json.dumps(stored))
    key: dict[str, Any] = {"pairs": "x", "options": (1,)}
    assert module._write_training_data(no_pairs, tmp_path, key) == {"forward": {}}
    with pytest.raises(RegardError, match="trained on other pairs or with other options"):
        module._write_training_data(no_pairs, tmp_path, {**key, "pairs": "y"})
    file.write_text("{}")
    with pytest.raises(RegardError, match="damaged; remove"):
        module._write_training_data(no_pairs, tmp_path, key)
