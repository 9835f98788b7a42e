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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from resilient_train.files import open_to_append
from resilient_train.secrets import masked
from resilient_train.types import Vitals
from resilient_train.wording import PROGRESS, DrawnLine, duration, log, printable

_CODES = {"bold": "1", "dim": "2", "italic": "3", "red": "31", "green": "32", "yellow": "33"}

Words = str | tuple[str, str]  # plain, or with a style: names of _CODES, separated by blanks


def is_terminal(stream: IO[str] | None) -> bool:
    """Say whether somebody reads along, or it was asked to print as if."""
    return bool(os.environ.get("FORCE_COLOR")) or (stream is not None and not stream.closed and stream.isatty())


def styled(text: str, style: str, stream: IO[str] | None) -> str:
    """Return a text in colour where that is shown, and wanted."""
    codes = ";".join(_CODES[name] for name in style.split())
    is_shown = codes and text and is_terminal(stream) and not os.environ.get("NO_COLOR")
    return f"\x1b[{codes}m{text}\x1b[0m" if is_shown else text


def print_line(*words: Words, indent: int = 0) -> None:
    """Print one line to stdout, or an empty one."""
    pairs = [(one, "") if isinstance(one, str) else one for one in words]
    line = "".join(styled(printable(masked(part)), style, sys.stdout) for part, style in pairs)
    print(" " * indent + line.rstrip(), flush=True)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


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
_EVERY_S = 0.2  # between two drawings


class Terminal:
    """Sends the log to the terminal and to a file."""

    def __init__(self, *, is_main: bool) -> None:
        self._drawn = DrawnLine(fail_safe(sys.stdout))
        self.is_live = is_main and is_terminal(sys.stdout)
        self._before = log.level, log.propagate
        log.setLevel(logging.DEBUG)  # for the file
        log.propagate = False
        handler = _ToTerminal(self._drawn, hide_progress=self.is_live)
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
        return ProgressLine(self._drawn if self.is_live else None, steps, done)


class _ToTerminal(logging.Handler):
    """Prints the message alone, errors to stderr: a traceback belongs into the file."""

    def __init__(self, drawn: DrawnLine, *, hide_progress: bool) -> None:
        super().__init__()
        self._drawn, self._hides_progress = drawn, hide_progress
        self._out, self._errors = fail_safe(sys.stdout), fail_safe(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "in_file_only", False) or (self._hides_progress and getattr(record, "progress", False)):
            return
        self._drawn.clear()
        is_error = record.levelno >= logging.ERROR
        usual = "red" if is_error else "yellow" if record.levelno >= logging.WARNING else ""
        stream = self._errors if is_error else self._out
        print(styled(record.getMessage(), getattr(record, "style", usual), stream), file=stream, flush=True)


class _ToFile(logging.FileHandler):
    """Ignores a full disk, which is reported elsewhere: logging would print a traceback for every line."""

    def _open(self) -> Any:
        return open(open_to_append(Path(self.baseFilename)), "a", encoding=self.encoding, errors=self.errors)

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class ProgressLine:
    """One line at the bottom of a terminal that is drawn again and again; without a terminal only lines in the log."""

    def __init__(self, line: DrawnLine | None, steps: int, done: int) -> None:
        self.steps, self.done, self.numbers, self.drawn = steps, done, "waiting for the first step", 0.0
        self._line = line
        self._past: deque[tuple[float, int]] = deque()  # times and steps, over the recent past
        self._draw()

    def step(self, step: int) -> None:
        """Note an update: called for every one, so it has to be cheap."""
        self.done = step
        if time.monotonic() - self.drawn > _EVERY_S:
            self._draw()

    def show(self, vitals: Vitals, metrics: Mapping[str, float]) -> None:
        """Show the numbers of an update that was read back."""
        more = "".join(f"  {name} {value:.4g}" for name, value in metrics.items() if math.isfinite(value))
        self.numbers = f"loss {vitals.loss:.4f}{more}  grad {vitals.grad_norm:.3g}  lr {vitals.lr:.2e}"
        self._draw()
        log.info("step %d/%d  %s", vitals.step, self.steps, f"{self.numbers}  {self._pace()}", extra=PROGRESS)

    def close(self) -> None:
        if self._line is not None:
            self._line.clear()

    def _draw(self) -> None:
        self.drawn = time.monotonic()
        self._past.append((self.drawn, self.done))
        while len(self._past) > 2 and self._past[0][0] < self.drawn - _SPEED_OVER_S:
            self._past.popleft()
        if self._line is not None:
            self._line.draw(f"step {self.done}/{self.steps}  {self.numbers}  {self._pace()}".rstrip())

    def _pace(self) -> str:
        """Return the steps per second over the recent past, and the time left."""
        (began, first), (ended, last) = self._past[0], self._past[-1]
        if not (last > first and ended > began):
            return ""
        speed = (last - first) / (ended - began)
        rate = f"{speed:.1f} steps/s" if speed >= 1 else f"{1 / speed:.1f} s/step"
        return f"{rate}  {duration((self.steps - self.done) / speed)} left"


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show on a terminal how many of `total` are done."""
    line = DrawnLine(fail_safe(sys.stderr)) if is_terminal(sys.stderr) else None
    try:
        yield lambda done: line.draw(f"{what} {done:,} of {total:,}") if line is not None else None
    finally:
        if line is not None:
            line.clear()
