"""Every choice that a recipe names learns to copy, through the command line; a new name is tried without being asked.

Each case differs from the defaults by one name, and by what that name needs. The training command itself translates
unseen sequences at the end, with beam search and cached decoding, and writes to the card how many were wrong.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from regard import recipe as recipes
from tests.cli.commands import Done, in_workers, inside, sequences, write, write_recipe

CHOICES: dict[str, Any] = {
    "model.attention.score": recipes.Score,
    "model.attention.weighting": recipes.Weighting,
    "model.attention.encoder": recipes.EncoderPattern,
    "model.attention.decoder": recipes.DecoderPattern,
    "model.attention.cross_attention": recipes.CrossAttentionPattern,
    "model.position": recipes.Position,
    "model.norm": recipes.Norm,
    "model.norm_order": recipes.NormOrder,
    "model.activation": recipes.Activation,
    "training.optimizer": recipes.Optimizer,
}

DEFAULTS = {
    "model.attention.score=scaled",
    "model.attention.weighting=softmax",
    "model.attention.encoder=full",
    "model.attention.decoder=full",
    "model.attention.cross_attention=full",
    "model.position=sinusoidal",
    "model.norm=layer",
    "model.norm_order=pre",
    "model.activation=relu",
    "training.optimizer=adam",
}
"""all of them together are one case"""

ELSEWHERE = {"model.position=tree"}
"""needs parses: test_trees.py"""

LONGER = ["training.steps=600", "training.validate_every=600"]

NEEDS: dict[str, list[str]] = {
    "model.attention.encoder=window": ["model.attention.window_size=2"],
    "model.attention.encoder=linformer": ["model.attention.linformer_k=6", "model.max_length=24"],
    "model.attention.encoder=bigbird": [
        "model.attention.block_size=2",
        "model.attention.global_blocks=1",
    ],
    "model.attention.decoder=window": ["model.attention.window_size=2"],
    "model.attention.cross_attention=linformer": [
        "model.attention.linformer_k=8",
        "model.max_length=24",
        *LONGER,
    ],
    "model.norm=none": ["training.learning_rate=0.003"],
    "model.norm_order=post": ["training.learning_rate=0.003"],
    "training.optimizer=sgd": ["training.learning_rate=1.0"],
    "training.optimizer=momentum": ["training.learning_rate=0.3", *LONGER],
    "training.optimizer=adagrad": ["training.learning_rate=0.1"],
    "training.optimizer=rmsprop": ["training.learning_rate=0.003"],
}
"""what goes with a name"""

BLIND = {"model.position=none", "model.position=index"}
"""to these a text is a bag of words, or nearly so: they learn to sort it"""

MOST_WRONG = 20
"""percent of the sequences; to guess is to have all but one in hundreds wrong"""

CASES = {
    "the defaults": ["model.norm_order=pre"],
    "model.attention.key_value_heads=1": ["model.attention.key_value_heads=1"],
} | {
    case: [case, *NEEDS.get(case, [])]
    for key, names in CHOICES.items()
    for case in (f"{key}={name}" for name in get_args(names))
    if case not in DEFAULTS | ELSEWHERE
}


def write_data(folder: Path, task: Callable[[list[str]], list[str]]) -> Path:
    every = [one for one in sequences(2000, "abcdefgh", range(2, 5)) if len(set(one)) == len(one)]
    for name, some in (("test", every[:100]), ("valid", every[100:120]), ("train", every[120:])):
        write(folder / f"{name}.src", map(" ".join, some))
        write(folder / f"{name}.tgt", (" ".join(task(one)) for one in some))
    names = ("train", "valid", "test")
    return write_recipe(
        folder,
        data={name: {"source": f"{name}.src", "target": f"{name}.tgt"} for name in names}
        | {"clean": {"max_tokens": 20}},
        model={"d_model": 32, "heads": 2, "d_ff": 64},
        training={"steps": 300, "validate_every": 300, "validate_sentences": 4}
        | {"tokens_per_batch": 256, "learning_rate": 0.01, "warmup": 40},
        score={"metrics": ["wer"]},
    )


def learn(folder: Path, case: str) -> tuple[Done, float]:
    """Train, and the share of unseen sequences that came out wrong."""
    recipe = write_data(folder, sorted if case in BLIND else list)
    sets = [word for change in CASES[case] for word in ("--set", change)]
    done = inside("train", recipe, *sets, "--out", "run", cwd=folder)
    if done.returncode:
        return done, 100.0
    (wrong,) = json.loads((folder / "run" / "card.json").read_text())["test"]
    return done, float(wrong["value"])


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Done, float]]:
    return in_workers(
        {case: partial(learn, tmp_path_factory.mktemp("choice"), case) for case in CASES}
    )


def test_every_default_is_a_name() -> None:
    names = {f"{key}={name}" for key, names in CHOICES.items() for name in get_args(names)}
    assert names >= DEFAULTS | ELSEWHERE | NEEDS.keys() | BLIND
    assert {default.rpartition("=")[0] for default in DEFAULTS} == CHOICES.keys()


@pytest.mark.parametrize("case", CASES)
def test_it_learns(case: str, learned: dict[str, tuple[Done, float]]) -> None:
    done, wrong = learned[case]
    assert done.returncode == 0, done.stderr
    assert wrong <= MOST_WRONG, done.stderr
