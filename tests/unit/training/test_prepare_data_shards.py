"""Training data that are prepared in parts are those of one process."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.data.batching import EpochRows, rows_by_share
from regard.data.corpus import train_pairs
from regard.data.token_dataset import write_dataset
from regard.errors import RegardError
from regard.recipe import Recipe, make_recipe
from regard.storage.resumable_output import WHOLE, Shard
from regard.storage.run_dir import RunDir
from regard.tasks import TASKS
from regard.training import prepare_data_shards as module
from regard.training.prepare_data import open_prepared, prepare
from regard.training.progress import ProgressReporter
from regard.training.run import prepare_data
from regard.training.train_test_overlap import source_hash


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_PAIRS", 64)


def write_corpus(folder: Path, pairs: int = 500) -> None:
    """Pairs with duplicates, blank sides, long and unequal ones, in every part."""
    draw = random.Random(1)
    lines = []
    for number in range(pairs):
        words = draw.choices("abcdefgh", k=draw.randint(1, 9))
        target = words[::-1] if number % 13 else ["x"] * 60
        lines.append(f"{' '.join(words)}\t{' '.join(target) if number % 17 else ''}")
        if number % 5 == 0:
            lines.append(draw.choice(lines))
    (folder / "train.tsv").write_text("".join(f"{line}\n" for line in lines))
    (folder / "valid.tsv").write_text("a b\tb a\n")


def recipe_for(folder: Path, training: dict[str, Any] | None = None, **data: Any) -> Recipe:
    files = {"train": {"pairs": "train.tsv"}, "valid": {"pairs": "valid.tsv"}}
    sections = {
        "data": {"root": str(folder), **files, "clean": {"max_tokens": 50}, **data},
        "tokenizer": {"kind": "char"},
        "training": training or {},
    }
    return make_recipe(sections, "test")


def prepared(folder: Path, recipe: Recipe, name: str, *shards: Shard) -> RunDir:
    for shard in shards or [WHOLE]:
        prepare_data(recipe, folder / name, shard, workers=1)
    return RunDir(folder / name)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"bidirectional": True},
        {"valid": None, "hold_out": 0.2},
        {"clean": {"keep_duplicates": True}},
        {"clean": {"max_tokens": 8, "max_ratio": 2}},
    ],
)
def test_the_dataset_is_that_of_one_pass_with_a_set_of_hashes(
    tmp_path: Path, data: dict[str, Any]
) -> None:
    write_corpus(tmp_path)
    recipe = recipe_for(tmp_path, **data)
    run = prepared(tmp_path, recipe, "run")
    rows = TASKS[recipe.task].encoder(recipe).rows
    pairs, expected = train_pairs(recipe.data), tmp_path / "expected.arrow"
    counts = write_dataset(expected, pairs, run.tokenizer(recipe), recipe.data.clean, rows)
    assert (run.data / "train.arrow").read_bytes() == expected.read_bytes()
    metadata = open_prepared(run, recipe).metadata
    assert metadata["train"] == {**counts.__dict__}
    assert counts.empty > 20
    assert counts.duplicates > 50 or recipe.data.clean.keep_duplicates
    hashes = {source_hash(pair.source) for pair in train_pairs(recipe.data)}
    assert np.load(run.train_sources_file).tolist() == sorted(hashes)
    assert not (run.data / "parts").exists()


def test_shards_in_any_order_give_the_same_files_and_skip_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path)
    recipe = recipe_for(tmp_path)
    whole = prepared(tmp_path, recipe, "whole")
    written = Counter[str]()
    save = module.PartFiles.save

    def count(self: module.PartFiles, corpus: str, number: int, part: module.Part) -> None:
        written[f"{corpus} {number}"] += 1
        save(self, corpus, number, part)

    monkeypatch.setattr(module.PartFiles, "save", count)
    third, first = Shard(3, 3), Shard(1, 3)
    run = prepared(tmp_path, recipe, "shards", third, first, third)
    assert {int(name.split()[1]) % 3 for name in written} == {0, 2}
    assert not (run.data / "train.arrow").exists()
    assert not open_metadata(run)
    prepare_data(recipe, run.folder)  # the second shard is missing, and is prepared now
    assert {*written.values()} == {1}
    for name in ("train.arrow", "valid.arrow", run.train_sources_file.name):
        assert (run.data / name).read_bytes() == (whole.data / name).read_bytes()
    assert not (run.data / "parts").exists()


def open_metadata(run: RunDir) -> bool:
    return run.metadata_file.exists()


def test_parts_of_other_data_or_settings_are_discarded(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = recipe_for(tmp_path)
    run = prepared(tmp_path, recipe, "run", Shard(1, 2))
    assert list((run.data / "parts").glob("train*.npz"))
    short = recipe_for(tmp_path, clean={"max_tokens": 6})
    run.write_recipe(short)
    prepare(run, short, ProgressReporter(run, enabled=False))
    assert open_prepared(run, short).train.source_lengths.max() <= 6


def test_processes_share_the_parts(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = recipe_for(tmp_path)
    whole = prepared(tmp_path, recipe, "whole")
    run = RunDir(tmp_path / "two")
    prepare_data(recipe, run.folder, workers=2)
    assert (run.data / "train.arrow").read_bytes() == (whole.data / "train.arrow").read_bytes()


def test_copies_leave_the_same_duplicates_out(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = recipe_for(tmp_path, {"augment": {"upper": 0.5}, "subword_copies": 2})
    opened = open_prepared(prepared(tmp_path, recipe, "run"), recipe)
    assert [len(copy) for copy in opened.copies] == [len(opened.train)] * 2


def test_files_are_mixed_by_weights_and_temperature(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path)
    lines = (tmp_path / "train.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "small.tsv").write_text("".join(f"z {line}" for line in lines[:60]))
    files = ["train.tsv", "small.tsv"]
    plain = prepared(tmp_path, recipe_for(tmp_path, train={"pairs": files}), "plain")
    recipe = recipe_for(tmp_path, train={"pairs": files, "weights": [1, 3]})
    run = RunDir(tmp_path / "mixed")
    prepare_data(recipe, run.folder)
    assert "small.tsv 75.0% (" in capsys.readouterr().err
    assert (run.data / "train.arrow").read_bytes() == (plain.data / "train.arrow").read_bytes()
    opened = open_prepared(run, recipe)
    assert opened.file_rows is not None
    large, small = opened.file_rows
    assert large + small == len(opened.train)
    assert 30 < small < 60
    shares = recipe.data.train.sampling_shares([large, small])
    assert shares == [0.25, 0.75]
    rows = EpochRows(rows_by_share([large, small], shares), seed=1, epoch=0)
    drawn = rows[np.arange(len(rows))]
    assert len(drawn) == len(opened.train)
    assert (drawn >= large).mean() == pytest.approx(0.75, abs=0.01)
    uses = np.bincount(drawn[drawn >= large] - large)
    assert uses.max() - uses.min() <= 1
    warm = recipe_for(tmp_path, train={"pairs": files, "temperature": 2})
    assert warm.data.train.sampling_shares([900, 100]) == pytest.approx([0.75, 0.25])


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"pairs": ["a", "b"], "weights": [1, 2, 3]}, "weights has 3 values for 2 file"),
        ({"pairs": ["a", "b"], "weights": [1, 0]}, "greater than 0"),
        ({"pairs": ["a", "b"], "weights": [1, 2], "temperature": 5}, "weights and temp"),
        ({"pairs": "a", "temperature": 5}, "temperature needs several files"),
    ],
)
def test_mixing_that_makes_no_sense_is_refused(
    tmp_path: Path, train: dict[str, Any], message: str
) -> None:
    with pytest.raises(RegardError, match=message):
        recipe_for(tmp_path, train=train)
    mixed = {"pairs": ["a", "b"], "weights": [1, 2]}
    with pytest.raises(RegardError, match=r"only for data\.train"):
        recipe_for(tmp_path, valid=mixed)


@pytest.mark.parametrize("text", ["", "3", "0/3", "4/3", "1/0", "a/b", "1/3/5", "-1/3"])
def test_a_shard_is_a_number_and_a_count(text: str) -> None:
    with pytest.raises(RegardError, match="expected I/N with I from 1 to N"):
        Shard.parse(text)


def test_shards_of_shards_cover_every_item_once() -> None:
    shards = [one for number in (1, 2, 3) for one in Shard(number, 3).split(2)]
    for index in range(30):
        assert sum(shard.has(index) for shard in shards) == 1
    assert all(Shard(2, 3).has(index) for index in range(30) if Shard(2, 3).split(2)[1].has(index))
