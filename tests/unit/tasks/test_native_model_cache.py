"""Prepared models: a second process translates the same without torch, and falls back when anything has changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.data.pairs import Pair
from regard.data.tokenizer import Tokenizer
from regard.inference import native_packing
from regard.inference.native_library import native_library
from regard.nn.network import named_weights
from regard.recipe import Recipe
from regard.storage.run_dir import RunDir
from regard.tasks import Translator, native_model_cache

pytestmark = pytest.mark.skipif(
    native_library().functions is None, reason="there is no native library"
)
HAS_GPU = any(map(os.path.exists, native_model_cache.GPU_DEVICES))
TEXTS = ["ein Hund", "a dog ein", "", "Hund " * 7]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for cached models."""
    monkeypatch.setenv(native_model_cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(native_model_cache, "GPU_DEVICES", ())
    return tmp_path / "cache"


@pytest.fixture
def run(small_recipe: Callable[..., Recipe], tmp_path: Path, cache: Path) -> RunDir:
    """A finished run whose network the native decoder supports."""
    return write_run(small_recipe(**SECTIONS), tmp_path / "run", seed=1)


SECTIONS: dict[str, dict[str, Any]] = {
    "tokenizer": {"kind": "word", "vocab_size": 60},
    "model": {"d_model": 32, "norm_order": "pre", "output_bias": True},
    "decoding": {"beam": 3},
}


def write_run(recipe: Recipe, folder: Path, seed: int) -> RunDir:
    folder.mkdir(exist_ok=True)
    run = RunDir(folder)
    run.write_recipe(recipe)
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: [Pair("ein Hund", "a dog")] * 5)
    tokenizer.save(run.folder)
    torch.manual_seed(seed)
    run.write_weights(named_weights(Translator.build(recipe, tokenizer)))
    run.write_card({})
    return run


def load(run: RunDir, precision: str = "auto") -> Translator:
    return Translator.load(run.folder, "cpu", precision, threads=2)  # type: ignore[arg-type]


def is_cached(model: Translator) -> bool:
    """Whether a model was read from the cache, and has not loaded its network."""
    return model.engine._network is None


def test_a_cached_model_translates_the_same(run: RunDir) -> None:
    first, second = load(run), load(run)
    assert (is_cached(first), is_cached(second)) == (False, True)
    for options in ({}, {"beam": 1}, {"beam": 4, "length_penalty": 0.0}, {"max_length": 2}):
        assert second.search(TEXTS, **options) == first.search(TEXTS, **options)
    assert second.search(TEXTS, nbest=3) == first.search(TEXTS, nbest=3)
    assert second.engine.summary == first.engine.summary
    assert is_cached(second)


def test_what_the_native_decoder_does_not_know_loads_the_network(run: RunDir) -> None:
    first, second = load(run), load(run)
    arguments: list[dict[str, Any]] = [
        {"no_repeat_ngram": 1},
        {"prefixes": ["a", "dog", "a", "dog"]},
        {"constraints": [["dog"]] * 4},
        {"temperature": 0.7, "seed": 3},
        {"coverage_penalty": 0.2},
    ]
    for one in arguments:
        assert second.search(TEXTS, **one) == first.search(TEXTS, **one), one
    assert not is_cached(second)
    weights = dict(second.network.named_parameters())
    for name, weight in first.network.named_parameters():
        assert torch.equal(weight, weights[name])


def test_more_positions_than_stored_are_computed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_packing, "STORED_POSITIONS", 4)
    first, second = load(run), load(run)
    short, long = ["a"], ["ein Hund a dog " * 9]
    assert second.search(short, max_length=3) == first.search(short, max_length=3)
    assert is_cached(second)
    assert second.search(long) == first.search(long)
    assert not is_cached(second)


def test_the_recipe_of_a_cached_model_is_complete(run: RunDir) -> None:
    load(run)
    stored, recipe = load(run).recipe, run.recipe()
    assert isinstance(stored, native_model_cache.StoredSection)
    assert list(stored.data.language_pairs) == recipe.data.language_pairs
    assert stored.decoding.protect == recipe.decoding.protect
    assert stored.decoding.is_sampling is False
    assert stored.model.attention.bias == recipe.model.attention.bias
    assert stored.decoding.model_dump() == recipe.decoding.model_dump()  # from the real one
    assert stored == recipe
    assert stored.decoding == recipe.decoding
    with pytest.raises(AttributeError):
        stored.decoding.beams  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("changed", ["weights", "card", "code", "tokenizer"])
def test_a_changed_run_is_cached_again(
    run: RunDir,
    small_recipe: Callable[..., Recipe],
    monkeypatch: pytest.MonkeyPatch,
    changed: str,
) -> None:
    load(run)
    if changed == "weights":
        before = run.weights_file.stat()
        write_run(small_recipe(**SECTIONS), run.folder, seed=2)
        # The times of a file can be set back, as archives do, but not when it was written.
        os.utime(run.weights_file, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif changed == "card":
        run.write_card({"note": "new"})
    elif changed == "code":
        monkeypatch.setattr(native_model_cache, "_code_hash", lambda: "other")
    else:
        other = small_recipe(**{**SECTIONS, "tokenizer": {"kind": "word", "vocab_size": 61}})
        write_run(other, run.folder, seed=1)
    second = load(run)
    assert not is_cached(second)
    third = load(run)
    assert is_cached(third)
    assert third.search(TEXTS) == second.search(TEXTS)


def test_weights_that_change_while_they_are_loaded_are_not_stored(
    run: RunDir, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze = Translator.freeze

    def train_meanwhile(model: Translator) -> None:
        freeze(model)
        os.utime(run.weights_file)

    monkeypatch.setattr(Translator, "freeze", train_meanwhile)
    load(run)
    assert not [*cache.glob("*.safetensors")]


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "text"])
def test_a_damaged_file_is_replaced(run: RunDir, cache: Path, damage: str) -> None:
    first = load(run)
    (path,) = cache.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    broken = {
        "flipped": bytes(content),
        "truncated": path.read_bytes()[:-100],
        "empty": b"",
        "text": b"not a model, but long enough for a header",
    }
    path.write_bytes(broken[damage])
    second = load(run)
    assert not is_cached(second)
    assert is_cached(load(run))
    assert second.search(TEXTS) == first.search(TEXTS)


def test_a_folder_that_cannot_be_written_is_no_error(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv(native_model_cache.VARIABLE, str(tmp_path / "file"))
    assert load(run).search(TEXTS) == load(run).search(TEXTS)
    assert not is_cached(load(run))


def test_when_no_prepared_model_is_used(
    run: RunDir, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = native_model_cache.cache_key
    assert state(run, "cpu", "int8") == state(run, "auto", "auto") is not None
    assert state(run, "cpu", "fp32") is None
    assert state(run, "cuda", "auto") is None
    monkeypatch.setattr(native_model_cache, "GPU_DEVICES", (str(tmp_path),))
    assert state(run, "auto", "auto") is None
    assert state(run, "cpu", "auto") is not None
    monkeypatch.setenv(native_model_cache.VARIABLE, "off")
    assert state(run, "cpu", "int8") is None
    monkeypatch.delenv(native_model_cache.VARIABLE)
    run.card_file.unlink()  # a run that is still trained
    assert state(run, "cpu", "int8") is None
    assert not cache.exists()


def test_the_oldest_models_are_deleted(
    run: RunDir, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(run)
    (path,) = cache.glob("*.safetensors")
    size = path.stat().st_size
    for number in range(3):
        other = cache / f"{number}.safetensors"
        other.write_bytes(bytes(size))
        os.utime(other, (number, number))
    path.unlink()
    monkeypatch.setattr(native_model_cache, "MAX_BYTES", 2 * size + size // 2)
    load(run)
    assert {one.name for one in cache.iterdir()} == {path.name, "2.safetensors"}


def modules_and_output(*arguments: object) -> tuple[set[str], str]:
    """The modules that a command imports, and what it prints."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "regard", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}, done.stdout


@pytest.mark.skipif(HAS_GPU, reason="with a GPU, torch selects the device")
def test_the_second_command_needs_no_torch(run: RunDir, tmp_path: Path) -> None:
    expected = load(run).search(TEXTS)
    heavy = {"torch", "pyarrow", "sacrebleu"}
    modules, output = modules_and_output("translate", run, *TEXTS)
    assert "sentencepiece" in modules
    assert not modules & {*heavy, "numpy", "pydantic", "yaml", "rich"}
    assert output.splitlines() == [best.text for best, *_ in expected]
    (tmp_path / "texts").write_text("\n".join(TEXTS) + "\n")
    options = ("--input", tmp_path / "texts", "--json", "--threads", 1, "--beam", 3)
    modules, output = modules_and_output("translate", run, *options)
    assert not modules & heavy
    found = [json.loads(line)["translations"] for line in output.splitlines()]
    assert found == [[one._asdict() for one in some] for some in expected]
    _, plain = modules_and_output("translate", run, *TEXTS, "--precision", "fp32")
    assert plain.count("\n") == len(TEXTS)
