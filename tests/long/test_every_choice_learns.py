"""Every registered component learns to copy, through the command line; new components are tested automatically.

Each case differs from the defaults by one choice and the settings it needs. Training itself translates unseen sequences
at the end, with beam search and cached decoding, and writes the error rate to the card.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from regard.recipe.registry import allowed_names
from tests.cli.commands import Done, in_workers, inside, sequences, write, write_recipe

KEYS = (
    "model.attention.score",
    "model.attention.weighting",
    "model.attention.encoder",
    "model.attention.decoder",
    "model.attention.cross_attention",
    "model.position",
    "model.norm",
    "model.norm_order",
    "model.residual",
    "model.activation",
    "training.optimizer",
)
CHOICES = {key: allowed_names(key) for key in KEYS}

DEFAULTS = {
    "model.attention.score=scaled_dot_product",
    "model.attention.weighting=softmax",
    "model.attention.encoder=full",
    "model.attention.decoder=full",
    "model.attention.cross_attention=full",
    "model.position=sinusoidal",
    "model.norm=layer",
    "model.norm_order=pre",
    "model.residual=add",
    "model.activation=relu",
    "training.optimizer=adam",
}
"""together one case"""

TESTED_ELSEWHERE = {"model.position=tree", "model.residual=none"}
"""needs parses: test_trees_end_to_end.py; does not learn, which is its purpose: docs/lab/residual-connections.md"""

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
    "model.norm=none": ["model.norm_order=post", "training.learning_rate=0.003"],
    "model.norm_order=post": ["training.learning_rate=0.003"],
    "training.optimizer=sgd": ["training.learning_rate=1.0"],
    "training.optimizer=momentum": ["training.learning_rate=0.3", *LONGER],
    "training.optimizer=adagrad": ["training.learning_rate=0.1"],
    "training.optimizer=rmsprop": ["training.learning_rate=0.003"],
}
"""further settings that a choice needs"""

ORDER_BLIND = {"model.position=none", "model.position=index"}
"""to these a text is a bag of words, or nearly so: they learn to sort instead"""

MAX_ERROR_RATE = 20
"""percent of the sequences; guessing gets all but one in hundreds wrong"""

CASES = {
    "the defaults": ["model.norm_order=pre"],
    "model.attention.key_value_heads=1": ["model.attention.key_value_heads=1"],
} | {
    case: [case, *NEEDS.get(case, [])]
    for key, names in CHOICES.items()
    for case in (f"{key}={name}" for name in names)
    if case not in DEFAULTS | TESTED_ELSEWHERE
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
        evaluation={"metrics": ["wer"]},
    )


def learn(folder: Path, case: str) -> tuple[Done, float]:
    """Train, and return the percentage of errors on unseen sequences."""
    recipe = write_data(folder, sorted if case in ORDER_BLIND else list)
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


def test_all_settings_name_registered_choices() -> None:
    names = {f"{key}={name}" for key, names in CHOICES.items() for name in names}
    assert names >= DEFAULTS | TESTED_ELSEWHERE | NEEDS.keys() | ORDER_BLIND
    assert {default.rpartition("=")[0] for default in DEFAULTS} == CHOICES.keys()


@pytest.mark.parametrize("case", CASES)
def test_choice_learns(case: str, learned: dict[str, tuple[Done, float]]) -> None:
    done, wrong = learned[case]
    assert done.returncode == 0, done.stderr
    assert wrong <= MAX_ERROR_RATE, done.stderr
