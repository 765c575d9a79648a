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

XLIFF = (
    '<xliff version="1.2"><file source-language="src" target-language="tgt"><body><trans-unit id="1">{}'
    "</trans-unit></body></file></xliff>\n"
)
TMX = '<tmx version="1.4"><header srclang="src"/><body><tu>{}</tu></body></tmx>\n'
TEXT_FILES = {
    "a.md": "---\ntitle: x\n---\n# The big dog\n\n- The *dog* slept.\n- It was **too tired**.[^1]\n\n```\ncode\n```\n\n"
    "[^1]: It slept.\n\n    The *dog* slept.\n",
    "a.html": "<!DOCTYPE html><p>The <b>big</b> dog &amp; the cat.<br>It slept.</p><script>a < b</script>\n",
    "a.json": '{"title": "The big dog", "list": ["It slept.", 2, null]}\n',
    "a.yaml": "title: The big dog  # comment\ntext: |\n  It slept.\n",
    "a.properties": "# comment\ntitle = The big dog\n",
    "a.srt": samples.SRT,
    "a.vtt": samples.VTT,
    "a.csv": samples.CSV,
    "a.txt": samples.TEXT,
}
ODT_CONTENT = samples.ODT_CONTENT.replace("page <text:page-number>3</text:page-number>", "it")
OFFICE_FILES = {
    "a.docx": samples.docx(),
    "a.pptx": samples.pptx(),
    "a.odt": samples.odt(ODT_CONTENT),
}
BILINGUAL_FILES = {
    "a.po": ('msgid "The big dog"\nmsgstr ""\n', 'msgid "The big dog"\nmsgstr "The big dog"\n'),
    "a.xlf": (
        XLIFF.format("<source><![CDATA[<p>The <b>big</b> dog</p>]]></source>"),
        XLIFF.format(
            "<source><![CDATA[<p>The <b>big</b> dog</p>]]></source>"
            "<target><![CDATA[<p>The <b>big</b> dog</p>]]></target>"
        ),
    ),
    "a.tmx": (
        TMX.format('<tuv xml:lang="src"><seg>It slept.</seg></tuv>'),
        TMX.format(
            '<tuv xml:lang="src"><seg>It slept.</seg></tuv><tuv xml:lang="tgt"><seg>It slept.</seg></tuv>'
        ),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that copies the sentences of all files, and with the files."""
    folder = tmp_path_factory.mktemp("copy")
    sentences: list[str] = []
    files: dict[str, str | bytes] = {**TEXT_FILES, **OFFICE_FILES}
    files |= {name: before for name, (before, _) in BILINGUAL_FILES.items()}
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


@pytest.mark.parametrize("name", BILINGUAL_FILES)
def test_a_missing_translation_is_filled_in(name: str, folder: Path) -> None:
    succeeds_inside("translate", "run", name, "--output", f"out-{name}", cwd=folder)
    assert (folder / f"out-{name}").read_text(encoding="utf-8") == BILINGUAL_FILES[name][1]
