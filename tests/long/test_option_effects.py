"""An option has an effect or is refused: every key of a recipe against every registered choice.

For each choice a small model is trained and used while all accesses to recipe keys are recorded. A key that nothing
read must be refused when a recipe sets it.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from regard.data.dependency_trees import ParsedSentence
from regard.errors import RegardError
from regard.recipe import Recipe, make_recipe
from regard.recipe.registry import LOCATIONS, allowed_names
from regard.recipe.validation import Section
from regard.tasks import Translator
from regard.training.run import train

OTHER_VALUES: dict[str, Any] = {
    "data.hold_out": 0.3,
    "data.context": 1,
    "data.bidirectional": True,
    "data.clean.max_tokens": 40,
    "data.clean.max_ratio": 5.0,
    "data.clean.keep_duplicates": True,
    "data.clean.truncate": True,
    "tokenizer.vocab_size": 290,
    "model.d_model": 24,
    "model.heads": 4,
    "model.d_k": 6,
    "model.d_v": 6,
    "model.encoder_layers": 2,
    "model.decoder_layers": 2,
    "model.d_ff": 20,
    "model.attention.window_size": 3,
    "model.attention.linformer_k": 5,
    "model.attention.block_size": 2,
    "model.attention.global_blocks": 1,
    "model.attention.random_blocks": 1,
    "model.attention.key_value_heads": 1,
    "model.attention.bias": True,
    "model.non_autoregressive.max_length_difference": 7,
    "model.non_autoregressive.length_loss_weight": 0.3,
    "model.non_autoregressive.extra_positions": 4,
    "model.dropout": 0.2,
    "model.attention_dropout": 0.3,
    "model.activation_dropout": 0.3,
    "model.final_norm": True,
    "model.max_length": 600,
    "model.max_distance": 3,
    "model.kernel_size": 5,
    "model.tie_embeddings": False,
    "model.tie_output": False,
    "model.output_bias": True,
    "training.tokens_per_batch": 900,
    "training.batching": "packed",
    "training.accumulate": 2,
    "training.learning_rate": 0.5,
    "training.betas": (0.8, 0.9),
    "training.epsilon": 1e-6,
    "training.weight_decay": 0.01,
    "training.warmup": 1,
    "training.clip_norm": 0.5,
    "training.subword_sampling": 0.1,
    "training.subword_copies": 3,
    "training.augment.upper": 0.3,
    "training.augment.title": 0.3,
    "training.augment.typos": 0.3,
    "training.augment.no_final_punctuation": 0.3,
    "training.rdrop": 1.0,
    "training.simcut": 1.0,
    "training.teacher_weight": 0.3,
    "training.word_dropout": 0.1,
    "training.target_word_dropout": 0.1,
    "training.label_smoothing": 0.2,
    "training.validate_every": 1,
    "training.validate_sentences": 3,
    "training.best_checkpoint_metric": "loss",
    "training.patience": 2,
    "training.checkpoint_every": 1,
    "training.keep_checkpoints": 2,
    "training.average": "none",
    "training.ema": 0.9,
    "training.log_every": 1,
    "training.seed": 2,
    "training.device": "cpu",
    "training.precision": "fp32",
    "decoding.beam": 3,
    "decoding.length_penalty": 0.9,
    "decoding.extra_length": 9,
    "decoding.max_length": 9,
    "decoding.iterations": 3,
    "decoding.length_beam": 2,
    "data.other_targets": ["fr"],
    "training.mix": 0.3,
    "training.freeze": ["encoder"],
    "training.extend_vocab": 10,
    "decoding.repetition_penalty": 1.5,
    "decoding.no_repeat_ngram": 3,
    "decoding.coverage_penalty": 0.2,
    "decoding.beam_groups": 5,
    "decoding.diversity_penalty": 0.9,
    "decoding.temperature": 0.8,
    "decoding.top_k": 5,
    "decoding.top_p": 0.9,
    "decoding.seed": 3,
    "decoding.mbr": 4,
    "decoding.constrained_beam": 7,
    "evaluation.tokenize": "char",
}
"""A value other than the default for every key that does not name a registered choice."""

NOT_HERE = {
    "data.root",
    "data.languages",
    "model.preset",
    "training.init_from",
    "training.teacher",
    "training.steps",
    "training.sharding",
    "training.activation_checkpointing",
    "tokenizer.shared",
    "tokenizer.target_kind",
}
"""keys that name files or languages, are needed to keep the test small, need several processes, change only the
memory, or have checks of their own"""

BASE: dict[str, Any] = {
    "model": {"preset": "tiny", "d_model": 16, "heads": 2, "encoder_layers": 1, "dropout": 0.1},
    "tokenizer": {"vocab_size": 300},
    "training": {"steps": 2, "tokens_per_batch": 600, "warmup": 2, "validate_sentences": 4},
}
SMALL_LAYERS = {"translation": {"decoder_layers": 1}, "language_model": {"decoder_layers": 1}}


def leaf_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from leaf_keys(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_key_has_another_value() -> None:
    """A new key must be added to the table above."""
    files = {f"data.{split}" for split in ("train", "valid", "test")}
    keys = {key for key in leaf_keys(Recipe) if not key.startswith(tuple(files))}
    assert keys - {*LOCATIONS} - NOT_HERE - files == {*OTHER_VALUES}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    draw = random.Random(1)
    words = ["red", "green", "blue", "one", "two", "three", "sky"]
    lines = [" ".join(draw.choices(words, k=draw.randint(2, 6))) for _ in range(60)]
    tags = [" ".join(str(len(word)) for word in line.split()) for line in lines]
    (folder / "pairs.tsv").write_text("".join(f"{line}\t{line[::-1]}\n" for line in lines))
    (folder / "tags.tsv").write_text("".join(map("{}\t{}\n".format, lines, tags)))
    (folder / "labels.tsv").write_text("".join(f"{line}\t{line[0]}\n" for line in lines))
    (folder / "text.txt").write_text("".join(f"{line}\n" for line in lines))
    parses = []
    for line in lines:
        rows = [
            f"{n}\t{word}\t_\tX\t_\t_\t{n - 1}\t_\t_\t_" for n, word in enumerate(line.split(), 1)
        ]
        parses.append("\n".join(rows) + "\n\n")
    (folder / "parses.conllu").write_text("".join(parses))
    return folder


FILES = {
    "translation": {"pairs": "pairs.tsv"},
    "tagging": {"pairs": "tags.tsv"},
    "classification": {"pairs": "labels.tsv"},
    "masked_lm": {"text": "text.txt"},
    "language_model": {"text": "text.txt"},
}


def recipe_for(key: str, name: str, data: Path) -> dict[str, Any]:
    """A small recipe that selects one choice."""
    values: dict[str, Any] = {section: dict(keys) for section, keys in BASE.items()}
    task = name if key == "task" else "translation"
    values |= {"task": task, "data": {"root": str(data), "train": dict(FILES[task])}}
    values["model"] |= SMALL_LAYERS.get(task, {})
    if task == "language_model" or name == "decoder_only":
        del values["model"]["encoder_layers"]
    if name == "tree":
        values["data"]["train"]["parses"] = "parses.conllu"
    if key == "model.non_autoregressive.length":
        values["model"]["architecture"] = "non_autoregressive"
    if key == "evaluation.metrics" and name in ("accuracy", "f1", "perplexity", "word_perplexity"):
        return {}  # metrics of other tasks
    set_key(values, key, (name,) if key in ("evaluation.metrics", "decoding.protect") else name)
    if key == "tokenizer.kind" and name == "word":
        values["tokenizer"]["vocab_size"] = 40
    return values


def set_key(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[last] = value


@contextmanager
def recorded_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The recipe keys that are read in the with-block."""
    prefixes = {"Data": "data", "Cleaning": "data.clean", "Attention": "model.attention"}
    prefixes |= {"NonAutoregressive": "model.non_autoregressive", "Augment": "training.augment"}
    read: set[str] = set()

    def get(self: Section, name: str) -> Any:
        kind = type(self)
        if name in kind.model_fields:
            section = kind.__name__.removesuffix("Config")
            read.add(f"{prefixes.get(section, section.lower())}.{name}")
        return object.__getattribute__(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Section, "__getattribute__", get, raising=False)
        yield read


CHOICES = [
    pytest.param(key, name, id=f"{key}={name}")
    for key in LOCATIONS
    for name in allowed_names(key)
    if name != "marian"
]


@pytest.mark.parametrize(("key", "name"), CHOICES)
def test_an_option_has_an_effect_or_is_refused(
    key: str, name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = recipe_for(key, name, data)
    if not values:
        pytest.skip("a metric of another task")
    recipe = make_recipe(values, "test")
    with recorded_keys(monkeypatch) as read:
        model = train(recipe, tmp_path / "run")
        if isinstance(model, Translator):
            parses = (
                [ParsedSentence(["red", "sky"], ["X", "X"], [0, 1])] if name == "tree" else None
            )
            model.translate(["red sky"], parses=parses)
            if not model.non_autoregressive:
                model.translate(["red sky"], constraints=[["blue"]], parses=parses)
    unread = [option for option in OTHER_VALUES if option not in read]
    silent = [option for option in unread if not is_refused(values, option)]
    assert not silent, f"neither read nor refused: {', '.join(silent)}"


def test_a_default_warmup_longer_than_training_is_reported(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = recipe_for("task", "tagging", data)
    del values["training"]["warmup"]
    train(make_recipe(values, "test"), tmp_path / "run")
    output = " ".join("".join(capfd.readouterr()).split())
    assert "training.warmup is 4,000 by default, longer than the 2 steps" in output


def test_sharding_in_one_process_is_reported(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = recipe_for("task", "tagging", data)
    values["training"]["sharding"] = "full_shard"
    train(make_recipe(values, "test"), tmp_path / "run")
    output = " ".join("".join(capfd.readouterr()).split())
    assert "training.sharding: full_shard has no effect with one process" in output


def is_refused(values: dict[str, Any], option: str) -> bool:
    changed = {name: dict(v) if isinstance(v, dict) else v for name, v in values.items()}
    for section in ("data", "model"):
        changed[section] = {
            name: dict(v) if isinstance(v, dict) else v for name, v in changed[section].items()
        }
    set_key(changed, option, OTHER_VALUES[option])
    try:
        make_recipe(changed, "test")
    except RegardError as error:
        return option in str(error)
    return False


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        (
            {"task": "tagging", "model": {"decoder_layers": 3}},
            "model.decoder_layers: 3 has no effect",
        ),
        (
            {"model": {"non_autoregressive": {"extra_positions": 3}}},
            "model.non_autoregressive.extra_positions: 3 has no effect",
        ),
        (
            {"training": {"optimizer": "sgd", "betas": (0.8, 0.9)}},
            "has no effect; "
            "it only applies to training.optimizer: adam, training.optimizer: adamw or training.optimizer: muon",
        ),
        (
            {"model": {"attention": {"window_size": 3}}},
            "model.attention.window_size: 3 has no effect",
        ),
        (
            {"model": {"attention": {"linformer_k": 3}}},
            "model.attention.linformer_k: 3 has no effect",
        ),
        (
            {"model": {"attention": {"block_size": 3}}},
            "model.attention.block_size: 3 has no effect",
        ),
        ({"model": {"max_distance": 3}}, "model.max_distance: 3 has no effect"),
        (
            {"model": {"norm": "none", "final_norm": True}},
            "model.final_norm: true has no effect with model.norm: none",
        ),
        (
            {"model": {"norm": "none", "norm_order": "pre"}},
            "model.norm_order: pre has no effect with model.norm: none",
        ),
        (
            {"task": "tagging", "data": {"train": {"pairs": "t.tsv"}, "clean": {"max_ratio": 3}}},
            "data.clean.max_ratio: 3.0 has no effect with task: tagging",
        ),
        (
            {"training": {"steps": 100, "warmup": 101}},
            "training.warmup: 101 is longer than training.steps: 100",
        ),
        ({"decoding": {"iterations": 3}}, "decoding.iterations: 3 has no effect"),
        (
            {"decoding": {"beam": 4, "beam_groups": 2, "constrained_beam": 20}},
            "decoding.constrained_beam: 20 has no effect",
        ),
        (
            {
                "model": {
                    "architecture": "non_autoregressive",
                    "non_autoregressive": {"length": "eos"},
                },
                "decoding": {"length_beam": 9},
            },
            "decoding.length_beam: 9 has no effect with model.non_autoregressive.length: eos",
        ),
        (
            {"model": {"architecture": "non_autoregressive"}, "decoding": {"beam": 7}},
            "decoding.beam: 7 has no effect with model.architecture: non_autoregressive",
        ),
    ],
)
def test_options_that_used_to_pass_silently_are_refused(
    sections: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RegardError) as caught:
        make_recipe({"data": {"train": {"pairs": "pairs.tsv"}}, **sections}, "test")
    assert problem in str(caught.value)
