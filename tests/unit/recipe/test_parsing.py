"""Recipes: every default, every error with its line and what is allowed, and back again unchanged."""

import re
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings, strategies as st

from regard.errors import RegardError
from regard.recipe import (
    PRESETS,
    DecodingConfig,
    DecodingOptions,
    Recipe,
    bundled_recipes,
    load_recipe,
    make_recipe,
    parse_recipe,
)
from regard.recipe.parsing import RENAMED_KEYS

DATA = "data: {train: {pairs: pairs.tsv}}\n"
FOLDER = Path(__file__).parents[3] / "recipes"


def parse(text: str, *changes: str) -> Recipe:
    return parse_recipe(text, "mine.yaml", changes)


def make(**sections: Any) -> Recipe:
    return make_recipe({"data": {"train": {"pairs": "pairs.tsv"}}, **sections}, "test")


def refusal(text: str, *changes: str) -> str:
    with pytest.raises(RegardError) as caught:
        parse(text, *changes)
    return str(caught.value)


# Defaults


def test_defaults_are_the_papers_base_model() -> None:
    recipe = parse(DATA)
    model, training, decoding = recipe.model, recipe.training, recipe.decoding
    assert (model.preset, model.encoder_layers, model.decoder_layers) == ("base", 6, 6)
    assert (model.d_model, model.d_ff, model.heads) == (512, 2048, 8)
    assert (model.d_k, model.d_v) == (64, 64)
    assert (model.dropout, model.attention_dropout, model.activation_dropout) == (0.1, 0.1, 0.1)
    assert (model.norm, model.norm_order, model.position) == ("layer", "post", "sinusoidal")
    assert (model.attention.score, model.attention.bias) == ("scaled_dot_product", False)
    assert (model.activation, model.tie_embeddings, model.tie_output) == ("relu", True, True)
    assert (training.optimizer, training.betas, training.epsilon) == ("adam", (0.9, 0.98), 1e-9)
    assert (training.schedule, training.warmup, training.learning_rate) == ("noam", 4000, 1.0)
    assert (training.steps, training.tokens_per_batch, training.keep_checkpoints) == (
        100_000,
        25_000,
        5,
    )
    assert (training.label_smoothing, training.label_smoothing_over) == (0.1, "all")
    assert (decoding.length_penalty, decoding.extra_length) == (0.6, 50)
    assert (recipe.tokenizer.kind, recipe.tokenizer.shared) == ("unigram", True)
    assert recipe.evaluation.metrics == ("bleu", "chrf", "ter")


@pytest.mark.parametrize(
    ("preset", "layers", "d_model", "d_ff", "heads", "dropout"),
    [
        ("tiny", 4, 128, 256, 4, 0.3),
        ("small", 6, 256, 1024, 4, 0.3),
        ("base", 6, 512, 2048, 8, 0.1),
        ("big", 6, 1024, 4096, 16, 0.3),
        ("huge", 24, 1024, 8192, 16, 0.1),
    ],
)
def test_presets(
    preset: str, layers: int, d_model: int, d_ff: int, heads: int, dropout: float
) -> None:
    model = make(model={"preset": preset}).model
    assert (model.encoder_layers, model.decoder_layers) == (layers, layers)
    assert (model.d_model, model.d_ff, model.heads) == (d_model, d_ff, heads)
    assert model.d_k == model.d_v == d_model // heads
    assert model.dropout == model.attention_dropout == model.activation_dropout == dropout


def test_there_are_six_presets() -> None:
    assert list(PRESETS) == ["tiny", "small", "fast", "base", "big", "huge"]


def test_what_is_given_wins_over_the_preset() -> None:
    model = make(model={"preset": "tiny", "d_model": 64, "dropout": 0.2, "decoder_layers": 1}).model
    assert (model.d_model, model.d_k, model.encoder_layers, model.decoder_layers) == (
        64,
        16,
        4,
        1,
    )
    assert model.attention_dropout == 0.2


def test_what_follows_follows() -> None:
    assert not make(tokenizer={"shared": False}).model.tie_embeddings
    assert make(training={"schedule": "cosine"}).training.learning_rate == 1e-3
    assert make(data={"train": {"source": "a", "target": "b"}}).data.train.source == ("a",)
    odd = make(model={"d_model": 30, "heads": 4, "d_k": 5, "d_v": 6}).model
    assert (odd.d_k, odd.d_v) == (5, 6)


@pytest.mark.parametrize("shared", ["yes", "true"])
def test_any_spelling_of_true_ties_a_shared_vocabulary(shared: str) -> None:
    recipe = parse(f"{DATA}tokenizer: {{shared: {shared}}}\n")
    assert recipe.tokenizer.shared
    assert recipe.model.tie_embeddings


def test_data_folder_is_the_recipes_else_the_environments_else_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("REGARD_DATA", raising=False)
    assert parse(DATA).data.location("x") == "x"
    monkeypatch.setenv("REGARD_DATA", "/env")
    assert parse(DATA).data.location("x") == "/env/x"
    assert parse(DATA, "data.root=/root").data.location("x") == "/root/x"
    assert parse(DATA, "data.root=/root").data.location("/far/x") == "/far/x"
    assert parse(DATA, "data.root=/root").data.location("s3://b/x") == "s3://b/x"
    remote = parse(DATA, "data.root=s3://bucket/").data
    assert [remote.location(name) for name in ("x", "/far/x")] == ["s3://bucket/x", "/far/x"]


def test_a_recipe_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse(DATA).decoding.beam = 7


# Shipped recipes


def test_every_recipe_in_the_folder_is_shipped() -> None:
    names = sorted(path.stem for path in FOLDER.iterdir())
    assert sorted(bundled_recipes()) == names
    assert names


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipe_loads_by_name_and_comes_back_equal(path: Path) -> None:
    recipe = load_recipe(path.stem)
    assert recipe == load_recipe(path)
    assert parse(recipe.to_yaml()) == recipe


def test_recipes_for_wmt_are_the_papers() -> None:
    base, big = load_recipe("wmt14-base"), load_recipe("wmt14-big")
    for recipe, steps, keep in ((base, 100_000, 5), (big, 300_000, 20)):
        assert (recipe.training.steps, recipe.training.keep_checkpoints) == (steps, keep)
        assert recipe.training.average == "last"
        assert recipe.training.clip_norm is None
        assert (recipe.decoding.beam, recipe.decoding.length_penalty) == (4, 0.6)
    assert (base.model.preset, big.model.preset) == ("base", "big")


# Back again


finite = st.floats(1e-12, 0.999, allow_nan=False)
names = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Zl", "Zp")), min_size=1, max_size=12
)


@settings(max_examples=60)
@example(None, ["1e3", "1e3.txt", "0e0"], 0.1, (0.9, 0.98), "tiny", 4, True, None)
@given(
    root=st.none() | names,
    files=st.lists(names, min_size=1, max_size=3),
    rate=finite,
    betas=st.tuples(finite, finite),
    preset=st.sampled_from(["tiny", "small", "base", "big"]),
    heads=st.integers(1, 9),
    shared=st.booleans(),
    ratio=st.none() | st.floats(1, 1e9),
)
def test_yaml_comes_back_equal(
    root: str | None,
    files: list[str],
    rate: float,
    betas: tuple[float, float],
    preset: str,
    heads: int,
    shared: bool,
    ratio: float | None,
) -> None:
    recipe = make(
        data={
            "root": root,
            "train": {"source": files, "target": files},
            "clean": {"max_ratio": ratio},
        },
        tokenizer={"shared": shared},
        model={"preset": preset, "heads": heads, "d_model": 8 * heads},
        training={"learning_rate": rate, "betas": betas, "epsilon": rate / 10},
    )
    text = recipe.to_yaml()
    again = parse(text)
    assert again == recipe
    assert again.to_yaml() == text


# Errors


def test_unknown_key_names_its_line_and_the_nearest_key() -> None:
    text = DATA + "model:\n  preset: tiny\n  d_modle: 64\n"
    assert refusal(text) == "mine.yaml: line 4: unknown key model.d_modle; did you mean d_model?"


@pytest.mark.parametrize(
    ("text", "key", "near"),
    [
        (DATA + "modle: {}\n", "modle", "model"),
        ("data: {train: {pairs: x, sorce: y}}\n", "data.train.sorce", "source"),
        ("data: {train: {pairs: x}, valid: {pair: x}}\n", "data.valid.pair", "pairs"),
        (DATA + "model: {attention: {scor: additive}}\n", "model.attention.scor", "score"),
    ],
)
def test_unknown_key_in_any_depth(text: str, key: str, near: str) -> None:
    assert f"unknown key {key}; did you mean {near}?" in refusal(text)


def test_unknown_key_like_no_other_lists_all() -> None:
    message = refusal(DATA + "decoding: {zzz: 1}\n")
    allowed = ", ".join(DecodingConfig.model_fields)
    assert message == f"mine.yaml: line 2: unknown key decoding.zzz; allowed: {allowed}"
    assert "beam, length_penalty" in allowed


def test_wrong_type_and_wrong_choice_say_what_is_allowed() -> None:
    assert refusal(DATA + "training: {steps: many}\n").startswith(
        "mine.yaml: line 2: training.steps: 'many' must be an integer"
    )
    assert refusal(DATA + "model: {norm_order: under}\n") == (
        "mine.yaml: line 2: model.norm_order: 'under' must be 'post' or 'pre'"
    )
    assert "'vast' must be 'tiny', 'small', 'fast', 'base', 'big' or 'huge'" in refusal(
        DATA + "model: {preset: vast}"
    )
    assert "line 2: model: 5 must be" in refusal(DATA + "model: 5\n")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("training", "steps", "0"),
        ("training", "label_smoothing", "1.0"),
        ("training", "learning_rate", ".nan"),
        ("training", "seed", "-1"),
        ("decoding", "beam", "0"),
        ("decoding", "length_penalty", "-0.5"),
        ("tokenizer", "vocab_size", "7"),
        ("data", "hold_out", "0.6"),
        ("model", "dropout", "1.0"),
        ("evaluation", "metrics", "[]"),
    ],
)
def test_values_out_of_range_are_refused(section: str, key: str, value: str) -> None:
    assert f"{section}.{key}:" in refusal(DATA, f"{section}.{key}={value}")


def test_all_problems_are_reported_at_once() -> None:
    text = (
        DATA
        + "decoding: {beem: 4, length_penalty: -1}\ntraining:\n  steps: no\n  optimizer: adamm\n"
    )
    first, *problems = refusal(text).splitlines()
    assert first == "mine.yaml: 4 problems:"
    assert sorted(re.findall(r"line (\d+)", "\n".join(problems))) == ["2", "2", "4", "5"]
    assert "  line 2: unknown key decoding.beem; did you mean beam?" in problems


@pytest.mark.parametrize("model", ["{d_model: wide}", "{heads: 0}", "{dropout: 1}"])
def test_one_mistake_is_one_problem(model: str) -> None:
    assert "problems" not in refusal(f"{DATA}model: {model}\n")


def test_missing_data() -> None:
    assert refusal("model: {preset: tiny}\n") == "mine.yaml: data is missing"
    assert refusal("data: {}\n") == "mine.yaml: data.train is missing"


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("{source: a}", "source and target must be given together"),
        ("{}", "expected one of: source and target, pairs"),
        ("{source: a, target: b, pairs: c}", "expected one of: source and target, pairs"),
        ("{source: [a, b], target: c}", r"source has 2 file\(s\) and target has 1"),
    ],
)
def test_texts_have_one_form(train: str, message: str) -> None:
    assert re.search(f"line 1: data.train: {message}", refusal(f"data: {{train: {train}}}\n"))


def test_width_and_heads_must_fit() -> None:
    message = refusal(DATA + "model: {d_model: 30, heads: 4}\n")
    wanted = "line 2: model.heads does not divide model.d_model: 7.50 features per head"
    assert wanted in message
    assert "needs an even model.d_model, not 15" in refusal(
        DATA + "model: {d_model: 15, heads: 3}\n"
    )
    assert make(model={"d_model": 15, "heads": 3, "position": "learned"}).model.d_model == 15


def test_learned_positions_must_reach_the_longest_text() -> None:
    learned = DATA + "model: {position: learned, max_length: 256}\n"
    message = refusal(learned)
    assert "model.max_length: 256 is shorter than the longest training text: 257" in message
    assert parse(learned, "data.clean.max_tokens=255").model.max_length == 256
    message = refusal(DATA, "model.max_length=1")
    assert (
        "model.max_length: 1 has no effect; it only applies to model.position: learned" in message
    )


def test_two_kinds_of_pieces_are_two_vocabularies() -> None:
    two = DATA + "tokenizer: {kind: char, target_kind: word, shared: false}\n"
    assert parse(two).tokenizer.of_target.kind == "word"
    assert "target_kind: word needs tokenizer.shared: false" in refusal(
        two.replace("shared: false", "shared: true")
    )
    assert "comes with an imported model" in refusal(two.replace("kind: word", "kind: marian"))
    assert parse(two.replace("kind: word", "kind: char")).tokenizer.target_kind is None
    assert "labels as targets" in refusal("task: classification\n" + two)
    drawn = two.replace("kind: char", "kind: bpe") + "training: {subword_sampling: 0.1}\n"
    assert "cannot be combined with tokenizer.target_kind" in refusal(drawn)


def test_embeddings_of_two_vocabularies_cannot_be_tied() -> None:
    text = DATA + "tokenizer: {shared: false}\nmodel: {tie_embeddings: true}\n"
    assert "model.tie_embeddings: true needs tokenizer.shared: true" in refusal(text)


def test_choosing_by_score_needs_sentences() -> None:
    assert "needs validate_sentences above 0" in refusal(DATA, "training.validate_sentences=0")
    changes = ("training.validate_sentences=0", "training.best_checkpoint_metric=loss")
    assert parse(DATA, *changes).training.best_checkpoint_metric == "loss"


@pytest.mark.parametrize("text", ["data: [", "a: b: c", "\tx: 1", "data: {train: 'x}\n"])
def test_not_yaml(text: str) -> None:
    assert re.match(r"mine\.yaml: line \d+: not YAML: ", refusal(text))


@pytest.mark.parametrize("text", ["", "# only a comment\n", "- a\n- b\n", "data", "5", "null"])
def test_no_sections(text: str) -> None:
    assert "but this file has none" in refusal(text)


@pytest.mark.parametrize("text", ["!!python/object/apply:os.getcwd []", "data: \x01"])
def test_yaml_is_data_only(text: str) -> None:
    assert "not YAML" in refusal(text)


def test_a_list_for_a_name_is_refused() -> None:
    assert "model.preset" in refusal(DATA + "model: {preset: [tiny]}\n")


def test_a_recipe_within_itself_is_refused() -> None:
    assert "mine.yaml" in refusal("data: &data {train: *data}\n")


def test_a_section_given_twice_is_refused() -> None:
    assert "decoding is on line 2 and again on line 3" in refusal(
        DATA + "decoding: {beam: 4}\ndecoding: {length_penalty: 1.0}\n"
    )


# Changes


def test_changes_are_read_as_yaml() -> None:
    recipe = parse(
        DATA + "training: {steps: 5, warmup: 7}\n",
        "training.steps=300",
        "training.clip_norm=null",
        "training.betas=[0.8, 0.9]",
        "data.train={source: a=b, target: c}",
        "decoding.length_penalty=1",
    )
    assert (recipe.training.steps, recipe.training.warmup) == (300, 7)
    assert recipe.training.clip_norm is None
    assert recipe.training.betas == (0.8, 0.9)
    assert recipe.data.train.source == ("a=b",)
    assert recipe.decoding.length_penalty == 1.0


@pytest.mark.parametrize("warmup", [200, 4000])
def test_a_warmup_longer_than_training_is_refused_if_it_is_given(warmup: int) -> None:
    """4,000 is the default, so only the recipe of a run, which has every key, may have it."""
    message = refusal(DATA + f"training: {{steps: 100, warmup: {warmup}}}\n")
    assert f"training.warmup: {warmup:,} is longer than training.steps: 100" in message
    recipe = parse(DATA + "training: {steps: 100}\n")
    assert recipe.training.warmup == 4000
    assert parse(recipe.to_yaml()) == recipe


def test_the_last_change_wins() -> None:
    assert parse(DATA, "decoding.beam=2", "decoding.beam=3").decoding.beam == 3


@pytest.mark.parametrize("change", ["training.steps", "=5", "training..steps=5", "training.=5", ""])
def test_a_change_has_a_key_and_a_value(change: str) -> None:
    message = refusal(DATA, change)
    assert message.startswith(f"--set {change}: expected section.key=value")


def test_a_change_that_is_not_yaml() -> None:
    assert refusal(DATA, "training.steps=[") == "--set training.steps=[: the value is not YAML"


def test_a_bad_change_is_not_blamed_on_a_line_of_the_file() -> None:
    text = DATA + "training: {steps: 5}\n"
    assert "line" not in refusal(text, "training.steps=none")
    assert (
        refusal(text, "training.stepz=5")
        == "--set: unknown key training.stepz; did you mean steps?"
    )


def test_problems_of_the_file_and_of_a_change_are_reported_together() -> None:
    message = refusal(DATA + "training: {warmpu: 5}\n", "training.stepz=5")
    assert message.startswith("mine.yaml: 2 problems:\n")


def test_a_file_that_is_not_named_like_a_recipe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "my.en"
    path.write_text("How are you: fine: thanks\n", encoding="utf-8")
    with pytest.raises(RegardError, match=r"my.en: not a recipe; .* ends in .yaml or .yml$"):
        load_recipe(path)


# Files


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("multi3k", "no bundled recipe and no file of that name; did you mean multi30k?"),
        (
            "zzz",
            "no bundled recipe and no file of that name; regard recipes lists the bundled recipes",
        ),
        ("multi3k.yaml", "no such file"),
        ("zzz.yml", "no such file"),
    ],
)
def test_a_missing_recipe_names_the_nearest_or_the_list(name: str, message: str) -> None:
    with pytest.raises(RegardError) as caught:
        load_recipe(name)
    assert str(caught.value) == f"{name}: {message}"


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"data: \xff")
    with pytest.raises(RegardError, match=r"x\.yaml: not UTF-8 text \(byte 6\)"):
        load_recipe(path)


def test_a_file_before_a_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo").write_text(DATA + "decoding: {beam: 77}\n")
    assert load_recipe("demo").decoding.beam == 77


def test_whole_yaml_has_every_key() -> None:
    values = yaml.safe_load(parse(DATA).to_yaml())
    assert values.keys() == Recipe.model_fields.keys()
    assert values["model"].keys() == type(parse(DATA).model).model_fields.keys()


def test_options_of_a_call_are_the_keys_of_the_decoding_section() -> None:
    assert DecodingOptions.__annotations__.keys() == DecodingConfig.model_fields.keys()


def test_old_names_are_refused_with_the_new_ones() -> None:
    text = DATA + "model: {norm_place: before, architecture: parallel}\nsearch: {alpha: 1.0}\n"
    message = refusal(text)
    assert "line 2: model.norm_place was renamed to model.norm_order" in message
    assert "line 2: model.architecture: parallel was renamed to non_autoregressive" in message
    assert (
        "line 3: search was renamed to decoding, search.alpha to decoding.length_penalty" in message
    )
    assert "model.norm_order: before was renamed to pre" in refusal(DATA, "model.norm_order=before")
    message = refusal(DATA, "model.norm_order=no_residual")
    assert "model.norm_order: no_residual was renamed to model.residual: none" in message


def test_a_network_may_have_neither_norms_nor_residual_connections() -> None:
    """Both have an effect; only the order of norms has none without norms."""
    model = parse(DATA, "model.norm=none", "model.residual=none").model
    assert (model.norm, model.residual) == ("none", "none")


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
def test_every_new_name_exists(old: str, new: str) -> None:
    values: Any = parse(DATA).model_dump()
    for part in new.split("."):
        assert part in values
        values = values[part]
    assert re.search(rf"{re.escape(old)} (was renamed )?to {new}", refusal(DATA, f"{old}=1"))


# Documents that are small on disk and large in memory


def bomb(levels: int, width: int) -> str:
    """A document of ``width ** levels`` values."""
    lines = [f"a0: &a0 [{', '.join('x' * width)}]"]
    for level in range(1, levels):
        aliases = ", ".join([f"*a{level - 1}"] * width)
        lines.append(f"a{level}: &a{level} [{aliases}]")
    return "\n".join(lines) + "\n"


def seconds_and_megabytes(text: str, *changes: str) -> tuple[str, float, float]:
    """The refusal of a document, and what it cost."""
    start = time.process_time()
    tracemalloc.start()
    try:
        message = refusal(text, *changes)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return message, time.process_time() - start, peak / 1e6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (bomb(9, 16), "more than 20,000 keys and values with its aliases written out"),
        (bomb(5, 8), "more than 20,000 keys and values with its aliases written out"),
        (DATA + "model: {heads: " + "[" * 5000 + "]" * 5000 + "}", "nested more than 32 levels"),
        (DATA + "model: &m {heads: [*m]}", "an alias in it contains itself"),
        (DATA + "# " + "x" * 200_000, "more than 200,000 characters"),
        (DATA + "model: {heads: " + "9" * 5000 + "}", "not a recipe: Exceeds the limit"),
        (DATA + "model: {heads: 2001-13-45}", "not a recipe: month must be in 1..12"),
    ],
    ids=["bomb", "small bomb", "nested", "circle", "long", "digits", "date"],
)
def test_a_document_that_would_be_too_large_is_refused_before_it_is_built(
    text: str, message: str
) -> None:
    found, seconds, megabytes = seconds_and_megabytes(text)
    assert message in found
    assert found.startswith("mine.yaml: ")
    assert "\n" not in found
    assert len(found) < 300
    assert seconds < 10
    assert megabytes < 50


def test_a_value_of_an_option_has_the_same_limits() -> None:
    message, seconds, megabytes = seconds_and_megabytes(DATA, "model.heads=" + "[" * 5000)
    assert "nested more than 32 levels" in message
    assert len(message) < 300
    assert max(seconds, megabytes) < 20


def test_aliases_that_repeat_little_are_allowed() -> None:
    text = "data:\n  train: &files {source: a.txt, target: b.txt}\n  valid: *files\n"
    data = parse(text).data
    assert data.valid is not None
    assert data.valid.source == data.train.source


@pytest.mark.parametrize(
    "text",
    [
        "model: {heads: " + "x" * 5000 + "}",
        "model: {heads: [" + "x, " * 5000 + "]}",
        "model: {heads: {" + ", ".join(f"k{n}: {n}" for n in range(5000)) + "}}",
        "model: {" + "x" * 900 + ": 1}",
        "training: {optimizer: " + "x" * 5000 + "}",
        "task: " + "x" * 5000,
        "\n".join(f"unknown{number}: 1" for number in range(500)),
    ],
)
def test_long_values_are_cut_in_messages(text: str) -> None:
    message = refusal(DATA + text)
    assert max(map(len, message.split("\n"))) < 1200
    assert message.count("\n") < 25
