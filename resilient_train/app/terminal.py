"""What a person sees while a run goes on: one live line on a terminal, plain lines in a pipe and in train.log."""

from __future__ import annotations

import errno
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from resilient_train.app.streams import lasting
from resilient_train.files import open_to_append
from resilient_train.types import Vitals
from resilient_train.wording import PROGRESS, duration, log

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # a disk that takes nothing: the run goes on without


class Display(Protocol):
    """Shows how far the run is."""

    def step(self, step: int) -> None:
        """Take note of an update: called for every one, so it has to be cheap."""

    def show(self, vitals: Vitals, metrics: Mapping[str, float]) -> None:
        """Show the numbers of an update that was read back."""

    def close(self) -> None:
        """Leave the terminal tidy."""


class Terminal:
    """Sends the log to the terminal and to a file, and keeps the live line below it."""

    def __init__(self, *, is_main: bool) -> None:
        self.console = Console(file=lasting(sys.stdout), highlight=False, soft_wrap=True)
        self.is_live = is_main and self.console.is_terminal
        self._before = log.level, log.propagate
        self._handlers: list[logging.Handler] = []
        self.file: IO[str] | None = None  # the one that it is written to as well
        log.setLevel(logging.INFO)
        log.propagate = False
        handler = _ToConsole(self.console, hide_progress=self.is_live)
        if not is_main:
            handler.setLevel(logging.ERROR)  # the other ranks speak only of what rank 0 cannot know
        self._add(handler)

    def log_to(self, path: Path) -> None:
        """Write everything to a file as well, with the time and with tracebacks."""
        try:
            file = _ToFile(path, encoding="utf-8")
        except OSError as error:
            if error.errno not in _FULL:
                raise
            log.error("%s cannot be written: %s", path, error.strerror or error)
            return
        self.file = file.stream
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._add(file)

    def close(self) -> None:
        """Leave the log as it was found: in a sweep the next run has its own file."""
        for handler in self._handlers:
            log.removeHandler(handler)
            with suppress(OSError):  # a full disk does not take the last lines either
                handler.close()
        log.setLevel(self._before[0])
        log.propagate = self._before[1]

    def _add(self, handler: logging.Handler) -> None:
        self._handlers.append(handler)
        log.addHandler(handler)

    def display(self, *, steps: int, done: int) -> Display:
        """Begin to show progress."""
        return LiveLine(self.console, steps, done) if self.is_live else PlainLines(steps, done)


class _ToConsole(logging.Handler):
    """Prints the message alone, errors to stderr: a traceback belongs into the file."""

    def __init__(self, console: Console, *, hide_progress: bool) -> None:
        super().__init__()
        self.console, self.hide_progress = console, hide_progress
        self.errors = Console(file=lasting(sys.stderr), highlight=False, soft_wrap=True)

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "in_file_only", False) or (self.hide_progress and getattr(record, "progress", False)):
            return
        if record.levelno >= logging.ERROR:
            self.errors.print(Text(record.getMessage(), style="red"))
        else:
            style = getattr(record, "style", "yellow" if record.levelno >= logging.WARNING else "")
            self.console.print(Text(record.getMessage(), style=style))


class _ToFile(logging.FileHandler):
    """Writes what the disk takes: a full one is told of where it matters, and not with a traceback for every line."""

    def _open(self) -> Any:
        return open(open_to_append(Path(self.baseFilename)), "a", encoding=self.encoding, errors=self.errors)

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class PlainLines:
    """One line whenever numbers are read back."""

    def __init__(self, steps: int, done: int) -> None:
        self.steps, self.speed = steps, _Speed(done)

    def step(self, step: int) -> None:
        pass

    def show(self, vitals: Vitals, metrics: Mapping[str, float]) -> None:
        pace = _pace(self.steps - vitals.step, self.speed.at(vitals.step))
        log.info("step %d/%d  %s  %s", vitals.step, self.steps, _numbers(vitals, metrics), pace, extra=PROGRESS)

    def close(self) -> None:
        pass


class LiveLine:
    """One line that renews itself at the foot of the terminal; the plain lines go to train.log all the same."""

    def __init__(self, console: Console, steps: int, done: int) -> None:
        self.plain = PlainLines(steps, done)
        self.steps, self.speed = steps, _Speed(done)
        self.numbers = ""
        self.step_now = done
        columns = (TextColumn("{task.fields[where]}"), BarColumn(bar_width=20), TextColumn("{task.fields[numbers]}"))
        self.progress = Progress(*columns, console=console, refresh_per_second=4, transient=True)
        self.task: TaskID = self.progress.add_task(
            "", total=steps, completed=done, where="", numbers="waiting for the first step"
        )
        self.drawn = 0.0
        self.progress.start()

    def step(self, step: int) -> None:
        self.step_now = step
        if (now := time.monotonic()) - self.drawn > 0.2:
            self.drawn = now
            pace = _pace(self.steps - step, self.speed.at(step))
            self.progress.update(
                self.task, completed=step, where=f"step {step}/{self.steps}", numbers=f"{self.numbers}  {pace}".strip()
            )

    def show(self, vitals: Vitals, metrics: Mapping[str, float]) -> None:
        self.numbers = _numbers(vitals, metrics)
        self.plain.show(vitals, metrics)

    def close(self) -> None:
        self.drawn = 0.0
        self.step(self.step_now)
        self.progress.stop()


class _Speed:
    """Steps per second over the recent past."""

    def __init__(self, done: int) -> None:
        self.marks = deque([(time.monotonic(), done)])

    def at(self, step: int) -> float:
        now = time.monotonic()
        self.marks.append((now, step))
        while len(self.marks) > 2 and now - self.marks[0][0] > 30:
            self.marks.popleft()
        then, before = self.marks[0]
        return (step - before) / (now - then) if now > then else 0.0


def _numbers(vitals: Vitals, metrics: Mapping[str, float]) -> str:
    told = "".join(f"  {name} {value:.4g}" for name, value in metrics.items() if math.isfinite(value))
    return f"loss {vitals.loss:.4f}{told}  grad {vitals.grad_norm:.3g}  lr {vitals.lr:.2e}"


def _pace(steps_left: int, speed: float) -> str:
    if speed <= 0:
        return ""
    rate = f"{speed:.1f} steps/s" if speed >= 1 else f"{1 / speed:.1f} s/step"
    return f"{rate}  {duration(steps_left / speed)} left"


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how many of `total` are done, where there is somebody at a terminal to look at it."""
    console = Console(file=lasting(sys.stderr))
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total or None)
        yield lambda done: progress.update(task, completed=done)
