"""Files that grow a portion at a time: what a kill leaves behind, and who may go on."""

import json
import os
import random
import re
from pathlib import Path

import pytest

from regard.errors import RegardError
from regard.storage.resumable_output import ResumableOutput

ASKED = {"input": "x", "options": {"beam": 5, "keep": ("numbers",)}}


def left_by_a_kill(files: list[Path], portions: int, torn: bytes = b"") -> None:
    """As if the process were gone after so many portions, and in the middle of one more."""
    journal = ResumableOutput(files, ASKED)
    for number in range(journal.done, journal.done + portions):
        journal.add(1, [f"line {number}\n", f"{number}-{number}\n"])
    for file in journal._open:
        file.write(torn)
        file.close()


def test_a_kill_at_any_moment_loses_and_repeats_nothing(tmp_path: Path) -> None:
    out, also = tmp_path / "out", tmp_path / "also"
    for torn in (b"", b"li", b"line 99\nline"):
        left_by_a_kill([out, also], 2, torn)
        assert not out.exists()
    with ResumableOutput([out, also], ASKED) as journal:
        assert journal.done == 6
        journal.add(1, ["line 6\n", "6-6\n"])
    assert out.read_text() == "".join(f"line {i}\n" for i in range(7))
    assert also.read_text() == "".join(f"{i}-{i}\n" for i in range(7))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["also", "out"]


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_a_kill_among_the_last_names_is_mended(tmp_path: Path, renamed: int) -> None:
    files = [tmp_path / "out", tmp_path / "also"]
    left_by_a_kill(files, 3)
    path = tmp_path / ".out.journal"
    path.write_text(json.dumps({**json.loads(path.read_text()), "whole": True}))
    for file in files[:renamed]:
        (tmp_path / f".{file.name}.partial").replace(file)
    with ResumableOutput(files, ASKED) as journal:
        assert journal.whole
    assert [len(file.read_text().split("\n")) for file in files] == [4, 4]
    assert len(list(tmp_path.iterdir())) == 2


def test_who_asks_for_something_else_is_refused_or_starts_anew(tmp_path: Path) -> None:
    files = [tmp_path / "out", tmp_path / "also"]
    left_by_a_kill(files, 2)
    other = {**ASKED, "input": "y", "options": {"beam": 4}}
    message = f"{files[0]}: begun with other input and options (2 lines are done)"
    with pytest.raises(RegardError, match=re.escape(message)):
        ResumableOutput(files, other)
    with ResumableOutput(files, other, overwrite=True) as journal:
        assert journal.done == 0
        journal.add(1, ["new\n", "new\n"])
    assert files[0].read_text() == "new\n"


def test_nothing_done_stands_in_nobodys_way(tmp_path: Path) -> None:
    files = [tmp_path / "out", tmp_path / "also"]
    left_by_a_kill(files, 0, b"torn")
    with ResumableOutput(files, {"input": "y"}) as journal:
        assert journal.done == 0
    assert files[0].read_text() == ""


def test_only_one_may_write(tmp_path: Path) -> None:
    out = [tmp_path / "out"]
    with (
        ResumableOutput(out, ASKED),
        pytest.raises(RegardError, match="another process is writing it"),
    ):
        ResumableOutput(out, ASKED)


def test_what_was_damaged_is_not_gone_on_with(tmp_path: Path) -> None:
    files = [tmp_path / "out", tmp_path / "also"]
    left_by_a_kill(files, 2)
    os.truncate(tmp_path / ".also.partial", 3)
    with pytest.raises(RegardError, match="shorter than it was; --overwrite starts anew"):
        ResumableOutput(files, ASKED)
    (tmp_path / ".out.journal").write_text("{")
    with pytest.raises(RegardError, match="damaged; --overwrite starts anew"):
        ResumableOutput(files, ASKED)


def test_what_nobody_can_go_on_with_is_whole_or_not_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="zip"), ResumableOutput([out], None) as journal:
        journal.add(1, [])
    assert list(tmp_path.iterdir()) == []
    with ResumableOutput([out], None) as journal:
        journal.add(1, [f"{random.random()}\n"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(RegardError, match=r"cannot be written: .*absent is no folder"):
        ResumableOutput([tmp_path / "absent" / "out"], None)
