"""The public API is typed: mypy --strict accepts a user's script and infers the right classes."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
from pathlib import Path

import regard

model = regard.load("runs/demo")
reveal_type(model)
reveal_type(model.translate(["The dog is tired."], beam=4, length_penalty=0.6))
reveal_type(model.search(["The dog is tired."], nbest=3, temperature=0.8, top_k=10))
reveal_type(model.trace("The dog is tired.", beam=2, prefix="Der", lenses=True))
reveal_type(regard.load(["runs/a", Path("runs/b")]))
reveal_type(regard.load("runs/ewt-tag", regard.Tagger).tag(["The dog barked ."]))
reveal_type(regard.load("runs/sst2", regard.Classifier).classify(["a good film"]))
reveal_type(regard.load("runs/mlm", regard.MaskedLM).fill("The [MASK] barked ."))
reveal_type(regard.load("runs/lm", regard.LanguageModel).generate("The ship", 20))
reveal_type(regard.Model.load(Path("runs/any"), precision="auto"))
reveal_type(regard.train("multi30k", out="runs/mine", changes=["training.steps=10"]))
reveal_type(regard.train("ewt-tag", regard.Tagger))
reveal_type(regard.train("more.tsv", init_from="runs/old", mix=0.5, freeze=["encoder"], extend_vocab=100))
reveal_type(regard.train(regard.DataFiles(source=("a.en",), target=("a.de",)), init_from=Path("runs/old")))
"""
INFERRED = [
    "regard.tasks.translation.Translator",
    "list[str]",
    "list[list[Translation",
    "regard.inspection.trace.Trace",
    "regard.tasks.translation.Translator",
    "list[Tagged",
    "list[Classification",
    "list[list[MaskFilling",
    "str",
    "regard.tasks.base.Model",
    "regard.tasks.translation.Translator",
    "regard.tasks.tagging.Tagger",
    "regard.tasks.translation.Translator",
    "regard.tasks.translation.Translator",
]
WRONG = """
import regard

model = regard.load("runs/demo")
model.translate(["a"], baem=4)
model.translate(["a"], beam="four")
regard.load("runs/demo", precision="int4")
regard.load("runs/ewt-tag", regard.Tagger).translate(["a"])
model.trace("a", baem=4)
model.trace("a", temperature="high")
model.set_decoding(baem=4)
regard.train("demo", ot="runs/demo")
regard.train("demo", minutes="3")
regard.load("runs/lm", regard.LanguageModel).generate("a", 5, temp=0.5)
regard.Traslator
"""


def check(script: str, folder: Path) -> list[str]:
    path = folder / "script.py"
    path.write_text(script)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", "--no-error-summary"]
    config = [
        "--config-file",
        str(root / "pyproject.toml"),
        "--cache-dir",
        str(root / ".mypy_cache"),
    ]
    found = subprocess.run(
        [*command, *config, str(path)], cwd=root, capture_output=True, text=True, check=False
    )
    return found.stdout.splitlines()


def test_a_users_script_is_typed(tmp_path: Path) -> None:
    lines = check(SCRIPT, tmp_path)
    assert [line for line in lines if ": error:" in line] == []
    revealed = [line.split('"')[1] for line in lines if "Revealed type is" in line]
    assert len(revealed) == len(INFERRED)
    for found, expected in zip(revealed, INFERRED, strict=True):
        assert expected.split("[")[-1].split(".")[-1] in found, (found, expected)


def test_mistakes_are_found(tmp_path: Path) -> None:
    errors = [line for line in check(WRONG, tmp_path) if ": error:" in line]
    first = WRONG.split("\n").index('model.translate(["a"], baem=4)') + 1
    expected = [*range(first, WRONG.count("\n") + 1)]
    assert sorted({int(line.split(":")[1]) for line in errors}) == expected, errors
