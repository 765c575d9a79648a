"""The log and the TensorBoard file of a run, also after a crash and on a full disk."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from regard.errors import RegardError
from regard.storage.run_dir import RunDir
from regard.training import progress
from regard.training.progress import EventFile, ProgressLine, ProgressReporter


@pytest.fixture
def reporter(tmp_path: Path) -> ProgressReporter:
    return ProgressReporter(RunDir(tmp_path), console=Console(file=io.StringIO()))


def test_a_torn_last_line_does_not_swallow_the_next_event(
    tmp_path: Path, reporter: ProgressReporter
) -> None:
    run = RunDir(tmp_path)
    run.log_file.write_text('{"event": "start"}\n{"event": "st')
    reporter.log("first")
    reporter.log("second")
    assert [event["event"] for event in run.log()] == ["start", "first", "second"]
    assert run.log_file.read_text().count("\n") == 4
    run.log_file.unlink()
    reporter.log("alone")
    assert run.log_file.read_text().startswith('{"event": "alone"')
    assert run.log_file.read_text().count("\n") == 1


@pytest.mark.parametrize("content", ["3", "[" * 100_000, '"x"', "\x00"])
def test_lines_that_are_no_events_are_skipped(
    tmp_path: Path, reporter: ProgressReporter, content: str
) -> None:
    run = RunDir(tmp_path)
    run.log_file.write_text(content + "\n")
    reporter.log("start")
    assert [event["event"] for event in run.log()] == ["start"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_progress_of_a_training_fits_into_the_terminal(width: int, tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=width, force_terminal=True, highlight=False)
    reporter = ProgressReporter(RunDir(tmp_path), console=console)
    reporter.start(0, 100_000)
    reporter.advance(12_345)
    reporter.show_step(12_345, 100_000, loss=5.123, learning_rate=2.8e-4, speed=123_456)
    reporter.close()
    last = re.sub(r"\x1b\[[\d;?]*\w", "", screen.getvalue()).rsplit("\r", 1)[-1]
    assert "step 12,345 of 100,000" in last
    assert "loss 5.123  lr 2.8e-04  123,456 tokens/s" in last
    assert " left" in last
    assert ("━" in last) == (width == 120)


full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")


@full
def test_a_full_disk_names_the_log(tmp_path: Path, reporter: ProgressReporter) -> None:
    reporter.run.log_file.symlink_to("/dev/full")
    with pytest.raises(
        RegardError, match=r"log\.jsonl: cannot be written: No space left on device"
    ):
        reporter.log("step", step=1, loss=2.0)


@full
def test_a_full_disk_names_the_events_and_nothing_follows(
    tmp_path: Path, reporter: ProgressReporter, capfd: pytest.CaptureFixture[str]
) -> None:
    reporter.log("step", step=1, loss=2.0)
    assert reporter.tensorboard is not None
    reporter.tensorboard.file.close()
    reporter.tensorboard.file = Path("/dev/full").open("ab")  # noqa: SIM115
    reporter.tensorboard.records._writer = reporter.tensorboard.file
    with pytest.raises(RegardError, match=r"tfevents.*: cannot be written: No space"):
        reporter.log("step", step=2, loss=2.0)
    reporter.close()
    assert capfd.readouterr().err == ""


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events = EventFile(tmp_path)
    for step in (1, 2):
        events.write(step, {"step/loss": step / 2, "step/speed": 10.0})
    found = [
        (event.step, value.tag, value.tensor.float_val[0] if value.HasField("tensor") else None)
        for event in EventFileLoader(str(events.path)).Load()
        for value in event.summary.value
    ]
    assert found == [
        (1, "step/loss", 0.5),
        (1, "step/speed", 10.0),
        (2, "step/loss", 1.0),
        (2, "step/speed", 10.0),
    ]
    events.close()


def test_events_in_a_folder_that_cannot_be_written_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "events").touch()
    with pytest.raises(RegardError, match=r"events/.*: cannot be written"):
        EventFile(tmp_path / "events")


def test_a_progress_line_has_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    lines: list[str] = []
    line = ProgressLine("Lines: ", 5_000, done=1_000, print_line=lines.append)
    now += 5
    line.advance(1_100)  # too soon for another line
    now += 15
    line.advance(2_000)
    assert lines == ["Lines: 2,000 of 5,000, 50 per second, 0:01:00 left"]
    unknown = ProgressLine("Pairs: ", print_line=lines.append)
    now += 20
    unknown.advance(40)
    assert lines[1:] == ["Pairs: 40, 2 per second"]


def test_a_progress_line_is_rewritten_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "REWRITE_SECONDS", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    line = ProgressLine("Lines: ", 3)
    for done in (1, 2):
        line.advance(done)
    line.close()
    shown = capsys.readouterr().err
    assert shown.count("\r") == 2
    assert "\n" not in shown
    assert shown.endswith("\x1b[2K")


def test_the_time_left_is_measured_from_the_first_steps_on(
    reporter: ProgressReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    reporter.start(0, 300, deadline=1_000.0, slow_steps=6)
    for step in range(1, 101):
        now += 20.0 if step < 5 else 1.0 if step <= 50 else 2.0
        reporter.advance(step)
    # 44 steps of one second and 50 of two seconds, after the slow ones
    assert reporter.time_left(100, 300).total_seconds() == round(144 / 94 * 200)


def test_the_end_is_not_estimated_from_steps_that_are_compiled(
    reporter: ProgressReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    messages: list[str] = []
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr(reporter, "message", messages.append)
    reporter.start(0, 1_000, slow_steps=5)
    for step in range(1, 31):
        now += 20.0 if step <= 5 else 1.0
        reporter.advance(step)
    (message,) = messages
    assert message.startswith("About 0:16:24 left for 984 steps")
