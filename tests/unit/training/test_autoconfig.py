"""Recipes chosen from the data."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from unicodedata import normalize

import pytest

from regard.data.pairs import Pair
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.recipe import DataFiles, Recipe, make_recipe
from regard.training import autoconfig as module
from regard.training.autoconfig import MIN_PAIRS, autoconfigure

TEXTS = DataFiles(pairs=("pairs.tsv",))


def write(folder: Path, lines: Sequence[str]) -> str:
    (folder / "pairs.tsv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(folder)


def prose(count: int) -> list[str]:
    return [f"this is sentence number{n}\tdies ist der Satz Nummer{n}" for n in range(count)]


def sounds(count: int) -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [
        f"{letters[n % 26]} {letters[n // 26 % 26]}\tS{n % 26} S{n // 26 % 26} S{n % 7}"
        for n in range(count)
    ]


def statistics(pairs: int, characters: float) -> module.CorpusStatistics:
    many = {f"word{number}" for number in range(module.MAX_SYMBOLS + 1)}
    side = module.SideStatistics(texts=pairs, characters=round(pairs * characters), symbols=many)
    return module.CorpusStatistics(pairs, side, side)


def test_too_few_pairs_are_refused_with_their_number(tmp_path: Path) -> None:
    root = write(tmp_path, prose(MIN_PAIRS - 1))
    with pytest.raises(RegardError, match=f"^too few pairs to train on: {MIN_PAIRS - 1};"):
        autoconfigure(TEXTS, root)


def test_just_enough_pairs_give_a_complete_recipe(tmp_path: Path) -> None:
    root = write(tmp_path, prose(MIN_PAIRS))
    recipe, reasons = autoconfigure(TEXTS, root)
    assert recipe.data.train == TEXTS
    assert recipe.data.path("pairs.tsv") == tmp_path / "pairs.tsv"
    assert recipe.model.preset == "tiny"
    assert recipe.tokenizer.kind == "unigram"
    assert any(reason.startswith(f"{MIN_PAIRS} pairs") for reason in reasons)
    assert make_recipe(recipe.model_dump(), "again") == recipe


def test_sizes_rise_with_the_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = write(tmp_path, prose(1))
    found: list[Recipe] = []
    counts = [50, 5_000, 5_001, 50_000, 50_001, 500_000, 500_001, 5_000_000, 5_000_001, 10**9]
    for count in counts:
        monkeypatch.setattr(
            module, "collect_statistics", lambda _, count=count: statistics(count, characters=400.0)
        )
        recipe, _ = autoconfigure(TEXTS, root)
        found.append(recipe)
    assert [recipe.tokenizer.vocab_size for recipe in found[::2]] == [
        1000,
        4000,
        8000,
        16000,
        32000,
    ]
    assert [recipe.tokenizer.vocab_size for recipe in found[1::2]] == [
        1000,
        4000,
        8000,
        16000,
        32000,
    ]
    for less, more in pairwise(found):
        assert less.model.d_model <= more.model.d_model
        assert less.model.dropout >= more.model.dropout
        assert less.batch_tokens <= more.batch_tokens
        assert less.data.hold_out >= more.data.hold_out
    widths = [recipe.model.d_model for recipe in found]
    assert (widths[0], widths[4], widths[-1]) == (128, 256, 512)
    for recipe in found:
        assert recipe.training.steps >= 200
        assert recipe.training.warmup < recipe.training.steps
        assert recipe.training.validate_every < recipe.training.steps


def test_steps_correspond_to_the_epochs_of_the_tier(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = write(tmp_path, prose(1))
    monkeypatch.setattr(
        module, "collect_statistics", lambda _: statistics(100_000, characters=19 * 4.7)
    )
    recipe, _ = autoconfigure(TEXTS, root)
    tokens = 100_000 * 20
    epochs = recipe.training.steps * recipe.batch_tokens / tokens
    assert epochs == pytest.approx(30, rel=0.01)


def test_a_large_alphabet_gets_a_larger_vocabulary(tmp_path: Path) -> None:
    lines = [f"word {n}\t{chr(0x4E00 + n)}{chr(0x5000 + n)}" for n in range(900)]
    recipe, reasons = autoconfigure(TEXTS, write(tmp_path, lines))
    alphabet = 900 * 2 + len("word 0123456789") - (0x4E00 + 900 - 0x5000)
    assert recipe.tokenizer.vocab_size == 3_000
    assert any(f"{alphabet:,} different characters" in reason for reason in reasons)


def test_decomposed_hangul_counts_as_composed_syllables(tmp_path: Path) -> None:
    syllables = [chr(0xAC00 + 5 * n) for n in range(1500)]
    lines = [
        normalize("NFD", f"word{n}\t{syllable * 3} {syllable}")
        for n, syllable in enumerate(syllables)
    ]
    recipe, _ = autoconfigure(TEXTS, write(tmp_path, lines))
    assert recipe.tokenizer.vocab_size == 3_000
    pairs = [Pair(*line.split("\t")) for line in lines]
    assert Tokenizer.train(recipe.tokenizer, lambda: pairs).source.size <= 3_000


def test_symbols_are_recognized_and_become_words(tmp_path: Path) -> None:
    recipe, reasons = autoconfigure(TEXTS, write(tmp_path, sounds(2001)))
    assert recipe.tokenizer.kind == "word"
    assert not recipe.tokenizer.shared
    assert not recipe.model.tie_embeddings
    assert recipe.evaluation.metrics == ("wer", "per")
    assert any("52 symbols" in reason for reason in reasons)  # 26 letters and S0 to S25


def words_and_sounds(count: int) -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [
        f"{letters[n % 26]}{letters[n // 26 % 26]}x{letters[n // 676]}\tS{n % 26} S{n // 26 % 26} S{n // 676}"
        for n in range(count)
    ]


def test_letters_of_single_words_to_sounds(tmp_path: Path) -> None:
    lines = words_and_sounds(2001)
    recipe, reasons = autoconfigure(TEXTS, write(tmp_path, lines))
    assert (recipe.tokenizer.kind, recipe.tokenizer.target_kind) == ("char", "word")
    assert recipe.evaluation.metrics == ("wer", "per")
    assert any(
        "single words and targets are sequences of 26 symbols" in reason for reason in reasons
    )
    assert any("dropout 0.1" in reason for reason in reasons)
    pairs = [Pair(*line.split("\t")) for line in lines]
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: pairs)
    (letters,) = tokenizer.source.encode(["abxc"])
    assert len(letters) == 1 + 4  # a word starts with a space
    (sounds,) = tokenizer.target.encode(["S1 S25 S0"])
    assert tokenizer.target.decode([sounds]) == ["S1 S25 S0"]
    assert len(sounds) == 3


def test_short_words_of_a_script_without_spaces_are_words(tmp_path: Path) -> None:
    lines = [f"{chr(0x30A1 + n % 80)}{chr(0x30A1 + n // 80)}ル\tx{n}y" for n in range(400)]
    assert autoconfigure(TEXTS, write(tmp_path, lines))[0].tokenizer.kind == "char"


def test_sounds_to_letters_and_letters_to_letters(tmp_path: Path) -> None:
    swapped = ["\t".join(reversed(line.split("\t"))) for line in words_and_sounds(2001)]
    recipe, _ = autoconfigure(TEXTS, write(tmp_path, swapped))
    assert (recipe.tokenizer.kind, recipe.tokenizer.target_kind) == ("word", "char")
    assert recipe.evaluation.metrics == ("wer", "chrf")
    letters = [f"{line.split()[-1]}\t{line.split()[-1].upper()}" for line in swapped]
    recipe, reasons = autoconfigure(TEXTS, write(tmp_path, letters))
    assert (recipe.tokenizer.kind, recipe.tokenizer.target_kind) == ("char", None)
    assert not recipe.tokenizer.shared
    assert any("both sides are single words" in reason for reason in reasons)


def test_a_tokenizer_kind_set_by_the_user_is_for_both_sides(tmp_path: Path) -> None:
    root = write(tmp_path, words_and_sounds(2001))
    recipe, reasons = autoconfigure(TEXTS, root, ["tokenizer.kind=bpe"])
    assert (recipe.tokenizer.kind, recipe.tokenizer.target_kind) == ("bpe", None)
    assert any(reason == "tokenizer: bpe, at most 1,000 entries" for reason in reasons)
    assert autoconfigure(TEXTS, root, ["tokenizer.shared=true"])[0].tokenizer.shared
    recipe, reasons = autoconfigure(TEXTS, root, ["tokenizer.target_kind=bpe"])
    assert (recipe.tokenizer.kind, recipe.tokenizer.target_kind) == ("char", "bpe")
    assert any("char for sources, bpe for targets" in reason for reason in reasons)


def test_tokens_are_counted_for_the_selected_kind(tmp_path: Path) -> None:
    root = write(tmp_path, words_and_sounds(2001))
    sounds, letters = (
        autoconfigure(TEXTS, root, change) for change in ([], ["tokenizer.kind=char"])
    )
    assert "about 4 tokens each" in sounds[1][0]
    assert "about 11 tokens each" in letters[1][0]
    assert letters[0].training.steps > 2 * sounds[0].training.steps


def test_a_few_exceptions_change_nothing(tmp_path: Path) -> None:
    lines = [*words_and_sounds(600), *["\t"] * 60, "東\tS1 S2", "two words\tS3"]
    assert autoconfigure(TEXTS, write(tmp_path, lines))[0].tokenizer.target_kind == "word"


def test_toy_sentences_stay_sentences(tmp_path: Path) -> None:
    lines = [
        f"the dog{n % 90} sees cat{n // 90 % 60}\tder Hund{n % 90} sieht Katze{n // 90 % 60}"
        for n in range(5000)
    ]
    assert autoconfigure(TEXTS, write(tmp_path, lines))[0].tokenizer.kind == "unigram"


@pytest.mark.parametrize("side", ["sources", "targets"])
def test_a_blank_side_is_refused(tmp_path: Path, side: str) -> None:
    lines = [f"\tword{n}" if side == "sources" else f"word{n}\t" for n in range(60)]
    with pytest.raises(RegardError, match=f"nothing to train on: all 60 {side} are blank"):
        autoconfigure(TEXTS, write(tmp_path, lines))


@pytest.mark.parametrize("text", ["ฉันรักเธอมาก", "我爱你，你爱我吗", "two words"])
def test_sentences_without_spaces_are_not_single_words(tmp_path: Path, text: str) -> None:
    lines = [f"{text}{number}\tword{number}" for number in range(300)]
    recipe, _ = autoconfigure(TEXTS, write(tmp_path, lines))
    assert recipe.tokenizer.kind == "unigram"


def test_prose_is_not_mistaken_for_symbols(tmp_path: Path) -> None:
    recipe, _ = autoconfigure(TEXTS, write(tmp_path, prose(2001)))
    assert recipe.tokenizer.kind == "unigram"
    assert recipe.evaluation.metrics[0] == "bleu"


def test_overrides_take_precedence(tmp_path: Path) -> None:
    root = write(tmp_path, prose(60))
    recipe, _ = autoconfigure(TEXTS, root, ["training.steps=7", "model.preset=small"])
    assert recipe.training.steps == recipe.training.warmup == 7
    assert recipe.model.d_model == 256


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"pairs\.tsv"):
        autoconfigure(TEXTS, str(tmp_path))
