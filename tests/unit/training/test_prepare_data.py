"""Data preparation: messages, and what is reused."""

from pathlib import Path
from typing import Any

import pytest

from regard.data.corpus import is_held_out, train_pairs, valid_pairs
from regard.data.token_dataset import TokenDataset
from regard.demo.corpus import generate
from regard.errors import RegardError
from regard.recipe import make_recipe
from regard.storage.run_dir import RunDir
from regard.training.prepare_data import PreparedData, open_prepared, prepare
from regard.training.progress import ProgressReporter


def messages_of(folder: Path, capsys: pytest.CaptureFixture[str], **data: Any) -> str:
    given = {"root": str(folder), "train": {"pairs": "train.tsv"}, **data}
    recipe = make_recipe({"data": given, "tokenizer": {"kind": "word", "vocab_size": 50}}, "test")
    run = RunDir(folder / "run")
    run.folder.mkdir()
    reporter = ProgressReporter(run)
    prepare(run, recipe, reporter)
    reporter.close()
    captured = capsys.readouterr()
    return captured.out + captured.err


def write(path: Path, *pairs: str) -> None:
    path.write_text("".join(f"{pair}\n" for pair in pairs))


@pytest.mark.parametrize("swapped", [False, True])
def test_swapped_files_are_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], swapped: bool
) -> None:
    pytest.importorskip("py3langid")
    sides = ("my.de", "my.en") if swapped else ("my.en", "my.de")
    for name, texts in zip(sides, zip(*generate("train", 100), strict=True), strict=True):
        write(tmp_path / name, *texts)
    train = {"source": "my.en", "target": "my.de"}
    stderr = messages_of(tmp_path, capsys, train=train, hold_out=0.2)
    warning = "warning: the texts look like de to en, not like en to de; are the files or columns"
    assert stderr.count(warning) == swapped


def test_an_overlap_with_the_training_data_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "train.tsv", "a\tx", "b\ty", "b\tz", "c\tx")
    write(tmp_path / "valid.tsv", " b\tx", "b\ty", "d\ty", " \ty")
    write(tmp_path / "test.tsv", "e\tx", "f\ty")
    both = {"valid": {"pairs": "valid.tsv"}, "test": {"pairs": "test.tsv"}}
    messages = messages_of(tmp_path, capsys, **both)
    assert "1 of 2 sources of data.valid also occur in the training data" in messages
    assert "data.test" not in messages


def test_held_out_pairs_are_not_checked_for_overlap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "train.tsv", *(f"w{number}\tx" for number in range(60)))
    messages = messages_of(tmp_path, capsys, hold_out=0.3)
    assert "Validation pairs" in messages
    assert "also occur" not in messages


def test_data_are_prepared_again_after_a_failed_preparation(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", "a b c\tx", "a\ty", "b\tz")
    write(tmp_path / "valid.tsv", "a b c\tx")
    data = {"root": str(tmp_path), "train": {"pairs": "train.tsv"}, "valid": {"pairs": "valid.tsv"}}
    sections = {"data": data, "tokenizer": {"kind": "word", "vocab_size": 50}}
    short = {**sections, "data": {**data, "clean": {"max_tokens": 2}}}
    short |= {"model": {"position": "learned", "max_length": 3}}
    run = RunDir(tmp_path / "run")
    run.folder.mkdir()
    full, reporter = make_recipe(sections, "test"), ProgressReporter(run, enabled=False)
    prepare(run, full, reporter)
    with pytest.raises(RegardError, match=r"no pairs to store; 0 of 1 pairs kept \(1 too long\)"):
        prepare(run, make_recipe(short, "test"), reporter)
    prepare(run, full, reporter)
    reporter.close()
    assert len(open_prepared(run, full).train) == 3


@pytest.mark.parametrize(("ratio", "warned"), [(2, True), (3, False)])
def test_a_warning_says_why_most_pairs_are_dropped(
    ratio: int, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "train.tsv", "a b c\tx", "c b a\tx", "a b\ty")
    data = {"root": str(tmp_path), "train": {"pairs": "train.tsv"}, "valid": {"pairs": "train.tsv"}}
    data |= {"clean": {"max_ratio": ratio}}
    run = RunDir(tmp_path / "run")
    run.folder.mkdir()
    reporter = ProgressReporter(run)
    recipe = make_recipe({"data": data, "tokenizer": {"kind": "word", "vocab_size": 50}}, "test")
    prepare(run, recipe, reporter)
    reporter.close()
    warning = "warning: 2 pairs are dropped for their length; if they are good, raise data.clean"
    assert (warning in capsys.readouterr().err) is warned


@pytest.mark.parametrize(
    ("valid", "message"),
    [
        ({"pairs": "empty.tsv"}, r"empty\.tsv: the file is empty"),
        ({"pairs": "torn.tsv"}, r"torn\.tsv:2: no tab"),
        (None, "no pair was held out for validation"),
    ],
)
def test_missing_validation_data_are_found_before_the_tokenizer_is_trained(
    tmp_path: Path,
    valid: dict[str, str] | None,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train_tokenizer(*_: Any) -> None:
        raise AssertionError("the tokenizer is trained")

    monkeypatch.setattr("regard.training.prepare_data.initial_tokenizer", train_tokenizer)
    write(tmp_path / "train.tsv", "a\tx", "b\ty")
    write(tmp_path / "empty.tsv")
    write(tmp_path / "torn.tsv", "a\tx", "b")
    with pytest.raises(RegardError, match=message):
        messages_of(tmp_path, capsys, **({"valid": valid} if valid else {"hold_out": 1e-9}))


def test_metadata_that_are_damaged_are_prepared_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "train.tsv", "a\tx", "b\ty")
    write(tmp_path / "valid.tsv", "a\tx")
    messages_of(tmp_path, capsys, valid={"pairs": "valid.tsv"})
    for content in ("", "{", "[" * 100_000, "[1]"):
        (tmp_path / "run/data/metadata.json").write_text(content)
        given = {"root": str(tmp_path), "train": {"pairs": "train.tsv"}}
        sections = {"data": {**given, "valid": {"pairs": "valid.tsv"}}}
        recipe = make_recipe({**sections, "tokenizer": {"kind": "word", "vocab_size": 50}}, "test")
        run = RunDir(tmp_path / "run")
        prepare(run, recipe, ProgressReporter(run, enabled=False))
        assert open_prepared(run, recipe).metadata["train"]["kept"] == 2


def prepared_with(folder: Path, **training: Any) -> PreparedData:
    """Prepare 40 pairs; ``folder`` is the run folder, next to the data."""
    lines = (f"this is sentence {n}.\tdas ist satz {n}." for n in range(40))
    write(folder.parent / "train.tsv", *lines)
    data = {"root": str(folder.parent), "train": {"pairs": "train.tsv"}, "hold_out": 0.1}
    sections = {"data": data, "tokenizer": {"kind": "char"}, "training": training}
    recipe = make_recipe(sections, "test")
    run = RunDir(folder)
    run.folder.mkdir()
    run.write_recipe(recipe)
    prepare(run, recipe, ProgressReporter(run))
    return open_prepared(run, recipe)


def texts_of(prepared: PreparedData, dataset: TokenDataset) -> list[str]:
    ranges = zip(dataset.source_starts, dataset.source_lengths, strict=True)
    rows = [dataset.ids[start : start + length].tolist() for start, length in ranges]
    return prepared.tokenizer.source.decode(rows)


def test_augmented_copies_are_written_and_used_in_turn(tmp_path: Path) -> None:
    augment = {"title": 0.5, "no_final_punctuation": 0.25}
    prepared = prepared_with(tmp_path / "run", augment=augment, subword_copies=4)
    plain, *copies = (
        texts_of(prepared, one)
        for one in (prepared.train, *map(prepared.dataset_for_epoch, range(5)))
    )
    assert copies[4] == copies[0]
    for row in zip(plain, *copies[:4], strict=True):
        original, *changed = row
        assert [text.casefold().rstrip(".") for text in changed] == [original.rstrip(".")] * 4
        # Spread evenly over the copies: half of them, and a quarter of them.
        assert sum(map(str.istitle, changed)) == 2
        assert sum(not text.endswith(".") for text in changed) == 1
    again = prepared_with(tmp_path / "again", augment=augment, subword_copies=4)
    for one, other in zip(prepared.copies, again.copies, strict=True):
        assert one.path.read_bytes() == other.path.read_bytes()


def test_without_augmentation_nothing_changes(tmp_path: Path) -> None:
    prepared, plain = prepared_with(tmp_path / "run"), prepared_with(tmp_path / "plain", augment={})
    assert not prepared.copies
    assert prepared.metadata["identity"] == plain.metadata["identity"]
    assert 0 <= prepared.metadata["seconds"] < 100
    both = [one.train.path.read_bytes() for one in (prepared, plain)]
    assert both[0] == both[1]


def test_bidirectional_data_have_every_pair_in_both_directions(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", "a b\tx", "c\ty z", "b\tb")
    write(tmp_path / "valid.tsv", "a c\ty")
    data = {"root": str(tmp_path), "train": {"pairs": "train.tsv"}, "valid": {"pairs": "valid.tsv"}}
    runs = []
    for bidirectional in (False, True):
        run = RunDir(tmp_path / f"run-{bidirectional}")
        run.folder.mkdir()
        values = {
            "data": {**data, "bidirectional": bidirectional},
            "tokenizer": {"kind": "word", "vocab_size": 50},
        }
        recipe = make_recipe(values, "test")
        reporter = ProgressReporter(run)
        prepare(run, recipe, reporter)
        reporter.close()
        runs.append((run, open_prepared(run, recipe)))
    (plain, one), (both, two) = runs
    # The second stage starts from the first one's tokenizer, which is that of a training in one direction.
    assert [path.read_bytes() for path in both.tokenizer_files()] == [
        path.read_bytes() for path in plain.tokenizer_files()
    ]
    assert texts(one.train, one) == [("a b", "x"), ("c", "y z"), ("b", "b")]
    assert texts(two.train, two) == [
        *(("a b", "x"), ("x", "a b"), ("c", "y z"), ("y z", "c")),
        ("b", "b"),  # its own reverse: a duplicate
    ]
    assert texts(two.valid, two) == texts(one.valid, one) == [("a c", "y")]
    assert one.metadata["identity"] != two.metadata["identity"]


def texts(dataset: TokenDataset, prepared: PreparedData) -> list[tuple[str, str]]:
    both = [
        (dataset.source_starts[:], dataset.source_lengths[:]),
        (dataset.target_starts[:], dataset.target_lengths[:]),
    ]
    sides = [
        [dataset.ids[start : start + length].tolist() for start, length in zip(*side, strict=True)]
        for side in both
    ]
    return list(zip(*map(prepared.tokenizer.source.decode, sides), strict=True))


def test_held_out_pairs_are_held_out_in_both_directions(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", *(f"w{number}\tx{number}" for number in range(60)))
    files = {"root": str(tmp_path), "train": {"pairs": "train.tsv"}, "hold_out": 0.3}
    data = make_recipe({"data": {**files, "bidirectional": True}}, "test").data
    train, valid = list(train_pairs(data)), list(valid_pairs(data))
    assert valid
    assert all(pair.source.startswith("w") for pair in valid)
    assert not {*valid, *((target, source) for source, target in valid)} & {*train}
    # A target that would be held out as a source is not used as one.
    assert not any(is_held_out(pair.source, 0.3) for pair in train)
    assert sum(pair.source.startswith("w") for pair in train) == 60 - len(valid)
    swapped = sum(pair.source.startswith("x") for pair in train)
    assert swapped == sum(
        not is_held_out(pair.target, 0.3) for pair in train if pair.source[0] == "w"
    )


def test_pairs_that_are_there_in_both_directions_are_not_leaked(tmp_path: Path) -> None:
    pairs = [(f"w{number}", f"x{number}") for number in range(60)]
    lines = [f"{one}\t{other}" for one, other in [*pairs, *(pair[::-1] for pair in pairs)]]
    write(tmp_path / "train.tsv", *lines)
    files = {"root": str(tmp_path), "train": {"pairs": "train.tsv"}, "hold_out": 0.3}
    data = make_recipe({"data": {**files, "bidirectional": True}}, "test").data
    assert not {*valid_pairs(data)} & {*train_pairs(data)}


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"task": "classification"}, "needs task: translation, not classification"),
        ({"tokenizer": {"shared": False}}, "needs tokenizer.shared: true"),
        ({"data": {"train": {"to": "de"}}}, "cannot be combined with data.train.to"),
        ({"data": {"train": {"tag": "bt"}}}, "cannot be combined with data.train.tag"),
        ({"data": {"context": 1}}, "cannot be combined with data.context"),
        ({"model": {"position": "tree"}}, "cannot be combined with model.position: tree"),
    ],
    ids=str,
)
def test_what_bidirectional_data_cannot_be_combined_with(
    sections: dict[str, Any], problem: str
) -> None:
    given = sections.get("data", {})
    train = {"pairs": "p.tsv", **given.get("train", {})}
    data = {**given, "bidirectional": True, "train": train}
    with pytest.raises(RegardError) as caught:
        make_recipe({**sections, "data": data}, "test")
    assert f"data.bidirectional: true {problem}" in str(caught.value).replace(
        "swaps pairs without a tag, so it ", ""
    )
