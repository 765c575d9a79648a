"""What happens, told three times: to the person at the terminal, to ``log.jsonl``, to TensorBoard."""

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

QUIET_SECONDS = 20.0
"""Where there is no terminal to draw a bar on, a line at most this often."""


class ProgressReporter:
    """Tells of one training. In every process but the first it is silent and writes nothing."""

    def __init__(self, run: RunDir, speaks: bool = True, console: Console | None = None) -> None:
        self.run = run
        self.speaks = speaks
        self.console = console or Console(stderr=True, highlight=False)
        self.board: SummaryWriter | None = None
        self.bar: Progress | None = None
        self.last_line = 0.0
        self.first_step, self.begun = 0, 0.0
        self.deadline: float | None = None

    def say(self, text: str) -> None:
        """One line for the person."""
        if self.speaks:
            self.console.print(escape(text), soft_wrap=True)

    def log(self, event: str, **facts: Any) -> None:
        """One line of log.jsonl; numbers of a step also go to TensorBoard."""
        if not self.speaks:
            return
        line = {"event": event, "time": round(time.time(), 3), **facts}
        with self.run.log_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        if "step" in facts:
            for name, value in facts.items():
                if isinstance(value, float):
                    self._board().add_scalar(f"{event}/{name}", value, facts["step"])

    def _board(self) -> SummaryWriter:
        if self.board is None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.run.events))
        return self.board

    def begin(self, step: int, steps: int, deadline: float | None = None) -> None:
        """Draw the bar."""
        self.first_step, self.begun, self.deadline = step, time.monotonic(), deadline
        if not (self.speaks and self.console.is_terminal):
            return
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}"),
            console=self.console,
        )
        self.bar.add_task("learning", total=steps, completed=step, news="")
        self.bar.start()

    def advance(self, step: int) -> None:
        """Move the bar."""
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=step)

    def step(
        self, step: int, steps: int, *, loss: float, learning_rate: float, speed: float
    ) -> None:
        news = f"loss {loss:.3f}  learning rate {learning_rate:.2e}  {speed:,.0f} tokens/s"
        news += f"  {self.left(step, steps)} left"
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], news=news)
        elif time.monotonic() - self.last_line > QUIET_SECONDS:
            self.last_line = time.monotonic()
            self.say(f"step {step:,} of {steps:,}  {news}")

    def left(self, step: int, steps: int) -> timedelta:
        """Until the steps are done, or the time is over."""
        now = time.monotonic()
        seconds = (now - self.begun) / max(1, step - self.first_step) * (steps - step)
        if self.deadline is not None:
            seconds = min(seconds, max(0.0, self.deadline - now))
        return timedelta(seconds=round(seconds))

    def end(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
        if self.board is not None:
            self.board.close()
            self.board = None
