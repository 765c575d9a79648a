import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from regard.data import tokenizer as module
from regard.data.pairs import Pair
from regard.data.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK
from regard.data.tokenizer import Tokenizer, extend_tokenizer, extended_ids
from regard.errors import RegardError
from regard.recipe import TokenizerConfig as Section

SENTENCE = "der die das ein kleiner großer Hund Katze läuft schläft über unter dem Haus Straße"
WORDS = SENTENCE.split()
PAIRS = [
    Pair(
        " ".join(WORDS[(n * k + k) % len(WORDS)] for k in range(1, 7)) + ".",
        " ".join(WORDS[(n + k * k) % len(WORDS)].upper() for k in range(1, 6)) + "!",
    )
    for n in range(60)
]
LOSSLESS: list[str] = ["unigram", "bpe", "char"]


def train(pairs: list[Pair] | None = None, **section: object) -> Tokenizer:
    texts = PAIRS if pairs is None else pairs
    return Tokenizer.train(Section.model_validate({"vocab_size": 400, **section}), lambda: texts)


@pytest.fixture(scope="module", params=LOSSLESS)
def lossless(request: pytest.FixtureRequest) -> Tokenizer:
    return train(kind=request.param)


@given(texts=st.lists(st.text()))
@example(texts=["", " ", "  ", " x", "x  ", "a  b", "\0", "a\0b", "\t", "\r", "\ufeff", "\ufffd"])
@example(texts=["▁", "▁▁ x▁", "▅", "\ufdd0", "\ufdd00", "\ufdd01\ufdd0", "⁇", "😀👩‍👩‍👧", "\uffff"])
@example(
    texts=["<s>", "</s>", "<unk>", "<pad>", "<0x41>", "a\u0301", "한국어", "\x1b[0m", "\u2028"]
)
def test_any_text_round_trips(lossless: Tokenizer, texts: list[str]) -> None:
    vocabulary = lossless.source
    ids = vocabulary.encode(texts)
    assert vocabulary.decode(ids) == [unicodedata.normalize("NFC", text) for text in texts]
    assert all(UNK < i < vocabulary.size for row in ids for i in row)


def test_words_have_the_same_pieces_at_the_start_and_inside(lossless: Tokenizer) -> None:
    [alone], [twice] = lossless.source.encode(["Hund"]), lossless.source.encode(["Hund Hund"])
    assert twice == alone + alone


def test_unknown_words_become_unk() -> None:
    vocabulary = train(kind="word").source
    [ids] = vocabulary.encode(["der Drache schläft ▁"])
    assert [i == UNK for i in ids] == [False, True, False, True]
    assert vocabulary.decode([ids, [UNK]]) == ["der ⁇ schläft ⁇", "⁇"]


def test_special_tokens_are_skipped_in_text_and_shown_as_pieces(lossless: Tokenizer) -> None:
    vocabulary = lossless.target
    [ids] = vocabulary.encode(["HUND"])
    assert vocabulary.decode([[BOS, *ids, EOS, PAD, PAD], []]) == ["HUND", ""]
    pieces = vocabulary.pieces([BOS, *ids, EOS, PAD, UNK])
    assert "".join(pieces[1:-3]) == "▁HUND"
    assert [pieces[0], *pieces[-3:]] == ["<s>", "</s>", "<pad>", "<unk>"]
    assert vocabulary.pieces(list(SPECIAL_TOKENS)) == list(SPECIAL_TOKENS.values())
    assert vocabulary.pieces(vocabulary.encode(["é"])[0])[1:] == ["<0xC3>", "<0xA9>"]


def test_empty_input_gives_empty_output(lossless: Tokenizer) -> None:
    assert lossless.source.encode([]) == []
    assert lossless.source.encode([""]) == [[]]
    assert lossless.source.decode([]) == []


@pytest.mark.parametrize(
    ("normalization", "expected"), [("nfc", "é ﬁ ²"), ("nfkc", "é fi 2"), ("none", "e\u0301 ﬁ ²")]
)
def test_normalization(normalization: str, expected: str) -> None:
    vocabulary = train(kind="char", normalize=normalization).source
    assert vocabulary.decode(vocabulary.encode(["e\u0301 ﬁ ²"])) == [expected]


@pytest.mark.parametrize("kind", [*LOSSLESS, "word"])
@pytest.mark.parametrize("shared", [True, False])
def test_a_tokenizer_can_be_saved_and_loaded(tmp_path: Path, kind: str, shared: bool) -> None:
    for stale in ("tokenizer.model", "tokenizer.source.model", "tokenizer.source.json"):
        (tmp_path / stale).write_text("left by an interrupted run")
    section = Section.model_validate({"kind": kind, "vocab_size": 400, "shared": shared})
    trained = Tokenizer.train(section, lambda: PAIRS)
    names = [path.name for path in trained.save(tmp_path)]
    two = ["tokenizer.source.model", "tokenizer.target.model"]
    assert names == (["tokenizer.model"] if shared else two)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    loaded = Tokenizer.load(tmp_path, section)
    assert loaded.shared == trained.shared == shared
    for side in ("source", "target"):
        old, new = getattr(trained, side), getattr(loaded, side)
        assert old.encode(["Der Hund äöü"]) == new.encode(["Der Hund äöü"])
        assert old.size == new.size


@pytest.mark.parametrize("kind", LOSSLESS)
def test_the_same_data_give_the_same_model_in_every_process(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        f"import hashlib, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
        "import test_tokenizer as t; t.module.MAX_TRAINING_CHARACTERS = 1000; "
        f"print(hashlib.sha256(t.train(kind={kind!r}).source.model).hexdigest())"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stderr == ""  # SentencePiece prints nothing
    monkeypatch.setattr(module, "MAX_TRAINING_CHARACTERS", 1000)
    assert train(kind=kind).source.model == train(kind=kind).source.model


def test_a_sample_is_sample_evenly_spread() -> None:
    sample = list(module._sample_evenly([Pair(str(n), "") for n in range(1000)], 0.1))
    assert [int(pair.source) for pair in sample] == list(range(0, 1000, 10))
    assert list(module._sample_evenly(PAIRS, 1.7)) == PAIRS
    assert list(module._sample_evenly(PAIRS, 1e-9)) == PAIRS[:1]


def test_sentencepiece_gets_no_more_text_from_a_larger_corpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[int] = []
    train_model = module._run_sentencepiece

    def record(texts: Iterator[bytes], **options: Any) -> bytes:
        escaped = list(texts)
        given.append(sum(len(text.decode()) - 1 for text in escaped))
        return train_model(iter(escaped), **options)

    monkeypatch.setattr(module, "_run_sentencepiece", record)
    monkeypatch.setattr(module, "MAX_TRAINING_CHARACTERS", 3000)
    for copies in (1, 4, 40):
        train(PAIRS * copies, kind="unigram")
    assert given == pytest.approx([3000] * 3, rel=0.05)


def test_text_is_counted_in_normalized_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COUNTED_PAIRS", 2)
    pairs = [Pair("ab", "e\u0301"), Pair("😀a", ""), Pair("\ud800", "漢" * 9)]
    found = module._count_text(pairs, ("source", "target"), "nfc", 5)
    assert found == module.TextStatistics(3, 2 + 1 + 2 + 1 + 5, len("abé😀漢") + 1)
    assert module._count_text(pairs, ("source",), "nfc", None).characters == 5


@pytest.mark.parametrize("kind", [*LOSSLESS, "word"])
@pytest.mark.parametrize("pairs", [PAIRS, PAIRS[:1], [Pair("a", "b")], [Pair("▅", "")]])
def test_a_small_corpus_gives_a_smaller_vocabulary(kind: str, pairs: list[Pair]) -> None:
    vocabulary = train(pairs, kind=kind, vocab_size=100_000).source
    assert len(SPECIAL_TOKENS) <= vocabulary.size < 2000
    if kind != "word":
        assert vocabulary.decode(vocabulary.encode(["Hund ▅"])) == ["Hund ▅"]


@pytest.mark.parametrize("kind", LOSSLESS)
def test_the_error_for_a_small_size_names_the_smallest_possible_one(kind: str) -> None:
    for pairs in (
        PAIRS,
        [Pair("".join(map(chr, range(0x4E00, 0x4E00 + n))), "") for n in (70, 400)],
    ):
        with pytest.raises(RegardError, match=r"tokenizer.vocab_size 9 is too small for ") as error:
            train(pairs, kind=kind, vocab_size=9)
        smallest = int(str(error.value).split()[-1])
        assert train(pairs, kind=kind, vocab_size=smallest).source.size == smallest
        with pytest.raises(RegardError, match=f"at least {smallest}"):
            train(pairs, kind=kind, vocab_size=smallest - 1)


def test_rare_characters_do_not_displace_longer_pieces() -> None:
    common, rare = "的是不了在人有我他这", "".join(map(chr, range(0x5000, 0x5000 + 300)))
    pairs = [Pair(common * 150, "") for _ in range(500)] + [Pair(rare, "")]
    vocabulary = train(pairs, kind="bpe", vocab_size=300).source
    [ids] = vocabulary.encode([rare])
    assert vocabulary.decode([ids]) == [rare]
    assert len(ids) == 3 * len(rare) + 1  # a space, and three bytes for each character


def test_long_lines_are_used_for_training() -> None:
    vocabulary = train([Pair("Hund " * 20_000, "Katze " * 20_000)]).source
    assert vocabulary.pieces(vocabulary.encode(["Hund"])[0]) == ["▁Hund"]


def test_training_without_text_is_refused() -> None:
    with pytest.raises(RegardError, match=r"no text .* source and target of all 1 pairs are empty"):
        train([Pair("", "")])
    with pytest.raises(RegardError, match=r"no text .* the target of all 1 pairs are empty"):
        train([Pair("a", "")], shared=False)
    with pytest.raises(RegardError, match="all 0 pairs"):
        train([])


def test_half_a_surrogate_pair_is_refused(lossless: Tokenizer) -> None:
    with pytest.raises(RegardError, match="an unpaired surrogate"):
        lossless.source.encode(["fine", "not \ud83d"])


def test_errors_in_the_data_are_raised_unchanged() -> None:
    def broken() -> list[Pair]:
        raise RegardError("file:7: broken")

    with pytest.raises(RegardError, match=r"^file:7: broken$"):
        Tokenizer.train(Section(), broken)


def test_an_interrupt_while_the_texts_are_read_is_no_error(pairs: list[Pair]) -> None:
    """SentencePiece replaces the exceptions of its input iterator."""
    reads = list[int]()

    def interrupted() -> Iterator[Pair]:
        reads.append(1)
        yield from pairs
        if len(reads) > 1:  # the first time, the characters are counted
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Tokenizer.train(Section(), interrupted)


def test_missing_and_damaged_files_are_reported(tmp_path: Path) -> None:
    section = Section()
    path = tmp_path / "tokenizer.model"
    with pytest.raises(RegardError, match=r"tokenizer.model: no such file"):
        Tokenizer.load(tmp_path, section)
    train().save(tmp_path)
    whole = path.read_bytes()
    for damaged in (b"", b"nonsense", whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(RegardError, match=r"tokenizer.model: damaged"):
            Tokenizer.load(tmp_path, section)
    path.write_bytes(whole.replace(b"<pad>", b"<cls>"))
    with pytest.raises(
        RegardError, match=r"not created by Regard: its first entries are \['<cls>'"
    ):
        Tokenizer.load(tmp_path, section)
    path.unlink()
    path.mkdir()
    with pytest.raises(RegardError, match=r"cannot be read: Is a directory"):
        Tokenizer.load(tmp_path, section)


# Extending a vocabulary

NEW_WORDS = ["Zug", "Bahnhof", "你好", "世界", "пример", "Gleis"]
NEW_PAIRS = [
    Pair(
        " ".join(NEW_WORDS[(n + k) % 6] for k in range(3)), " ".join(NEW_WORDS[n % 6 :: 2]) + " 你"
    )
    for n in range(60)
]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", [*LOSSLESS, "word"])
def test_an_extended_vocabulary_keeps_its_entries_and_splits_new_texts_less(
    kind: str, shared: bool
) -> None:
    config = Section.model_validate({"vocab_size": 400, "kind": kind, "shared": shared})
    original = Tokenizer.train(config, lambda: PAIRS, tags=["2de"])
    extended = extend_tokenizer(original, config, lambda: NEW_PAIRS, 12, ["2de", "2zh"])
    assert extended.shared == shared
    assert extended.source.tags == {"2de": 5, "2zh": 6}
    for side in ("source", "target"):
        before, after = getattr(original, side), getattr(extended, side)
        known = before.pieces(range(before.size))
        pieces = after.pieces(range(after.size))
        tag = int(side == "source" or shared)
        assert before.size + tag < after.size <= before.size + tag + 12
        assert [piece for piece in pieces if piece in {*known}] == known
        texts = [getattr(pair, side) for pair in NEW_PAIRS]
        if kind == "word":
            assert all(UNK not in row for row in after.encode(texts))
        else:
            assert after.decode(after.encode(texts)) == texts
            assert sum(map(len, after.encode(texts))) < 0.8 * sum(map(len, before.encode(texts)))
        ids = extended_ids(before, after)
        assert [ids[after_id] for after_id in range(5)] == [[i] for i in range(5)]
        new = [i for i, piece in enumerate(pieces) if piece not in {*known}]
        spelled = {i: "".join(before.decode([ids[i]])) for i in new if i not in after.tags.values()}
        if kind != "word":  # whose new words were unknown
            assert all(spelled[i] == pieces[i].replace("▁", " ").strip() for i in spelled)
    assert extended_ids(original.source, extended.source)[6] == [5]  # from the tag that exists


def test_the_first_tag_starts_from_all_pieces() -> None:
    config = Section(vocab_size=400)
    original = Tokenizer.train(config, lambda: PAIRS)
    extended = extend_tokenizer(original, config, lambda: NEW_PAIRS, 0, ["2zh"])
    assert extended.source.tags == {"2zh": 5}
    ids = extended_ids(original.source, extended.source)
    assert ids[5] == list(range(5, original.source.size))
    assert ids[6:] == [[i] for i in range(5, original.source.size)]


def test_an_extension_needs_no_room_for_rare_characters() -> None:
    """The alphabet of the new texts is larger than the original vocabulary and the extension together."""
    config = Section(vocab_size=300)
    pairs = [Pair("".join(chr(0x4E00 + n) for n in range(k, k + 9)), "x") for k in range(0, 900, 9)]
    original = Tokenizer.train(config, lambda: [Pair("a b", "c d")] * 3)
    assert (
        extend_tokenizer(original, config, lambda: pairs, 5).source.size == original.source.size + 5
    )


@pytest.mark.parametrize(
    ("kind", "vocab_size", "alphabet", "coverage"),
    [
        ("unigram", 1_000, 256, 1.0),
        ("unigram", 1_000, 257, 0.9995),
        ("unigram", 2_000, 500, 1.0),  # a quarter of the vocabulary
        ("bpe", 2_000, 501, 0.9995),
        ("char", 2_000, 501, 1.0),
    ],
)
def test_rare_characters_of_a_large_alphabet_have_no_entry(
    kind: str, vocab_size: int, alphabet: int, coverage: float
) -> None:
    options = module._training_options(Section(kind=kind, vocab_size=vocab_size), alphabet)
    assert options["character_coverage"] == coverage


def test_bytes_are_inside_of_words() -> None:
    """A byte may be part of a letter; spaces and punctuation are boundaries."""
    vocabulary = train(kind="bpe").source
    starts, ends = vocabulary.word_boundaries()
    pieces = vocabulary.pieces(range(vocabulary.size))
    assert vocabulary.byte_ids
    for i in vocabulary.byte_ids:
        assert (starts[i], ends[i]) == (False, False)
    letters = [i for i, piece in enumerate(pieces) if piece.isalpha()]
    words = [i for i, piece in enumerate(pieces) if piece[1:].isalpha() and piece[0] == "▁"]
    assert letters
    assert words
    assert not any(starts[i] or ends[i] for i in letters)
    assert all(starts[i] and not ends[i] for i in words)
