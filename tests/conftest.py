"""Fixtures for all tests. Importing this file first turns on the checking of tensor shapes in every test."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

# One thread, unless the caller says otherwise, because the models are small; before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import settings
from jaxtyping import install_import_hook

# Before regard is imported anywhere, because the hook checks only modules imported after it. Not with a GPU, where
# networks are compiled: torch.compile and Triton cannot trace checked functions.
if not torch.cuda.is_available():
    install_import_hook(["regard.nn", "regard.decoding"], "beartype.beartype")

from regard.data.pairs import Pair
from regard.data.special_tokens import EOS
from regard.data.tokenizer import Tokenizer
from regard.demo.corpus import generate
from regard.inference import device
from regard.inference.native_library import native_library
from regard.nn.network import named_weights
from regard.recipe import Recipe, make_recipe
from regard.storage.run_dir import RunDir
from regard.tasks import Translator, build_network
from regard.training.checkpoint import TrainingState, checkpoint_name, save_checkpoint

# No deadline: the time an example takes depends on the other users of the machine.
settings.register_profile("regard", deadline=None)
settings.load_profile("regard")

# Prepared models of the tests, of this process and those it starts, are not put into the user's cache.
PREPARED_MODELS = TemporaryDirectory(prefix="regard-prepared-")
os.environ["REGARD_PREPARED"] = PREPARED_MODELS.name
native_library()  # built now if it is missing, so that no test waits for it or prints that it is built


@pytest.fixture(scope="session", autouse=True)
def compute_on_the_cpu() -> Iterator[None]:
    """Let ``device: auto`` be the CPU, because results are compared exactly; tests of a GPU name it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "default_device", lambda: torch.device("cpu"))
        yield


SMALL_MODEL = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 16, "heads": 2, "d_ff": 32}


def _small_recipe(**sections: dict[str, Any]) -> Recipe:
    values: dict[str, Any] = {"data": {"train": {"pairs": "pairs.tsv"}}, **sections}
    values["model"] = {**SMALL_MODEL, "dropout": 0.0, **values.get("model", {})}
    return make_recipe(values, "test")


@pytest.fixture(scope="session")
def small_recipe() -> Callable[..., Recipe]:
    """A function that makes the recipe of a small model without dropout, from the sections that differ."""
    return _small_recipe


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder with the corpora: $REGARD_DATA, or shared/data next to the repository."""
    configured = os.environ.get("REGARD_DATA")
    folder = Path(configured) if configured else Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no data: {folder} is not a folder (set $REGARD_DATA)")
    return folder


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run folder with untrained weights. Tests must not change it."""
    run = RunDir(tmp_path_factory.mktemp("runs") / "finished")
    run.folder.mkdir()
    tokenizer_section = {"kind": "word", "vocab_size": 60}
    # The checkpoints of trained_run are at steps 2 and 4; others would be those of an interruption.
    recipe = _small_recipe(tokenizer=tokenizer_section, training={"checkpoint_every": 2})
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: [Pair("ein Hund", "a dog")] * 5)
    run.write_recipe(recipe)
    tokenizer.save(run.folder)
    torch.manual_seed(1)
    run.write_weights(named_weights(build_network(recipe, tokenizer)))
    run.write_card({"note": "for tests"})
    return run.folder


@pytest.fixture(scope="session")
def trained_run(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a log and two checkpoints, the second with its final weights. Tests must not change it."""
    run = RunDir(shutil.copytree(finished_run, tmp_path_factory.mktemp("runs") / "trained"))
    run.checkpoints.mkdir()
    weights = run.weights()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    for step, saved in ((2, zeros), (4, weights)):
        path = run.checkpoints / checkpoint_name(step)
        save_checkpoint(path, TrainingState(step), saved, None, {})
    lines = [
        '{"event": "start", "step": 0, "steps": 4}',
        '{"event": "step", "step": 1, "loss": 9.0, "learning_rate": 0.1}',
        '{"event": "step", "step": 2, "loss": 3.0, "learning_rate": 0.2}',
        '{"event": "valid", "step": 2, "best": true, "loss": 2.5, "perplexity": 12.2, "bleu": 50.0}',
        '{"event": "start", "step": 1, "steps": 4}',
        '{"event": "step", "step": 2, "loss": 2.0, "learning_rate": 0.2}',
        '{"event": "step", "step": 3, "loss": NaN, "learning_rate": 0.2}',
        '{"event": "valid", "step": 4, "best": false, "loss": 2.6, "perplexity": 13.5, "bleu": 40.0}',
        '{"event": "st',
    ]
    run.log_file.write_text("\n".join(lines), encoding="utf-8")
    return run.folder


@pytest.fixture
def run_folder(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that the test may change."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


# Small runs with random weights, for conversion


@pytest.fixture(scope="session")
def pairs() -> list[Pair]:
    return list(generate("train", 400))


@pytest.fixture(scope="session")
def make_run(
    tmp_path_factory: pytest.TempPathFactory,
    pairs: list[Pair],
) -> Callable[..., Path]:
    """A function that makes a run with random weights, large enough that its translations differ.

    Biases and gains are random too, so that a conversion that loses one is noticed.
    """
    tokenizers: dict[str, Tokenizer] = {}

    def make(**sections: dict[str, Any]) -> Path:
        sections = {"tokenizer": {"vocab_size": 420}, **sections}
        recipe = _small_recipe(**sections)
        key = recipe.tokenizer.model_dump_json()
        if key not in tokenizers:
            tokenizers[key] = Tokenizer.train(recipe.tokenizer, lambda: pairs)
        tokenizer = tokenizers[key]
        run = RunDir(tmp_path_factory.mktemp("exchange") / "run")
        run.folder.mkdir()
        run.write_recipe(recipe)
        tokenizer.save(run.folder)
        torch.manual_seed(1)
        network = Translator.build(recipe, tokenizer)
        with torch.no_grad():
            for name, weight in network.named_parameters():
                weight.add_(torch.randn_like(weight) * (0.4 if "layers" in name else 0.2))
            for buffer in filter(torch.Tensor.is_floating_point, network.buffers()):
                buffer.add_(torch.rand_like(buffer) * 0.5)
            ids = torch.randint(5, min(300, tokenizer.source.size), (40, 12))
            if recipe.model.norm == "batch":
                for _ in range(30):  # with random statistics, values would grow from layer to layer
                    network.train()(ids, ids)
            if network.projection.bias is not None:
                logits = network.eval()(ids, ids).flatten(0, 1)
                margin = logits.max(-1).values - logits[:, EOS]
                bias = network.projection.bias
                bias[EOS] += margin.quantile(0.2)  # otherwise EOS would almost never be generated
                # As in a trained model: CTranslate2 redistributes the probability of suppressed tokens.
                bias[list(tokenizer.target.suppressed_tokens)] = -50.0
        run.write_weights(named_weights(network))
        run.write_card({"note": "for tests"})
        return run.folder

    return make
