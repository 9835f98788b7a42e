"""What a person sees of a run: lines on a terminal or in a pipe, and in train.log."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from resilient_train.ground.secrets import masked
from resilient_train.ground.wording import log, printable

_CODES = {"bold": "1", "red": "31", "green": "32", "yellow": "33"}

Words = str | tuple[str, str]  # plain, or with a style: names of _CODES, separated by blanks


def is_terminal(stream: IO[str] | None) -> bool:
    """Say whether somebody reads along, or it was asked to print as if."""
    return bool(os.environ.get("FORCE_COLOR")) or (stream is not None and not stream.closed and stream.isatty())


def styled(text: str, style: str, stream: IO[str] | None) -> str:
    codes = ";".join(_CODES[name] for name in style.split())
    is_shown = codes and text and is_terminal(stream) and not os.environ.get("NO_COLOR")
    return f"\x1b[{codes}m{text}\x1b[0m" if is_shown else text


def print_line(*words: Words) -> None:
    pairs = [(one, "") if isinstance(one, str) else one for one in words]
    line = "".join(styled(printable(masked(part)), style, sys.stdout) for part, style in pairs)
    print(line.rstrip(), flush=True)


def print_table(rows: Sequence[Sequence[str]]) -> None:
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


_PROGRESS_EVERY_S = 5.0  # on a terminal, where a fast run would print a screen of such lines a second


class Terminal:
    def __init__(self, *, is_main: bool) -> None:
        self._before = log.level, log.propagate
        log.setLevel(logging.DEBUG)  # for the file
        log.propagate = False
        handler = _ToTerminal()
        handler.setLevel(logging.INFO if is_main else logging.ERROR)  # others only print what rank 0 cannot know
        log.addHandler(handler)
        self._handlers: list[logging.Handler] = [handler]

    def log_to(self, path: Path) -> None:
        handler = _ToFile(path, encoding="utf-8")
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


class _ToTerminal(logging.Handler):
    """Prints the message alone, errors to stderr: a traceback belongs into the file."""

    def __init__(self) -> None:
        super().__init__()
        self._out, self._errors = fail_safe(sys.stdout), fail_safe(sys.stderr)
        self._next_progress = 0.0  # not shown on a terminal before

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "in_file_only", False):
            return
        if getattr(record, "progress", False) and is_terminal(self._out):
            if record.created < self._next_progress:
                return
            self._next_progress = record.created + _PROGRESS_EVERY_S
        is_error = record.levelno >= logging.ERROR
        usual = "red" if is_error else "yellow" if record.levelno >= logging.WARNING else ""
        stream = self._errors if is_error else self._out
        print(styled(record.getMessage(), getattr(record, "style", usual), stream), file=stream, flush=True)


class _ToFile(logging.FileHandler):
    """Ignores a full disk, which is reported elsewhere: logging would print a traceback for every line."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass
