"""Every bundled recipe trains on the first lines of its data, and the model can be used."""

import gzip
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from regard.data.corpus import read_pairs
from regard.data.text_files import read_lines
from regard.demo.corpus import generate, write_pairs
from regard.recipe import DataFiles, bundled_recipes, load_recipe
from tests.cli.commands import Done, in_workers, inside

LINES = 300
QUICK = {
    "model.d_model": "128",
    "training.steps": "3",
    "training.warmup": "2",
    "training.tokens_per_batch": "300",
    "training.validate_sentences": "4",
    "training.device": "cpu",
    "training.init_from": "null",
    "data.test": "null",
    "data.clean.max_tokens": "40",
}
USE: dict[str, list[object]] = {
    "translation": ["translate", "run", "a dog"],
    "tagging": ["tag", "run", "a dog"],
    "classification": ["classify", "run", "a dog"],
    "masked_lm": ["fill", "run", "a [MASK]", "--best", 1],
    "language_model": ["generate", "run", "a dog", "--tokens", 5],
}


def names(texts: DataFiles) -> list[str]:
    roles = (texts.source, texts.target, texts.pairs, texts.conllu, texts.text)
    return [name for names in roles if names for name in names]


def needed(recipe: str) -> list[str]:
    """The files a recipe trains with."""
    data = load_recipe(recipe).data
    return [*names(data.train), *(names(data.valid) if data.valid else ())]


def head(source: Path, copy: Path) -> None:
    """Copy the first lines of a file, compressed if the name ends in .gz."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    # In CoNLL-U a line is a word, and every tag must occur.
    count = 40 * LINES if "train.conllu" in copy.name else LINES
    if copy.name.startswith("valid") and "conllu" not in copy.name:
        count = LINES // 20
    text = "".join(f"{line}\n" for line in islice(read_lines(source), count)).encode()
    copy.write_bytes(gzip.compress(text) if copy.suffix == ".gz" else text)


def write_heads(recipe: str, data_folder: Path, folder: Path) -> str:
    """Write small data for a recipe; returns the reason if that is not possible."""
    if recipe == "demo":
        for split in ("train", "valid"):
            write_pairs(folder / split, generate(split, LINES))
        return ""
    if recipe in ("multi30k-non-autoregressive", "multi30k-fast"):
        return write_student(recipe, data_folder, folder)
    missing = [name for name in needed(recipe) if not (data_folder / name).is_file()]
    if missing:
        return f"{recipe}: no {', '.join(missing)} in {data_folder}"
    for name in needed(recipe):
        head(data_folder / name, folder / name)
    return ""


def write_student(recipe: str, data_folder: Path, folder: Path) -> str:
    """Human pairs instead of a teacher's: they do as well for three steps."""
    if reason := write_heads("multi30k", data_folder, folder):
        return reason
    data = load_recipe("multi30k", [f"data.root={folder}"]).data
    pairs = read_pairs(data.train, data)
    (name,) = names(load_recipe(recipe).data.train)
    (folder / name).write_text("".join(f"{pair.source}\t{pair.target}\n" for pair in pairs))
    return ""


def use(recipe: str, folder: Path) -> tuple[Done, Done]:
    """Train, and run the model on one line."""
    # The data are too small for the vocabulary of the whole corpus.
    full = load_recipe(recipe)
    size = min(full.tokenizer.vocab_size, 3000)
    language = full.data.targets[:1]
    command = [*USE[full.task], *(("--to", *language) if language else ())]
    changes = {**QUICK, "data.root": str(folder), "tokenizer.vocab_size": str(size)}
    if full.training.subword_sampling:
        changes["training.subword_copies"] = "2"
    if full.task == "translation":
        changes["decoding.extra_length"] = "5"
    sets = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    trained = inside("train", recipe, "--out", "run", *sets, cwd=folder)
    return trained, inside(*command, cwd=folder)


@pytest.fixture(scope="module")
def used(
    data_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str | tuple[Done, Done]]:
    """The result for each recipe, or why it was skipped."""
    found: dict[str, str | tuple[Done, Done]] = {}
    jobs = {}
    for recipe in bundled_recipes():
        folder = tmp_path_factory.mktemp(recipe)
        if reason := write_heads(recipe, data_folder, folder):
            found[recipe] = reason
        else:
            jobs[recipe] = partial(use, recipe, folder)
    return {**found, **in_workers(jobs)}


@pytest.mark.parametrize("recipe", bundled_recipes())
def test_a_bundled_recipe_trains_and_can_be_used(
    recipe: str, used: dict[str, str | tuple[Done, Done]]
) -> None:
    result = used[recipe]
    if isinstance(result, str):
        pytest.skip(result)
    trained, using = result
    assert trained.returncode == 0, trained.stderr
    assert "Training stopped: all 3 steps are done." in trained.stderr
    assert using.returncode == 0, using.stderr
    assert using.stdout.count("\n") == 1
