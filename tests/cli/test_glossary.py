"""A glossary whose terms cannot be guaranteed is refused before any file is written."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import inside, write


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            [],
            "'Quark' and 1 more cannot be guaranteed: this model's tokenizer cannot encode them without unknown tokens",
        ),
        (["--set", "beam_groups=5"], "beam_groups 5: cannot be combined with constraints"),
        (["--mbr", "4"], "sampling cannot guarantee constraints"),
    ],
)
def test_an_impossible_glossary_is_refused_at_once(
    options: list[str], message: str, finished_run: Path, tmp_path: Path
) -> None:
    write(tmp_path / "terms.tsv", ["dog\tHund", "curd\tQuark", "whey\tMolke"])
    write(tmp_path / "in", ["a text without any of the terms"])
    files = ["--input", "in", "--output", "out", "--glossary", "terms.tsv"]
    done = inside("translate", finished_run, *files, *options, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "terms.tsv"]


def test_beam_groups_of_the_recipe_are_refused_too(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run(decoding={"beam_groups": 5})
    write(tmp_path / "terms.tsv", ["dog\tHund"])
    done = inside("translate", run, "a cat", "--glossary", "terms.tsv", cwd=tmp_path)
    assert done.returncode == 2
    assert "beam_groups 5: cannot be combined with constraints" in done.stderr
