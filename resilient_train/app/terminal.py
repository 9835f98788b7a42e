"""What a person sees during a run: one live line on a terminal, plain lines in a pipe and in train.log."""

from __future__ import annotations

import errno
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from resilient_train.files import open_to_append
from resilient_train.secrets import masked
from resilient_train.types import Vitals
from resilient_train.wording import PROGRESS, duration, log, printable

_LEAST = 20  # columns: lines are wider than a narrower terminal

Words = str | tuple[str, str]  # plain, or with a style


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich would end the process with 1


class Page:
    """What is printed to a terminal, or to a pipe."""

    def __init__(self) -> None:
        self._file = sys.stdout
        colours = None if os.environ.get("NO_COLOR") else "auto"
        self._console = _Console(file=self._file, color_system=colours, highlight=False, soft_wrap=True)  # type: ignore[arg-type]
        self.width = max(_LEAST, self._console.width) if self._console.is_terminal else None

    def line(self, *words: Words, indent: int = 0, hang: int | None = None) -> None:
        """Print one line, or an empty one; if it is wrapped, the rest begins `hang` columns from the left."""
        pairs = [(one, "") if isinstance(one, str) else one for one in words]
        text = Text.assemble(" " * indent, *((printable(masked(part)), style) for part, style in pairs))
        text.rstrip()
        if self.width is None:
            print(text.plain, file=self._file, flush=True)
            return
        hang = min(indent if hang is None else hang, self.width // 2)
        while True:
            line = text.wrap(self._console, self.width)[0] if text else text
            text = text[len(line.plain) :]
            line.rstrip()
            self._console.print(line)
            if not text:
                return
            text = Text(" " * hang) + text[len(text.plain) - len(text.plain.lstrip()) :]

    def table(self, rows: Sequence[Sequence[str]], indent: int = 0) -> None:
        """Print rows of cells in columns."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            self.line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)), indent=indent)


_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.ECONNRESET)  # a pipe, a terminal, a device, a socket


@contextmanager
def survive_hangup() -> Iterator[None]:
    """Let the process continue without its terminal, whatever prints meanwhile: this package, user code, a library."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = fail_safe(before[0]), fail_safe(before[1])
    # A shell that ends sends SIGHUP to what it started. An elastic agent passes it on, and kills after half a minute.
    ignores = "TORCHELASTIC_RUN_ID" not in os.environ and threading.current_thread() is threading.main_thread()
    ignores = ignores and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    if ignores:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        if ignores:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _FailSafe):
                stream.flush()  # Python's own flush at exit would end the process with a complaint and 120
        sys.stdout, sys.stderr = before


def until_unread(call: Callable[[], int]) -> int:
    """Call what only prints something; return its exit code, or 0 if the output has no reader any more."""
    try:
        code = call()
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in _GONE:
            raise
        for stream in (sys.stdout, sys.stderr):
            _FailSafe(stream).flush()
        return 0
    return code


def fail_safe(stream: IO[str] | None) -> IO[str] | None:
    """Return a stream that never fails: its reader may disappear, its disk may be full."""
    return stream if stream is None or isinstance(stream, _FailSafe) else cast("IO[str]", _FailSafe(stream))


class _FailSafe:
    """A stream that writes to nowhere once its reader is gone, as do programs that only have its descriptor."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self._try(lambda: self._stream.writelines(lines))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except OSError as error:
            if error.errno in _GONE:  # a full disk may have room later
                with suppress(OSError, ValueError):  # it may have no descriptor
                    null = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(null, self._stream.fileno())
                    os.close(null)
                    self._stream.flush()  # what its buffer still holds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # the run continues without its log file
_SPEED_OVER_S = 300  # two steps at least: one may take minutes


class Terminal:
    """Sends the log to the terminal and to a file."""

    def __init__(self, *, is_main: bool) -> None:
        self.console = Console(file=fail_safe(sys.stdout), highlight=False, soft_wrap=True)
        self.is_live = is_main and self.console.is_terminal
        self._before = log.level, log.propagate
        log.setLevel(logging.DEBUG)  # for the file
        log.propagate = False
        handler = _ToConsole(self.console, hide_progress=self.is_live)
        handler.setLevel(logging.INFO if is_main else logging.ERROR)  # others only print what rank 0 cannot know
        log.addHandler(handler)
        self._handlers: list[logging.Handler] = [handler]

    def log_to(self, path: Path) -> None:
        """Write everything to a file as well, with the time and with tracebacks."""
        try:
            handler = _ToFile(path, encoding="utf-8")
        except OSError as error:
            if error.errno not in _FULL:
                raise
            log.error("%s cannot be written: %s", path, error.strerror or error)
            return
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        self._handlers.append(handler)

    def close(self) -> None:
        """Restore the log: in a sweep the next run has its own file."""
        for handler in self._handlers:
            log.removeHandler(handler)
            with suppress(OSError):  # the disk may be full
                handler.close()
        log.setLevel(self._before[0])
        log.propagate = self._before[1]

    def progress_line(self, *, steps: int, done: int) -> ProgressLine:
        """Begin to show progress."""
        return ProgressLine(self.console if self.is_live else None, steps, done)


class _ToConsole(logging.Handler):
    """Prints the message alone, errors to stderr: a traceback belongs into the file."""

    def __init__(self, console: Console, *, hide_progress: bool) -> None:
        super().__init__()
        self.console, self.hide_progress = console, hide_progress
        self.errors = Console(file=fail_safe(sys.stderr), highlight=False, soft_wrap=True)

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "in_file_only", False) or (self.hide_progress and getattr(record, "progress", False)):
            return
        if record.levelno >= logging.ERROR:
            self.errors.print(Text(record.getMessage(), style="red"))
        else:
            style = getattr(record, "style", "yellow" if record.levelno >= logging.WARNING else "")
            self.console.print(Text(record.getMessage(), style=style))


class _ToFile(logging.FileHandler):
    """Ignores a full disk, which is reported elsewhere: logging would print a traceback for every line."""

    def _open(self) -> Any:
        return open(open_to_append(Path(self.baseFilename)), "a", encoding=self.encoding, errors=self.errors)

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class ProgressLine:
    """One line at the bottom of a terminal that is drawn again and again; without a console only lines in the log."""

    def __init__(self, console: Console | None, steps: int, done: int) -> None:
        self.steps, self.done, self.numbers, self.drawn = steps, done, "", 0.0
        columns = [TextColumn("{task.fields[where]}"), BarColumn(bar_width=20), TextColumn("{task.fields[numbers]}")]
        self.progress = Progress(
            *columns,
            console=console,
            refresh_per_second=4,
            transient=True,
            disable=console is None,
            speed_estimate_period=_SPEED_OVER_S,
        )
        self.progress.add_task("", total=steps, completed=done, where="", numbers="waiting for the first step")
        self.progress.start()

    def step(self, step: int) -> None:
        """Note an update: called for every one, so it has to be cheap."""
        self.done = step
        if time.monotonic() - self.drawn > 0.2:
            self._draw()

    def show(self, vitals: Vitals, metrics: Mapping[str, float]) -> None:
        """Show the numbers of an update that was read back."""
        more = "".join(f"  {name} {value:.4g}" for name, value in metrics.items() if math.isfinite(value))
        self.numbers = f"loss {vitals.loss:.4f}{more}  grad {vitals.grad_norm:.3g}  lr {vitals.lr:.2e}"
        self._draw()
        log.info("step %d/%d  %s", vitals.step, self.steps, f"{self.numbers}  {self._pace()}", extra=PROGRESS)

    def close(self) -> None:
        self._draw()
        self.progress.stop()

    def _draw(self) -> None:
        self.drawn = time.monotonic()
        line = f"{self.numbers}  {self._pace()}".strip()
        where = f"step {self.done}/{self.steps}"
        self.progress.update(self.progress.task_ids[0], completed=self.done, where=where, numbers=line)

    def _pace(self) -> str:
        """Return the steps per second over the recent past, and the time left."""
        if not (speed := self.progress.tasks[0].speed):
            return ""
        rate = f"{speed:.1f} steps/s" if speed >= 1 else f"{1 / speed:.1f} s/step"
        return f"{rate}  {duration((self.steps - self.done) / speed)} left"


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show on a terminal how many of `total` are done."""
    console = Console(file=fail_safe(sys.stderr))
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total or None)
        yield lambda done: progress.update(task, completed=done)
