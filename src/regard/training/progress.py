"""Progress reports of training: messages and a progress bar in the terminal, ``log.jsonl``, and TensorBoard."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from regard.storage.run_dir import RunDir

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SECONDS_BETWEEN_LINES = 20.0
"""Shortest time between two progress lines where there is no terminal for a progress bar."""


class ProgressReporter:
    """Reports the progress of one training run. Only the main process has it enabled."""

    def __init__(self, run: RunDir, enabled: bool = True, console: Console | None = None) -> None:
        self.run = run
        self.enabled = enabled
        self.console = console or Console(stderr=True, highlight=False)
        self.tensorboard: SummaryWriter | None = None
        self.bar: Progress | None = None
        self.last_line = 0.0
        self.first_step, self.start_time = 0, 0.0
        self.deadline: float | None = None

    def message(self, text: str) -> None:
        """Print one line to the terminal."""
        if self.enabled:
            self.console.print(escape(text), soft_wrap=True)

    def log(self, event: str, **values: Any) -> None:
        """Append one line to log.jsonl; the floats of a step also go to TensorBoard."""
        if not self.enabled:
            return
        line = {"event": event, "time": round(time.time(), 3), **values}
        with self.run.log_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        if "step" in values:
            for name, value in values.items():
                if isinstance(value, float):
                    self._writer().add_scalar(f"{event}/{name}", value, values["step"])

    def _writer(self) -> SummaryWriter:
        if self.tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(str(self.run.events))
        return self.tensorboard

    def start(self, step: int, steps: int, deadline: float | None = None) -> None:
        """Start the progress bar at ``step`` of ``steps``; ``deadline`` is a time of ``time.monotonic()``."""
        self.first_step, self.start_time, self.deadline = step, time.monotonic(), deadline
        if not (self.enabled and self.console.is_terminal):
            return
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            console=self.console,
        )
        self.bar.add_task("training", total=steps, completed=step, status="")
        self.bar.start()

    def advance(self, step: int) -> None:
        """Move the progress bar."""
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=step)

    def show_step(
        self, step: int, steps: int, *, loss: float, learning_rate: float, speed: float
    ) -> None:
        """Show loss, learning rate, speed in tokens per second, and the time left."""
        status = f"loss {loss:.3f}  learning rate {learning_rate:.1e}  {speed:,.0f} tokens/s"
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
        return timedelta(seconds=round(seconds))

    def close(self) -> None:
        """Remove the progress bar and close the TensorBoard file."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
        if self.tensorboard is not None:
            self.tensorboard.close()
            self.tensorboard = None
