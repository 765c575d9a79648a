"""An ensemble: its probabilities and its search against an independent computation."""

import itertools
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.data.special_tokens import BOS, EOS
from regard.errors import RegardError
from regard.inference.packed_transformer import PackedEnsemble
from regard.nn.ensemble import Ensemble
from regard.nn.network import Network, named_weights
from regard.recipe import Recipe
from regard.storage.run_dir import RunDir
from regard.tasks import Translator
from regard.training.distillation import distill

TEXTS = ["ein Hund", "a dog", "dog"]


@pytest.fixture(scope="module")
def runs(
    finished_run: Path,
    small_recipe: Callable[..., Recipe],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Path]:
    """Three runs with one tokenizer; the last one has another size, norm order and width."""
    folders = []
    sizes: list[dict[str, Any]] = [
        {},
        {},
        {"d_model": 24, "norm_order": "pre", "decoder_layers": 1},
    ]
    for seed, size in enumerate(sizes):
        run = RunDir(
            shutil.copytree(finished_run, tmp_path_factory.mktemp("runs") / f"seed-{seed}")
        )
        recipe = small_recipe(tokenizer={"kind": "word", "vocab_size": 60}, model=size)
        run.write_recipe(recipe)
        torch.manual_seed(seed)
        network = Translator.build(recipe, run.tokenizer(recipe))
        for weight in network.parameters():
            weight.data.add_(torch.randn_like(weight) * 0.3)
        run.write_weights(named_weights(network))
        folders.append(run.folder)
    return folders


@pytest.fixture(scope="module")
def model(runs: list[Path]) -> Translator:
    return Translator.load(runs, "cpu")


@pytest.fixture(scope="module")
def members(runs: list[Path]) -> list[Network]:
    return [Translator.load(run, "cpu").network for run in runs]


@torch.no_grad()
def next_probabilities(members: list[Network], source: list[int], output: list[int]) -> Any:
    """The mean of the probabilities of the members for the token after ``output``, without any cache."""
    ids = torch.tensor([[*source, EOS]]), torch.tensor([[BOS, *output]])
    logits = [member(*ids)[0, -1].double().numpy() for member in members]
    exponentials = [np.exp(one - one.max()) for one in logits]
    return np.mean([one / one.sum() for one in exponentials], axis=0)


def greedy_by_hand(
    members: list[Network], source: list[int], suppressed: list[int], limit: int
) -> tuple[list[int], list[float]]:
    output: list[int] = []
    found: list[float] = []
    while len(output) < limit:
        probabilities = next_probabilities(members, source, output)
        probabilities[suppressed] = -1
        token = int(probabilities.argmax())
        found.append(float(np.log(probabilities[token])))
        if token == EOS:
            break
        output.append(token)
    return output, found


def test_greedy_search_takes_the_best_mean_probability(
    model: Translator, members: list[Network], runs: list[Path]
) -> None:
    assert isinstance(model.engine.packed, PackedEnsemble)
    suppressed = list(model.tokenizer.target.suppressed_tokens)
    found = model.generate(TEXTS, beam=1, max_length=6)
    for text, (best,) in zip(TEXTS, found, strict=True):
        (source,) = model.encode([text])
        tokens, log_probabilities = greedy_by_hand(members, source, suppressed, 6)
        assert best.hypothesis.tokens == tokens
        np.testing.assert_allclose(
            best.hypothesis.token_log_probabilities[: len(tokens)],
            log_probabilities[: len(tokens)],
            atol=2e-5,
        )
    single = Translator.load(runs[0], "cpu")
    assert model.translate(TEXTS, beam=1) != single.translate(TEXTS, beam=1)


def test_a_wide_beam_finds_the_best_of_all_sequences(
    model: Translator, members: list[Network]
) -> None:
    """Every sequence of at most two tokens is scored by hand."""
    target = model.tokenizer.target
    words = sorted({*range(target.size)} - {*target.suppressed_tokens, EOS, BOS})
    (source,) = model.encode(["ein Hund"])
    next_token = cache(lambda *output: next_probabilities(members, source, list(output)))
    scores = {}
    for length in range(3):
        for tokens in itertools.product(words, repeat=length):
            total = 0.0
            for end, token in enumerate([*tokens, EOS]):
                total += float(np.log(next_token(*tokens[:end])[token]))
            scores[tokens] = total
    ((best,),) = model.generate(["ein Hund"], beam=200, length_penalty=0.0, max_length=2)
    expected = max(scores, key=lambda tokens: scores[tokens])
    assert tuple(best.hypothesis.tokens) == expected
    assert best.hypothesis.log_probability == pytest.approx(scores[expected], abs=5e-5)


def test_packed_and_plain_decoding_agree(model: Translator) -> None:
    packed = model.generate(TEXTS, beam=3, max_length=6)
    plain = model.generate(TEXTS, beam=3, max_length=6, plain=True)
    for one, other in zip(packed, plain, strict=True):
        assert one[0].translation.text == other[0].translation.text
        assert one[0].translation.score == pytest.approx(other[0].translation.score, abs=1e-4)


def test_teacher_forcing_gives_the_mean_probabilities(
    members: list[Network], runs: list[Path]
) -> None:
    configs = [RunDir(run).recipe().model for run in runs]
    ensemble = Ensemble(members, configs).eval()
    source, target = torch.tensor([[5, 6, EOS]]), torch.tensor([[BOS, 7, 8]])
    with torch.no_grad():
        found: Tensor = ensemble(source, target)[0]
    for end in range(3):
        expected = next_probabilities(members, [5, 6], [7, 8][:end])
        np.testing.assert_allclose(found[end].exp().numpy(), expected, rtol=1e-4, atol=1e-6)


def test_an_ensemble_of_one_model_twice_is_that_model(runs: list[Path]) -> None:
    twice, once = (
        regard.load([runs[0], runs[0]], device="cpu"),
        regard.load([runs[0]], device="cpu"),
    )
    assert twice.translate(TEXTS, beam=4) == once.translate(TEXTS, beam=4)
    assert twice.run is None
    assert once.run is not None


def test_distillation_from_an_ensemble_can_be_resumed(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Translator.load(runs[:2], "cpu")
    sources, output = tmp_path / "sources.txt", tmp_path / "pairs.jsonl"
    sources.write_text("".join(f"{text}\n" for text in TEXTS))
    monkeypatch.setattr("regard.training.distillation.CHUNK_SIZE", 1)
    translate, calls = model.translate, []

    def fail_at_third(texts: list[str], **options: Any) -> list[str]:
        calls.append(texts)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return translate(texts, **options)

    monkeypatch.setattr(model, "translate", fail_at_third)
    with pytest.raises(KeyboardInterrupt):
        distill(model, output, sources)
    distill(model, output, sources)
    assert calls == [[TEXTS[0]], [TEXTS[1]], [TEXTS[2]], [TEXTS[2]]]
    lines = output.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["target"] for line in lines] == translate(TEXTS)


def test_models_that_cannot_be_combined_are_refused(
    runs: list[Path], make_run: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(RegardError, match="its tokenizer differs from that of"):
        regard.load([runs[0], make_run()])
    with pytest.raises(RegardError, match="no run folder"):
        regard.load([])
    other = Path(shutil.copytree(runs[1], tmp_path / "other"))
    recipe = (other / "recipe.yaml").read_text()
    (other / "recipe.yaml").write_text(recipe.replace("context: 0", "context: 2"))
    with pytest.raises(RegardError, match=r"other: data.context is 2, but 0 in"):
        regard.load([runs[0], other])
    with pytest.raises(RegardError, match="trace: not supported for an ensemble"):
        regard.load(runs[:2]).trace("ein Hund")
    with pytest.raises(RegardError, match="coverage_penalty: this model has no cross-attention"):
        regard.load(runs[:2]).translate(["ein Hund"], coverage_penalty=0.2)
