"""Run folders: files that belong together are checked against each other, and written atomically."""

import json
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from regard.errors import RegardError
from regard.recipe import Recipe, make_recipe
from regard.storage.atomic_files import read_metadata, write_atomic, write_text
from regard.storage.run_dir import RunDir, sha256
from regard.tasks import Translator

SmallRecipe = Callable[..., Recipe]
FILES = ["recipe.yaml", "tokenizer.model", "model.safetensors"]


def corrupt(path: Path) -> None:
    """Change one byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# Bundles


def test_a_bundle_is_four_files_and_loads(run_folder: Path) -> None:
    assert sorted(path.name for path in run_folder.iterdir()) == sorted([*FILES, "card.json"])
    assert len(Translator.load(run_folder, "cpu").translate(["ein Hund", ""])) == 2


def test_the_recipe_round_trips(small_recipe: SmallRecipe, tmp_path: Path) -> None:
    recipe = small_recipe(
        data={"train": {"pairs": "Wörter 词.tsv"}}, training={"learning_rate": 1e-7}
    )
    run = RunDir(tmp_path)
    run.write_recipe(recipe)
    assert run.recipe() == recipe


def test_runs_written_by_earlier_versions_can_be_opened(tmp_path: Path) -> None:
    """A new key in the sections model and tokenizer must not change the hash of a recipe that does not set it."""
    run = RunDir(tmp_path)
    run.write_recipe(make_recipe({"data": {"train": {"pairs": "x.tsv"}}}, "test"))
    run.write_weights({"weight": torch.zeros(1)})
    with safe_open(run.weights_file, "pt") as file:
        metadata = read_metadata(file)
    earlier = "25ae666b08bdc3595fa45b377c790897a14ac3976ef34808cd54060c04dffaa4"
    assert metadata.pop("sha256")
    assert metadata == {"recipe.yaml": earlier}


def test_the_card_names_every_file_by_hash(run_folder: Path) -> None:
    card = RunDir(run_folder).card()
    assert card["note"] == "for tests"
    assert card["files"] == {name: sha256(run_folder / name) for name in FILES}


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_is_refused_by_name(run_folder: Path, name: str) -> None:
    corrupt(run_folder / name)
    with pytest.raises(RegardError, match=rf"{name}: not the file that card\.json was written for"):
        RunDir(run_folder).weights()


WORDS = {"tokenizer": {"kind": "word", "vocab_size": 60}}  # as in the run


def test_weights_without_a_card_name_their_tokenizer(run_folder: Path) -> None:
    (run_folder / "card.json").unlink()
    assert RunDir(run_folder).weights()
    corrupt(run_folder / "tokenizer.model")
    with pytest.raises(
        RegardError, match=r"tokenizer\.model: not the file that model\.safetensors"
    ):
        RunDir(run_folder).weights()


@pytest.mark.parametrize(
    ("sections", "compatible"),
    [
        ({"decoding": {"beam": 2}, "training": {"steps": 7}, **WORDS}, True),
        ({"model": {"norm_order": "pre"}, **WORDS}, False),
        ({"model": {"residual": "none"}, **WORDS}, False),
    ],
)
def test_weights_without_a_card_name_the_model_of_their_recipe(
    small_recipe: SmallRecipe,
    run_folder: Path,
    sections: dict[str, dict[str, Any]],
    compatible: bool,
) -> None:
    run = RunDir(run_folder)
    run.card_file.unlink()
    run.write_recipe(small_recipe(**sections))
    if compatible:
        assert run.weights()
    else:
        with pytest.raises(RegardError, match=r"recipe\.yaml: not the file that model"):
            run.weights()


def test_weights_of_another_run_are_refused(
    small_recipe: SmallRecipe, run_folder: Path, tmp_path: Path
) -> None:
    other = RunDir(tmp_path / "other")
    other.folder.mkdir()
    other.write_recipe(small_recipe(model={"norm_order": "pre"}))
    other.weights_file.write_bytes((run_folder / "model.safetensors").read_bytes())
    with pytest.raises(RegardError, match=r"recipe\.yaml: not the file that model\.safetensors"):
        other.weights()


@pytest.mark.parametrize("with_card", [True, False])
def test_a_missing_tokenizer_is_named(run_folder: Path, with_card: bool) -> None:
    (run_folder / "tokenizer.model").unlink()
    if not with_card:
        (run_folder / "card.json").unlink()
    with pytest.raises(RegardError, match=r"tokenizer\.model: missing"):
        RunDir(run_folder).weights()


def test_missing_weights_are_reported(run_folder: Path) -> None:
    (run_folder / "model.safetensors").unlink()
    with pytest.raises(RegardError, match="no model yet"):
        RunDir(run_folder).weights()


def test_truncated_weights_are_reported_as_damaged(run_folder: Path) -> None:
    path = run_folder / "model.safetensors"
    (run_folder / "card.json").unlink()
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RegardError, match=r"model\.safetensors: damaged"):
        RunDir(run_folder).weights()


def test_weights_without_a_header_are_refused(run_folder: Path) -> None:
    (run_folder / "card.json").unlink()
    save_file({"x": torch.ones(1)}, run_folder / "model.safetensors")
    with pytest.raises(RegardError, match=r"model\.safetensors"):
        RunDir(run_folder).weights()


@pytest.mark.parametrize(
    "content",
    [
        b'{"steps": ',
        b"",
        b"\xff\xfe",
        b"[1, 2]",
        b"[" * 100_000,
        b'{"steps": ' * 50_000,
        b'{"files": [1]}',
        b'{"files": null}',
        b'{"files": {"recipe.yaml": 3}}',
        b'{"steps": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_broken_card_is_refused_by_name(run_folder: Path, content: bytes) -> None:
    (run_folder / "card.json").write_bytes(content)
    with pytest.raises(RegardError, match=r"card\.json: damaged"):
        RunDir(run_folder).weights()


@pytest.mark.parametrize(
    "values",
    [
        {"steps": "many"},
        {"seconds": "long"},
        {"seconds": 10**400},
        {"vocabulary": [1, 2]},
        {"data": None},
        {"valid": {"loss": "low"}},
        {"valid": [1]},
        {"test": [{"metric": "bleu"}]},
        {"test": [3]},
        {"test": 3},
        {"parameters": {}},
    ],
)
def test_a_card_of_wrong_types_is_one_line(run_folder: Path, values: dict[str, Any]) -> None:
    card = {
        "steps": 1,
        "epochs": 1,
        "seconds": 2.0,
        "parameters": 5,
        "hardware": "x",
        "vocabulary": {"source": 5, "target": 5},
        "data": {"train": {"kept": 2}},
        "test": [],
        "valid": {"loss": 1.0},
        "reason_stopped": "x",
        "command": "x",
    }
    run = RunDir(run_folder)
    assert "1 step, 1 epoch, " in "\n".join(run.describe(run.recipe(), card))
    score = {"metric": "wer", "name": "WER", "value": 63.64, "low": 55.94, "high": 71.33}
    card["valid_scores"] = [score | {"signature": "s", "higher_is_better": False}]
    lines = run.describe(run.recipe(), card)
    assert "validation   with the recipe's decoding options: WER 63.64 [55.94, 71.33]  s" in lines
    metric = run.recipe().evaluation.metrics[0]
    lines = run.describe(run.recipe(), card | {"valid": {"loss": 1.0, metric: 2.0}})
    greedy = f"; greedy decoding, as during training: {metric} 2.000"
    assert f"validation   loss 1.000{greedy}" in lines
    with pytest.raises(RegardError, match=r"card\.json: incomplete card"):
        run.describe(run.recipe(), {**card, **values})


def test_one_bit_of_the_weights_is_noticed_without_a_card(run_folder: Path) -> None:
    run = RunDir(run_folder)
    run.card_file.unlink()
    before = run.weights_file.read_bytes()
    end_of_header = 8 + int.from_bytes(before[:8], "little")
    for place in (end_of_header, (end_of_header + len(before)) // 2, len(before) - 1):
        for bit in (0, 7):
            changed = bytearray(before)
            changed[place] ^= 1 << bit
            run.weights_file.write_bytes(changed)
            with pytest.raises(RegardError, match=r"model\.safetensors: damaged: .* checksum"):
                run.weights()
    run.weights_file.write_bytes(before)
    assert run.weights()


def test_every_byte_of_the_header_is_protected(run_folder: Path) -> None:
    run = RunDir(run_folder)
    run.card_file.unlink()
    before = run.weights_file.read_bytes()
    end_of_header = 8 + int.from_bytes(before[:8], "little")
    for place in range(0, end_of_header, 7):
        if before[place : place + 1].isspace():
            continue  # padding
        changed = bytearray(before)
        changed[place] ^= 1
        run.weights_file.write_bytes(changed)
        with pytest.raises(RegardError):
            run.weights()


def test_weights_without_a_checksum_are_not_of_this_version(run_folder: Path) -> None:
    run = RunDir(run_folder)
    run.card_file.unlink()
    with safe_open(run.weights_file, "pt") as file:
        metadata = read_metadata(file)
    del metadata["sha256"]
    save_file(run.weights(), run.weights_file, {"regard": json.dumps(metadata)})
    with pytest.raises(
        RegardError, match=r"model\.safetensors: no checksum.*not written by this version of regard"
    ):
        run.weights()


@pytest.mark.parametrize("text", ["[" * 100_000, "[1]", "3", "{"])
def test_weights_with_strange_metadata_are_damaged(run_folder: Path, text: str) -> None:
    run = RunDir(run_folder)
    weights = run.weights()
    run.card_file.unlink()
    save_file(weights, run.weights_file, {"regard": text})
    with pytest.raises(RegardError, match=r"model\.safetensors: damaged"):
        run.weights()


def test_a_card_cannot_name_files_outside_the_folder(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    card = {"files": {"../secret": sha256(tmp_path / "secret")}}
    (run_folder / "card.json").write_text(json.dumps(card))
    with pytest.raises(RegardError, match="secret: missing"):
        RunDir(run_folder).weights()


def test_new_weights_remove_the_old_card(run_folder: Path) -> None:
    run = RunDir(run_folder)
    run.write_weights({"x": torch.ones(2)})
    assert run.card() == {}
    assert run.weights()["x"].tolist() == [1, 1]


def test_other_folders_are_not_runs(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match="not a run folder"):
        RunDir(tmp_path).recipe()
    with pytest.raises(RegardError, match="no such folder"):
        RunDir(tmp_path / "nowhere").recipe()


def test_a_recipe_that_is_not_text_is_refused_by_name(run_folder: Path) -> None:
    (run_folder / "recipe.yaml").write_bytes(b"data: \xff")
    with pytest.raises(RegardError, match=r"recipe\.yaml: not UTF-8"):
        RunDir(run_folder).recipe()


def test_an_unfinished_run_says_so(run_folder: Path) -> None:
    run = RunDir(run_folder)
    lines = run.describe(run.recipe(), {})
    assert "not finished" in lines[-1]
    assert "2+2 layers, width 16, 2 heads, feed-forward 32" in lines[1]


# Writing


def test_a_file_is_replaced_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for text in ("first", "second"):
        write_text(path, text)
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def write(temporary: Path) -> None:
        temporary.write_text("new")
        assert temporary.parent == path.parent  # a rename within one file system is atomic
        assert path.read_text() == "old"

    write_atomic(path, write)
    assert path.read_text() == "new"


def test_a_file_is_synced_before_it_is_renamed_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power failure can leave an empty file under the new name."""
    path, calls = tmp_path / "x", list[tuple[str, str]]()
    sync, replace = os.fsync, Path.replace

    def record_sync(file: int) -> None:
        calls.append(("sync", Path(f"/proc/self/fd/{file}").readlink().name))
        sync(file)

    def record_replace(self: Path, target: Path) -> Path:
        calls.append(("rename", target.name))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "replace", record_replace)
    write_text(path, "text")
    assert calls == [("sync", ".x.partial"), ("rename", "x"), ("sync", tmp_path.name)]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_crash_leaves_the_old_file_and_no_other(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def write(temporary: Path) -> None:
        temporary.write_text("ne")
        raise error

    with pytest.raises(error):
        write_atomic(path, write)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_an_error_for_the_user(tmp_path: Path) -> None:
    def write(temporary: Path) -> None:
        temporary.write_text("ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(RegardError, match="x: cannot be written: No space left on device"):
        write_atomic(tmp_path / "x", write)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="reads the memory map of the process"
)
def test_weights_are_memory_mapped(run_folder: Path) -> None:
    (weight, *_) = Translator.load(run_folder, "cpu").network.parameters()
    files = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, name = line.split()
        low, high = (int(address, 16) for address in addresses.split("-"))
        files += [name] if low <= weight.data_ptr() < high else []
    assert files == [str((run_folder / "model.safetensors").resolve())]
    before = (run_folder / "model.safetensors").read_bytes()
    with torch.no_grad():
        weight.zero_()
    assert (run_folder / "model.safetensors").read_bytes() == before


def test_a_process_that_lost_the_folder_writes_nothing_more(tmp_path: Path) -> None:
    """On a file system that does not share locks, another machine may take the folder; here it writes its name."""
    run = RunDir(tmp_path)
    run.checkpoints.mkdir()
    with run.lock() as free:
        assert free
        run.check_owner()
        assert RunDir(tmp_path).is_locked()
        with RunDir(tmp_path).lock() as again:
            assert not again
        run.lock_file.write_text("process 7 on elsewhere, 0123\n")
        for write in (run.check_owner, lambda: run.write_weights({}), lambda: run.write_card({})):
            with pytest.raises(RegardError, match="process 7 on elsewhere is training here now"):
                write()
    assert not run.weights_file.exists()
    run.check_owner()  # without the lock, nothing is checked
    RunDir(tmp_path).check_owner()


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    first, second = RunDir(tmp_path), RunDir(tmp_path)
    first.checkpoints.mkdir()
    with ExitStack() as stack:
        assert stack.enter_context(first.lock())
        timer = threading.Timer(0.2, stack.close)
        timer.start()
        with second.lock(seconds=20) as free:
            assert free
        timer.join()
