"""A model with dependency-tree positions learns what only the tree contains: the head of every word."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.commands import Done, regard, sequences, write, write_recipe

ROOT = "root"
Heads = list[int]


def any_tree(count: int, draw: random.Random) -> Heads:
    """The heads of a random tree of ``count`` words."""
    order = draw.sample(range(1, count + 1), count)
    heads = {word: draw.choice(order[:index]) for index, word in enumerate(order) if index}
    return [heads.get(word, 0) for word in range(1, count + 1)]


def conllu(words: Sequence[str], heads: Heads) -> str:
    rows = enumerate(zip(words, heads, strict=True), 1)
    return "".join(f"{n}\t{word}\t_\tX\t_\t_\t{head}\t_\t_\t_\n" for n, (word, head) in rows)


def head_words(words: Sequence[str], heads: Heads) -> str:
    return " ".join(words[head - 1] if head else ROOT for head in heads)


def write_split(folder: Path, name: str, texts: list[list[str]], trees: list[Heads]) -> None:
    write(folder / f"{name}.src", map(" ".join, texts))
    write(folder / f"{name}.tgt", map(head_words, texts, trees))
    write(folder / f"{name}.conllu", map(conllu, texts, trees))


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    folder = tmp_path_factory.mktemp("trees")
    draw = random.Random(1)
    every = sequences(2100, "abcdefgh", range(2, 6))
    # Each test text occurs twice, with two trees: a model that ignores trees cannot get both right.
    texts = {"train": every[100:], "valid": every[50:100], "test": every[:50] * 2}
    for name, some in texts.items():
        write_split(folder, name, some, [any_tree(len(one), draw) for one in some])
    files = {
        name: {"source": f"{name}.src", "target": f"{name}.tgt", "parses": f"{name}.conllu"}
        for name in texts
    }
    model = {"position": "tree", "max_distance": 4, "d_model": 64, "heads": 4, "d_ff": 64}
    small = {"encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0, "norm_order": "pre"}
    recipe = write_recipe(
        folder, data=files, model={**model, **small}, training={"steps": 300, "validate_every": 300}
    )
    return folder, regard("train", recipe, "--out", "run", cwd=folder)


def test_the_head_of_every_word_is_predicted(learned: tuple[Path, Done]) -> None:
    folder, training = learned
    assert training.returncode == 0, training.stderr
    done = regard("translate", "run", "--input", "test.src", "--parses", "test.conllu", cwd=folder)
    assert done.returncode == 0, done.stderr
    expected = (folder / "test.tgt").read_text().splitlines()
    found = done.stdout.splitlines()
    correct = sum(one == other for one, other in zip(found, expected, strict=True))
    assert correct >= 0.9 * len(expected), training.stderr


def test_evaluate_reads_trees(learned: tuple[Path, Done]) -> None:
    folder, _ = learned
    texts = ("--source", "test.src", "--reference", "test.tgt", "--parses", "test.conllu")
    done = regard("evaluate", "run", *texts, "--beam", 1, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    bleu, *_ = json.loads(done.stdout)["scores"]
    assert bleu["value"] > 80, done.stdout


def test_missing_trees_are_reported(learned: tuple[Path, Done]) -> None:
    folder, _ = learned
    done = regard("translate", "run", "a b", cwd=folder)
    assert done.returncode == 2
    assert done.stderr == (
        "regard: this model has position: tree, so it needs the parse of every text: "
        "--parses F.conllu on the command line, parses=… in Python\n"
    )


def test_a_sentence_with_its_tree_can_be_inspected(learned: tuple[Path, Done]) -> None:
    folder, _ = learned
    write(folder / "one.conllu", [conllu(["a", "b", "c"], [2, 0, 2])])
    done = regard("look", "run", "a b c", "--parses", "one.conllu", cwd=folder)
    assert done.returncode == 0, done.stderr
    translation = regard(
        "translate", "run", "a b c", "--parses", "one.conllu", cwd=folder
    ).stdout.strip()
    assert f'"translation":"{translation}"' in (folder / "look.html").read_text()
    done = regard("look", "run", "a b", "--parses", "one.conllu", cwd=folder)
    assert done.returncode == 2
    assert "one.conllu:1, line 1 of the sentence: the parse does not match the text" in done.stderr
