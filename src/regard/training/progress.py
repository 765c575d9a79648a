"""Progress reports: one line for long commands; for training a progress bar, ``log.jsonl`` and TensorBoard."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import RegardError, shorten

if TYPE_CHECKING:
    from datetime import timedelta

    from rich.console import Console
    from rich.progress import Progress

    from regard.storage.run_dir import RunDir

SECONDS_BETWEEN_LINES = 20.0
"""Shortest time between two progress lines where there is no terminal for a progress bar."""
REWRITE_SECONDS, ERASE_LINE = 0.2, "\x1b[2K"
SECONDS_BEFORE_ESTIMATE = 10.0
"""The time left is estimated from the steps after the first, slower ones, once they have taken this long."""
SECONDS_BETWEEN_SAMPLES = 60.0
"""Shortest time between two prints of sample translations."""
SAMPLE_WIDTH = 70
WIDTH_FOR_BAR = 110
"""Smallest width of a terminal in which a bar is shown beside the text."""


def shorten_text(text: str) -> str:
    """A text as it is shown in a sample translation."""
    return shorten(text, SAMPLE_WIDTH)


class ProgressLine:
    """How many items are done, how fast, and the time left.

    On a terminal, one line is rewritten in place; otherwise, or with ``print_line``, a line is printed now and then.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        done: int = 0,
        print_line: Callable[[str], object] | None = None,
    ) -> None:
        """what: begins the line. total: None if it is unknown. done: items of an earlier process."""
        self.what, self.total, self.first = what, total, done
        self.may_rewrite = print_line is None
        self.print_line = print_line or self._print
        self.shown = False
        self.start = self.last = time.monotonic()

    @cached_property
    def console(self) -> Console:
        """Made when something is shown: importing rich takes longer than a short command."""
        from rich.console import Console

        return Console(stderr=True, highlight=False)

    @property
    def in_place(self) -> bool:
        """Whether one line is rewritten."""
        return self.may_rewrite and self.console.is_terminal

    def advance(self, done: int) -> None:
        """Show that this many items are done, those of an earlier process included."""
        now = time.monotonic()
        if now - self.last < min(REWRITE_SECONDS, SECONDS_BETWEEN_LINES):
            return
        if now - self.last >= (REWRITE_SECONDS if self.in_place else SECONDS_BETWEEN_LINES):
            self.last, self.shown = now, True
            self.print_line(self.what + self.describe(done, now))

    def describe(self, done: int, now: float) -> str:
        """For example “1,200 of 5,000, 311 per second, 0:00:12 left”."""
        rate = (done - self.first) / max(1e-9, now - self.start)
        if self.total is None:
            return f"{done:,}, {rate:,.0f} per second"
        text = f"{done:,} of {self.total:,}, {rate:,.3g} per second"
        if rate:
            from datetime import timedelta

            text += f", {timedelta(seconds=round((self.total - done) / rate))} left"
        return text

    def close(self) -> None:
        """Remove the line from the terminal."""
        if self.shown and self.in_place:
            self.console.file.write(ERASE_LINE)
            self.console.file.flush()

    def _print(self, text: str) -> None:
        if self.in_place:
            self.console.file.write(f"{ERASE_LINE}{text}\r")
            self.console.file.flush()
        else:
            _print_line(self.console, text)


def _print_line(console: Console, text: str) -> None:
    from rich.markup import escape

    console.print(escape(text), soft_wrap=True)


class ProgressReporter:
    """Reports the progress of one training run. Only the main process has it enabled."""

    def __init__(self, run: RunDir, enabled: bool = True, console: Console | None = None) -> None:
        from rich.console import Console

        self.run = run
        self.enabled = enabled
        self.console = console or Console(stderr=True, highlight=False)
        self.tensorboard: EventFile | None = None
        self.bar: Progress | None = None
        self.last_line = 0.0
        self.first_step, self.steps, self.start_time = 0, 0, 0.0
        self.end_announced = False
        self.slow_steps, self.skips_slow_steps = 1, True
        """whether the time is still to be measured from another step: the first ones are slower"""
        self.last_samples = time.monotonic()
        self.deadline: float | None = None

    def message(self, text: str) -> None:
        """Print one line to the terminal."""
        if self.enabled:
            _print_line(self.console, text)

    def log(self, event: str, **values: Any) -> None:
        """Append one line to log.jsonl; the floats of a step also go to TensorBoard."""
        if not self.enabled:
            return
        line = {"event": event, "time": round(time.time(), 3), **values}
        _append_line(self.run.log_file, json.dumps(line, ensure_ascii=False))
        scalars = {
            f"{event}/{name}": value for name, value in values.items() if isinstance(value, float)
        }
        if "step" in values and scalars:
            self.tensorboard = self.tensorboard or EventFile(self.run.events)
            self.tensorboard.write(values["step"], scalars)

    def start(
        self, step: int, steps: int, deadline: float | None = None, slow_steps: int = 1
    ) -> None:
        """Start the progress bar at ``step`` of ``steps``.

        deadline: a time of ``time.monotonic()``.
        slow_steps: the first steps, from which the time left is not estimated: a GPU compiles them.
        """
        self.slow_steps = slow_steps
        self.first_step, self.start_time, self.deadline = step, time.monotonic(), deadline
        self.steps, self.end_announced, self.skips_slow_steps = steps, False, True
        if not (self.enabled and self.console.is_terminal):
            return
        from rich.progress import BarColumn, Progress, TextColumn

        self.bar = Progress(
            TextColumn("step {task.completed:,.0f} of {task.total:,.0f}"),
            *([BarColumn(bar_width=20)] if self.console.width >= WIDTH_FOR_BAR else []),
            TextColumn("{task.fields[status]}"),
            console=self.console,
        )
        self.bar.add_task("training", total=steps, completed=step, status="")
        self.bar.start()

    def samples_are_due(self) -> bool:
        """Whether it is time to print sample translations again."""
        now = time.monotonic()
        if not self.enabled or now - self.last_samples < SECONDS_BETWEEN_SAMPLES:
            return False
        self.last_samples = now
        return True

    def set_steps(self, steps: int) -> None:
        """Change the number of steps of the progress bar."""
        self.steps = steps
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], total=steps)

    def advance(self, step: int) -> None:
        """Move the progress bar. If there is no plan, print the expected end soon after the start."""
        now = time.monotonic()
        if self.skips_slow_steps and step >= self.first_step + self.slow_steps:
            self.first_step, self.start_time = step, now
            self.skips_slow_steps = False
        elif self._can_announce_end(step, now):
            self.end_announced = True
            self.message(self.expected_end(step))
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=step)

    def show_step(
        self, step: int, steps: int, *, loss: float, learning_rate: float, speed: float
    ) -> None:
        """Show loss, learning rate, speed in tokens per second, and the time left."""
        name = "learning rate" if self.bar is None else "lr"
        status = f"loss {loss:.3f}  {name} {learning_rate:.1e}  {speed:,.0f} tokens/s"
        status += f"  {self.time_left(step, steps)} left"
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], status=status)
        elif time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            self.message(f"step {step:,} of {steps:,}  {status}")

    def time_left(self, step: int, steps: int) -> timedelta:
        """Estimated time until the last step or the deadline, whichever is earlier."""
        now = time.monotonic()
        seconds = (now - self.start_time) / max(1, step - self.first_step) * (steps - step)
        if self.deadline is not None:
            seconds = min(seconds, max(0.0, self.deadline - now))
        from datetime import timedelta

        return timedelta(seconds=round(seconds))

    def _can_announce_end(self, step: int, now: float) -> bool:
        measured = step > self.first_step + 2 and now - self.start_time > SECONDS_BEFORE_ESTIMATE
        known = self.end_announced or self.deadline is not None
        return measured and not self.skips_slow_steps and not known

    def expected_end(self, step: int) -> str:
        """For example “About 3:40:00 left for 6,700 steps, ending at about 21:14”."""
        left = self.time_left(step, self.steps)
        from datetime import datetime

        until = datetime.now() + left
        day = "" if until.date() == datetime.now().date() else f" on {until:%A}"
        return (
            f"About {left} left for {self.steps - step:,} steps, ending at about {until:%H:%M}{day}"
        )

    def close(self) -> None:
        """Remove the progress bar and close the TensorBoard file."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
        if self.tensorboard is not None:
            self.tensorboard.close()
            self.tensorboard = None


def _append_line(path: Path, line: str) -> None:
    """Append a line to a file, on a line of its own even if a crash has left half a line at the end."""
    try:
        with path.open("ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line
            file.write(line.encode("utf-8") + b"\n")
    except OSError as error:
        raise _write_error(path, error) from None


def _write_error(path: Path, error: OSError) -> RegardError:
    return RegardError(f"{path}: cannot be written: {error.strerror or error}")


class EventFile:
    """A file of scalars for TensorBoard.

    TensorBoard's own writer has a thread, whose errors (a full disk) are printed as tracebacks after ours.
    """

    def __init__(self, folder: Path) -> None:
        import socket

        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"events.out.tfevents.{time.time_ns():019d}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("ab")
        except OSError as error:
            raise _write_error(self.path, error) from None
        self.records = RecordWriter(self.file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the scalars of a step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for name, value in scalars.items():
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
            self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def _write(self, event: Any) -> None:
        try:
            self.records.write(event.SerializeToString())
            self.file.flush()
        except OSError as error:
            raise _write_error(self.path, error) from None

    def close(self) -> None:
        with suppress(OSError):  # reported when it was written
            self.file.close()
