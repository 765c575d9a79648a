"""Recipes chosen from the data."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unicodedata import normalize

import pytest

from regard.data.pairs import Pair
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.recipe import DataFiles, Recipe, make_recipe
from regard.recipe.registry import LOCATIONS, find_registry
from regard.training import autoconfig as module
from regard.training.autoconfig import (
    MIN_PAIRS,
    MODEL_RULES,
    SYMBOL_RULES,
    _alternatives,
    autoconfigure,
)
from regard.training.corpus_statistics import MAX_SYMBOLS, CorpusStatistics, SideStatistics
from regard.training.cost_model import DeviceSpeed

TEXTS = DataFiles(pairs=("pairs.tsv",))


CPU, GPU = DeviceSpeed("cpu", 3_900.0), DeviceSpeed("cuda", 1.08e6, batching="packed")


def configure(
    root: str,
    overrides: Sequence[str] = (),
    minutes: float | None = None,
    speed: DeviceSpeed = CPU,
) -> tuple[Recipe, list[str]]:
    """The automatic recipe and its reasons, for a device of known speed."""
    chosen = autoconfigure(TEXTS, root, overrides, minutes=minutes, speed=speed)
    return chosen.recipe, chosen.reasons


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


def statistics(pairs: int, characters: float) -> CorpusStatistics:
    many = {f"word{number}" for number in range(MAX_SYMBOLS + 1)}
    side = SideStatistics(texts=pairs, characters=round(pairs * characters), symbols=many)
    return CorpusStatistics(pairs, side, side)


def test_too_few_pairs_are_refused_with_their_number(tmp_path: Path) -> None:
    root = write(tmp_path, prose(MIN_PAIRS - 1))
    with pytest.raises(RegardError, match=f"^too few pairs to train on: {MIN_PAIRS - 1};"):
        configure(root)


def test_just_enough_pairs_give_a_complete_recipe(tmp_path: Path) -> None:
    root = write(tmp_path, prose(MIN_PAIRS))
    recipe, reasons = configure(root)
    assert recipe.data.train == TEXTS
    assert recipe.data.location("pairs.tsv") == str(tmp_path / "pairs.tsv")
    assert recipe.model.norm_order == "pre"
    assert recipe.tokenizer.kind == "unigram"
    assert any(reason.startswith(f"{MIN_PAIRS} pairs") for reason in reasons)
    assert make_recipe(recipe.model_dump(), "again") == recipe


@pytest.fixture
def corpus_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int, float], str]:
    """Pretends that the training data have this many pairs, with targets of this many characters."""

    def pretend(pairs: int, characters: float) -> str:
        monkeypatch.setattr(module, "collect_statistics", lambda _: statistics(pairs, characters))
        return write(tmp_path, prose(1))

    return pretend


def test_larger_corpora_get_larger_vocabularies_and_batches(
    corpus_of: Callable[[int, float], str],
) -> None:
    counts = [50, 20_000, 20_001, 50_000, 50_001, 500_000, 500_001, 5_000_000, 5_000_001, 10**9]
    found = [configure(corpus_of(count, 100.0), speed=GPU)[0] for count in counts]
    sizes = [recipe.tokenizer.vocab_size for recipe in found]
    assert sizes == [size for size in (4_000, 6_000, 8_000, 16_000, 32_000) for _ in range(2)]
    for less, more in pairwise(found):
        assert less.data.hold_out >= more.data.hold_out
    for recipe in found:
        assert recipe.training.steps >= 200
        assert recipe.training.warmup <= recipe.training.steps // 10
        assert recipe.training.validate_every <= recipe.training.steps // 20 + 1


def test_more_time_gives_a_larger_model_with_more_regularization(
    corpus_of: Callable[[int, float], str],
) -> None:
    root = corpus_of(5_000, 16 * 4.2)
    short, _ = configure(root, minutes=15)
    hour, _ = configure(root, minutes=150)
    gpu, _ = configure(root, minutes=5, speed=GPU)
    assert [recipe.model.d_model for recipe in (short, hour, gpu)] == [128, 192, 512]
    assert [recipe.training.rdrop for recipe in (short, hour, gpu)] == [0.0, 2.0, 5.0]
    assert [recipe.data.bidirectional for recipe in (short, hour, gpu)] == [False, True, True]
    assert (gpu.training.subword_sampling, gpu.training.subword_copies) == (0.3, 16)
    larger, _ = configure(corpus_of(16_000, 16 * 4.2), minutes=20, speed=GPU)
    assert (larger.training.subword_sampling, larger.training.subword_copies) == (0.3, 5)
    assert [recipe.model.dropout for recipe in (short, hour, gpu)] == [0.1, 0.2, 0.3]
    assert [recipe.training.batching for recipe in (short, hour, gpu)] == ["padded"] * 2 + [
        "packed"
    ]


def test_a_short_time_gives_small_batches(corpus_of: Callable[[int, float], str]) -> None:
    root = corpus_of(165_000, 8 * 4.7)
    minutes = 10, 30, 60 * 24
    recipes = [configure(root, minutes=time)[0] for time in minutes]
    assert [recipe.training.optimizer for recipe in recipes] == ["muon", "muon", "adam"]
    assert [recipe.training.tokens_per_batch for recipe in recipes] == [1_024, 4_096, 4_096]


def test_tiny_is_trained_by_muon_on_a_cpu_unless_the_user_chooses_an_optimizer(
    corpus_of: Callable[[int, float], str],
) -> None:
    root = corpus_of(7_000, 80.0)

    def chosen(speed: DeviceSpeed, *overrides: str) -> tuple[str, float]:
        training = configure(root, overrides, minutes=5, speed=speed)[0].training
        return training.optimizer, training.learning_rate

    assert chosen(CPU) == chosen(CPU, "training.optimizer=muon") == ("muon", 0.01)
    assert chosen(CPU, "training.optimizer=adam") == ("adam", 0.003)
    assert chosen(CPU, "training.learning_rate=0.02") == ("muon", 0.02)
    assert chosen(CPU, "training.sharding=full_shard") == ("adam", 0.003)  # refused with Muon
    assert chosen(CPU, "training.sharding=auto") == ("muon", 0.01)
    assert chosen(GPU, "model.preset=tiny")[0] == "adam"
    assert any("optimizer Muon" in reason for reason in configure(root, minutes=5)[1])


def test_batches_are_large_only_with_muon(corpus_of: Callable[[int, float], str]) -> None:
    root = corpus_of(100_000, 19 * 4.7)
    batches = [
        configure(root, [f"training.optimizer={name}"], minutes=30)[0].batch_tokens
        for name in ("muon", "adam", "sgd")
    ]
    assert batches == [4_096, 1_024, 1_024]


@pytest.mark.parametrize(
    ("change", "sizes"),
    [
        ("model.d_model=256", (256, 4, 768)),
        ("model.d_ff=100", (192, 6, 100)),
        ("model.heads=2", (192, 2, 768)),
        ("model.architecture=lstm", (192, 6, 256)),
        ("model.architecture=convolution", (192, 6, 256)),
        ("model.architecture=decoder_only", (192, 6, 768)),
        ("model.preset=small", (256, 4, 1_024)),
        ("model.attention.key_value_heads=3", (192, 6, 768)),
        ("model.attention.key_value_heads=4", (192, 4, 768)),
        ("model.attention.key_value_heads=8", (192, 8, 768)),
    ],
)
def test_the_sizes_of_a_rule_fit_what_the_user_sets(
    corpus_of: Callable[[int, float], str], change: str, sizes: tuple[int, int, int]
) -> None:
    """The rule has 6 heads and a feed-forward layer: 256 is not divisible by 6, and an LSTM has no such layer."""
    model = configure(corpus_of(5_000, 16 * 4.2), [change], minutes=150)[0].model
    assert (model.d_model, model.heads, model.d_ff) == sizes


REFUSED = {
    "task": {"tagging", "classification", "masked_lm", "language_model"},
    "model.position": {"tree"},  # needs parses
    "model.attention.decoder": {"linformer", "bigbird"},
    "model.attention.cross_attention": {"window", "bigbird"},
    "model.non_autoregressive.length": {"eos"},  # needs architecture: non_autoregressive
    "evaluation.metrics": {"accuracy", "f1", "perplexity", "word_perplexity"},  # of other tasks
}
LISTS = ("decoding.protect", "evaluation.metrics")


@pytest.mark.parametrize("speed", [CPU, GPU], ids=["cpu", "cuda"])
@pytest.mark.parametrize("minutes", [5, 90])
def test_automatic_values_give_way_to_every_choice_of_the_user(
    corpus_of: Callable[[int, float], str], speed: DeviceSpeed, minutes: float
) -> None:
    root = corpus_of(5_000, 16 * 4.2)
    speed = replace(speed, reference=27_000.0, batching="packed")
    choices = [(key, name) for key in LOCATIONS for name in find_registry(key).choices]
    for key, name in choices:
        setting = f"{key}=[{name}]" if key in LISTS else f"{key}={name}"
        if name in REFUSED.get(key, ()):
            with pytest.raises(RegardError, match=rf"{key}: '?{name}"):
                configure(root, [setting], minutes, speed)
        else:
            configure(root, [setting], minutes, speed)
    recipe, _ = configure(root, ["training.activation_checkpointing=true"], minutes, speed)
    assert recipe.training.batching == "padded"
    recipe, _ = configure(root, ["training.simcut=1"], minutes, speed)
    assert (recipe.training.simcut, recipe.training.rdrop) == (1, 0)
    recipe, _ = configure(root, [" training.steps = 1e2"], minutes, speed)
    assert (recipe.training.steps, recipe.training.warmup) == (100, 10)


def test_steps_are_those_that_the_time_allows_or_the_most_that_help(
    corpus_of: Callable[[int, float], str],
) -> None:
    root = corpus_of(100_000, 19 * 4.7)
    recipe, _ = configure(root, minutes=15)
    seconds = 0.9 * 15 * 60 - 15
    trained = recipe.training.steps * recipe.batch_tokens
    assert trained == pytest.approx(seconds * CPU.reference, rel=0.05)
    recipe, _ = configure(corpus_of(1_000, 19 * 3.95), minutes=60, speed=GPU)
    epochs = recipe.training.steps * recipe.batch_tokens / (1_000 * 20)
    assert epochs == pytest.approx(500, rel=0.05)


def refitted(
    root: str, factor: float, minutes: float, speed: DeviceSpeed, overrides: Sequence[str] = ()
) -> tuple[Recipe, Recipe]:
    """The recipe, and the one for a device that is ``factor`` times as fast as estimated."""
    chosen = autoconfigure(TEXTS, root, overrides, minutes=minutes, speed=speed)
    rate = factor * chosen.choice.tokens_per_second
    return chosen.recipe, chosen.refit(
        rate, 60 * minutes - module.START_SECONDS[speed.device]
    ).recipe


def test_the_model_is_chosen_again_for_the_measured_speed(
    corpus_of: Callable[[int, float], str],
) -> None:
    root = corpus_of(29_000, 14 * 4.5)
    before, slow = refitted(root, 1 / 4, 3, GPU)
    assert (before.model.d_model, before.training.rdrop) == (512, 5.0)
    assert (slow.model.d_model, slow.model.dropout, slow.training.rdrop) == (512, 0.3, 0.0)
    assert slow.tokenizer == before.tokenizer
    tiny, fast = refitted(root, 20, 60, CPU)
    assert (tiny.model.d_model, fast.model.d_model) == (128, 192)
    for factor, overrides in ((0.9, []), (1 / 4, ["model.dropout=0.2"])):
        before, kept = refitted(root, factor, 3, GPU, overrides)
        assert kept.model == before.model


def test_a_model_that_is_too_slow_is_recognized_during_training(
    corpus_of: Callable[[int, float], str],
) -> None:
    root = corpus_of(29_000, 14 * 4.5)
    chosen = autoconfigure(TEXTS, root, minutes=5, speed=GPU)
    needed = chosen.choice.rule.min_epochs * chosen.choice.epoch_tokens
    for share, slow in ((0.7, True), (0.8, False)):
        assert chosen.is_too_slow(share * needed / (0.9 * 200), 200) is slow
    assert not chosen.is_too_slow(0.5 * needed / (0.9 * 200), 200, int(0.5 * needed))
    assert not chosen.is_too_slow(1.0, 49)  # no time left for another model
    own = autoconfigure(TEXTS, root, ["model.preset=base"], minutes=5, speed=GPU)
    assert not own.is_too_slow(1.0, 200)


def test_training_does_not_start_again_with_the_same_model(
    corpus_of: Callable[[int, float], str],
) -> None:
    """One model has two rules, for 8 epochs and, on a GPU, for 2: too slow for the first is not too slow."""
    slow = DeviceSpeed("cuda", 1.7e5, batching="packed")
    chosen = autoconfigure(TEXTS, corpus_of(165_000, 8 * 4.7), minutes=5, speed=slow)
    assert (chosen.choice.rule.name, chosen.choice.rule.min_epochs) == ("wide, short", 8)
    rate = 0.3 * chosen.choice.tokens_per_second
    assert not chosen.is_too_slow(rate, 230)
    assert chosen.refit(rate, 230).recipe.batch_tokens == chosen.recipe.batch_tokens
    assert chosen.is_too_slow(0.05 * rate, 230)  # for the second rule, too


def test_on_a_slow_gpu_batches_are_not_small(corpus_of: Callable[[int, float], str]) -> None:
    root = corpus_of(165_000, 8 * 4.7)
    slow = DeviceSpeed("cuda", 2.0e5, batching="packed")
    recipe, _ = configure(root, minutes=2, speed=slow)
    assert (recipe.model.preset, recipe.batch_tokens) == ("base", 4_096)


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_speed_near_the_estimate_changes_only_the_number_of_steps(
    corpus_of: Callable[[int, float], str], factor: float
) -> None:
    before, after = refitted(corpus_of(165_000, 8 * 4.7), factor, 15, CPU)
    assert (after.model, after.batch_tokens) == (before.model, before.batch_tokens)
    # The plan takes off what the time does not allow.
    tokens = after.training.steps * after.batch_tokens
    assert tokens == pytest.approx(60 * 165_000 * 9, rel=0.05)
    _, fixed = refitted(corpus_of(165_000, 8 * 4.7), factor, 15, CPU, ["training.steps=700"])
    assert fixed.training.steps == 700


def test_without_a_time_one_is_chosen_for_the_device(
    corpus_of: Callable[[int, float], str],
) -> None:
    times = {
        (pairs, speed.device): autoconfigure(TEXTS, corpus_of(pairs, 80.0), speed=speed).minutes
        for pairs in (1_000, 30_000, 3_000_000)
        for speed in (CPU, GPU)
    }
    assert times[3_000_000, "cpu"] == 60
    assert times[30_000, "cpu"] == 30
    assert times[1_000, "cuda"] == 2
    assert times[30_000, "cuda"] == 10
    assert times[3_000_000, "cuda"] == 20


def test_without_a_time_the_steps_of_the_user_are_not_planned(tmp_path: Path) -> None:
    root = write(tmp_path, prose(60))
    steps = ["training.steps=7"]
    assert autoconfigure(TEXTS, root, steps, speed=CPU).minutes is None
    assert autoconfigure(TEXTS, root, steps, speed=CPU, minutes=3).minutes == 3


def test_a_time_that_is_too_short_is_said_with_one_that_suffices(
    corpus_of: Callable[[int, float], str],
) -> None:
    root = corpus_of(30_000, 80.0)
    _, reasons = configure(root, minutes=2)
    (warning,) = [reason for reason in reasons if reason.startswith("warning")]
    assert "2 min is too short" in warning
    assert warning.endswith("allow at least --minutes 10")
    _, reasons = configure(root, minutes=30)
    assert not any(reason.startswith("warning") for reason in reasons)
    assert any("a better model" in reason and "--minutes" in reason for reason in reasons)


def test_the_nearest_better_model_is_suggested(corpus_of: Callable[[int, float], str]) -> None:
    chosen = autoconfigure(TEXTS, corpus_of(400, 16 * 3.95), minutes=0.5, speed=CPU)
    assert chosen.choice.rule.name == "tiny"
    assert chosen.choice.next_rule is not None
    assert chosen.choice.next_rule.name == "tiny, many epochs"
    suggested = chosen.choice.minutes_for(chosen.choice.next_rule)
    root, enough = str(chosen.recipe.data.root), math.ceil(suggested)
    longer = autoconfigure(TEXTS, root, minutes=enough, speed=CPU)
    assert longer.choice.rule.name == "tiny, many epochs"


def test_a_large_alphabet_gets_a_larger_vocabulary(tmp_path: Path) -> None:
    lines = [f"word {n}\t{chr(0x4E00 + n)}{chr(0x5000 + n)}" for n in range(900)]
    recipe, reasons = configure(write(tmp_path, lines))
    alphabet = 900 * 2 + len("word 0123456789") - (0x4E00 + 900 - 0x5000)
    assert recipe.tokenizer.vocab_size == 6_000
    assert any(f"{alphabet:,} distinct characters" in reason for reason in reasons)


def test_decomposed_hangul_counts_as_composed_syllables(tmp_path: Path) -> None:
    syllables = [chr(0xAC00 + 5 * n) for n in range(1500)]
    lines = [
        normalize("NFD", f"word{n}\t{syllable * 3} {syllable}")
        for n, syllable in enumerate(syllables)
    ]
    recipe, _ = configure(write(tmp_path, lines))
    assert recipe.tokenizer.vocab_size == 6_000
    pairs = [Pair(*line.split("\t")) for line in lines]
    assert Tokenizer.train(recipe.tokenizer, lambda: pairs).source.size <= 6_000


def test_symbols_are_recognized_and_become_words(tmp_path: Path) -> None:
    recipe, reasons = configure(write(tmp_path, sounds(2001)))
    assert recipe.tokenizer.kind == "word"
    assert not recipe.tokenizer.shared
    assert not recipe.model.tie_embeddings
    assert recipe.evaluation.metrics == ("wer", "per")
    assert any("52 different symbols" in reason for reason in reasons)  # 26 letters and S0 to S25


def words_and_sounds(count: int) -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [
        f"{letters[n % 26]}{letters[n // 26 % 26]}x{letters[n // 676]}\tS{n % 26} S{n // 26 % 26} S{n // 676}"
        for n in range(count)
    ]


def test_letters_of_single_words_to_sounds(tmp_path: Path) -> None:
    lines = words_and_sounds(2001)
    recipe, reasons = configure(write(tmp_path, lines))
    assert (recipe.tokenizer.kind, recipe.tokenizer.target_kind) == ("char", "word")
    assert recipe.evaluation.metrics == ("wer", "per")
    assert any(
        "single words and targets are sequences of 26 different symbols" in reason
        for reason in reasons
    )
    pairs = [Pair(*line.split("\t")) for line in lines]
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: pairs)
    (letters,) = tokenizer.source.encode(["abxc"])
    assert len(letters) == 1 + 4  # a word starts with a space
    (sounds,) = tokenizer.target.encode(["S1 S25 S0"])
    assert tokenizer.target.decode([sounds]) == ["S1 S25 S0"]
    assert len(sounds) == 3


def test_short_words_of_a_script_without_spaces_are_words(tmp_path: Path) -> None:
    lines = [f"{chr(0x30A1 + n % 80)}{chr(0x30A1 + n // 80)}ル\tx{n}y" for n in range(400)]
    assert configure(write(tmp_path, lines))[0].tokenizer.kind == "char"


def test_sounds_to_letters_and_letters_to_letters(tmp_path: Path) -> None:
    swapped = ["\t".join(reversed(line.split("\t"))) for line in words_and_sounds(2001)]
    recipe, _ = configure(write(tmp_path, swapped))
    assert (recipe.tokenizer.kind, recipe.tokenizer.target_kind) == ("word", "char")
    assert recipe.evaluation.metrics == ("wer", "chrf")
    letters = [f"{line.split()[-1]}\t{line.split()[-1].upper()}" for line in swapped]
    recipe, reasons = configure(write(tmp_path, letters))
    assert (recipe.tokenizer.kind, recipe.tokenizer.target_kind) == ("char", None)
    assert not recipe.tokenizer.shared
    assert any("both sides are single words" in reason for reason in reasons)


def test_a_tokenizer_kind_set_by_the_user_is_for_both_sides(tmp_path: Path) -> None:
    root = write(tmp_path, words_and_sounds(2001))
    recipe, reasons = configure(root, ["tokenizer.kind=bpe"])
    assert (recipe.tokenizer.kind, recipe.tokenizer.target_kind) == ("bpe", None)
    assert any(reason == "tokenizer: bpe, at most 1,000 entries" for reason in reasons)
    assert configure(root, ["tokenizer.shared=true"])[0].tokenizer.shared
    recipe, reasons = configure(root, ["tokenizer.target_kind=bpe"])
    assert (recipe.tokenizer.kind, recipe.tokenizer.target_kind) == ("char", "bpe")
    assert any("char for sources, bpe for targets" in reason for reason in reasons)


def test_tokens_are_counted_for_the_selected_kind(tmp_path: Path) -> None:
    root = write(tmp_path, words_and_sounds(2001))
    sounds, letters = (configure(root, change) for change in ([], ["tokenizer.kind=char"]))
    assert "about 4 tokens per target" in sounds[1][0]
    assert "about 11 tokens per target" in letters[1][0]


def test_a_few_exceptions_change_nothing(tmp_path: Path) -> None:
    lines = [*words_and_sounds(600), *["\t"] * 60, "東\tS1 S2", "two words\tS3"]
    assert configure(write(tmp_path, lines))[0].tokenizer.target_kind == "word"


def test_toy_sentences_stay_sentences(tmp_path: Path) -> None:
    lines = [
        f"the dog{n % 90} sees cat{n // 90 % 60}\tder Hund{n % 90} sieht Katze{n // 90 % 60}"
        for n in range(5000)
    ]
    assert configure(write(tmp_path, lines))[0].tokenizer.kind == "unigram"


@pytest.mark.parametrize("side", ["sources", "targets"])
def test_a_blank_side_is_refused(tmp_path: Path, side: str) -> None:
    lines = [f"\tword{n}" if side == "sources" else f"word{n}\t" for n in range(60)]
    with pytest.raises(RegardError, match=f"nothing to train on: all 60 {side} are blank"):
        configure(write(tmp_path, lines))


@pytest.mark.parametrize("text", ["ฉันรักเธอมาก", "我爱你，你爱我吗", "two words"])
def test_sentences_without_spaces_are_not_single_words(tmp_path: Path, text: str) -> None:
    lines = [f"{text}{number}\tword{number}" for number in range(300)]
    recipe, _ = configure(write(tmp_path, lines))
    assert recipe.tokenizer.kind == "unigram"


def test_prose_is_not_mistaken_for_symbols(tmp_path: Path) -> None:
    recipe, _ = configure(write(tmp_path, prose(2001)))
    assert recipe.tokenizer.kind == "unigram"
    assert recipe.evaluation.metrics == ("chrf", "bleu")


def test_overrides_take_precedence(tmp_path: Path) -> None:
    root = write(tmp_path, prose(60))
    recipe, _ = configure(root, ["training.steps=7", "model.preset=small"])
    assert recipe.training.steps == 7
    assert recipe.training.warmup == 1
    assert (recipe.model.d_model, recipe.model.encoder_layers) == (256, 6)


def test_validation_data_of_the_user_replace_held_out_pairs(tmp_path: Path) -> None:
    recipe, reasons = configure(write(tmp_path, prose(60)), ["data.valid.pairs=valid.tsv"])
    assert recipe.data.valid == DataFiles(pairs=("valid.tsv",))
    assert "validation: data.valid" in reasons


def test_sampling_and_another_schedule_can_be_set(tmp_path: Path) -> None:
    root = write(tmp_path, prose(60))
    recipe, _ = configure(root, ["decoding.temperature=0.5", "training.schedule=noam"])
    assert recipe.decoding.is_sampling
    assert recipe.training.learning_rate == 1.0


def test_bleu_of_scripts_without_spaces_is_computed_on_characters(tmp_path: Path) -> None:
    chinese = [f"sentence {n}\t我爱你，你爱我吗{chr(0x5000 + n)}" for n in range(100)]
    assert configure(write(tmp_path, chinese))[0].evaluation.tokenize == "zh"
    japanese = [f"sentence {n}\tわたしはあなたが好きです{chr(0x5000 + n)}" for n in range(100)]
    assert configure(write(tmp_path, japanese))[0].evaluation.tokenize == "char"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"pairs\.tsv"):
        configure(str(tmp_path))


def test_the_time_of_a_better_model_is_in_minutes() -> None:
    choice = SimpleNamespace(next_rule=MODEL_RULES[0], minutes_for=lambda rule: 150.2)
    (reason,) = _alternatives(cast(Any, choice))
    assert reason.endswith("needs about 2 h 30 min: --minutes 151")
    assert _alternatives(cast(Any, SimpleNamespace(next_rule=None))) == []


def test_the_numbers_of_the_rules_are_plausible() -> None:
    for rule in (*MODEL_RULES, *SYMBOL_RULES):
        assert 0 <= rule.dropout <= 0.5
        assert 0 <= rule.rdrop <= 5
        assert 0.0005 <= rule.rates.adam <= 0.005
        assert 0 < rule.cost.cpu <= 20
        assert rule.device == "cpu" or 0 < rule.cost.cuda <= rule.cost.cpu
        assert rule.min_epochs < rule.max_epochs


@pytest.mark.parametrize("own", [False, True])
def test_steps_that_the_user_has_set_are_not_planned(
    corpus_of: Callable[[int, float], str], own: bool
) -> None:
    overrides = ["training.steps=100"] if own else []
    chosen = autoconfigure(TEXTS, corpus_of(400, 80.0), overrides, speed=CPU)
    assert chosen.own_steps is own


def test_a_model_that_is_kept_has_the_time_that_is_left(
    corpus_of: Callable[[int, float], str],
) -> None:
    """The steps get 90% of 1,000 seconds; with the start, that is 90% of the time of the run."""
    chosen = autoconfigure(TEXTS, corpus_of(400, 80.0), minutes=20, speed=CPU)
    kept = chosen.refit(chosen.choice.tokens_per_second, 1_000.0)
    assert kept.choice.minutes == pytest.approx((900 + 15) / 0.9 / 60)


@pytest.mark.parametrize(
    ("pairs", "minutes", "speed", "expected"),
    [
        (5_000, 5, GPU, (True, 0.3)),
        (5_000, 1.5, GPU, (True, 0.0)),
        (5_000, 0.9, GPU, (False, 0.0)),  # too few epochs: a direction would get half of them
        (20_000, 5, GPU, (False, 0.0)),  # too many pairs
        (2_000, 30, CPU, (True, 0.0)),
        (2_000, 10, CPU, (False, 0.0)),
    ],
)
def test_few_pairs_are_used_in_both_directions_if_there_is_time_for_many_epochs(
    corpus_of: Callable[[int, float], str],
    pairs: int,
    minutes: float,
    speed: DeviceSpeed,
    expected: tuple[bool, float],
) -> None:
    recipe, reasons = configure(corpus_of(pairs, 120.0), minutes=minutes, speed=speed)
    assert (recipe.data.bidirectional, recipe.training.subword_sampling) == expected
    assert any("in both directions" in reason for reason in reasons) == expected[0]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["tokenizer.shared=false", "model.tie_embeddings=false"], (False, 0.0)),
        (["data.train.to=[de]"], (False, 0.0)),
        (["data.context=1"], (False, 0.0)),
        (["data.bidirectional=false"], (False, 0.0)),
        (["data.bidirectional=true"], (True, 0.0)),
        (["tokenizer.kind=bpe"], (True, 0.0)),  # as BPE-dropout, 0.3 is too much
        (["training.subword_sampling=0"], (True, 0.0)),
        (["training.subword_sampling=0.1"], (True, 0.1)),
        (["training.subword_copies=4"], (True, 0.3)),
        (["data.languages=[zh-Hans,zh-Hant]"], (False, 0.0)),  # one language
        (["training.teacher=[runs/teacher]"], (False, 0.0)),  # it may know one direction
        (["training.steps=1000"], (False, 0.0)),  # these may be too few
    ],
)
def test_pairs_are_used_as_the_user_says(
    corpus_of: Callable[[int, float], str], overrides: list[str], expected: tuple[bool, float]
) -> None:
    recipe, _ = configure(corpus_of(5_000, 80.0), overrides, 10, GPU)
    assert (recipe.data.bidirectional, recipe.training.subword_sampling) == expected


@pytest.mark.parametrize("damaged", ["this is sentense number {}", "dies ist der Satz Numer {}"])
def test_text_repair_is_not_trained_in_both_directions(tmp_path: Path, damaged: str) -> None:
    """The model could not know from a text which direction is meant."""
    lines = [f"{damaged.format(n)}\tdies ist der Satz Nummer {n}" for n in range(1_000)]
    recipe, _ = configure(write(tmp_path, lines), minutes=5, speed=GPU)
    assert recipe.data.bidirectional == damaged.startswith("this")


def test_the_use_of_the_pairs_is_chosen_again_for_the_measured_speed(
    corpus_of: Callable[[int, float], str],
) -> None:
    root = corpus_of(5_000, 120.0)
    for factor, expected in ((1.0, (True, 0.3)), (0.1, (True, 0.0)), (0.04, (False, 0.0))):
        recipe = refitted(root, factor, 5, GPU)[1]
        assert (recipe.data.bidirectional, recipe.training.subword_sampling) == expected


def test_summaries_are_kept_whatever_their_length(tmp_path: Path) -> None:
    lines = [
        f"{f'the long message number{n} says much ' * 9}\tmessage number{n}" for n in range(60)
    ]
    root = write(tmp_path, lines)
    recipe, reasons = configure(root)
    assert (recipe.data.clean.max_ratio, recipe.data.clean.truncate) == (None, True)
    assert any("sources are about 20 times as long as targets" in reason for reason in reasons)
    assert recipe.evaluation.metrics == ("rouge1", "rouge2", "rougeL")
    recipe, reasons = configure(root, ["data.clean.max_ratio=30"])
    assert recipe.data.clean.max_ratio == 30
    assert not any(reason.startswith("lengths") for reason in reasons)
    recipe, reasons = configure(write(tmp_path, prose(60)))
    assert (recipe.data.clean.max_ratio, recipe.data.clean.truncate) == (9, False)
    assert not any(reason.startswith("lengths") for reason in reasons)


def test_blank_targets_do_not_make_summaries(tmp_path: Path) -> None:
    lines = [
        line if n % 8 == 0 else line.partition("\t")[0] + "\t" for n, line in enumerate(prose(480))
    ]
    recipe, _ = configure(write(tmp_path, lines))
    assert recipe.evaluation.metrics == ("chrf", "bleu")


def test_steps_of_summaries_are_counted_in_source_tokens(tmp_path: Path) -> None:
    """A batch of summaries is full of source tokens: an epoch has as many steps as one of the sources."""
    message = "the long message says much, as messages do,"
    lines = [f"{message * 12} {n}\t{message} {n}" for n in range(3_000)]
    fast = DeviceSpeed("cuda", 1e9)
    chosen = autoconfigure(TEXTS, write(tmp_path, lines), minutes=60, speed=fast)
    choice, recipe = chosen.choice, chosen.recipe
    ratio = choice.source_ratio
    assert ratio == pytest.approx(12, rel=0.2)
    assert choice.speed.reference == pytest.approx(1e9 * 2 / (1 + ratio))
    steps = ratio * choice.epochs * choice.epoch_tokens / recipe.batch_tokens
    assert recipe.training.steps == pytest.approx(steps, rel=0.01)
    assert any(f"for about {choice.epochs:.0f} epochs" in reason for reason in chosen.reasons)
    cut = ["data.clean.max_tokens=60"]
    assert autoconfigure(TEXTS, str(tmp_path), cut, speed=fast).choice.source_ratio < ratio / 1.5


@pytest.mark.parametrize(("copies", "share"), [(60, 100), (54, 90), (53, None)])
def test_a_file_that_was_given_twice_is_noticed(
    copies: int, share: int | None, tmp_path: Path
) -> None:
    lines = [line if n >= copies else f"word{n} x\tword{n} x" for n, line in enumerate(prose(60))]
    warnings = [reason for reason in configure(write(tmp_path, lines))[1] if "equal" in reason]
    expected = (
        f"warning: {share}% of the targets equal their sources; is one of the files the wrong one?"
    )
    assert warnings == ([] if share is None else [expected])
