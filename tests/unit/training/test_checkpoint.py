"""Checkpoints come back exactly, or not at all with the reason; and their mean is the mean."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from regard.errors import RegardError
from regard.nn.state_dict import copy_weights, named_weights
from regard.nn.transformer import Transformer
from regard.recipe import Optimizer, Recipe
from regard.storage.run_dir import RunDir
from regard.tasks import Translator
from regard.training.checkpoint import (
    Progress,
    average,
    average_run,
    checkpoint_files,
    checkpoint_name,
    discard,
    load_checkpoint,
    moments_of,
    put_moments,
    save_checkpoint,
    step_of,
)
from regard.training.optimizers import OPTIMIZERS

SmallRecipe = Callable[..., Recipe]
PROGRESS = Progress(7, 2, 31, 123_456, 9.75, [(3, -12.5, 2.0), (6, 0.1 + 0.2, 1.5)])


def weights(seed: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        "encoder.weight": torch.randn(3, 4),
        "half": torch.randn(5).bfloat16(),
        "scalar": torch.randn(()),
        "transposed": torch.randn(2, 6).T,
    }


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / checkpoint_name(7)
    save_checkpoint(path, PROGRESS, weights(1), weights(2), {"encoder.weight/step": torch.ones(())})
    return path


# Round trip


def test_all_comes_back_exactly(saved: Path) -> None:
    progress, groups = load_checkpoint(saved)
    assert progress == PROGRESS
    assert_same(groups["model"], weights(1))
    assert_same(groups["average"], weights(2))
    assert_same(groups["optimizer"], {"encoder.weight/step": torch.ones(())})


def test_without_a_moving_average_there_is_none(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "x", Progress(), weights(), None, {})
    progress, groups = load_checkpoint(tmp_path / "x")
    assert progress == Progress()
    assert groups["average"] == {}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_as_if_never_stopped(
    small_recipe: SmallRecipe, tmp_path: Path, name: Optimizer
) -> None:
    training = small_recipe(training={"optimizer": name, "learning_rate": 0.1}).training
    x = torch.randn(8, 4)

    def make() -> tuple[nn.Linear, Any, dict[Tensor, str]]:
        model = nn.Linear(4, 3)
        named: dict[Tensor, str] = {weight: name for name, weight in model.named_parameters()}
        return model, OPTIMIZERS[name](model.parameters(), training), named

    def learn(model: nn.Linear, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    model, optimizer, named = make()
    for _ in range(3):
        learn(model, optimizer)
    save_checkpoint(
        tmp_path / "x", Progress(3), named_weights(model), None, moments_of(optimizer, named)
    )
    learn(model, optimizer)

    again, other, its_names = make()
    _, groups = load_checkpoint(tmp_path / "x")
    copy_weights(again, groups["model"], "x")
    put_moments(other, its_names, groups["optimizer"])
    learn(again, other)
    assert_same(dict(again.state_dict()), dict(model.state_dict()))


# Damage


@pytest.mark.parametrize("share", [0, 0.01, 0.3, 0.7, 0.999])
def test_a_truncated_file_is_refused_by_name(saved: Path, share: float) -> None:
    content = saved.read_bytes()
    saved.write_bytes(content[: int(share * len(content))])
    with pytest.raises(RegardError, match=rf"{saved.name}: not a whole checkpoint"):
        load_checkpoint(saved)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match="nowhere: not a whole checkpoint"):
        load_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "header",
    [
        {"progress": "{"},
        {"other": "x"},
        None,
        {"progress": "[]"},
        {"progress": '{"step": 1}'},
        {"progress": '{"step": 1, "validations": [], "new": 3}'},
    ],
)
def test_another_safetensors_file_is_refused_by_name(
    tmp_path: Path, header: dict[str, str] | None
) -> None:
    save_file({"model.x": torch.ones(2)}, tmp_path / "x", header)
    with pytest.raises(RegardError, match="x: not a whole checkpoint"):
        load_checkpoint(tmp_path / "x")


def test_a_crash_while_writing_leaves_the_old_file_whole(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def crash(_tensors: object, path: Path, _header: object) -> None:
        path.write_bytes(b"half of the new fi")
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", crash)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(saved, Progress(8), weights(3), None, {})
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_a_new_file_replaces_the_old_and_leaves_nothing_else(saved: Path) -> None:
    save_checkpoint(saved, Progress(8), weights(3), None, {})
    progress, groups = load_checkpoint(saved)
    assert progress.step == 8
    assert_same(groups["model"], weights(3))
    assert list(saved.parent.iterdir()) == [saved]


def test_a_folder_that_cannot_be_written_is_an_error_for_the_user(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match="cannot be written"):
        save_checkpoint(tmp_path / "none" / "x", Progress(), weights(), None, {})


# Files


def test_checkpoints_are_listed_oldest_first_and_nothing_else(tmp_path: Path) -> None:
    steps = [5, 100_000, 20, 1_000_000, 3]
    for step in steps:
        (tmp_path / checkpoint_name(step)).touch()
    for other in ("step-7.safetensors", ".step-000000009.safetensors.12", "step-000000001.tmp"):
        (tmp_path / other).touch()
    found = checkpoint_files(tmp_path)
    assert [step_of(path) for path in found] == sorted(steps)
    discard(found, found[-2:])
    assert [step_of(path) for path in checkpoint_files(tmp_path)] == [100_000, 1_000_000]


# Averages


def save(folder: Path, step: int, values: dict[str, Tensor], moving: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / checkpoint_name(step)
    save_checkpoint(path, Progress(step), values, moving, {})
    return path


def test_average_is_the_mean_in_double_precision(tmp_path: Path) -> None:
    torch.manual_seed(1)
    several = [{"w": 10.0 ** torch.randint(-3, 6, (50,)) * torch.randn(50)} for _ in range(5)]
    paths = [save(tmp_path, step, values) for step, values in enumerate(several)]
    mean = np.mean([values["w"].numpy().astype(np.float64) for values in several], axis=0)
    found = average(paths)["w"]
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy(), mean.astype(np.float32))


def test_average_loses_nothing_to_cancellation(tmp_path: Path) -> None:
    paths = [save(tmp_path, n, {"w": torch.tensor([v])}) for n, v in enumerate([1e9, 1.5, -1e9])]
    assert average(paths)["w"].tolist() == [0.5]


def test_average_takes_the_moving_average_where_there_is_one(tmp_path: Path) -> None:
    one = save(tmp_path, 1, {"w": torch.tensor([100.0])}, {"w": torch.tensor([1.0])})
    two = save(tmp_path, 2, {"w": torch.tensor([3.0])})
    assert average([one, two])["w"].tolist() == [2.0]


def test_checkpoints_of_two_models_have_no_average(tmp_path: Path) -> None:
    one, two = (save(tmp_path, n, {name: torch.ones(1)}) for n, name in enumerate("ab"))
    with pytest.raises(RegardError, match=rf"{two.name}: other weights than .*{one.name}"):
        average([one, two])


@pytest.fixture
def run_with_checkpoints(run_folder: Path) -> Path:
    run = RunDir(run_folder)
    whole = run.weights()
    for step in (10, 20, 30):
        save(run.checkpoints, step, {name: step * tensor for name, tensor in whole.items()})
    return run_folder


@pytest.mark.parametrize(("last", "steps"), [(None, [10, 20, 30]), (2, [20, 30]), (1, [30])])
def test_average_of_a_run_is_a_bundle_to_use(
    run_with_checkpoints: Path, tmp_path: Path, last: int | None, steps: list[int]
) -> None:
    out = tmp_path / "deep" / "averaged"
    assert average_run(run_with_checkpoints, out, last) == steps
    old, new = RunDir(run_with_checkpoints), RunDir(out)
    assert new.recipe() == old.recipe()
    assert new.card()["averaged_steps"] == steps
    factor = sum(steps) / len(steps)
    for name, tensor in old.weights().items():
        torch.testing.assert_close(new.weights()[name], factor * tensor)
    assert len(Translator.load(out, "cpu").translate(["ein Hund"])) == 1
    assert not new.checkpoints.exists()


def test_average_of_a_run_overwrites_nothing(run_with_checkpoints: Path, tmp_path: Path) -> None:
    out = tmp_path / "precious"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(RegardError, match="precious: not empty"):
        average_run(run_with_checkpoints, out, None)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    with pytest.raises(RegardError, match="not empty"):
        average_run(run_with_checkpoints, run_with_checkpoints, None)


def test_more_checkpoints_than_there_are_cannot_be_averaged(
    run_with_checkpoints: Path, run_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(RegardError, match="3 checkpoints are kept there, 4 asked for"):
        average_run(run_with_checkpoints, tmp_path / "out", 4)
    discard(checkpoint_files(RunDir(run_folder).checkpoints), [])
    with pytest.raises(RegardError, match="0 checkpoints are kept there, 1 asked for"):
        average_run(run_folder, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


# Weights into a network


@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_a_network_go_into_another(small_recipe: SmallRecipe, tied: bool) -> None:
    section = small_recipe(model={"tie_embeddings": tied, "tie_output": tied}).model
    one, two = (Transformer(section, 20, 20) for _ in range(2))
    named = named_weights(one)
    assert sum(tensor.numel() for tensor in named.values()) == sum(
        weight.numel() for weight in one.parameters()
    )
    copy_weights(two, named, "x")
    source, target = torch.randint(1, 20, (2, 5)), torch.randint(1, 20, (2, 4))
    assert torch.equal(one.eval()(source, target), two.eval()(source, target))


def test_weights_that_do_not_fit_are_refused_and_named(small_recipe: SmallRecipe) -> None:
    network = Transformer(small_recipe().model, 20, 20)
    others = Transformer(small_recipe().model, 30, 30)
    with pytest.raises(
        RegardError, match=r"m\.x: .*encoder\.embedding\.weight is \[30, 16\], not \[20, 16\]"
    ):
        copy_weights(network, named_weights(others), "m.x")
    fewer = named_weights(network)
    fewer["surplus"] = fewer.pop("encoder.layers.0.attention.key.weight")
    with pytest.raises(
        RegardError, match=r"no encoder\.layers\.0\.attention\.key\.weight; unknown surplus"
    ):
        copy_weights(network, fewer, "m.x")
