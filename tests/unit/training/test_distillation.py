"""Distillation writes a teacher's translations as pairs, all of them or none; and a teacher in the loss."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.data.corpus import read_pairs
from regard.data.pairs import Pair
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.nn.network import named_weights
from regard.recipe import DataConfig, DataFiles, Recipe, make_recipe
from regard.storage.run_dir import RunDir
from regard.tasks import Translator, build_network
from regard.training.distillation import distill, read_teacher, teacher_tokenizer
from regard.training.prepare_data import check_files
from regard.training.run import train

TEXTS = ["a dog", "a dog", "", "ein\tHund"]


@pytest.fixture
def teacher(finished_run: Path) -> Translator:
    return Translator.load(finished_run, "cpu")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    path = tmp_path / "some.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    return path


def test_every_source_gives_one_pair_in_order_including_duplicates(
    teacher: Translator, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.training.distillation.CHUNK_SIZE", 3)
    lines: list[str] = []
    output = tmp_path / "pairs.jsonl"
    assert distill(teacher, output, sources, lines.append, beam=2) == 4
    pairs = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [pair["source"] for pair in pairs] == TEXTS
    assert [pair["target"] for pair in pairs] == teacher.translate(TEXTS, beam=2)
    assert lines[0] == "4 sources to translate"
    assert lines[-1].startswith("4 of 4, ")


def test_a_tab_is_refused_in_tsv_output(teacher: Translator, sources: Path, tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"some.txt:4: .* contains a tab.*\.jsonl"):
        distill(teacher, tmp_path / "pairs.tsv", sources)
    assert list(tmp_path.iterdir()) == [sources], "all pairs or none"


@pytest.mark.parametrize("back_translation", [False, True])
def test_line_breaks_are_spaces_in_tsv_output(
    teacher: Translator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back_translation: bool
) -> None:
    """A line of a text file may contain a carriage return, and a translation may contain anything."""
    (tmp_path / "some.txt").write_bytes(b"a\rdog\r\nein Hund\r\n\n")
    monkeypatch.setattr(teacher, "translate", lambda texts, **options: ["x\ny\rz\t"] * len(texts))
    lines: list[str] = []
    output = tmp_path / "pairs.tsv"
    assert distill(teacher, output, tmp_path / "some.txt", lines.append, back_translation) == 3
    files = DataFiles(pairs=(str(output),))
    pairs = [tuple(pair) for pair in read_pairs(files, DataConfig(train=files))]
    texts = ["a dog", "ein Hund", ""]
    assert pairs == [("x y z ", text) if back_translation else (text, "x y z ") for text in texts]
    assert [line.partition(",")[0] for line in lines if "carriage return" in line] == [
        "1 of 3 sources contain a carriage return or a line feed"
    ]


def test_the_output_name_must_have_a_known_suffix(teacher: Translator, sources: Path) -> None:
    with pytest.raises(RegardError, match=r"pairs.de: .* must end in .tsv or .jsonl"):
        distill(teacher, Path("pairs.de"), sources)


# Token-level distillation


def student_recipe(folder: Path, teachers: list[Path], **training: object) -> Recipe:
    values = {
        "data": {"root": str(folder), "train": {"pairs": "pairs.tsv"}, "hold_out": 0.2},
        "tokenizer": {"kind": "word", "vocab_size": 60},
        "model": {"preset": "tiny", "d_model": 16, "heads": 2, "d_ff": 16, "encoder_layers": 1},
        "training": {
            "steps": 3,
            "warmup": 1,
            "tokens_per_batch": 200,
            "validate_sentences": 2,
            "teacher": [str(one) for one in teachers],
            **training,
        },
    }
    return make_recipe(values, "test")


def test_a_student_learns_the_probabilities_of_an_ensemble(
    finished_run: Path, tmp_path: Path
) -> None:
    """The teacher knows other words than the student's data, and the student gets its tokenizer."""
    words = ["ein", "Hund", "a", "dog"]
    lines = [f"{one} {two}\t{two}\n" for one, two in product(words, repeat=2)]
    (tmp_path / "pairs.tsv").write_text("".join(lines))
    recipe = student_recipe(tmp_path, [finished_run, finished_run], teacher_weight=1.0)
    student = train(recipe, tmp_path / "student")
    assert isinstance(student, Translator)
    for path in RunDir(finished_run).tokenizer_files():
        assert (tmp_path / "student" / path.name).read_bytes() == path.read_bytes()
    weights = named_weights(build_network(recipe, student.tokenizer))
    assert RunDir(tmp_path / "student").weights().keys() == weights.keys(), "without the teacher's"


def test_a_teacher_with_another_tokenizer_is_refused(finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("a b\tb\n" * 3)
    recipe = student_recipe(tmp_path, [finished_run])
    other = recipe.tokenizer.model_copy(update={"vocab_size": 50})
    with pytest.raises(RegardError, match=r"training.teacher: nothing is not a run folder"):
        check_files(student_recipe(tmp_path, [Path("nothing")]))
    with pytest.raises(RegardError, match=r"the tokenizer section of .* differs"):
        teacher_tokenizer(recipe.model_copy(update={"tokenizer": other}))
    run = RunDir(tmp_path / "run")
    run.folder.mkdir()
    Tokenizer.train(recipe.tokenizer, lambda: [Pair("x y", "z")] * 5).save(run.folder)
    with pytest.raises(RegardError, match=r"the tokenizer of .*finished differs from that of"):
        read_teacher(recipe, run, torch.device("cpu"))


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"task": "classification"}, "not classification"),
        ({"model": {"architecture": "non_autoregressive"}}, "not architecture: non_autoreg"),
        ({"model": {"position": "tree"}}, "cannot be combined with model.position: tree"),
        (
            {"training": {"teacher": None, "teacher_weight": 0.3}},
            "teacher_weight: 0.3 has no effect",
        ),
    ],
    ids=str,
)
def test_what_a_teacher_is_not_for(sections: dict[str, Any], problem: str) -> None:
    values = {"data": {"train": {"pairs": "p.tsv"}}, "training": {"teacher": "t"}, **sections}
    with pytest.raises(RegardError) as caught:
        make_recipe(values, "test")
    assert problem in str(caught.value)


@pytest.mark.parametrize("batching", ["packed", "padded"])
def test_a_teacher_that_cannot_be_packed_needs_padded_batches(
    make_run: Callable[..., Path], batching: str
) -> None:
    run = RunDir(make_run(model={"norm": "batch"}))
    recipe = run.recipe()
    changes = {"teacher": (str(run.folder),), "batching": batching}
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update=changes)})
    if batching == "padded":
        teacher = read_teacher(recipe, run, torch.device("cpu"))
        assert not any(weight.requires_grad for weight in teacher.parameters())
    else:
        with pytest.raises(
            RegardError, match=r"does not support training.batching: packed \(batch"
        ):
            read_teacher(recipe, run, torch.device("cpu"))
