"""Decoding options of a call: each has an effect, or is refused in one line."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from regard.errors import RegardError
from regard.nn.positions import SinusoidalTable
from regard.tasks import Translator

TEXTS = ["ein Hund", "ein ein ein Hund Hund Hund"]


@pytest.fixture(scope="module")
def model(finished_run: Path) -> Translator:
    return Translator.load(finished_run, "cpu")


@pytest.mark.parametrize("options", [{"max_length": 2}, {"extra_length": 1}, {"max_length": 40}])
@pytest.mark.parametrize("beam", [1, 3])
def test_a_translation_is_as_long_as_the_call_allows(
    model: Translator, options: dict[str, Any], beam: int
) -> None:
    """The same limit as in a recipe; untrained weights decode up to it."""
    by_call = model.search(TEXTS, beam=beam, **options)
    same = Translator.load(model.run.folder if model.run else "", "cpu")
    same.set_decoding(beam=beam, **options)
    assert by_call == same.search(TEXTS)
    most = options.get("max_length", max(map(len, model.encode(TEXTS))) + 2)
    assert max(len(found[0].tokens) for found in by_call) <= most


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"beam": 0}, "beam"),
        ({"beam": 2000}, "beam"),
        ({"length_penalty": -3.0}, "length_penalty"),
        ({"length_penalty": 400.0}, "length_penalty"),
        (
            {"beam": 1, "temperature": 1e-45},
            r"temperature 1e-45 must be 0 \(search instead of sampling\)",
        ),
    ],
)
def test_a_trace_refuses_wrong_options(
    model: Translator, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RegardError, match=problem):
        model.trace(TEXTS[0], **{"beam": 3, "length_penalty": 0.6, **options})


SEARCH_ONLY = "no effect; it only applies to search, not to sampling"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"temperature": 0.7, "length_penalty": 2.0}, f"length_penalty 2.0: {SEARCH_ONLY}"),
        (
            {"temperature": 0.7, "length_normalization": "transformers"},
            f"length_normalization 'transformers': {SEARCH_ONLY}",
        ),
        ({"temperature": 0.7, "constrained_beam": 3}, f"constrained_beam 3: {SEARCH_ONLY}"),
        ({"temperature": 0.7, "diversity_penalty": 2.0}, f"diversity_penalty 2.0: {SEARCH_ONLY}"),
        ({"mbr": 4, "length_penalty": 2.0}, f"length_penalty 2.0: {SEARCH_ONLY}"),
        ({"mbr": 4, "temperature": 0.0}, "mbr 4 draws samples, but temperature 0 turns sampling"),
        ({"top_k": 3}, "top_k 3: no effect; it only applies to decoding.temperature or"),
        ({"temperature": 0.0, "top_p": 0.5}, "top_p 0.5: no effect; it only applies to"),
        ({"seed": 5}, "seed 5: no effect; it only applies to"),
        ({"diversity_penalty": 2.0}, "no effect; it only applies to decoding.beam_groups above 1"),
        ({"constrained_beam": 20}, "constrained_beam 20: no effect without constraints"),
        (
            {"constrained_beam": 20, "beam_groups": 5},
            "constrained_beam 20: no effect; it only applies to decoding.beam_groups: 1",
        ),
    ],
)
def test_an_option_without_effect_is_refused(
    model: Translator, options: dict[str, Any], problem: str
) -> None:
    for call in (lambda: model.translate(TEXTS, **options), lambda: model.trace("a", **options)):
        with pytest.raises(RegardError, match=re.escape(problem)) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_given_length_is_the_only_limit(make_run: Callable[..., Path]) -> None:
    model = Translator.load(make_run(model={"architecture": "non_autoregressive"}), "cpu")
    limits: list[Any] = [{"max_length": 3}, {"extra_length": 2}, {"length_beam": 2}]
    for options in limits:
        (name,) = options
        with pytest.raises(RegardError, match=f"{name} .: no effect with a given length"):
            model.translate(["a dog"], length=9, **options)
    assert model.translate(["a dog"], length=9, length_beam=1) == model.translate(
        ["a dog"], length=9
    )


def test_a_single_text_is_not_a_list_of_texts(model: Translator) -> None:
    for method in (model.search, model.translate):
        with pytest.raises(RegardError, match="the texts must be a list"):
            method("ein Hund")
        with pytest.raises(RegardError, match="the texts must be a list of strings"):
            method(["ein Hund", cast(str, 3)])


def test_there_are_not_more_threads_than_cores(finished_run: Path) -> None:
    assert Translator.load(finished_run, "cpu", threads=30_000).threads < 30_000


def test_a_sinusoidal_table_is_long_enough_if_another_thread_replaces_it() -> None:
    class ReplacedTable(SinusoidalTable):
        """Between any two reads of the table, another thread has stored its own, shorter one."""

        @property
        def table(self) -> torch.Tensor:
            return torch.zeros(1, 2)

        @table.setter
        def table(self, _: torch.Tensor) -> None: ...

    table = ReplacedTable(lambda length: torch.ones(length, 2))
    assert len(table(700, torch.device("cpu"))) >= 700


@pytest.fixture(scope="module")
def sharp(make_run: Callable[..., Path]) -> Path:
    return make_run(decoding={"extra_length": 6})


def test_every_method_needs_at_least_one_translation(sharp: Path) -> None:
    model = Translator.load(sharp, "cpu")
    methods: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"mbr": 3}]
    for options in methods:
        for nbest in (0, -1):
            with pytest.raises(RegardError, match=f"nbest {nbest}: must be at least 1"):
                model.search(["a dog"], nbest=nbest, **options)


def test_temperature_zero_searches_whatever_the_recipe_says(sharp: Path) -> None:
    model = Translator.load(sharp, "cpu")
    searched = model.search(["the dog sees a cat"])
    greedy = model.predict(["the dog sees a cat"], quick=True)
    model.set_decoding(temperature=2.0, mbr=4)
    assert model.search(["the dog sees a cat"], temperature=0.0, mbr=0) == searched
    assert model.predict(["the dog sees a cat"], quick=True) == greedy, "validation is greedy"


def test_more_translations_than_the_beam_widen_it(make_run: Callable[..., Path]) -> None:
    sections = {"model": {"architecture": "non_autoregressive"}}
    model = Translator.load(make_run(**sections), "cpu")
    (found,) = model.search(["the dog sees a cat"], nbest=7)
    assert 1 < len(found) <= 7


def test_the_precision_of_a_model_is_that_of_its_engine(sharp: Path) -> None:
    plain = Translator.load(sharp, "cpu")
    model = Translator(plain.recipe, plain.tokenizer, plain.network, plain.device, "bf16")
    half = model.search(["the dog sees a cat"])[0][0].log_probability
    model.set_precision("fp32")
    whole = model.search(["the dog sees a cat"])[0][0].log_probability
    assert half != whole
    assert whole == pytest.approx(
        plain.search(["the dog sees a cat"])[0][0].log_probability, abs=1e-4
    )


def test_a_tree_of_groups_has_every_candidate_once(sharp: Path) -> None:
    trace = Translator.load(sharp, "cpu").trace("the dog sees a cat", beam=4, beam_groups=2)
    first = [node for node in trace.beam if node.parent == 0]
    assert sum(node.state == "kept" for node in first) <= 4
    ids = {node.id for node in trace.beam}
    assert len(ids) == len(trace.beam)
