"""The examples of docs/architecture.md work, and the boxes of its diagrams name files that exist."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import regard

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
MODULES = {
    "class ScaleNorm": "regard.nn.norms",
    "class Dilated": "regard.nn.attention_patterns",
    "class Bitext": "regard.data.formats.plain_text",
    "class Summarizer": "regard.tasks.translation",
    "class SplitRequest": "regard.server.schemas",
}
"""the module that each example is added to"""
CHECK = """
import sys
from importlib import import_module
from pathlib import Path
import torch

for module, code in EXAMPLES:
    space = vars(import_module(module))
    exec(code, space)

from regard.data.formats import pair_format
from regard.nn.transformer import Transformer
from regard.recipe import make_recipe
from regard.tasks import TASKS

recipe = make_recipe(
    {
        "task": "summarization",
        "data": {"train": {"pairs": "my.bitext"}},
        "model": {
            "preset": "tiny", "dropout": 0, "norm": "scale",
            "attention": {"encoder": "dilated", "decoder": "dilated"},
        },
        "training": {},
    },
    "the example",
)
assert recipe.evaluation.metrics == ("rouge1", "rouge2", "rougeL")
assert TASKS[recipe.task].model.__name__ == "Summarizer"
torch.manual_seed(1)
network = Transformer(recipe.model, 20, 20).eval()
assert [type(one).__name__ for one in network.modules()].count("ScaleNorm") > 10
memory = network.encode(torch.tensor([[5, 6, 7, 2]]))
assert memory.states.isfinite().all()
Path("my.bitext").write_text("a ||| b, c\\n")
assert [*pair_format(Path("my.bitext")).read(Path("my.bitext"))] == [("a", "b, c")]
"""


def test_packages_are_listed_in_the_order_of_the_import_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract, *_) = settings["tool"]["importlinter"]["contracts"]
    layers = [name for layer in contract["layers"] for name in reversed(layer.split(" | "))]
    packages = layers[-2::-1]  # without errors.py
    (sentence,) = re.findall(r"data flows through them: ([^.]*)\.", PAGE)
    assert re.split(r",\s", sentence) == packages
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("src/regard/ ")[2]
    for listing, indent in ((regard.__doc__, 4), (readme, 6)):
        names = re.findall(rf"^ {{{indent}}}(\w+)/ ", listing or "", re.MULTILINE)
        assert names == packages


def code_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_examples_work(tmp_path: Path) -> None:
    examples = [
        (module, block)
        for start, module in MODULES.items()
        for block in code_blocks()
        if start in block
    ]
    assert len(examples) == len(MODULES)
    script = f"EXAMPLES = {examples!r}\n{CHECK}"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


def test_a_decoding_option_is_one_file(finished_run: Path, tmp_path: Path) -> None:
    """The example, put into a copy of the source, works in the Python API and in a recipe."""
    shutil.copytree(ROOT / "src/regard", tmp_path / "regard")
    file = tmp_path / "regard/decoding/options_and_logits_processors.py"
    processor = next(block for block in code_blocks() if "class MinLength" in block)
    field = next(block for block in code_blocks() if "min_length: Annotated" in block)
    text = file.read_text(encoding="utf-8")
    for before, added in (
        ("# " + "-" * 93 + "\n# The options\n", f"{processor}\n\n"),
        ("    temperature: Annotated", field),
        ("    temperature: float | None\n", "    min_length: int | None\n"),
    ):
        assert text.count(before) == 1
        text = text.replace(before, added + before)
    file.write_text(text, encoding="utf-8")
    script = f"""
import sys, regard
from regard.recipe import make_recipe

model = regard.load({str(finished_run)!r}, device="cpu")
assert regard.__file__.startswith({str(tmp_path)!r})
make_recipe({{"data": {{"train": {{"pairs": "x.tsv"}}}}, "decoding": {{"min_length": 5}}}}, "the example")
for options in ({{"beam": 4}}, {{"temperature": 1.0}}):
    texts = ["Hund", "ein Hund", "ein", "Hund ein Hund", "Hund Hund"]
    shortest = min(len(best.tokens) for best, in model.search(texts, **options))
    assert shortest < 40 <= min(len(best.tokens) for best, in model.search(texts, min_length=40, **options))
"""
    subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )


def test_every_box_names_a_file() -> None:
    diagrams = re.findall(r"^```mermaid\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(diagrams) == 3
    for diagram in diagrams:
        files = re.findall(r'\["[^"]+<br/>([^"]+)"\]', diagram)
        assert len(files) >= 12
        assert not [file for file in files if not (ROOT / "src/regard" / file).is_file()]
