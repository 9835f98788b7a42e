"""What a person sees of a run: lines on a terminal or in a pipe, and in train.log."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from resilient_train.ground.secrets import masked
from resilient_train.ground.wording import log, printable


def print_line(line: str = "") -> None:
    print(printable(masked(line)).rstrip(), flush=True)


_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.ECONNRESET)  # a pipe, a terminal, a device, a socket


def survive_hangup() -> None:
    """Let the process continue without its terminal, whatever prints meanwhile: this package, user code, a library."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            raw = io.BufferedWriter(_Lossy(stream.fileno(), "w", closefd=False))
            lossy = io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=stream.line_buffering)
            setattr(sys, name, lossy)
    # A shell that ends sends SIGHUP to what it started. An elastic agent passes it on, and kills after half a minute.
    if "TORCHELASTIC_RUN_ID" not in os.environ and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


class _Lossy(io.FileIO):
    """Never fails, and writes to nowhere once its reader is gone, as do programs that only have its descriptor."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in _GONE:  # a full disk may have room later
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.fileno())
                os.close(null)
            return len(data)


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

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "in_file_only", False):
            stream = sys.stderr if record.levelno >= logging.ERROR else sys.stdout
            print(record.getMessage(), file=stream, flush=True)


class _ToFile(logging.FileHandler):
    """Ignores a full disk, which is reported elsewhere: logging would print a traceback for every line."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass
