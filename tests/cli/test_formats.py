"""Training and evaluation on files as people have them, without a recipe."""

import json
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from regard.cli.evaluate import _check_direction, _test_pairs
from regard.storage.run_dir import RunDir
from regard.training import autoconfig, planner
from regard.training.cost_model import DeviceSpeed
from tests.cli.commands import SMALL_MODEL, inside, succeeds_inside, write

WORDS = (
    ("dog", "cat", "house", "tree", "sleeps", "runs"),
    ("Hund", "Katze", "Haus", "Baum", "schläft", "rennt"),
)
SHORT = ("--set", "training.steps=2", "--set", "training.device=cpu", *SMALL_MODEL)


@pytest.fixture(autouse=True)
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is not measured: which model is chosen does not matter here."""
    speed = DeviceSpeed("cpu", 5_000.0)
    monkeypatch.setattr(autoconfig, "measure_device", lambda device: speed)


def some_pairs(count: int = 120) -> list[tuple[str, str]]:
    draw = random.Random(1)
    texts = []
    for number in range(count):
        picked = [draw.randrange(6) for _ in range(4)]
        texts.append(
            (
                f"{number} the " + " ".join(WORDS[0][word] for word in picked),
                f"{number} das " + " ".join(WORDS[1][word] for word in picked),
            )
        )
    return texts


PAIRS = some_pairs()


def tmx(pairs: list[tuple[str, str]]) -> str:
    units = "".join(
        f'<tu><tuv xml:lang="en"><seg>{source}</seg></tuv><tuv xml:lang="de"><seg>{target}</seg></tuv></tu>'
        for source, target in pairs
    )
    return f'<tmx version="1.4"><header srclang="en"/><body>{units}</body></tmx>'


def write_tmx(folder: Path) -> str:
    (folder / "my.tmx").write_text(tmx(PAIRS), encoding="utf-8")
    return "my.tmx"


def write_three(folder: Path) -> str:
    rows = (f"{number}\t{source}\t{target}" for number, (source, target) in enumerate(PAIRS))
    write(folder / "three.tsv", ["Nr.\ten\tde", *rows])
    return "three.tsv --columns en,de"


def write_corpus(folder: Path) -> str:
    with zipfile.ZipFile(folder / "corpus.zip", "w") as archive:
        archive.writestr("x.en-de.en", "".join(f"{source}\n" for source, _ in PAIRS))
        archive.writestr("x.en-de.de", "".join(f"{target}\n" for _, target in PAIRS))
    return "corpus.zip"


def write_folder(folder: Path) -> str:
    (folder / "memories").mkdir()
    (folder / "memories" / "a.tmx").write_text(tmx(PAIRS[:60]), encoding="utf-8")
    records = [{"translation": {"en": source, "de": target}} for source, target in PAIRS[60:]]
    pq.write_table(pa.Table.from_pylist(records), folder / "memories" / "b.parquet")
    return "memories/"


def write_two_files(folder: Path) -> str:
    write(folder / "a.csv", ["English;German", *(f"{a};{b}" for a, b in PAIRS[:60])])
    lines = (json.dumps({"en": a, "de": b}) for a, b in PAIRS[60:])
    write(folder / "b.jsonl", lines)
    return "a.csv b.jsonl"


@pytest.mark.parametrize(
    "write_files", [write_tmx, write_three, write_corpus, write_folder, write_two_files]
)
def test_files_are_understood_and_trained_on(
    write_files: Callable[[Path], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*write_files(tmp_path).split(), "--set", "data.bidirectional=false"]
    done = succeeds_inside("train", *arguments, *SHORT, "--out", "run", cwd=tmp_path)
    assert "  120 pairs, en to de; the first:\n" in done.stderr
    source, target = PAIRS[0]
    assert f"    {source}  →  {target}\n" in done.stderr
    recipe = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "languages:\n  - en\n  - de" in recipe
    if write_files is not write_folder:
        return
    resumed = succeeds_inside("train", *arguments, *SHORT, "--out", "run", cwd=tmp_path)
    assert "already trained" in resumed.stderr
    (tmp_path / "test.tmx").write_text(tmx(PAIRS[:5]), encoding="utf-8")
    scored = succeeds_inside("evaluate", "run", "--pairs", "test.tmx", "--json", cwd=tmp_path)
    assert json.loads(scored.stdout)["sentences"] == 5
    write(tmp_path / "test.tsv", ["id\ten\tde", "1\ta dog\tein Hund"])
    evaluate = ("evaluate", "run", "--pairs", "test.tsv", "--columns")
    swapped = inside(*evaluate, "de,en", cwd=tmp_path)
    assert "--columns de,en: wrong order; the model translates en to de" in swapped.stderr
    succeeds_inside(*evaluate, "en,de", cwd=tmp_path)
    for name, line in (("test.en", "a dog"), ("test.de", "ein Hund")):
        write(tmp_path / name, [line])
    hint = "are --source and --reference swapped?"
    for files, is_swapped in ((("test.en", "test.de"), False), (("test.de", "test.en"), True)):
        options = ("--source", files[0], "--reference", files[1])
        done = succeeds_inside("evaluate", "run", *options, cwd=tmp_path)
        assert (hint in done.stderr) is is_swapped
    # A model of both directions can be scored in either.
    one_direction = RunDir(tmp_path / "run").recipe()
    data = one_direction.data.model_copy(update={"bidirectional": True})
    model = SimpleNamespace(recipe=one_direction.model_copy(update={"data": data}))
    names = {"source": "test.de", "target": "test.en"}
    swapped_files = {side: str(tmp_path / name) for side, name in names.items()}
    _test_pairs(cast(Any, model), swapped_files, None)
    note = "these pairs are de to en; the model is trained in both directions"
    messages = capsys.readouterr().err
    assert hint not in messages
    assert note in messages
    _check_direction(cast(Any, model), ("de", "en"))
    assert note in capsys.readouterr().err


def test_pairs_that_validation_had_no_time_for_are_scored_after_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "VALIDATION_SHARE", 0.0)
    monkeypatch.setattr(planner, "MAX_VALIDATION_SHARE", 0.0)
    (tmp_path / "my.tmx").write_text(tmx(PAIRS), encoding="utf-8")
    minutes = ("--minutes", "0.3", "--set", "training.steps=3", "--set", "data.hold_out=0.4")
    done = succeeds_inside("train", "my.tmx", *minutes, *SHORT[2:], "--out", "run", cwd=tmp_path)
    assert "the last checkpoint is kept" in done.stderr
    assert re.search(r"On \d+ validation pairs: .*\n  best ", done.stderr)


def test_bad_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    lines = [f"{source}\t{target}" for source, target in PAIRS]
    write(tmp_path / "my.tsv", [*lines, "no tab"])
    refused = inside("train", "my.tsv", *SHORT, cwd=tmp_path)
    assert refused.returncode == 2
    assert "my.tsv:121: no tab in 'no tab'" in refused.stderr
    done = succeeds_inside("train", "my.tsv", *SHORT, "--on-bad-line", "skip", cwd=tmp_path)
    assert "bad lines skipped: 1 of 121 (the first: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("many.tsv", "which columns are source and target? Candidates: 'en', 'de', 'fr'"),
        ("many.tsv --columns en", "--columns en: expected two names and a comma"),
        ("many.tsv --on-bad-line ignore", "--on-bad-line ignore: must be error or skip"),
        (
            "my.yaml --columns en,de",
            "--columns applies to data files; in a recipe, set data.train.columns",
        ),
        ("empty", "empty: no files of pairs"),
        ("*.tmx", "*.tmx: no such file"),
        ("table.ods", "table.ods: unsupported spreadsheet format; save it as XLSX or CSV (UTF-8)"),
        ("many.tsv other.tsv --languages en,fr", "too few pairs to train on: 2"),
    ],
)
def test_what_is_not_certain_is_refused_in_one_line(
    arguments: str, message: str, tmp_path: Path
) -> None:
    write(tmp_path / "many.tsv", ["en\tde\tfr", "a\tb\tc"])
    write(tmp_path / "other.tsv", ["en\tfr", "a\tb"])
    write(tmp_path / "my.yaml", ["data: {train: {pairs: many.tsv}}"])
    write(tmp_path / "table.ods", ["PK"])
    (tmp_path / "empty").mkdir()
    done = inside("train", *arguments.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_recipe_names_columns(tmp_path: Path) -> None:
    write_three(tmp_path)
    data = "{train: {pairs: three.tsv, columns: [de, en]}, languages: [de, en]}"
    write(tmp_path / "my.yaml", [f"data: {data}", "model: {preset: tiny}"])
    changes = ("--set", "training.warmup=1", "--set", "tokenizer.vocab_size=300")
    done = succeeds_inside("train", "my.yaml", *SHORT, *changes, cwd=tmp_path)
    assert "Training pairs: " in done.stderr
