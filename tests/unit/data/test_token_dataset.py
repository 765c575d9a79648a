import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from regard.data import cleaning, token_dataset as module
from regard.data.batching import pad_sources, pad_targets
from regard.data.cleaning import CleaningCounts, EncodedPair
from regard.data.pairs import Pair
from regard.data.token_dataset import TokenDataset, write_dataset, write_rows
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.recipe import CleaningConfig, TokenizerConfig as Section

PAIRS = [Pair(f"ein Satz {n}", f"a sentence {n} " + "x" * (n % 7)) for n in range(500)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    section = Section(kind="char", vocab_size=300, shared=False)
    return Tokenizer.train(section, lambda: PAIRS)


def texts_of(dataset: TokenDataset, tokenizer: Tokenizer) -> list[Pair]:
    rows = np.arange(len(dataset))
    sources, targets = pad_sources(dataset, rows).tolist(), pad_targets(dataset, rows).tolist()
    return list(map(Pair, tokenizer.source.decode(sources), tokenizer.target.decode(targets)))


def test_the_garbage_collector_does_not_run_while_rows_are_tokenized(tmp_path: Path) -> None:
    enabled = []

    def rows(count: int) -> Iterator[EncodedPair]:
        for _ in range(count):
            enabled.append(gc.isenabled())
            yield EncodedPair([1], [2])
        raise RegardError("stop")

    with (tmp_path / "rows").open("wb") as file, pytest.raises(RegardError, match="stop"):
        write_rows(file, rows(3))
    assert enabled == [True, False, False]  # the first row is read to know the columns
    assert gc.isenabled()


@pytest.mark.parametrize("rows", [1, 7, 500, 501])
def test_every_pair_round_trips_with_any_size_of_record_batches(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(module, "ROWS_PER_RECORD_BATCH", rows)
    monkeypatch.setattr(cleaning, "PAIRS_PER_CHUNK", 64)
    counts = write_dataset(tmp_path / "a.arrow", PAIRS, tokenizer, None)
    dataset = TokenDataset(tmp_path / "a.arrow")
    assert texts_of(dataset, tokenizer) == PAIRS
    assert counts == CleaningCounts(read=500, kept=500)
    assert [path.name for path in tmp_path.iterdir()] == ["a.arrow"]
    encoded = tokenizer.source.encode([pair.source for pair in PAIRS])
    lengths = dataset.source_lengths
    assert list(lengths) == list(map(len, encoded))
    assert (
        lengths[:].dtype == np.asarray(lengths).dtype == dataset.target_lengths[:].dtype == np.int32
    )
    assert (lengths.sum(), lengths.max()) == (sum(lengths), max(lengths))
    assert lengths[499] == lengths[np.array([3, 499])][1] == lengths[499:][0] == len(encoded[499])
    for row in (-1, 500):
        with pytest.raises(IndexError):
            lengths[row]


@given(pairs=st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=20))
def test_without_cleaning_row_n_is_line_n(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Tokenizer,
    pairs: list[tuple[str, str]],
) -> None:
    path = tmp_path_factory.mktemp("dataset") / "valid.arrow"
    write_dataset(path, [Pair(*pair) for pair in pairs], tokenizer, None)
    normalize = tokenizer.source.normalize
    expected = [(normalize(source), normalize(target)) for source, target in pairs]
    assert texts_of(TokenDataset(path), tokenizer) == expected


def test_the_ids_are_a_view_of_the_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_dataset(tmp_path / "a", PAIRS, tokenizer, None)
    dataset = TokenDataset(tmp_path / "a")
    assert len(dataset.ids) == (tmp_path / "a").stat().st_size // 4
    assert not dataset.ids.flags.writeable


def test_each_reason_for_dropping_is_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pairs = [
        Pair("gut", "good"),
        Pair("", "good"),
        Pair("gut", " \u3000\t"),
        Pair("gut", "good"),
        Pair("gu\u0308t", "good"),
        Pair("g\u00fct", "good"),  # equals the one before once normalized
        Pair("x" * 30, "good" * 4),
        Pair("x" * 9, "y"),
    ]
    counts = write_dataset(
        tmp_path / "a", pairs, tokenizer, CleaningConfig(max_tokens=20, max_ratio=4)
    )
    assert counts == CleaningCounts(read=8, kept=2, empty=2, duplicates=2, too_long=1, ratio=1)
    assert counts.summary == (
        "2 of 8 pairs kept (2 empty, 2 duplicate, 1 too long, 1 of unequal length)"
    )
    assert texts_of(TokenDataset(tmp_path / "a"), tokenizer) == [
        Pair("gut", "good"),
        Pair("güt", "good"),
    ]

    lenient = CleaningConfig(max_ratio=None, keep_duplicates=True)
    assert write_dataset(tmp_path / "a", pairs, tokenizer, lenient) == CleaningCounts(
        8, kept=6, empty=2
    )


def test_only_equal_pairs_are_duplicates(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pairs = [Pair("gut", "good"), Pair("gut", "well"), Pair("wohl", "well"), Pair("gut", "well")]
    counts = write_dataset(tmp_path / "a", pairs, tokenizer, CleaningConfig())
    assert counts == CleaningCounts(read=4, kept=3, duplicates=1)
    assert texts_of(TokenDataset(tmp_path / "a"), tokenizer) == pairs[:3]


def test_the_limits_themselves_are_allowed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pair = Pair("x" * 7, "y")  # each side with a space in front: 8 and 2 tokens
    clean = CleaningConfig(max_tokens=8, max_ratio=4)
    assert write_dataset(tmp_path / "a", [pair], tokenizer, clean).kept == 1


def test_the_summary_of_counts() -> None:
    assert CleaningCounts(read=29_000, kept=29_000).summary == "all 29,000 pairs kept"
    some = CleaningCounts(read=29_000, kept=28_990, empty=4, too_long=6)
    assert some.summary == "28,990 of 29,000 pairs kept (4 empty, 6 too long)"


def test_a_dataset_without_pairs_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(RegardError, match=r"0 of 1 pairs kept \(1 empty\); see data.clean"):
        write_dataset(tmp_path / "a", [Pair("", "x")], tokenizer, CleaningConfig())
    with pytest.raises(RegardError, match="none were read"):
        write_dataset(tmp_path / "a", [], tokenizer, None)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def broken() -> object:
        yield from PAIRS
        raise RegardError("file:501: broken")

    write_dataset(tmp_path / "a", PAIRS[:3], tokenizer, None)
    with pytest.raises(RegardError, match="file:501: broken"):
        write_dataset(tmp_path / "a", broken(), tokenizer, None)  # type: ignore[arg-type]
    assert len(TokenDataset(tmp_path / "a")) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_path_that_cannot_be_written_is_reported(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(RegardError, match="cannot be written: No such file or directory"):
        write_dataset(tmp_path / "no" / "a", PAIRS, tokenizer, None)


def test_missing_and_damaged_datasets_are_reported(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "a.arrow"
    with pytest.raises(RegardError, match="no such file"):
        TokenDataset(path)
    with pytest.raises(RegardError, match=r"cannot be read|damaged"):
        TokenDataset(tmp_path)
    write_dataset(path, PAIRS, tokenizer, None)
    whole = path.read_bytes()
    for damaged in (b"", b"nonsense", whole[:-1], whole[: len(whole) // 2], whole[100:]):
        path.write_bytes(damaged)
        with pytest.raises(RegardError, match="damaged"):
            TokenDataset(path)


def test_no_flipped_byte_leads_to_reads_outside_the_file(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = tmp_path / "a.arrow"
    write_dataset(path, PAIRS[:20], tokenizer, None)
    whole = path.read_bytes()
    for offset in range(0, len(whole), 5):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0xFF]) + whole[offset + 1 :])
        try:
            dataset = TokenDataset(path)
        except RegardError:
            continue
        for starts, lengths in (
            (dataset.source_starts[:], dataset.source_lengths[:]),
            (dataset.target_starts[:], dataset.target_lengths[:]),
        ):
            assert (starts >= 0).all()
            assert (lengths >= 0).all()
            assert (starts + lengths <= len(dataset.ids)).all()
