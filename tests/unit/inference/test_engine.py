"""The engine: a search can be stopped between two steps, and runs in native code where that is supported."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.data.pairs import Pair
from regard.data.tokenizer import Tokenizer
from regard.decoding.hypothesis import Hypothesis, Phrase, Tokenization, tokens_needed
from regard.inference import native_packing, quantization
from regard.inference.engine import Request, SearchInterrupted
from regard.inference.native_library import NativeLibrary
from regard.inference.worker_pool import WorkerPool
from regard.nn.network import named_weights
from regard.recipe import Precision, Recipe, override_decoding
from regard.storage.run_dir import RunDir
from regard.tasks import Translator, native_model_cache


@pytest.mark.parametrize("workers", [False, True])
@pytest.mark.parametrize("beam", [1, 3])
def test_an_interrupted_search_stops(finished_run: Path, workers: bool, beam: int) -> None:
    if workers and sys.platform != "linux":
        pytest.skip("worker processes need fork, which only Linux has")
    model = Translator.load(finished_run, "cpu", threads=2)
    if workers:
        model.engine.pool = WorkerPool(model.engine.generate_batch, 2)
    texts = ["ein Hund", "a dog", "ein Hund a dog"]
    before = model.translate(texts, beam=beam)
    model.interrupt.set()
    with pytest.raises(SearchInterrupted):
        model.translate(texts, beam=beam)
    model.interrupt.clear()
    assert model.translate(texts, beam=beam) == before
    model.engine.stop_workers()


@pytest.fixture
def native_model(small_recipe: Callable[..., Recipe], tmp_path: Path) -> Translator:
    """A model whose sizes the native decoder supports."""
    sections = {"tokenizer": {"kind": "word", "vocab_size": 60}, "model": {"d_model": 32}}
    recipe = small_recipe(**sections)
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: [Pair("ein Hund", "a dog")] * 5)
    run = RunDir(tmp_path)
    run.write_recipe(recipe)
    tokenizer.save(run.folder)
    torch.manual_seed(1)
    run.write_weights(named_weights(Translator.build(recipe, tokenizer)))
    model = Translator.load(run.folder, "cpu", "int8", threads=2)
    if model.engine.native is None:
        pytest.skip(str(model.engine.native_reason))
    return model


def test_native_code_is_used_for_what_it_supports(
    native_model: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, texts = native_model.engine, ["ein Hund", "a dog"]
    assert f"native decoder ({engine.native.kernels})" in engine.summary  # type: ignore[union-attr]
    calls: list[str] = []

    def record(name: str) -> None:
        method = getattr(engine, name)

        def recorded(*arguments: Any) -> list[list[Hypothesis]]:
            found: list[list[Hypothesis]] = method(*arguments)
            calls.extend([name] * len(found))
            return found

        monkeypatch.setattr(engine, name, recorded)

    record("_in_native_code")
    record("_in_batches")
    native_model.translate(texts, beam=2)
    native_model.translate(texts, beam=1)
    assert calls == ["_in_native_code"] * 4
    calls.clear()
    native_model.translate(texts, beam=2, no_repeat_ngram=2)
    assert calls == ["_in_batches"] * 2
    calls.clear()
    native_model.translate(texts, prefixes=["a", ""], beam=2)
    assert sorted(calls) == ["_in_batches", "_in_native_code"]
    calls.clear()
    native_model.translate(texts[:1], beam=1000, max_length=1)
    engine.generate([Request([7], limit=100)], native_model.recipe.decoding)
    huge = native_model.recipe.decoding.model_copy(update={"beam": 1000})
    assert engine._decoding_path(Request([7], limit=100), huge, native=True) == "network"
    assert calls == ["_in_native_code"] * 2


def test_native_code_searches_with_a_model_whose_recipe_samples(native_model: Translator) -> None:
    sampling = {"temperature": 0.7, "top_k": 5, "top_p": 0.9}
    decoding = native_model.recipe.decoding.model_copy(update=sampling)
    assert native_model.engine.native is not None
    assert not native_model.engine.native.supports(decoding)
    assert native_model.engine.native.supports(override_decoding(decoding, {"temperature": 0}))


def test_an_interrupted_native_search_raises(native_model: Translator) -> None:
    native_model.interrupt.set()
    with pytest.raises(SearchInterrupted):
        native_model.translate(["ein Hund", "a dog"])
    native_model.interrupt.clear()
    assert len(native_model.translate(["ein Hund", "a dog"])) == 2


def test_without_the_library_the_summary_names_the_reason(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = NativeLibrary(None, "there is no C++ compiler to build it with")
    for module in (quantization, native_packing, native_model_cache):
        monkeypatch.setattr(module, "native_library", lambda: missing)
    model = Translator.load(finished_run, "cpu", "int8")
    assert model.engine.native is None
    assert "torch's kernels (there is no C++ compiler to build it with)" in model.engine.summary
    assert len(model.translate(["ein Hund"])) == 1


@pytest.mark.parametrize(("packed", "precision"), [(False, "auto"), (True, "fp32")])
def test_a_network_that_cannot_be_packed_is_used_as_it_is(
    make_run: Callable[..., Path], packed: bool, precision: Precision
) -> None:
    attention = {} if packed else {"key_value_heads": 1}
    model = Translator.load(make_run(model={"attention": attention}), "cpu", precision, threads=2)
    assert model.engine.is_packed is packed
    assert ("without packed weights" in model.engine.summary) is not packed
    assert model.engine.summary.startswith("fp32 on cpu")
    assert model.engine.is_concurrent(model.recipe.decoding) is packed
    model.engine.start_workers()
    assert model.engine.pool is None or packed
    assert len(model.translate(["ein Hund"])) == 1
    model.engine.stop_workers()


def test_workers_that_start_late_have_the_usual_priority(finished_run: Path) -> None:
    engine = Translator.load(finished_run, "cpu", "fp32", threads=2).engine
    engine._fork_workers()
    assert engine.background_pool is None
    engine.stop_workers()


def test_required_phrases_are_not_cut_off(finished_run: Path) -> None:
    """Four source tokens and two more are the limit, unless the prefix and the phrases need more."""
    model = Translator.load(finished_run, "cpu", "fp32")
    decoding = model.recipe.decoding.model_copy(update={"extra_length": 2})
    plain = Request([5, 6, 7, 8])
    phrase = Phrase((Tokenization((5, 6, 7)),), times=3)
    needed = tokens_needed([phrase])
    assert needed > 6
    limits = [
        model.engine.max_tokens(one, decoding)
        for one in (plain, plain._replace(phrases=[phrase], prefix=[5, 6]))
    ]
    assert limits == [6, 2 + needed]
