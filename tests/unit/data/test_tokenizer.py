import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st

from regard.data import tokenizer as module
from regard.data.corpus import Pair
from regard.data.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.recipe import Tokenizer as Section, TokenizerKind

SENTENCE = "der die das ein kleiner großer Hund Katze läuft schläft über unter dem Haus Straße"
WORDS = SENTENCE.split()
PAIRS = [
    Pair(
        " ".join(WORDS[(n * k + k) % len(WORDS)] for k in range(1, 7)) + ".",
        " ".join(WORDS[(n + k * k) % len(WORDS)].upper() for k in range(1, 6)) + "!",
    )
    for n in range(60)
]
LOSSLESS: list[TokenizerKind] = ["unigram", "bpe", "characters"]


def learn(pairs: list[Pair] | None = None, **section: object) -> Tokenizer:
    texts = PAIRS if pairs is None else pairs
    return Tokenizer.train(Section.model_validate({"vocab_size": 400, **section}), lambda: texts)


@pytest.fixture(scope="module", params=LOSSLESS)
def lossless(request: pytest.FixtureRequest) -> Tokenizer:
    return learn(kind=request.param)


@given(texts=st.lists(st.text()))
@example(texts=["", " ", "  ", " x", "x  ", "a  b", "\0", "a\0b", "\t", "\r", "\ufeff", "\ufffd"])
@example(texts=["▁", "▁▁ x▁", "▅", "\ufdd0", "\ufdd00", "\ufdd01\ufdd0", "⁇", "😀👩‍👩‍👧", "\uffff"])
@example(
    texts=["<s>", "</s>", "<unk>", "<pad>", "<0x41>", "a\u0301", "한국어", "\x1b[0m", "\u2028"]
)
def test_any_text_comes_back(lossless: Tokenizer, texts: list[str]) -> None:
    vocabulary = lossless.source
    ids = vocabulary.encode(texts)
    assert vocabulary.decode(ids) == [unicodedata.normalize("NFC", text) for text in texts]
    assert all(UNK < i < vocabulary.size for row in ids for i in row)


def test_words_are_the_same_pieces_at_the_start_and_inside(lossless: Tokenizer) -> None:
    [alone], [twice] = lossless.source.encode(["Hund"]), lossless.source.encode(["Hund Hund"])
    assert twice == alone + alone


def test_unknown_words_become_the_unknown_mark() -> None:
    vocabulary = learn(kind="word").source
    [ids] = vocabulary.encode(["der Drache schläft ▁"])
    assert [i == UNK for i in ids] == [False, True, False, True]
    assert vocabulary.decode([ids, [UNK]]) == ["der ⁇ schläft ⁇", "⁇"]


def test_marks_are_silent_in_text_and_named_as_pieces(lossless: Tokenizer) -> None:
    vocabulary = lossless.target
    [ids] = vocabulary.encode(["HUND"])
    assert vocabulary.decode([[BOS, *ids, EOS, PAD, PAD], []]) == ["HUND", ""]
    pieces = vocabulary.pieces([BOS, *ids, EOS, PAD, UNK])
    assert "".join(pieces[1:-3]) == "▁HUND"
    assert [pieces[0], *pieces[-3:]] == ["<s>", "</s>", "<pad>", "<unk>"]
    assert vocabulary.pieces(list(SPECIAL_TOKENS)) == list(SPECIAL_TOKENS.values())
    assert vocabulary.pieces(vocabulary.encode(["é"])[0])[1:] == ["<0xC3>", "<0xA9>"]


def test_nothing_gives_nothing(lossless: Tokenizer) -> None:
    assert lossless.source.encode([]) == []
    assert lossless.source.encode([""]) == [[]]
    assert lossless.source.decode([]) == []


@pytest.mark.parametrize(
    ("normalization", "outcome"), [("nfc", "é ﬁ ²"), ("nfkc", "é fi 2"), ("none", "e\u0301 ﬁ ²")]
)
def test_normalization(normalization: str, outcome: str) -> None:
    vocabulary = learn(kind="char", normalize=normalization).source
    assert vocabulary.decode(vocabulary.encode(["e\u0301 ﬁ ²"])) == [outcome]


@pytest.mark.parametrize("kind", [*LOSSLESS, "words"])
@pytest.mark.parametrize("shared", [True, False])
def test_saved_and_loaded_it_is_the_same(tmp_path: Path, kind: str, shared: bool) -> None:
    for stale in ("tokenizer.model", "tokenizer.source.model", "tokenizer.source.json"):
        (tmp_path / stale).write_text("of a training before, which was broken off")
    section = Section.model_validate({"kind": kind, "vocab_size": 400, "shared": shared})
    learnt = Tokenizer.train(section, lambda: PAIRS)
    names = [path.name for path in learnt.save(tmp_path)]
    two = ["tokenizer.source.model", "tokenizer.target.model"]
    assert names == (["tokenizer.model"] if shared else two)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    loaded = Tokenizer.load(tmp_path, section)
    assert loaded.shared == learnt.shared == shared
    for side in ("source", "target"):
        old, new = getattr(learnt, side), getattr(loaded, side)
        assert old.encode(["Der Hund äöü"]) == new.encode(["Der Hund äöü"])
        assert old.size == new.size


@pytest.mark.parametrize("kind", LOSSLESS)
def test_the_same_data_give_the_same_model_in_any_process(
    kind: TokenizerKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        f"import hashlib, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
        "import test_tokenizer as t; t.module.LETTERS_TO_LEARN_FROM = 1000; "
        f"print(hashlib.sha256(t.learn(kind={kind!r}).source.model).hexdigest())"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stderr == ""  # SentencePiece keeps quiet
    monkeypatch.setattr(module, "LETTERS_TO_LEARN_FROM", 1000)
    assert learn(kind=kind).source.model == learn(kind=kind).source.model


def test_a_sample_is_evenly_spread() -> None:
    sample = list(module._evenly([Pair(str(n), "") for n in range(1000)], 0.1))
    assert [int(pair.source) for pair in sample] == list(range(0, 1000, 10))
    assert list(module._evenly(PAIRS, 1.7)) == PAIRS
    assert list(module._evenly(PAIRS, 1e-9)) == PAIRS[:1]


@pytest.mark.parametrize("kind", [*LOSSLESS, "words"])
@pytest.mark.parametrize("pairs", [PAIRS, PAIRS[:1], [Pair("a", "b")], [Pair("▅", "")]])
def test_small_data_give_a_smaller_vocabulary(kind: str, pairs: list[Pair]) -> None:
    vocabulary = learn(pairs, kind=kind, size=100_000).source
    assert len(SPECIAL_TOKENS) <= vocabulary.size < 2000
    if kind != "words":
        assert vocabulary.decode(vocabulary.encode(["Hund ▅"])) == ["Hund ▅"]


@pytest.mark.parametrize("kind", LOSSLESS)
def test_too_small_a_size_names_the_smallest_that_works(kind: TokenizerKind) -> None:
    for pairs in (
        PAIRS,
        [Pair("".join(map(chr, range(0x4E00, 0x4E00 + n))), "") for n in (70, 400)],
    ):
        with pytest.raises(RegardError, match=r"tokenizer.vocab_size 9 is too small for ") as error:
            learn(pairs, kind=kind, size=9)
        smallest = int(str(error.value).split()[-1])
        assert learn(pairs, kind=kind, size=smallest).source.size == smallest
        with pytest.raises(RegardError, match=f"at least {smallest}"):
            learn(pairs, kind=kind, size=smallest - 1)


def test_rare_letters_do_not_crowd_out_the_pieces() -> None:
    common, rare = "的是不了在人有我他这", "".join(map(chr, range(0x5000, 0x5000 + 300)))
    pairs = [Pair(common * 150, "") for _ in range(500)] + [Pair(rare, "")]
    vocabulary = learn(pairs, kind="bpe", size=300).source
    [ids] = vocabulary.encode([rare])
    assert vocabulary.decode([ids]) == [rare]
    assert len(ids) == 3 * len(rare) + 1  # a space, and three bytes for each letter


def test_long_lines_take_part_in_the_learning() -> None:
    vocabulary = learn([Pair("Hund " * 20_000, "Katze " * 20_000)]).source
    assert vocabulary.pieces(vocabulary.encode(["Hund"])[0]) == ["▁Hund"]


def test_no_text_at_all() -> None:
    with pytest.raises(RegardError, match=r"no text .* source and target of all 1 pairs are empty"):
        learn([Pair("", "")])
    with pytest.raises(RegardError, match=r"no text .* the target of all 1 pairs are empty"):
        learn([Pair("a", "")], shared=False)
    with pytest.raises(RegardError, match="all 0 pairs"):
        learn([])


def test_half_a_surrogate_pair_is_not_text(lossless: Tokenizer) -> None:
    with pytest.raises(RegardError, match="half of a surrogate pair"):
        lossless.source.encode(["fine", "not \ud83d"])


def test_errors_of_the_data_come_through() -> None:
    def broken() -> list[Pair]:
        raise RegardError("file:7: broken")

    with pytest.raises(RegardError, match=r"^file:7: broken$"):
        Tokenizer.train(Section(), broken)


def test_loading_what_is_missing_or_damaged(tmp_path: Path) -> None:
    section = Section()
    path = tmp_path / "tokenizer.model"
    with pytest.raises(RegardError, match=r"tokenizer.model: no such file"):
        Tokenizer.load(tmp_path, section)
    learn().save(tmp_path)
    whole = path.read_bytes()
    for damaged in (b"", b"nonsense", whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(RegardError, match=r"tokenizer.model: damaged"):
            Tokenizer.load(tmp_path, section)
    path.write_bytes(whole.replace(b"<pad>", b"<cls>"))
    with pytest.raises(RegardError, match=r"not made by Regard: its first entries are \['<cls>'"):
        Tokenizer.load(tmp_path, section)
    path.unlink()
    path.mkdir()
    with pytest.raises(RegardError, match=r"cannot be read: Is a directory"):
        Tokenizer.load(tmp_path, section)
