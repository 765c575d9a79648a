"""Fine-tuning copies the tokenizer and the weights of another run, or reports what does not fit."""

import json
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.data.pairs import Pair
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.nn.network import named_weights
from regard.recipe import DataFiles, Recipe, make_recipe
from regard.storage.run_dir import RunDir
from regard.tasks import TASKS, build_network
from regard.training import fine_tuning as module
from regard.training.fine_tuning import (
    PATIENCE,
    RATE_FACTOR,
    FineTuning,
    check_compatible,
    fine_tuning_from_recipe,
    fine_tuning_recipe,
    freeze_weights,
    initial_tokenizer,
    load_initial_weights,
)
from regard.training.resume import planned_values

MODEL = {"d_model": 16, "heads": 2, "d_ff": 32}
PAIRS = [Pair("a b c", "X Y X")] * 3


def recipe_of(task: str, init_from: Path | None = None, **sections: dict[str, Any]) -> Recipe:
    values: dict[str, Any] = {
        "task": task,
        "data": {"train": {"text": "t"} if TASKS[task].text_only else {"pairs": "p.tsv"}},
        "training": {"init_from": None if init_from is None else str(init_from)},
    }
    # A decoder unlike that of the other tasks, which have the default number of layers and ignore it.
    decoder = {} if "model.decoder_layers" in TASKS.choices[task].ignores else {"decoder_layers": 1}
    values["model"] = {**MODEL, **decoder, **sections.get("model", {})}
    values["tokenizer"] = {"kind": "word", "vocab_size": 60, **sections.get("tokenizer", {})}
    return make_recipe(values, "test")


def run_of(recipe: Recipe, folder: Path) -> Path:
    """A run as training leaves it, with random weights."""
    folder.mkdir()
    run = RunDir(folder)
    tokenizer = initial_tokenizer(recipe, lambda: PAIRS)
    run.write_recipe(recipe)
    tokenizer.save(folder)
    run.write_weights(named_weights(build_network(recipe, tokenizer)))
    return folder


def test_labels_can_start_from_a_run_with_another_target_tokenizer(tmp_path: Path) -> None:
    two = {"target_kind": "char", "shared": False, "vocab_size": 300}
    start = run_of(recipe_of("translation", tokenizer=two), tmp_path / "before")
    recipe = recipe_of("classification", start, tokenizer={"vocab_size": 300})
    tokenizer = initial_tokenizer(recipe, lambda: PAIRS)
    assert "encoder weights from" in load_initial_weights(
        build_network(recipe, tokenizer), recipe, tokenizer
    )


@pytest.mark.parametrize("before", ["masked_lm", "translation"])
@pytest.mark.parametrize("task", ["tagging", "classification"])
def test_tasks_with_labels_copy_the_encoder_and_get_a_new_head(
    before: str, task: str, tmp_path: Path
) -> None:
    start = run_of(recipe_of(before), tmp_path / "before")
    recipe = recipe_of(task, start, model={"dropout": 0.4})
    tokenizer = initial_tokenizer(recipe, lambda: PAIRS)
    assert tokenizer.source.model == (start / "tokenizer.model").read_bytes()
    assert tokenizer.target.decode([[5], [6]]) == ["X", "Y"]
    network = build_network(recipe, tokenizer)
    head = named_weights(network)["projection.weight"].clone()
    message = load_initial_weights(network, recipe, tokenizer)
    own, theirs = named_weights(network), RunDir(start).weights()
    copied = [name for name in own if name.startswith("encoder.")]
    assert all(torch.equal(own[name], theirs[name]) for name in copied)
    assert torch.equal(own["projection.weight"], head)
    assert (
        f"{len(copied)} encoder weights from {start}; randomly initialized: projection" in message
    )


@pytest.mark.parametrize(
    ("before", "task"), [("language_model", "translation"), ("masked_lm", "masked_lm")]
)
def test_other_tasks_copy_all_weights(before: str, task: str, tmp_path: Path) -> None:
    model = {"architecture": "decoder_only"} if before == "language_model" else {}
    start = run_of(recipe_of(before, model=model), tmp_path / "before")
    recipe = recipe_of(task, start, model=model)
    tokenizer = initial_tokenizer(recipe, lambda: PAIRS)
    network = build_network(recipe, tokenizer)
    message = load_initial_weights(network, recipe, tokenizer)
    theirs = RunDir(start).weights()
    assert named_weights(network).keys() == theirs.keys()
    assert all(torch.equal(own, theirs[name]) for name, own in named_weights(network).items())
    assert "randomly" not in message


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"d_model": 32}}, "model.d_model is 16 there, 32 here"),
        ({"model": {"norm": "rms"}}, "model.norm is layer there, rms here"),
        ({"tokenizer": {"normalize": "lower"}}, "tokenizer.normalize is nfc there, lower here"),
    ],
)
def test_a_run_that_does_not_fit_is_refused_with_the_differences(
    sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    start = run_of(recipe_of("masked_lm"), tmp_path / "before")
    with pytest.raises(RegardError, match=f"does not match this recipe: .*{message}"):
        initial_tokenizer(recipe_of("tagging", start, **sections), lambda: PAIRS)


def test_the_first_weight_that_does_not_fit_is_named(tmp_path: Path) -> None:
    start = run_of(recipe_of("masked_lm"), tmp_path / "before")
    recipe = recipe_of("tagging", start)
    tokenizer = initial_tokenizer(recipe, lambda: PAIRS)
    deeper = build_network(recipe_of("tagging", model={"encoder_layers": 7}), tokenizer)
    with pytest.raises(RegardError, match=r"has no weight encoder.layers.6.attention.query"):
        load_initial_weights(deeper, recipe, tokenizer)
    wider = build_network(recipe_of("tagging", model={"d_model": 32}), tokenizer)
    with pytest.raises(
        RegardError, match=r"encoder.embedding.weight .* has shape \[\d+, 16\], but .*32\]"
    ):
        load_initial_weights(wider, recipe, tokenizer)


def test_a_run_whose_tokenizer_has_changed_is_refused(tmp_path: Path) -> None:
    """After the data were prepared, the other run was trained again."""
    recipe = recipe_of("tagging", run_of(recipe_of("masked_lm"), tmp_path / "before"))
    other = Tokenizer.train(recipe.tokenizer, lambda: [Pair("d e", "X Y")], labels=True)
    with pytest.raises(RegardError, match=r"the tokenizer of .*before has changed"):
        load_initial_weights(build_network(recipe, other), recipe, other)


def test_a_missing_run_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match="no such folder"):
        initial_tokenizer(recipe_of("tagging", tmp_path / "absent"), lambda: PAIRS)


# What is taken from the run


def test_keys_that_a_recipe_leaves_out_are_taken_from_the_run(tmp_path: Path) -> None:
    start = run_of(recipe_of("translation", model={"norm_order": "pre"}), tmp_path / "before")
    values = {
        "data": {"train": {"pairs": "p.tsv"}},
        "model": {"dropout": 0.4},
        "training": {"init_from": str(start)},
    }
    recipe, theirs = make_recipe(values, "test"), RunDir(start).recipe()
    assert recipe.tokenizer == theirs.tokenizer
    dropout = {"dropout": 0.4, "attention_dropout": 0.4, "activation_dropout": 0.4}
    assert recipe.model == theirs.model.model_copy(update=dropout)
    assert make_recipe(recipe.model_dump(), "test") == recipe


def test_a_bidirectional_run_can_be_fine_tuned_for_either_direction(tmp_path: Path) -> None:
    values = recipe_of("translation").model_dump()
    data = {"train": {"pairs": "p.tsv"}, "languages": ("en", "de")}
    for bidirectional in (True, False):
        given = {**values, "data": {**data, "bidirectional": bidirectional}}
        start = run_of(make_recipe(given, "test"), tmp_path / f"both-{bidirectional}")
        back = {"data": {**data, "languages": ("de", "en")}, "training": {"init_from": str(start)}}
        recipe, theirs = make_recipe(back, "test"), RunDir(start).recipe()
        if bidirectional:
            check_compatible(RunDir(start), theirs, recipe)
        else:
            with pytest.raises(RegardError, match="translates en to de"):
                check_compatible(RunDir(start), theirs, recipe)


def test_a_preset_of_another_size_is_not_overwritten(tmp_path: Path) -> None:
    start = run_of(recipe_of("translation"), tmp_path / "before")
    values = {"data": {"train": {"pairs": "p.tsv"}}, "model": {"preset": "small"}}
    recipe = make_recipe({**values, "training": {"init_from": str(start)}}, "test")
    assert recipe.model.d_model == 256
    with pytest.raises(RegardError, match=r"model\.d_model is 16 there, 256 here"):
        check_compatible(RunDir(start), RunDir(start).recipe(), recipe)


def test_a_task_with_labels_takes_only_the_keys_of_the_encoder(tmp_path: Path) -> None:
    attention = {"decoder": "window", "window_size": 8, "bias": True}
    start = run_of(
        recipe_of("translation", model={"attention": attention, "output_bias": True}),
        tmp_path / "before",
    )
    values = {"task": "tagging", "data": {"train": {"pairs": "p.tsv"}}}
    values["training"] = {"init_from": str(start)}
    values["model"] = {"attention": {"window_size": 64}}
    recipe = make_recipe(values, "test")
    assert (recipe.model.d_model, recipe.model.attention.bias) == (16, True)
    assert (recipe.model.attention.decoder, recipe.model.output_bias) == ("full", False)
    assert not recipe.tokenizer.shared


# Vocabulary extension


@pytest.mark.parametrize("shared", [True, False])
def test_new_entries_start_from_the_mean_of_what_they_were_split_into(
    shared: bool, tmp_path: Path
) -> None:
    section = {"kind": "unigram", "vocab_size": 300, "shared": shared}
    start = run_of(recipe_of("translation", tokenizer=section), tmp_path / "before")
    recipe = recipe_of("translation", start, tokenizer=section)
    recipe = make_recipe(recipe.model_dump(), "test", ["training.extend_vocab=4"])
    pairs = [Pair("abba abba abba", "XYXY YXYX XYXY")] * 20
    tokenizer = initial_tokenizer(recipe, lambda: pairs)
    network = build_network(recipe, tokenizer)
    message = load_initial_weights(network, recipe, tokenizer)
    run = RunDir(start)
    original, theirs, own = run.tokenizer(run.recipe()), run.weights(), named_weights(network)
    source, target = (
        getattr(tokenizer, side).size - getattr(original, side).size
        for side in ("source", "target")
    )
    counts = f"{source}" if shared else f"{source} source and {target} target"
    assert f"; {counts} new vocabulary entries start as the mean" in message
    for side, name in (
        ("source", "encoder.embedding.weight"),
        ("target", "decoder.embedding.weight"),
    ):
        name = "encoder.embedding.weight" if shared else name
        before, after = getattr(original, side), getattr(tokenizer, side)
        assert after.size > before.size
        for piece, row in zip(after.pieces(range(after.size)), own[name], strict=True):
            known = before.pieces(range(before.size))
            ids = [known.index(piece)] if piece in known else before.split_piece(piece)
            torch.testing.assert_close(row, theirs[name][ids].mean(0))


# Frozen weights


@pytest.mark.parametrize(
    ("groups", "trained"),
    [
        (["encoder"], {"encoder.embedding", "decoder"}),
        (["encoder", "embeddings"], {"decoder"}),
        (["all-but-embeddings"], {"encoder.embedding"}),
        (["all-but-decoder"], {"decoder"}),
    ],
)
def test_groups_of_weights_are_frozen(groups: list[str], trained: set[str], tmp_path: Path) -> None:
    recipe = recipe_of("translation")
    network = build_network(recipe, initial_tokenizer(recipe, lambda: PAIRS))
    freeze_weights(network, groups)
    for name, parameter in network.named_parameters():
        assert parameter.requires_grad == name.startswith(tuple(trained)), name


@pytest.mark.parametrize("group", ["self_attention", "cross_attention", "feed_forward", "norms"])
def test_parts_of_layers_are_frozen(group: str) -> None:
    recipe = recipe_of("translation")
    network = build_network(recipe, initial_tokenizer(recipe, lambda: PAIRS))
    freeze_weights(network, [group])
    frozen = {name for name, one in network.named_parameters() if not one.requires_grad}
    part = {"self_attention": ".attention.", "norms": "norm."}.get(group, f".{group}.")
    assert frozen == {name for name, _ in network.named_parameters() if part in name}
    assert frozen


def test_freezing_nothing_or_everything_is_refused() -> None:
    recipe = recipe_of("tagging")
    network = build_network(recipe, initial_tokenizer(recipe, lambda: PAIRS))
    with pytest.raises(RegardError, match="cross_attention: this model has no such weights"):
        freeze_weights(network, ["cross_attention"])
    with pytest.raises(RegardError, match="leaves nothing to train"):
        freeze_weights(network, ["encoder", "embeddings"])


# Languages and choices


def translation_run(folder: Path, **data: Any) -> Path:
    """A run of a named language pair."""
    recipe = recipe_of("translation")
    values = recipe.model_dump()
    values["data"] |= {"languages": ("en", "de"), **data}
    return run_of(make_recipe(values, "test"), folder)


def fine_tuned(run: Path, languages: tuple[str, str] | None, **options: Any) -> Recipe:
    files = DataFiles(pairs=("more.tsv",))
    found, _ = fine_tuning_recipe(
        FineTuning(run, **options), files, "/data", languages=languages, pairs=PAIRS * 40
    )
    return found


def test_the_plan_of_a_run_is_not_taken(tmp_path: Path) -> None:
    """Fine-tuning has a time of its own."""
    run = RunDir(translation_run(tmp_path / "before"))
    planned = {"validate_sentences": 0, "best_checkpoint_metric": "last"}
    recipe = run.recipe()
    training = recipe.training.model_copy(update=planned)
    run.write_recipe(recipe.model_copy(update={"training": training}))
    assert fine_tuned(run.folder, None).training.best_checkpoint_metric == "last"
    run.plan_file.parent.mkdir(exist_ok=True)
    run.plan_file.write_text(json.dumps(planned_values(recipe)))
    found = fine_tuned(run.folder, None).training
    assert (found.best_checkpoint_metric, found.validate_sentences) == ("score", 500)


def test_a_new_target_language_is_added_with_a_tag(tmp_path: Path) -> None:
    recipe = fine_tuned(translation_run(tmp_path / "run"), ("en", "fr"), extend_vocab=5, mix=0.2)
    assert recipe.data.targets == ["fr", "de"]
    assert recipe.data.tags == ["2de", "2fr"]
    assert recipe.data.language_pairs == [("en", "fr"), ("en", "de")]
    tokenizer = initial_tokenizer(recipe, lambda: PAIRS)
    assert [*tokenizer.source.tags] == ["2de", "2fr"]


def test_a_multilingual_run_keeps_its_languages(tmp_path: Path) -> None:
    train = {"pairs": ("a.tsv", "b.tsv"), "to": ("de", "fr")}
    run = translation_run(tmp_path / "run", train=train)
    assert fine_tuned(run, ("en", "fr")).data.targets == ["fr", "de"]
    with pytest.raises(RegardError, match="it translates to de, fr; name the languages"):
        fine_tuned(run, None)
    with pytest.raises(RegardError, match="but the new data are en to es"):
        fine_tuned(run, ("en", "es"))


@pytest.mark.parametrize("codes", [("en", "de"), ("en", "hau")])
def test_pairs_of_the_opposite_direction_are_refused(
    codes: tuple[str, str], tmp_path: Path
) -> None:
    """Even if a code of three letters could name the same language as one of two."""
    run = translation_run(tmp_path / "run", languages=codes)
    with pytest.raises(RegardError, match=f"but the new data are {codes[1]} to en; swap source"):
        fine_tuned(run, codes[::-1])


@pytest.mark.parametrize("codes", [("en", "de"), ("qaa", "qab"), ("de", "de-simple")])
def test_the_opposite_direction_can_be_added_to_the_vocabulary(
    codes: tuple[str, str], tmp_path: Path
) -> None:
    run = translation_run(tmp_path / "run", languages=codes)
    recipe = fine_tuned(run, codes[::-1], extend_vocab=5)
    assert recipe.data.targets == [codes[0], codes[1]]


def test_a_bidirectional_run_accepts_pairs_of_either_direction(tmp_path: Path) -> None:
    run = translation_run(tmp_path / "run", bidirectional=True)
    for languages in (("en", "de"), ("de", "en")):
        recipe = fine_tuned(run, languages)
        assert recipe.data.language_pairs == [languages]
        assert not recipe.data.bidirectional


@pytest.mark.parametrize("languages", [("en-US", "de-AT"), ("eng", "deu"), ("en", "mul"), None])
def test_codes_of_the_same_languages_are_accepted(
    languages: tuple[str, str] | None, tmp_path: Path
) -> None:
    recipe = fine_tuned(translation_run(tmp_path / "run"), languages)
    assert recipe.data.languages == (languages or ("en", "de"))
    assert recipe.data.targets == []


def test_the_learning_rate_is_a_fraction_of_the_peak_of_the_run(tmp_path: Path) -> None:
    recipe = fine_tuned(translation_run(tmp_path / "run"), None)
    peak = 1 / (16 * 4000) ** 0.5  # noam, d_model 16, warmup 4000
    assert recipe.training.learning_rate == pytest.approx(RATE_FACTOR * peak, rel=0.02)
    assert recipe.training.schedule == "cosine"
    again = run_of(recipe.model_copy(), tmp_path / "again")
    assert fine_tuned(again, None).training.learning_rate == recipe.training.learning_rate


def test_an_imported_run_gets_a_fixed_low_rate(tmp_path: Path) -> None:
    run = translation_run(tmp_path / "run")
    RunDir(run).write_card({"imported_from": "opus-mt"})
    recipe = fine_tuned(run, None)
    assert recipe.training.learning_rate == 1e-4
    assert recipe.batch_tokens <= 4_096


@pytest.mark.parametrize(
    ("model", "training", "fastest", "expected"),
    [
        ({}, {}, ("packed", "bf16"), ("packed", "bf16")),
        ({}, {"batching": "packed", "precision": "bf16"}, ("padded", "fp32"), ("padded", "fp32")),
        ({}, {"precision": "fp32"}, ("packed", "bf16"), ("packed", "fp32")),
        ({"position": "relative"}, {}, ("packed", "bf16"), ("padded", "auto")),
        ({}, {"activation_checkpointing": True}, ("packed", "bf16"), ("padded", "auto")),
    ],
)
def test_batching_and_precision_are_the_fastest_on_this_device(
    model: dict[str, Any],
    training: dict[str, Any],
    fastest: tuple[str, str],
    expected: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not those of the run, which may have been trained on another device, or imported."""
    monkeypatch.setattr(module, "fastest_batches", lambda device: fastest)
    values = recipe_of("translation", model=model).model_dump()
    values["training"] |= {"device": "cpu", "tokens_per_batch": 9_000, **training}
    run = run_of(make_recipe(values, "test"), tmp_path / "run")
    recipe = fine_tuned(run, None)
    assert (recipe.training.batching, recipe.training.precision) == expected


def test_what_a_recipe_gives_is_kept_and_the_rest_is_chosen(tmp_path: Path) -> None:
    run = translation_run(tmp_path / "run")
    (tmp_path / "pairs.tsv").write_text("".join(f"a b {n}\tX Y\n" for n in range(99)))
    recipe_file = tmp_path / "my.yaml"
    recipe_file.write_text(
        f"data: {{root: {tmp_path}, train: {{pairs: pairs.tsv}}, hold_out: 0.5}}\n"
        "training: {steps: 7, label_smoothing: 0.2}\n"
    )
    recipe, _ = fine_tuning_from_recipe(FineTuning(run, mix=0.5), recipe_file)
    training = recipe.training
    assert (training.steps, training.label_smoothing, training.mix) == (7, 0.2, 0.5)
    assert (training.schedule, training.warmup, training.patience) == ("cosine", 1, PATIENCE)
    recipe, _ = fine_tuning_from_recipe(
        FineTuning(run), recipe_file, ["training.learning_rate=0.5", "training.warmup=3"]
    )
    assert (recipe.training.schedule, recipe.training.learning_rate) == ("noam", 0.5)


@pytest.mark.parametrize(("count", "share"), [(2_000, 0.1), (10_000, 0.05), (600_000, 0.001)])
def test_500_pairs_are_held_out_for_validation(tmp_path: Path, count: int, share: float) -> None:
    """At most a tenth of them, and at least a thousandth."""
    run, files = translation_run(tmp_path / "run"), DataFiles(pairs=("more.tsv",))
    pairs = repeat(PAIRS[0], count)
    recipe, _ = fine_tuning_recipe(FineTuning(run), files, "/data", pairs=pairs)
    assert recipe.data.hold_out == share


def test_the_tokenizer_is_that_of_the_initial_run_or_the_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = Tokenizer.train(recipe_of("translation").tokenizer, lambda: PAIRS)
    monkeypatch.setattr(module, "teacher_tokenizer", lambda recipe: teacher)
    recipe = recipe_of("translation")
    taught = recipe.training.model_copy(update={"teacher": ("a run",)})
    student = recipe.model_copy(update={"training": taught})
    assert module.initial_tokenizer(student, lambda: PAIRS) is teacher
    run = translation_run(tmp_path / "run")
    both = taught.model_copy(update={"init_from": str(run)})
    found = module.initial_tokenizer(recipe.model_copy(update={"training": both}), lambda: PAIRS)
    assert found.source.model == RunDir(run).tokenizer(RunDir(run).recipe()).source.model
    assert module.initial_tokenizer(recipe, lambda: PAIRS).source.size > 5
