"""Fine-tuning copies the tokenizer and the weights of another run, or reports what does not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from regard.data.pairs import Pair
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.nn.network import named_weights
from regard.recipe import Recipe, make_recipe
from regard.storage.run_dir import RunDir
from regard.tasks import TASKS, build_network
from regard.training.fine_tuning import initial_tokenizer, load_initial_weights

MODEL = {"d_model": 16, "heads": 2, "d_ff": 32}
PAIRS = [Pair("a b c", "X Y X")] * 3


def recipe_of(task: str, init_from: Path | None = None, **sections: dict[str, Any]) -> Recipe:
    values: dict[str, Any] = {
        "task": task,
        "data": {"train": {"text": "t"} if TASKS[task].text_only else {"pairs": "p.tsv"}},
        "training": {"init_from": None if init_from is None else str(init_from)},
    }
    # A decoder unlike that of the other tasks, which have the default number of layers and ignore it.
    decoder = {} if "model.decoder_layers" in TASKS.choices[task].ignores else {"decoder_layers": 1}
    values["model"] = {**MODEL, **decoder, **sections.get("model", {})}
    values["tokenizer"] = {"kind": "word", "vocab_size": 60, **sections.get("tokenizer", {})}
    return make_recipe(values, "test")


def run_of(recipe: Recipe, folder: Path) -> Path:
    """A run as training leaves it, with random weights."""
    folder.mkdir()
    run = RunDir(folder)
    tokenizer = initial_tokenizer(recipe, lambda: PAIRS)
    run.write_recipe(recipe)
    tokenizer.save(folder)
    run.write_weights(named_weights(build_network(recipe, tokenizer)))
    return folder


def test_labels_can_start_from_a_run_with_another_target_tokenizer(tmp_path: Path) -> None:
    two = {"target_kind": "char", "shared": False, "vocab_size": 300}
    start = run_of(recipe_of("translation", tokenizer=two), tmp_path / "before")
    recipe = recipe_of("classification", start, tokenizer={"vocab_size": 300})
    tokenizer = initial_tokenizer(recipe, lambda: PAIRS)
    assert "encoder weights from" in load_initial_weights(
        build_network(recipe, tokenizer), recipe, tokenizer
    )


@pytest.mark.parametrize("before", ["masked_lm", "translation"])
@pytest.mark.parametrize("task", ["tagging", "classification"])
def test_tasks_with_labels_copy_the_encoder_and_get_a_new_head(
    before: str, task: str, tmp_path: Path
) -> None:
    start = run_of(recipe_of(before), tmp_path / "before")
    recipe = recipe_of(task, start, model={"dropout": 0.4})
    tokenizer = initial_tokenizer(recipe, lambda: PAIRS)
    assert tokenizer.source.model == (start / "tokenizer.model").read_bytes()
    assert tokenizer.target.decode([[5], [6]]) == ["X", "Y"]
    network = build_network(recipe, tokenizer)
    head = named_weights(network)["projection.weight"].clone()
    message = load_initial_weights(network, recipe, tokenizer)
    own, theirs = named_weights(network), RunDir(start).weights()
    copied = [name for name in own if name.startswith("encoder.")]
    assert all(torch.equal(own[name], theirs[name]) for name in copied)
    assert torch.equal(own["projection.weight"], head)
    assert (
        f"{len(copied)} encoder weights from {start}; randomly initialized: projection" in message
    )


@pytest.mark.parametrize(
    ("before", "task"), [("language_model", "translation"), ("masked_lm", "masked_lm")]
)
def test_other_tasks_copy_all_weights(before: str, task: str, tmp_path: Path) -> None:
    model = {"architecture": "decoder_only"} if before == "language_model" else {}
    start = run_of(recipe_of(before, model=model), tmp_path / "before")
    recipe = recipe_of(task, start, model=model)
    tokenizer = initial_tokenizer(recipe, lambda: PAIRS)
    network = build_network(recipe, tokenizer)
    message = load_initial_weights(network, recipe, tokenizer)
    theirs = RunDir(start).weights()
    assert named_weights(network).keys() == theirs.keys()
    assert all(torch.equal(own, theirs[name]) for name, own in named_weights(network).items())
    assert "randomly" not in message


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"d_model": 32}}, "model.d_model is 16 there, 32 here"),
        ({"model": {"norm": "rms"}}, "model.norm is layer there, rms here"),
        ({"tokenizer": {"normalize": "lower"}}, "tokenizer.normalize is nfc there, lower here"),
    ],
)
def test_a_run_that_does_not_fit_is_refused_with_the_differences(
    sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    start = run_of(recipe_of("masked_lm"), tmp_path / "before")
    with pytest.raises(RegardError, match=f"does not match this recipe: .*{message}"):
        initial_tokenizer(recipe_of("tagging", start, **sections), lambda: PAIRS)


def test_the_first_weight_that_does_not_fit_is_named(tmp_path: Path) -> None:
    start = run_of(recipe_of("masked_lm"), tmp_path / "before")
    recipe = recipe_of("tagging", start)
    tokenizer = initial_tokenizer(recipe, lambda: PAIRS)
    deeper = build_network(recipe_of("tagging", model={"encoder_layers": 7}), tokenizer)
    with pytest.raises(RegardError, match=r"has no weight encoder.layers.6.attention.query"):
        load_initial_weights(deeper, recipe, tokenizer)
    wider = build_network(recipe_of("tagging", model={"d_model": 32}), tokenizer)
    with pytest.raises(
        RegardError, match=r"encoder.embedding.weight .* has shape \[\d+, 16\], but .*32\]"
    ):
        load_initial_weights(wider, recipe, tokenizer)


def test_a_run_whose_tokenizer_has_changed_is_refused(tmp_path: Path) -> None:
    """After the data were prepared, the other run was trained again."""
    recipe = recipe_of("tagging", run_of(recipe_of("masked_lm"), tmp_path / "before"))
    other = Tokenizer.train(recipe.tokenizer, lambda: [Pair("d e", "X Y")], labels=True)
    with pytest.raises(RegardError, match=r"the tokenizer of .*before has changed"):
        load_initial_weights(build_network(recipe, other), recipe, other)


def test_a_missing_run_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match="no such folder"):
        initial_tokenizer(recipe_of("tagging", tmp_path / "absent"), lambda: PAIRS)
