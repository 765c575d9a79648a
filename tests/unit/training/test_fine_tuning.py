"""A training that starts from another run takes its tokenizer and every weight that fits, or says what does not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from regard.data.corpus import Pair
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.nn.state_dict import named_weights
from regard.recipe import Recipe, Task, make_recipe
from regard.storage.run_dir import RunDir
from regard.tasks import build_network
from regard.training.fine_tuning import initial_tokenizer, load_initial_weights

MODEL = {"d_model": 16, "heads": 2, "d_ff": 32, "decoder_layers": 1}
PAIRS = [Pair("a b c", "X Y X")] * 3


def recipe_of(task: Task, start: Path | None = None, **sections: dict[str, Any]) -> Recipe:
    alone = task in ("mask", "continue")
    values: dict[str, Any] = {
        "task": task,
        "data": {"train": {"text": "t"} if alone else {"pairs": "p.tsv"}},
        "training": {"init_from": None if start is None else str(start)},
    }
    values["model"] = {**MODEL, **sections.get("model", {})}
    values["tokenizer"] = {"kind": "word", "vocab_size": 60, **sections.get("tokenizer", {})}
    return make_recipe(values, "test")


def run_of(recipe: Recipe, folder: Path) -> Path:
    """A run as training leaves it, its weights random."""
    folder.mkdir()
    run = RunDir(folder)
    tokenizer = initial_tokenizer(recipe, lambda: PAIRS)
    run.write_recipe(recipe)
    tokenizer.save(folder)
    run.write_weights(named_weights(build_network(recipe, tokenizer)))
    return folder


def test_labels_start_from_a_run_whose_target_was_cut_in_another_way(tmp_path: Path) -> None:
    two = {"target_kind": "char", "shared": False, "vocab_size": 300}
    start = run_of(recipe_of("translate", tokenizer=two), tmp_path / "before")
    recipe = recipe_of("classify", start, tokenizer={"vocab_size": 300})
    tokenizer = initial_tokenizer(recipe, lambda: PAIRS)
    assert "of the encoder taken" in load_initial_weights(
        build_network(recipe, tokenizer), recipe, tokenizer
    )


@pytest.mark.parametrize("before", ["mask", "translate"])
@pytest.mark.parametrize("task", ["tag", "classify"])
def test_labels_take_the_encoder_and_begin_with_a_new_head(
    before: Task, task: Task, tmp_path: Path
) -> None:
    start = run_of(recipe_of(before), tmp_path / "before")
    recipe = recipe_of(task, start, model={"dropout": 0.4, "decoder_layers": 3})
    tokenizer = initial_tokenizer(recipe, lambda: PAIRS)
    assert tokenizer.source.model == (start / "tokenizer.model").read_bytes()
    assert tokenizer.target.decode([[5], [6]]) == ["X", "Y"]
    network = build_network(recipe, tokenizer)
    head = named_weights(network)["projection.weight"].clone()
    said = load_initial_weights(network, recipe, tokenizer)
    own, theirs = named_weights(network), RunDir(start).weights()
    taken = [name for name in own if name.startswith("encoder.")]
    assert all(torch.equal(own[name], theirs[name]) for name in taken)
    assert torch.equal(own["projection.weight"], head)
    assert f"{len(taken)} weights of the encoder taken from {start}; new: projection" in said


@pytest.mark.parametrize(("before", "task"), [("continue", "translate"), ("mask", "mask")])
def test_other_tasks_take_everything(before: Task, task: Task, tmp_path: Path) -> None:
    model = {"architecture": "decoder_only"} if before == "continue" else {}
    start = run_of(recipe_of(before, model=model), tmp_path / "before")
    recipe = recipe_of(task, start, model=model)
    tokenizer = initial_tokenizer(recipe, lambda: PAIRS)
    network = build_network(recipe, tokenizer)
    said = load_initial_weights(network, recipe, tokenizer)
    theirs = RunDir(start).weights()
    assert named_weights(network).keys() == theirs.keys()
    assert all(torch.equal(own, theirs[name]) for name, own in named_weights(network).items())
    assert "new" not in said


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"d_model": 32}}, "model.d_model is 16 there, 32 here"),
        ({"model": {"norm": "rms"}}, "model.norm is layer there, rms here"),
        ({"tokenizer": {"normalize": "lower"}}, "tokenizer.normalize is nfc there, lower here"),
    ],
)
def test_another_shape_is_refused_with_what_differs(
    sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    start = run_of(recipe_of("mask"), tmp_path / "before")
    with pytest.raises(RegardError, match=f"of another shape: .*{message}"):
        initial_tokenizer(recipe_of("tag", start, **sections), lambda: PAIRS)


def test_the_first_weight_that_does_not_fit_is_named(tmp_path: Path) -> None:
    start = run_of(recipe_of("mask"), tmp_path / "before")
    recipe = recipe_of("tag", start)
    tokenizer = initial_tokenizer(recipe, lambda: PAIRS)
    deeper = build(recipe_of("tag", model={"encoder_layers": 7}), tokenizer)
    with pytest.raises(RegardError, match=r"has no weight encoder.layers.6.attention.query"):
        load_initial_weights(deeper, recipe, tokenizer)
    wider = build(recipe_of("tag", model={"d_model": 32}), tokenizer)
    with pytest.raises(
        RegardError, match=r"encoder.embedding.weight .* is \[\d+, 16\], here .*32\]"
    ):
        load_initial_weights(wider, recipe, tokenizer)


def test_a_run_whose_tokenizer_is_another_by_now_is_refused(tmp_path: Path) -> None:
    """The text was prepared, and before it was learned from, the other run was trained anew."""
    recipe = recipe_of("tag", run_of(recipe_of("mask"), tmp_path / "before"))
    other = Tokenizer.train(recipe.tokenizer, lambda: [Pair("d e", "X Y")], labels=True)
    with pytest.raises(RegardError, match="before has another tokenizer"):
        load_initial_weights(build_network(recipe, other), recipe, other)


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match="no such folder"):
        initial_tokenizer(recipe_of("tag", tmp_path / "absent"), lambda: PAIRS)
