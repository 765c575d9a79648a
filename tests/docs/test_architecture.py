"""The examples of docs/architecture.md work, and the boxes of its diagrams name files that exist."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
MODULES = {
    "class ScaleNorm": "regard.nn.norms",
    "class Dilated": "regard.nn.sparse_attention",
    "class MinLength": "regard.decoding.logits_processors",
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


def test_the_examples_work(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    examples = [
        (module, block) for start, module in MODULES.items() for block in blocks if start in block
    ]
    assert len(examples) == len(MODULES)
    script = f"EXAMPLES = {examples!r}\n{CHECK}"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


def test_every_box_names_a_file() -> None:
    diagrams = re.findall(r"^```mermaid\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(diagrams) == 3
    for diagram in diagrams:
        files = re.findall(r'\["[^"]+<br/>([^"]+)"\]', diagram)
        assert len(files) >= 12
        assert not [file for file in files if not (ROOT / "src/regard" / file).is_file()]
