"""Checkpoints are restored exactly or refused with a reason, and averaged exactly."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from regard.errors import RegardError
from regard.nn.network import copy_weights, named_weights
from regard.nn.transformer import Transformer
from regard.recipe import Recipe
from regard.storage.atomic_files import tensors_checksum
from regard.storage.run_dir import RunDir
from regard.tasks import Translator
from regard.training.checkpoint import (
    CheckpointWriter,
    TrainingState,
    average_checkpoints,
    average_run,
    average_runs,
    averageable_checkpoints,
    checkpoint_files,
    checkpoint_name,
    checkpoint_step,
    delete_checkpoints,
    load_checkpoint,
    load_optimizer_state,
    optimizer_state,
    save_checkpoint,
)
from regard.training.distributed import ProcessGroup
from regard.training.optimizers import OPTIMIZERS

SmallRecipe = Callable[..., Recipe]
STATE = TrainingState(7, 2, 31, 123_456, 9.75, [(3, -12.5, 2.0), (6, 0.1 + 0.2, 1.5)])


def weights(seed: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        "encoder.weight": torch.randn(3, 4),
        "half": torch.randn(5).bfloat16(),
        "scalar": torch.randn(()),
        "transposed": torch.randn(2, 6).T,
    }


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / checkpoint_name(7)
    save_checkpoint(path, STATE, weights(1), weights(2), {"encoder.weight/step": torch.ones(())})
    return path


# Round trip


def test_a_checkpoint_is_restored_exactly(saved: Path) -> None:
    state, groups = load_checkpoint(saved)
    assert state == STATE
    assert_same(groups["model"], weights(1))
    assert_same(groups["ema"], weights(2))
    assert_same(groups["optimizer"], {"encoder.weight/step": torch.ones(())})


def test_a_checkpoint_without_a_moving_average(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "x", TrainingState(), weights(), None, {})
    state, groups = load_checkpoint(tmp_path / "x")
    assert state == TrainingState()
    assert groups["ema"] == {}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_resumes_as_if_never_stopped(
    small_recipe: SmallRecipe, tmp_path: Path, name: str
) -> None:
    training = small_recipe(training={"optimizer": name, "learning_rate": 0.1}).training
    x = torch.randn(8, 4)

    def make() -> tuple[nn.ModuleList, Any, dict[Tensor, str]]:
        model = nn.ModuleList([nn.Linear(4, 3)])
        named: dict[Tensor, str] = {weight: name for name, weight in model.named_parameters()}
        return model, OPTIMIZERS[name](model, training), named

    def step(model: nn.ModuleList, optimizer: Any) -> None:
        optimizer.zero_grad()
        model[0](x).square().sum().backward()
        optimizer.step()

    model, optimizer, named = make()
    for _ in range(3):
        step(model, optimizer)
    save_checkpoint(
        tmp_path / "x",
        TrainingState(3),
        named_weights(model),
        None,
        optimizer_state(optimizer, named),
    )
    step(model, optimizer)

    resumed, other, other_names = make()
    _, groups = load_checkpoint(tmp_path / "x")
    copy_weights(resumed, groups["model"], "x")
    load_optimizer_state(other, other_names, groups["optimizer"])
    step(resumed, other)
    assert_same(dict(resumed.state_dict()), dict(model.state_dict()))


# Damaged files


@pytest.mark.parametrize("fraction", [0, 0.01, 0.3, 0.7, 0.999])
def test_a_truncated_file_is_refused_by_name(saved: Path, fraction: float) -> None:
    content = saved.read_bytes()
    saved.write_bytes(content[: int(fraction * len(content))])
    with pytest.raises(RegardError, match=rf"{saved.name}: not a complete checkpoint"):
        load_checkpoint(saved)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match="nowhere: not a complete checkpoint"):
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
    with pytest.raises(RegardError, match="x: not a complete checkpoint"):
        load_checkpoint(tmp_path / "x")


def test_one_bit_of_a_checkpoint_is_noticed(saved: Path) -> None:
    before = saved.read_bytes()
    end_of_header = 8 + int.from_bytes(before[:8], "little")
    for place in (end_of_header, (end_of_header + len(before)) // 2, len(before) - 1):
        changed = bytearray(before)
        changed[place] ^= 1
        saved.write_bytes(changed)
        with pytest.raises(RegardError, match=r"not a complete checkpoint: .* checksum"):
            load_checkpoint(saved)


def test_equal_tensors_have_equal_checksums_and_others_do_not() -> None:
    tensors = {"a": torch.arange(4.0), "b": torch.tensor(3, dtype=torch.int64)}
    checksum = tensors_checksum(tensors, {"x": 1})
    assert tensors_checksum(dict(reversed(tensors.items())), {"x": 1}) == checksum
    changed: list[dict[str, Tensor]] = [
        {**tensors, "a": torch.arange(4.0).view(2, 2)},
        {**tensors, "a": torch.arange(4.0).view(torch.int32)},
        {"b": tensors["a"], "a": tensors["b"]},
        {"a": tensors["a"]},
        {**tensors, "a": torch.arange(8.0)[::2]},
    ]
    assert all(tensors_checksum(one, {"x": 1}) != checksum for one in changed)
    assert tensors_checksum(tensors, {"x": 2}) != checksum
    transposed = torch.arange(6.0).view(2, 3).T
    assert tensors_checksum({"a": transposed}, {}) == tensors_checksum(
        {"a": transposed.contiguous()}, {}
    )


def test_a_crash_while_writing_leaves_the_old_file_whole(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def crash(_tensors: object, path: Path, _header: object) -> None:
        path.write_bytes(b"half of the new fi")
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", crash)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(saved, TrainingState(8), weights(3), None, {})
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_a_new_file_replaces_the_old_and_leaves_nothing_else(saved: Path) -> None:
    save_checkpoint(saved, TrainingState(8), weights(3), None, {})
    state, groups = load_checkpoint(saved)
    assert state.step == 8
    assert_same(groups["model"], weights(3))
    assert list(saved.parent.iterdir()) == [saved]


def test_a_checkpoint_written_in_a_thread_is_that_of_the_moment(
    saved: Path, tmp_path: Path
) -> None:
    state, tensors = load_checkpoint(saved)
    run = RunDir(tmp_path / "thread")
    run.checkpoints.mkdir(parents=True)
    writer = CheckpointWriter(run, ProcessGroup(0, 1, torch.device("cpu")))
    assert not writer.wait()
    trained = {name: tensor.clone() for name, tensor in tensors["model"].items()}
    writer.start(state, trained, tensors["ema"], tensors["optimizer"])
    state.step += 1  # training goes on
    state.validations.append((state.step, 0.0, 0.0))
    for tensor in trained.values():
        tensor.zero_()
    assert writer.wait()
    assert (run.checkpoints / saved.name).read_bytes() == saved.read_bytes()


def test_a_checkpoint_that_a_thread_cannot_write_is_reported(tmp_path: Path) -> None:
    writer = CheckpointWriter(RunDir(tmp_path / "missing"), ProcessGroup(0, 1, torch.device("cpu")))
    writer.start(TrainingState(), weights(), None, {})
    with pytest.raises((RegardError, OSError), match="missing"):
        writer.wait()
    assert not writer.wait()


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match="cannot be written"):
        save_checkpoint(tmp_path / "none" / "x", TrainingState(), weights(), None, {})


# Files


def test_checkpoints_are_listed_oldest_first_and_nothing_else(tmp_path: Path) -> None:
    steps = [5, 100_000, 20, 1_000_000, 3]
    for step in steps:
        (tmp_path / checkpoint_name(step)).touch()
    for other in ("step-7.safetensors", ".step-000000009.safetensors.12", "step-000000001.tmp"):
        (tmp_path / other).touch()
    found = checkpoint_files(tmp_path)
    assert [checkpoint_step(path) for path in found] == sorted(steps)
    delete_checkpoints(tmp_path, found[-2:])
    assert [checkpoint_step(path) for path in checkpoint_files(tmp_path)] == [100_000, 1_000_000]


# Averages


def save(folder: Path, step: int, values: dict[str, Tensor], ema: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / checkpoint_name(step)
    save_checkpoint(path, TrainingState(step), values, ema, {})
    return path


def test_average_is_the_mean_in_double_precision(tmp_path: Path) -> None:
    torch.manual_seed(1)
    several = [{"w": 10.0 ** torch.randint(-3, 6, (50,)) * torch.randn(50)} for _ in range(5)]
    paths = [save(tmp_path, step, values) for step, values in enumerate(several)]
    mean = np.mean([values["w"].numpy().astype(np.float64) for values in several], axis=0)
    found = average_checkpoints(paths)["w"]
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy(), mean.astype(np.float32))


def test_average_loses_nothing_to_cancellation(tmp_path: Path) -> None:
    paths = [save(tmp_path, n, {"w": torch.tensor([v])}) for n, v in enumerate([1e9, 1.5, -1e9])]
    assert average_checkpoints(paths)["w"].tolist() == [0.5]


def test_average_takes_the_moving_average_where_there_is_one(tmp_path: Path) -> None:
    one = save(tmp_path, 1, {"w": torch.tensor([100.0])}, {"w": torch.tensor([1.0])})
    two = save(tmp_path, 2, {"w": torch.tensor([3.0])})
    assert average_checkpoints([one, two])["w"].tolist() == [2.0]


def test_checkpoints_of_two_models_cannot_be_averaged(tmp_path: Path) -> None:
    one, two = (save(tmp_path, n, {name: torch.ones(1)}) for n, name in enumerate("ab"))
    with pytest.raises(
        RegardError, match=rf"{two.name}: its weights differ in name from those of .*{one.name}"
    ):
        average_checkpoints([one, two])


@pytest.fixture
def run_with_checkpoints(run_folder: Path) -> Path:
    """A run with checkpoints at steps 10, 20 and 30, as scheduled by its recipe."""
    run = RunDir(run_folder)
    weights = run.weights()
    recipe = run.recipe()
    training = recipe.training.model_copy(update={"checkpoint_every": 10})
    run.write_recipe(recipe.model_copy(update={"training": training}))
    run.write_card({})  # the card names the recipe by hash
    for step in (10, 20, 30):
        save(run.checkpoints, step, {name: step * tensor for name, tensor in weights.items()})
    return run_folder


@pytest.mark.parametrize(("last", "steps"), [(None, [10, 20, 30]), (2, [20, 30]), (1, [30])])
def test_the_average_of_a_run_is_a_usable_run_folder(
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


def write_run(folder: Path, finished: Path, factor: float, **training: object) -> Path:
    """A copy of a run with other weights and training settings."""
    run = RunDir(shutil.copytree(finished, folder))
    recipe, weights = run.recipe(), run.weights()
    changed = recipe.training.model_copy(update=training)
    run.write_recipe(recipe.model_copy(update={"training": changed}))
    run.write_weights({name: factor * tensor for name, tensor in weights.items()})
    run.write_card({})
    return folder


def test_runs_that_started_from_the_same_weights_are_averaged(
    finished_run: Path, tmp_path: Path
) -> None:
    one, two, other = (
        write_run(tmp_path / f"{seed}", finished_run, factor, init_from=start, seed=seed)
        for factor, start, seed in ((1, "runs/start", 1), (4, "runs/start", 2), (1, None, 3))
    )
    average_runs([one, two], tmp_path / "soup")
    soup, weights = RunDir(tmp_path / "soup").weights(), RunDir(finished_run).weights()
    for name, tensor in weights.items():
        torch.testing.assert_close(soup[name], 2.5 * tensor)
    assert RunDir(tmp_path / "soup").card()["averaged_from"] == f"{one}, {two}"
    assert len(Translator.load(tmp_path / "soup", "cpu").translate(["ein Hund"])) == 1
    with pytest.raises(RegardError, match=r"3: it did not start from the same weights as .*1"):
        average_runs([one, other], tmp_path / "bad")
    with pytest.raises(RegardError, match="soup: the folder is not empty"):
        average_runs([one, two], tmp_path / "soup")
    assert not (tmp_path / "bad").exists()


def test_averaging_a_run_overwrites_nothing(run_with_checkpoints: Path, tmp_path: Path) -> None:
    out = tmp_path / "precious"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(RegardError, match="precious: the folder is not empty"):
        average_run(run_with_checkpoints, out, None)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    with pytest.raises(RegardError, match="the folder is not empty"):
        average_run(run_with_checkpoints, run_with_checkpoints, None)


def test_a_checkpoint_written_by_an_interruption_is_not_averaged(
    run_with_checkpoints: Path, tmp_path: Path
) -> None:
    run = RunDir(run_with_checkpoints)
    save(run.checkpoints, 35, {name: 1e6 * tensor for name, tensor in run.weights().items()})
    assert average_run(run_with_checkpoints, tmp_path / "all", None) == [10, 20, 30]
    assert average_run(run_with_checkpoints, tmp_path / "last", 1) == [30]
    with pytest.raises(RegardError, match=r"there are only 3 \(not counting step 35, saved by an"):
        average_run(run_with_checkpoints, tmp_path / "four", 4)


@pytest.mark.parametrize(("average", "steps"), [("best", [10, 20, 35]), ("last", [10, 20])])
def test_a_checkpoint_validated_at_a_time_limit_counts_among_the_best(
    small_recipe: SmallRecipe, tmp_path: Path, average: str, steps: list[int]
) -> None:
    training = small_recipe(training={"checkpoint_every": 10, "average": average}).training
    for step in (10, 20):
        save(tmp_path, step, {"w": torch.ones(1)})
    state = TrainingState(35, validations=[(35, 1.0, 1.0)])
    save_checkpoint(tmp_path / checkpoint_name(35), state, {"w": torch.ones(1)}, None, {})
    found = averageable_checkpoints(tmp_path, training)
    assert [checkpoint_step(path) for path in found] == steps
    assert averageable_checkpoints(tmp_path, training, state) == found


def test_more_checkpoints_than_there_are_cannot_be_averaged(
    run_with_checkpoints: Path, run_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(RegardError, match=r"cannot average 4 checkpoints: there are only 3$"):
        average_run(run_with_checkpoints, tmp_path / "out", 4)
    delete_checkpoints(RunDir(run_folder).checkpoints, [])
    with pytest.raises(RegardError, match=r"cannot average 1 checkpoint: there are only 0$"):
        average_run(run_folder, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


# Weights of a network


@pytest.mark.parametrize("tied", [True, False])
def test_weights_can_be_copied_to_another_network(small_recipe: SmallRecipe, tied: bool) -> None:
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
        RegardError,
        match=r"m\.x: .*encoder\.embedding\.weight has shape \[30, 16\], expected \[20, 16\]",
    ):
        copy_weights(network, named_weights(others), "m.x")
    fewer = named_weights(network)
    fewer["surplus"] = fewer.pop("encoder.layers.0.attention.key.weight")
    with pytest.raises(
        RegardError,
        match=r"encoder\.layers\.0\.attention\.key\.weight is missing; surplus is unknown",
    ):
        copy_weights(network, fewer, "m.x")
