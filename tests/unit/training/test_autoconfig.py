"""Sizes chosen from the data."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from unicodedata import normalize

import pytest

from regard.data.corpus import Pair
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.recipe import DataFiles, Recipe, make_recipe
from regard.training import autoconfig as module
from regard.training.autoconfig import FEWEST_PAIRS, choose

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


def measured(pairs: int, letters: float) -> module.Measured:
    many = {f"word{number}" for number in range(module.FEW_SYMBOLS + 1)}
    side = module.Side(texts=pairs, letters=round(pairs * letters), symbols=many)
    return module.Measured(pairs, side, side)


def test_too_few_pairs_are_refused_with_their_number(tmp_path: Path) -> None:
    root = write(tmp_path, prose(FEWEST_PAIRS - 1))
    with pytest.raises(RegardError, match=f"^too few pairs to learn from: {FEWEST_PAIRS - 1};"):
        choose(TEXTS, root)


def test_just_enough_pairs_give_a_whole_recipe_that_knows_its_data(tmp_path: Path) -> None:
    root = write(tmp_path, prose(FEWEST_PAIRS))
    recipe, reasons = choose(TEXTS, root)
    assert recipe.data.train == TEXTS
    assert recipe.data.path("pairs.tsv") == tmp_path / "pairs.tsv"
    assert recipe.model.preset == "tiny"
    assert recipe.tokenizer.kind == "unigram"
    assert any(reason.startswith(f"{FEWEST_PAIRS} pairs") for reason in reasons)
    assert make_recipe(recipe.model_dump(), "again") == recipe


def test_sizes_rise_with_the_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = write(tmp_path, prose(1))
    found: list[Recipe] = []
    counts = [50, 5_000, 5_001, 50_000, 50_001, 500_000, 500_001, 5_000_000, 5_000_001, 10**9]
    for count in counts:
        monkeypatch.setattr(
            module, "_measure", lambda _, count=count: measured(count, letters=400.0)
        )
        recipe, _ = choose(TEXTS, root)
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
        assert less.training.tokens_per_batch <= more.training.tokens_per_batch
        assert less.data.hold_out >= more.data.hold_out
    widths = [recipe.model.d_model for recipe in found]
    assert (widths[0], widths[4], widths[-1]) == (128, 256, 512)
    for recipe in found:
        assert recipe.training.steps >= 200
        assert recipe.training.warmup < recipe.training.steps
        assert recipe.training.validate_every < recipe.training.steps


def test_steps_go_through_the_data_so_many_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = write(tmp_path, prose(1))
    monkeypatch.setattr(module, "_measure", lambda _: measured(100_000, letters=19 * 4.7))
    recipe, _ = choose(TEXTS, root)
    tokens = 100_000 * 20
    times = recipe.training.steps * recipe.training.tokens_per_batch / tokens
    assert times == pytest.approx(30, rel=0.01)


def test_a_large_alphabet_gets_a_larger_vocabulary(tmp_path: Path) -> None:
    lines = [f"word {n}\t{chr(0x4E00 + n)}{chr(0x5000 + n)}" for n in range(900)]
    recipe, reasons = choose(TEXTS, write(tmp_path, lines))
    alphabet = 900 * 2 + len("word 0123456789") - (0x4E00 + 900 - 0x5000)
    assert recipe.tokenizer.vocab_size == 3_000
    assert any(f"{alphabet:,} different letters" in reason for reason in reasons)


def test_decomposed_hangul_counts_as_the_signs_it_becomes(tmp_path: Path) -> None:
    signs = [chr(0xAC00 + 5 * n) for n in range(1500)]
    lines = [normalize("NFD", f"word{n}\t{sign * 3} {sign}") for n, sign in enumerate(signs)]
    recipe, _ = choose(TEXTS, write(tmp_path, lines))
    assert recipe.tokenizer.vocab_size == 3_000
    pairs = [Pair(*line.split("\t")) for line in lines]
    assert Tokenizer.train(recipe.tokenizer, lambda: pairs).source.size <= 3_000


def test_symbols_are_seen_and_kept_whole(tmp_path: Path) -> None:
    recipe, reasons = choose(TEXTS, write(tmp_path, sounds(2001)))
    assert recipe.tokenizer.kind == "words"
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
    recipe, reasons = choose(TEXTS, write(tmp_path, lines))
    assert (recipe.tokenizer.kind, recipe.tokenizer.target_kind) == ("characters", "words")
    assert recipe.evaluation.metrics == ("wer", "per")
    assert any("single words, targets made of 26 symbols" in reason for reason in reasons)
    assert any("dropout 0.1" in reason for reason in reasons)
    pairs = [Pair(*line.split("\t")) for line in lines]
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: pairs)
    (letters,) = tokenizer.source.encode(["abxc"])
    assert len(letters) == 1 + 4  # a word begins with a blank
    (sounds,) = tokenizer.target.encode(["S1 S25 S0"])
    assert tokenizer.target.decode([sounds]) == ["S1 S25 S0"]
    assert len(sounds) == 3


def test_short_words_of_a_script_without_blanks_are_words(tmp_path: Path) -> None:
    lines = [f"{chr(0x30A1 + n % 80)}{chr(0x30A1 + n // 80)}ル\tx{n}y" for n in range(400)]
    assert choose(TEXTS, write(tmp_path, lines))[0].tokenizer.kind == "characters"


def test_sounds_to_letters_and_letters_to_letters(tmp_path: Path) -> None:
    turned = ["\t".join(reversed(line.split("\t"))) for line in words_and_sounds(2001)]
    recipe, _ = choose(TEXTS, write(tmp_path, turned))
    assert (recipe.tokenizer.kind, recipe.tokenizer.target_kind) == ("words", "characters")
    assert recipe.evaluation.metrics == ("wer", "chrf")
    letters = [f"{line.split()[-1]}\t{line.split()[-1].upper()}" for line in turned]
    recipe, reasons = choose(TEXTS, write(tmp_path, letters))
    assert (recipe.tokenizer.kind, recipe.tokenizer.target_kind) == ("characters", None)
    assert not recipe.tokenizer.shared
    assert any("both sides are single words" in reason for reason in reasons)


def test_a_wish_for_one_kind_is_one_for_both_sides(tmp_path: Path) -> None:
    root = write(tmp_path, words_and_sounds(2001))
    recipe, reasons = choose(TEXTS, root, ["tokenizer.kind=bpe"])
    assert (recipe.tokenizer.kind, recipe.tokenizer.target_kind) == ("bpe", None)
    assert any(reason == "tokenizer: bpe, at most 1,000 entries" for reason in reasons)
    assert choose(TEXTS, root, ["tokenizer.shared=true"])[0].tokenizer.shared
    recipe, reasons = choose(TEXTS, root, ["tokenizer.target_kind=bpe"])
    assert (recipe.tokenizer.kind, recipe.tokenizer.target_kind) == ("characters", "bpe")
    assert any("characters for sources, bpe for targets" in reason for reason in reasons)


def test_tokens_are_those_of_the_kind_that_is_taken(tmp_path: Path) -> None:
    root = write(tmp_path, words_and_sounds(2001))
    sounds, letters = (choose(TEXTS, root, change) for change in ([], ["tokenizer.kind=char"]))
    assert "about 4 tokens each" in sounds[1][0]
    assert "about 11 tokens each" in letters[1][0]
    assert letters[0].training.steps > 2 * sounds[0].training.steps


def test_a_few_that_are_otherwise_change_nothing(tmp_path: Path) -> None:
    lines = [*words_and_sounds(600), *["\t"] * 60, "東\tS1 S2", "two words\tS3"]
    assert choose(TEXTS, write(tmp_path, lines))[0].tokenizer.target_kind == "words"


def test_toy_sentences_stay_sentences(tmp_path: Path) -> None:
    lines = [
        f"the dog{n % 90} sees cat{n // 90 % 60}\tder Hund{n % 90} sieht Katze{n // 90 % 60}"
        for n in range(5000)
    ]
    assert choose(TEXTS, write(tmp_path, lines))[0].tokenizer.kind == "unigram"


@pytest.mark.parametrize("side", ["sources", "targets"])
def test_a_blank_side_is_refused(tmp_path: Path, side: str) -> None:
    lines = [f"\tword{n}" if side == "sources" else f"word{n}\t" for n in range(60)]
    with pytest.raises(RegardError, match=f"nothing to learn: all 60 {side} are blank"):
        choose(TEXTS, write(tmp_path, lines))


@pytest.mark.parametrize("text", ["ฉันรักเธอมาก", "我爱你，你爱我吗", "two words"])
def test_sentences_without_blanks_are_no_single_words(tmp_path: Path, text: str) -> None:
    lines = [f"{text}{number}\tword{number}" for number in range(300)]
    recipe, _ = choose(TEXTS, write(tmp_path, lines))
    assert recipe.tokenizer.kind == "unigram"


def test_prose_is_not_taken_for_symbols(tmp_path: Path) -> None:
    recipe, _ = choose(TEXTS, write(tmp_path, prose(2001)))
    assert recipe.tokenizer.kind == "unigram"
    assert recipe.evaluation.metrics[0] == "bleu"


def test_changes_come_on_top(tmp_path: Path) -> None:
    root = write(tmp_path, prose(60))
    recipe, _ = choose(TEXTS, root, ["training.steps=7", "model.preset=small"])
    assert recipe.training.steps == 7
    assert recipe.model.d_model == 256


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"pairs\.tsv"):
        choose(TEXTS, str(tmp_path))
