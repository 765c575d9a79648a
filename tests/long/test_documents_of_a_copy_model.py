"""A model that is trained to copy gives back each document, through the real command line.

The files have no placeholders: they are replaced by words of the vocabulary before the search, and this small model
copies only sentences that it has seen. With a function that copies, ``tests/unit/documents`` has all kinds of files.
"""

from pathlib import Path

import pytest

from regard.documents.base import read_archive
from tests.cli.commands import succeeds_inside, write, write_recipe
from tests.unit.documents import samples
from tests.unit.documents.translators import parse

TEXT_FILES = {
    "a.md": "---\ntitle: x\n---\n# The big dog\n\n- The *dog* slept.\n- It was **too tired**.\n\n```\ncode\n```\n",
    "a.html": "<!DOCTYPE html><p>The <b>big</b> dog &amp; the cat.<br>It slept.</p><script>a < b</script>\n",
    "a.json": '{"title": "The big dog", "list": ["It slept.", 2, null]}\n',
    "a.yaml": "title: The big dog  # comment\ntext: |\n  It slept.\n",
    "a.properties": "# comment\ntitle = The big dog\n",
    "a.srt": samples.SRT,
    "a.vtt": samples.VTT,
    "a.csv": samples.CSV,
    "a.txt": samples.TEXT,
}
OFFICE_FILES = {"a.docx": samples.docx(), "a.pptx": samples.pptx()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that copies the sentences of all files, and with the files."""
    folder = tmp_path_factory.mktemp("copy")
    sentences: list[str] = []
    files: dict[str, str | bytes] = {**TEXT_FILES, **OFFICE_FILES}
    for name, content in files.items():
        raw = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(raw)
        sentences += parse(name, raw).sentences
    lines = sorted({" ".join(sentence.split()) for sentence in sentences})
    for side in ("src", "tgt"):
        write(folder / f"train.{side}", lines * 20)
        write(folder / f"valid.{side}", lines[:20])
    recipe = write_recipe(
        folder,
        tokenizer={"kind": "unigram", "vocab_size": 500, "normalize": "none"},
        training={
            "steps": 700,
            "tokens_per_batch": 1024,
            "learning_rate": 0.004,
            "validate_every": 700,
        },
    )
    succeeds_inside("train", recipe, "--out", "run", cwd=folder)
    return folder


@pytest.mark.parametrize("name", TEXT_FILES)
def test_a_text_file_is_equal_byte_for_byte(name: str, folder: Path) -> None:
    columns = ["--columns", "text"] if name.endswith("csv") else []
    succeeds_inside("translate", "run", name, *columns, "--output", f"out-{name}", cwd=folder)
    assert (folder / f"out-{name}").read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("name", OFFICE_FILES)
def test_an_office_file_has_the_same_runs_and_styles(name: str, folder: Path) -> None:
    succeeds_inside("translate", "run", name, "--output", f"out-{name}", cwd=folder)
    before, after = (read_archive((folder / one).read_bytes()) for one in (name, f"out-{name}"))
    assert [data for _, data in before] == [data for _, data in after]
