"""Every task through the command line: train on a small problem, use, score; and common mistakes."""

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.cli.commands import Done, inside, regard, write

MODEL: dict[str, Any] = {"d_model": 32, "heads": 2, "d_ff": 64}
MODEL |= {"dropout": 0.0, "norm_order": "pre"}
TRAINING = {"tokens_per_batch": 512, "schedule": "cosine", "learning_rate": 0.01}
TRAINING |= {"label_smoothing": 0.0}


def recipe(folder: Path, task: str, kind: str, steps: int, **sections: dict[str, Any]) -> Path:
    """A recipe for quick training on ``train.KIND``, with ``valid.KIND`` and ``test.KIND``."""
    decodes = task in ("translation", "language_model")
    full: dict[str, Any] = {
        "task": task,
        "data": {
            split: {"text" if kind == "txt" else "pairs": f"{split}.{kind}"}
            for split in ("train", "valid", "test")
        },
        "tokenizer": {"kind": "word", "vocab_size": 60},
        "model": {**MODEL, "decoder_layers" if decodes else "encoder_layers": 1},
        "training": {**TRAINING, "steps": steps, "warmup": min(20, steps), "validate_every": steps},
    }
    for name, section in sections.items():
        full[name] = {**full.get(name, {}), **section}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(full), encoding="utf-8")
    return path


def lines(folder: Path, kind: str, make: Callable[[random.Random], str], count: int = 1500) -> None:
    draw = random.Random(1)
    for split, number in (("train", count), ("valid", 40), ("test", 100)):
        write(folder / f"{split}.{kind}", (make(draw) for _ in range(number)))


def letters(draw: random.Random, some: str = "abcdefgh", shortest: int = 2) -> list[str]:
    return draw.choices(some, k=draw.randint(shortest, 8))


class Learned(NamedTuple):
    folder: Path
    training: Done
    using: Done
    scoring: Done


def learn(folder: Path, path: Path, *use: object) -> Learned:
    training = inside("train", path, "--out", "run", cwd=folder)
    using = inside(use[0], "run", *use[1:], cwd=folder)
    scoring = inside("evaluate", "run", "--json", cwd=folder)
    return Learned(folder, training, using, scoring)


# The problem of each task


def tagged(draw: random.Random) -> str:
    """Made-up words of several subwords; the tag says whether a word starts with a vowel."""
    words = ["".join(letters(draw)) for _ in range(draw.randint(1, 6))]
    return " ".join(words) + "\t" + " ".join(tag_of(word) for word in words)


def tag_of(word: str) -> str:
    return "VOWEL" if word[0] in "ae" else "OTHER"


def counted(draw: random.Random) -> str:
    """A text and whether it has more a than b."""
    while True:
        text = letters(draw, "abc", shortest=3)
        if text.count("a") != text.count("b"):
            return (
                " ".join(text) + "\t" + ("more" if text.count("a") > text.count("b") else "fewer")
            )


def repeated(draw: random.Random) -> str:
    """One letter, repeated."""
    return " ".join(draw.choice("abcdefgh") * draw.randint(4, 8))


def to_the_end(draw: random.Random) -> str:
    """The alphabet from one of its first six letters to its end."""
    return " ".join("abcdefgh"[draw.randrange(6) :])


def backwards(draw: random.Random) -> str:
    text = letters(draw)[:6]
    return " ".join(text) + "\t" + " ".join(reversed(text))


def learn_tags(folder: Path) -> Learned:
    lines(folder, "tsv", tagged)
    path = recipe(folder, "tagging", "tsv", 150, tokenizer={"kind": "bpe", "vocab_size": 300})
    return learn(folder, path, "tag", "abba bab", "hebe")


def learn_classes(folder: Path) -> Learned:
    lines(folder, "tsv", counted)
    path = recipe(folder, "classification", "tsv", 250)
    return learn(folder, path, "classify", "a c a b", "b c b")


def learn_masks(folder: Path) -> Learned:
    lines(folder, "txt", repeated)
    path = recipe(folder, "masked_lm", "txt", 200)
    return learn(folder, path, "fill", "c c [MASK] c c", "--best", 2)


def learn_to_continue(folder: Path) -> Learned:
    lines(folder, "txt", to_the_end, count=600)
    path = recipe(folder, "language_model", "txt", 120, data={"clean": {"max_tokens": 40}})
    return learn(folder, path, "generate", "c d", "--tokens", 30, "--temperature", 0)


def learn_decoder_only(folder: Path) -> Learned:
    lines(folder, "tsv", backwards, count=4000)
    path = recipe(
        folder,
        "translation",
        "tsv",
        500,
        model={
            "architecture": "decoder_only",
            "d_model": 64,
            "decoder_layers": 2,
            "position": "rotary",
        },
        training={"learning_rate": 0.005},
        evaluation={"metrics": ["rouge1", "rouge2", "rougeL", "wer"]},
    )
    return learn(folder, path, "translate", "a b c d")


TASKS = {
    "tag": learn_tags,
    "classify": learn_classes,
    "mask": learn_masks,
    "continue": learn_to_continue,
    "decoder": learn_decoder_only,
}


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Learned]:
    return {name: task(tmp_path_factory.mktemp(name)) for name, task in TASKS.items()}


def succeeds(*arguments: object, cwd: Path) -> Done:
    done = inside(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done


def scores(found: Learned) -> dict[str, float]:
    assert found.training.returncode == 0, found.training.stderr
    assert found.using.returncode == 0, found.using.stderr
    assert found.scoring.returncode == 0, found.scoring.stderr
    results = json.loads(found.scoring.stdout)["scores"]
    for result in results:
        assert result["low"] <= result["value"] <= result["high"]
        assert "bs:1000" in result["signature"]
    return {result["metric"]: result["value"] for result in results}


# Results


def test_tagging_words_of_several_subwords(learned: dict[str, Learned]) -> None:
    found = scores(learned["tag"])
    assert learned["tag"].using.stdout == "abba/VOWEL bab/OTHER\nhebe/OTHER\n"
    assert found.keys() == {"accuracy", "f1"}
    assert min(found.values()) >= 98
    assert 'try  regard tag run "…"' in learned["tag"].training.stderr


def test_tags_as_json_and_from_a_file(learned: dict[str, Learned]) -> None:
    folder = learned["tag"].folder
    done = regard("tag", "run", "--json", cwd=folder, stdin="ab ba\n\n")
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["words"], first["tags"]) == (["ab", "ba"], ["VOWEL", "OTHER"])
    assert all(0.5 < value <= 1 for value in first["probabilities"])
    assert second["words"] == []
    write(folder / "words.txt", ["ab ba"])
    succeeds("tag", "run", "--input", "words.txt", "--output", "tags.txt", cwd=folder)
    assert (folder / "tags.txt").read_text() == "ab/VOWEL ba/OTHER\n"


def test_classification(learned: dict[str, Learned]) -> None:
    found = scores(learned["classify"])
    assert min(found["accuracy"], found["f1"]) >= 97
    first, second = (line.split("\t") for line in learned["classify"].using.stdout.splitlines())
    assert [first[0], second[0]] == ["more", "fewer"]
    assert 0.5 < float(first[1]) <= 1


def test_masked_words(learned: dict[str, Learned]) -> None:
    found = scores(learned["mask"])
    assert found["accuracy"] >= 95
    assert found["perplexity"] < 1.5
    best, second = (line.split("\t") for line in learned["mask"].using.stdout.splitlines())
    assert best[1] == "c"
    assert float(best[0]) > 0.5 > float(second[0])


def test_language_model(learned: dict[str, Learned]) -> None:
    found = scores(learned["continue"])
    assert learned["continue"].using.stdout == "c d e f g h\n"
    # Only the first letter of a line is uncertain: one of six.
    lines = (learned["continue"].folder / "test.txt").read_text().splitlines()
    best = 6 ** (len(lines) / sum(len(line.split()) + 1 for line in lines))
    assert 0.97 * best < found["perplexity"] < 1.05 * best
    assert found["word_perplexity"] == pytest.approx(found["perplexity"])  # words are its tokens


def test_a_sampled_continuation_depends_on_the_seed_alone(learned: dict[str, Learned]) -> None:
    say = partial(
        succeeds, "generate", "run", "--tokens", 20, "--temperature", 3, "--seed",
        cwd=learned["continue"].folder,
    )  # fmt: skip
    first, again, other = (say(seed).stdout for seed in (1, 1, 2))
    assert first == again != other


def test_a_decoder_only_model_translates(learned: dict[str, Learned]) -> None:
    found = scores(learned["decoder"])
    assert learned["decoder"].using.stdout == "d c b a\n"
    assert found["rougeL"] >= 97
    assert found["wer"] <= 10


# Fine-tuning


def named(draw: random.Random) -> str:
    text = repeated(draw)
    return f"{text}\t{text[0].upper()}"


def test_fine_tuning_copies_the_encoder(learned: dict[str, Learned], tmp_path: Path) -> None:
    lines(tmp_path, "tsv", named, count=200)
    start = str(learned["mask"].folder / "run")
    path = recipe(tmp_path, "classification", "tsv", 20, training={"init_from": start})
    done = succeeds("train", path, "--out", "run", cwd=tmp_path)
    assert f"encoder weights from {start}; randomly initialized: projection.weight, pool.query" in (
        done.stderr
    )
    assert succeeds("classify", "run", "c c c c", cwd=tmp_path).stdout.startswith("C\t")
    original = (Path(start) / "tokenizer.model").read_bytes()
    assert (tmp_path / "run" / "tokenizer.source.model").read_bytes() == original


def test_fine_tuning_with_another_shape_is_refused(
    learned: dict[str, Learned], tmp_path: Path
) -> None:
    lines(tmp_path, "tsv", named, count=60)
    start = str(learned["mask"].folder / "run")
    path = recipe(
        tmp_path, "classification", "tsv", 20, training={"init_from": start}, model={"d_model": 64}
    )
    done = inside("train", path, "--set", "tokenizer.kind=bpe", "--out", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "model.d_model is 32 there, 64 here" in done.stderr
    assert "tokenizer.kind is word there, bpe here" in done.stderr


# Mistakes


@pytest.mark.parametrize(
    ("task", "train", "valid", "message"),
    [
        ("tagging", "a b\tX", "a\tX", "2 words but 1 tags: 'a b', 'X'; each word needs one tag"),
        (
            "tagging",
            "a b\tX Y",
            "a\tZ",
            "label 'Z' of 'a' does not occur in data.train; known labels: X, Y",
        ),
        ("classification", "a b\tvery good", "a\tbad", "'very good' cannot be the label of 'a b'"),
        (
            "classification",
            "a b\tgood",
            "a\tbad",
            "label 'bad' of 'a' does not occur in data.train",
        ),
    ],
)
def test_data_that_do_not_fit_the_task(
    task: str, train: str, valid: str, message: str, tmp_path: Path
) -> None:
    for name, line in (("train", train), ("valid", valid), ("test", train)):
        write(tmp_path / f"{name}.tsv", [line])
    done = inside("train", recipe(tmp_path, task, "tsv", 5), "--out", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("Traceback") == 0


def test_a_text_without_a_mask(learned: dict[str, Learned]) -> None:
    done = inside("fill", "run", "no gap", cwd=learned["mask"].folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no [MASK] in 'no gap'" in done.stderr


def test_more_tokens_than_a_block(learned: dict[str, Learned]) -> None:
    done = inside("generate", "run", "a", "--tokens", 40, cwd=learned["continue"].folder)
    assert done.returncode == 2
    assert (
        "tokens 40: must be between 1 and 39, because the model was trained on blocks of 40 tokens"
        in done.stderr
    )


@pytest.mark.parametrize("command", ["translate", "classify", "fill", "generate", "look", "serve"])
def test_a_model_of_another_task(command: str, learned: dict[str, Learned]) -> None:
    done = inside(command, "run", *["a"] * (command != "serve"), cwd=learned["tag"].folder)
    assert done.returncode == 2
    assert "run: a model for task tagging, not " in done.stderr
    assert "use it with  regard tag" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_beam_is_for_translation(learned: dict[str, Learned]) -> None:
    done = inside("evaluate", "run", "--beam", 3, cwd=learned["tag"].folder)
    assert "--beam: only for translation models, not for tagging" in done.stderr


def test_models_are_compared_only_by_paired_metrics(learned: dict[str, Learned]) -> None:
    compared = succeeds("evaluate", "run", "--against", "run", cwd=learned["tag"].folder)
    assert compared.stdout.count("p = 1.0000: no significant difference") == 2
    refused = inside("evaluate", "run", "--against", "run", cwd=learned["continue"].folder)
    assert refused.returncode == 2
    assert "perplexity: models cannot be compared on this metric" in refused.stderr
