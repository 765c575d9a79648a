"""A glossary that cannot be kept to is refused before any file is touched, wherever its terms occur."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import inside, write


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "'Quark' and 1 more cannot be guaranteed: this model's tokenizer cannot spell it"),
        (["--set", "groups=5"], "groups 5: with constraints there are no groups"),
        (["--mbr", "4"], "mbr draws samples, which cannot be made to say them"),
    ],
)
def test_a_glossary_is_refused_at_once(
    options: list[str], message: str, finished_run: Path, tmp_path: Path
) -> None:
    write(tmp_path / "terms.tsv", ["dog\tHund", "curd\tQuark", "whey\tMolke"])
    write(tmp_path / "in", ["nothing of the sort"])
    files = ["--input", "in", "--output", "out", "--glossary", "terms.tsv"]
    done = inside("translate", finished_run, *files, *options, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "terms.tsv"]


def test_groups_of_the_recipe_too(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(search={"beam_groups": 5})
    write(tmp_path / "terms.tsv", ["dog\tHund"])
    done = inside("translate", run, "a cat", "--glossary", "terms.tsv", cwd=tmp_path)
    assert done.returncode == 2
    assert "groups 5: with constraints there are no groups" in done.stderr
