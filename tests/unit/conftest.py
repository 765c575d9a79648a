"""Small random runs to exchange."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.marks import END
from regard.model import Translator, weights_of
from regard.recipe import Recipe
from regard.run import Run
from regard.text.corpus import Pair
from regard.text.grammar import generate
from regard.text.tokenizer import Tokenizer

MakeRun = Callable[..., Path]


@pytest.fixture(scope="session")
def pairs() -> list[Pair]:
    return list(generate("train", 400))


@pytest.fixture(scope="session")
def make_run(
    tmp_path_factory: pytest.TempPathFactory,
    small_recipe: Callable[..., Recipe],
    pairs: list[Pair],
) -> MakeRun:
    """Makes a bundle with random weights: sharp enough that its translations differ, all biases and gains in use."""
    known: dict[str, Tokenizer] = {}

    def make(**sections: dict[str, Any]) -> Path:
        sections = {"tokenizer": {"size": 420}, **sections}
        recipe = small_recipe(**sections)
        key = recipe.tokenizer.model_dump_json()
        if key not in known:
            known[key] = Tokenizer.train(recipe.tokenizer, lambda: pairs)
        run = Run(tmp_path_factory.mktemp("exchange") / "run")
        run.folder.mkdir()
        run.write_recipe(recipe)
        known[key].save(run.folder)
        torch.manual_seed(1)
        network = Translator.build(recipe, known[key])
        with torch.no_grad():
            for name, weight in network.named_parameters():
                weight.add_(torch.randn_like(weight) * (0.4 if "layers" in name else 0.2))
            for buffer in network.buffers():
                buffer.add_(torch.rand_like(buffer) * 0.5)
            if network.projection.bias is not None:
                ids = torch.randint(5, 300, (40, 12))
                logits = network.eval()(ids, ids).flatten(0, 1)
                behind = logits.max(-1).values - logits[:, END]
                bias = network.projection.bias
                bias[END] += behind.quantile(0.2)  # else it would hardly ever come
                # As in a trained model; CTranslate2 shares out the probability of what may not be said.
                bias[list(known[key].target.never_said)] = -50.0
        run.write_weights(weights_of(network))
        run.write_card({"note": "for tests"})
        return run.folder

    return make
