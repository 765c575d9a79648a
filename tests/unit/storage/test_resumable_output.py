"""Resumable output: what a killed process leaves behind, and who may resume it."""

import json
import os
import random
import re
from pathlib import Path

import pytest

from regard.errors import RegardError
from regard.storage.resumable_output import ResumableOutput
from tests.cli.test_full_disk import file_size_limit

KEY = {"input": "x", "options": {"beam": 5, "protect": ("numbers",)}}


def write_and_die(files: list[Path], chunks: int, torn: bytes = b"") -> None:
    """Do what a process does that is killed after this many chunks, in the middle of another one."""
    output = ResumableOutput(files, KEY)
    for number in range(output.done, output.done + chunks):
        output.add(1, [f"line {number}\n", f"{number}-{number}\n"])
    for file in output._open:
        file.write(torn)
        file.close()


def test_a_kill_at_any_moment_loses_and_repeats_nothing(tmp_path: Path) -> None:
    out, also = tmp_path / "out", tmp_path / "also"
    for torn in (b"", b"li", b"line 99\nline"):
        write_and_die([out, also], 2, torn)
        assert not out.exists()
    with ResumableOutput([out, also], KEY) as output:
        assert output.done == 6
        output.add(1, ["line 6\n", "6-6\n"])
    assert out.read_text() == "".join(f"line {i}\n" for i in range(7))
    assert also.read_text() == "".join(f"{i}-{i}\n" for i in range(7))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["also", "out"]


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_a_kill_during_the_final_renaming_is_repaired(tmp_path: Path, renamed: int) -> None:
    files = [tmp_path / "out", tmp_path / "also"]
    write_and_die(files, 3)
    path = tmp_path / ".out.journal"
    path.write_text(json.dumps({**json.loads(path.read_text()), "complete": True}))
    for file in files[:renamed]:
        (tmp_path / f".{file.name}.partial").replace(file)
    with ResumableOutput(files, KEY) as output:
        assert output.complete
    assert [len(file.read_text().split("\n")) for file in files] == [4, 4]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_different_resume_key_is_refused_unless_overwriting(tmp_path: Path) -> None:
    files = [tmp_path / "out", tmp_path / "also"]
    write_and_die(files, 2)
    other = {**KEY, "input": "y", "options": {"beam": 4}}
    message = f"{files[0]}: started with different input and options (2 lines are done)"
    with pytest.raises(RegardError, match=re.escape(message)):
        ResumableOutput(files, other)
    with ResumableOutput(files, other, overwrite=True) as output:
        assert output.done == 0
        output.add(1, ["new\n", "new\n"])
    assert files[0].read_text() == "new\n"


def test_output_without_finished_items_is_replaced(tmp_path: Path) -> None:
    files = [tmp_path / "out", tmp_path / "also"]
    write_and_die(files, 0, b"torn")
    with ResumableOutput(files, {"input": "y"}) as output:
        assert output.done == 0
    assert files[0].read_text() == ""


def test_only_one_process_may_write(tmp_path: Path) -> None:
    out = [tmp_path / "out"]
    with (
        ResumableOutput(out, KEY),
        pytest.raises(RegardError, match="another process is writing it"),
    ):
        ResumableOutput(out, KEY)


def test_damaged_output_is_not_resumed(tmp_path: Path) -> None:
    files = [tmp_path / "out", tmp_path / "also"]
    write_and_die(files, 2)
    os.truncate(tmp_path / ".also.partial", 3)
    with pytest.raises(
        RegardError, match="shorter than its journal says; use --overwrite to start again"
    ):
        ResumableOutput(files, KEY)
    (tmp_path / ".out.journal").write_text("{")
    with pytest.raises(RegardError, match="damaged; use --overwrite to start again"):
        ResumableOutput(files, KEY)


def test_output_without_a_resume_key_is_complete_or_absent(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="zip"), ResumableOutput([out], None) as output:
        output.add(1, [])
    assert list(tmp_path.iterdir()) == []
    with ResumableOutput([out], None) as output:
        output.add(1, [f"{random.random()}\n"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(RegardError, match=r"cannot be written: .*absent is not a folder"):
        ResumableOutput([tmp_path / "absent" / "out"], None)


def test_a_file_that_cannot_grow_is_named_and_resumed(tmp_path: Path) -> None:
    """What is left in the buffer is not written again when the file is closed: that error would name no file."""
    lines = ["a" * 600 + "\n", "b" * 600 + "\n"]

    def write_too_much() -> None:
        with ResumableOutput([tmp_path / "out"], KEY) as output:
            output.add(1, lines[:1])
            with file_size_limit(1000):
                output.add(1, lines[1:])

    with pytest.raises(RegardError, match=r"out: cannot be written: File too large"):
        write_too_much()
    with ResumableOutput([tmp_path / "out"], KEY) as output:
        assert output.done == 1
        output.add(1, lines[1:])
    assert (tmp_path / "out").read_text() == "".join(lines)


def test_an_interruption_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list[str]()
    out = tmp_path / "out"

    def work(output: ResumableOutput, items: int) -> None:
        with output:
            for _ in range(items):
                output.add(1, ["line\n"])
            raise KeyboardInterrupt

    def interrupt(key: dict[str, str] | None, items: int) -> str:
        with pytest.raises(KeyboardInterrupt):
            work(ResumableOutput([out], key, report=lines.append), items)
        return lines.pop()

    assert interrupt(None, 1) == f"Interrupted; nothing of {out} is kept"
    again = "run the same command again"
    assert interrupt({}, 0) == f"Interrupted before the first lines of {out} were done; {again}"
    assert interrupt({}, 3) == f"Interrupted; 3 lines of {out} are kept. To resume, {again}"
    monkeypatch.setattr(ResumableOutput, "header", 1)
    out = tmp_path / "pairs"
    assert interrupt({}, 1) == f"Interrupted before the first lines of {out} were done; {again}"
    assert interrupt({}, 1) == f"Interrupted; one of the lines of {out} is kept. To resume, {again}"
    assert lines == []
