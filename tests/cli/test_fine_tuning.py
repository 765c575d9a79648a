"""Fine-tuning through the command line: regard train more.tsv --from RUN."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from regard.demo.corpus import generate
from regard.storage.run_dir import RunDir
from regard.training.checkpoint import checkpoint_files, load_checkpoint
from regard.training.progress import ProgressReporter
from tests.cli.commands import inside, succeeds, succeeds_inside, write

OLD = """
data: {train: {pairs: old.tsv}, languages: [en, de], hold_out: 0.1}
tokenizer: {kind: word, vocab_size: 90}
model: {preset: tiny, d_model: 16, heads: 2, d_ff: 32, encoder_layers: 1, decoder_layers: 1}
training: {steps: 2, tokens_per_batch: 400, warmup: 2, validate_every: 2, checkpoint_every: 2, validate_sentences: 2}
decoding: {beam: 1}
evaluation: {metrics: [chrf]}
"""
FEW = [
    *("--set", "training.steps=4", "--set", "training.schedule=constant"),
    *("--set", "training.validate_every=4", "--set", "training.checkpoint_every=2"),
    *("--set", "training.best_checkpoint_metric=loss"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with old and new data, and a run of the old data. Tests must not change these."""
    folder = tmp_path_factory.mktemp("fine_tuning")
    write(folder / "old.tsv", (f"{s}\t{t}" for s, t in generate("train", 80)))
    write(folder / "new.tsv", (f"{s} Now .\t{t} Jetzt ." for s, t in generate("train", 60, 2)))
    (folder / "old.yaml").write_text(f"{OLD}\n".replace("old.tsv", str(folder / "old.tsv")))
    succeeds_inside("train", "old.yaml", "--out", "old", cwd=folder)
    return folder


def test_a_run_is_fine_tuned_and_scored_on_old_and_new_data(folder: Path) -> None:
    options = ("--mix", "0.5", "--extend-vocab", "9", "--freeze", "encoder", "--out", "new")
    done = succeeds("train", "new.tsv", "--from", "old", *options, *FEW, cwd=folder)
    assert "60 pairs, en to de; the first:" in done.stderr  # the languages of the old run
    assert "from old: tiny of 1+1 layers, width 16, word tokenizer" in done.stderr
    assert "learning rate: 0.044, schedule constant" in done.stderr  # a quarter of 0.177
    assert "mix: 50% of the pairs are from the run's training data" in done.stderr
    assert "new vocabulary entries start as the mean of the pieces" in done.stderr
    closing = done.stderr.split("Training stopped")[1]
    old, new = RunDir(folder / "old"), RunDir(folder / "new")
    recipe, card = new.recipe(), new.card()
    assert recipe.training.init_from == str(folder / "old")
    assert recipe.model == old.recipe().model
    assert recipe.data.language_pair == ("en", "de")
    assert card["data"]["old"]["kept"] > 50
    assert card["vocabulary"]["source"] == old.card()["vocabulary"]["source"] + 9
    described = succeeds_inside("info", "new", cwd=folder).stdout
    for name, of in (("old", "validation of"), ("new", "validation of new")):
        scores = card["fine_tuning"]["sets"][name]
        assert of in scores["set"]
        before, after = scores["before"][0]["value"], scores["after"][0]["value"]
        line = f"chrF2 {before:.1f} before, {after:.1f} after"
        assert line in closing
        assert line in described
    theirs, own = old.weights(), new.weights()
    frozen = [name for name in own if name.startswith("encoder.layers")]
    assert all(torch.equal(own[name], theirs[name]) for name in frozen)
    trained = [name for name in own if name.startswith("decoder.layers")]
    assert not any(torch.equal(own[name], theirs[name]) for name in trained)
    again = succeeds_inside("train", "new.tsv", "--from", "old", *options, *FEW, cwd=folder)
    assert "new is already trained" in again.stderr


@pytest.mark.parametrize("average", ["best", "last"])
def test_a_model_that_fine_tuning_makes_worse_is_not_returned(folder: Path, average: str) -> None:
    harmful = ("--set", "training.learning_rate=9", "--set", "training.validate_every=1")
    options = (*FEW, *harmful, "--set", f"training.average={average}", "--set", "training.steps=3")
    command = ("train", "new.tsv", "--from", "old", *options, "--out", f"worse-{average}")
    done = succeeds_inside(*command, cwd=folder)
    assert "step 0: validation loss" in done.stderr
    assert "average of 3 checkpoints is no better than the model before fine-tuning" in done.stderr
    assert f"before fine-tuning: worse-{average} has the weights of {folder / 'old'}" in done.stderr
    theirs, own = RunDir(folder / "old").weights(), RunDir(folder / f"worse-{average}").weights()
    assert all(torch.equal(own[name], theirs[name]) for name in own)


def test_fine_tuning_is_resumed_before_its_first_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start is validated once, and the plan of a time limit is kept."""
    command = ("train", "new.tsv", "--from", "old", *FEW, "--out", "early", "--minutes", "0.5")
    with monkeypatch.context() as patch:
        patch.setattr(ProgressReporter, "advance", interrupt)
        done = inside(*command, cwd=folder)
    assert done.returncode == 130
    assert "Interrupted: the prepared data are kept; no training step is saved" in done.stderr
    assert done.stderr.count("step 0: validation loss") == 1
    assert "Plan:" in done.stderr
    resumed = succeeds_inside(*command, cwd=folder)
    assert "step 0: validation loss" not in resumed.stderr
    assert "Plan:" not in resumed.stderr
    assert "keeps its plan of 4 steps" in resumed.stderr
    assert "has the weights of" not in resumed.stderr


def interrupt(reporter: ProgressReporter, step: int) -> None:
    raise KeyboardInterrupt


def test_a_resumed_fine_tuning_gives_the_same_weights(folder: Path) -> None:
    options = ("--mix", "0.4", *FEW, "--set", "training.warmup=1")
    command = ("train", "new.tsv", "--from", "old", *options)
    succeeds_inside(*command, "--out", "whole", cwd=folder)
    succeeds_inside(*command, "--set", "training.steps=2", "--out", "halves", cwd=folder)
    resumed = succeeds_inside(*command, "--out", "halves", cwd=folder)
    assert "Resuming from step 2 of 4" in resumed.stderr
    assert "before, " in resumed.stderr  # the scores before training were kept
    states = [
        load_checkpoint(checkpoint_files(folder / name / "checkpoints")[-1])[1]["model"]
        for name in ("whole", "halves")
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("new.tsv --from absent", "--from absent: no such folder"),
        ("new.tsv --from .", "--from .: not a run folder"),
        ("new.tsv --from marian", "import the model first:  regard import marian --from hugging"),
        ("new.tsv --mix 0.5", "--mix 0.5: only for fine-tuning; name the run with --from"),
        ("new.tsv --from old --mix 1.5", "training.mix: 1.5 must be less than 1"),
        ("new.tsv --from old --mix -1", "training.mix: -1.0 must be greater than or equal to 0"),
        ("new.tsv --from old --freeze head", "training.freeze.0: 'head' must be encoder, decoder"),
        ("new.tsv --from old --freeze encoder,all-but-norms", "must be the only group"),
        (
            "new.tsv --from old --freeze embeddings --extend-vocab 9",
            "entries of training.extend_vo",
        ),
        (
            "new.tsv --from old --set training.init_from=x",
            "training.init_from is x; use only one of them",
        ),
        ("new.tsv --from old --out old", "training.init_from is the run itself"),
        ("new.tsv --from old --languages en,fr", "en to de, but the new data are en to fr; --ext"),
        ("new.tsv --from lm", "--from lm: a run for task language_model"),
        ("new.tsv --from old --set model.d_model=32", "model.d_model is 16 there, 32 here"),
        ("small.yaml --from old", "including model.preset, are taken from"),
        (
            "new.yaml --from old",
            "--from old: training.init_from is elsewhere; use only one of them",
        ),
        ("new.tsv --from gone --mix 0.5", "training.mix: cannot read the training data of"),
        ("new.tsv --from changed --mix 0.5", "have changed since it was trained"),
        ("new.tsv --from imported --mix 0.5", "was imported, so its training data are not known"),
        ("few.tsv --from old", "too few pairs to train on: 3; at least 50 are needed"),
    ],
)
def test_wrong_uses_are_refused_in_one_line(
    arguments: str, message: str, folder: Path, wrong: None
) -> None:
    done = inside("train", *arguments.split(), cwd=folder)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1 + done.stderr.count("\n  ") + (
        "with this recipe" in done.stderr
    ) + ("The data:" in done.stderr)


@pytest.fixture(scope="module")
def wrong(folder: Path) -> None:
    """Runs and files that cannot be used."""
    (folder / "marian").mkdir()
    (folder / "marian" / "config.json").write_text("{}")
    text = (folder / "old.yaml").read_text()
    (folder / "new.yaml").write_text(text.replace("{steps", "{init_from: elsewhere, steps"))
    small = "data: {train: {pairs: old.tsv}}\nmodel: {preset: small}\n"
    (folder / "small.yaml").write_text(small)
    write(folder / "few.tsv", ["a\tb"] * 3)
    for name in ("gone", "changed", "imported", "lm"):
        shutil.copytree(folder / "old", folder / name)
    recipe = (folder / "old" / "recipe.yaml").read_text()
    (folder / "gone" / "recipe.yaml").write_text(recipe.replace("old.tsv", "gone.tsv"))
    (folder / "lm" / "recipe.yaml").write_text(
        "task: language_model\ndata: {train: {text: t.txt}}\n"
    )
    write(folder / "changed.tsv", ["a\tb"] * 60)
    (folder / "changed" / "recipe.yaml").write_text(recipe.replace("old.tsv", "changed.tsv"))
    (folder / "imported" / "card.json").write_text(json.dumps({"imported_from": "opus"}))
