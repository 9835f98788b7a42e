"""What a person sees of a run: lines on a terminal or in a pipe, and in train.log."""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

from resilient_train.ground.secrets import masked
from resilient_train.ground.wording import log, printable


def print_line(line: str = "") -> None:
    print(printable(masked(line)).rstrip(), flush=True)


def survive_hangup() -> None:
    """Let the process continue without its terminal: what is printed then, by whomever, is in train.log at most."""
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def leave(number: int, frame: FrameType | None) -> None:
        for descriptor in terminals:
            _silence(descriptor)

    # A shell that ends sends SIGHUP to what it started. An elastic agent passes it on, and kills after half a minute.
    if "TORCHELASTIC_RUN_ID" not in os.environ and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, leave)


def _silence(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


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
            try:
                print(record.getMessage(), file=stream, flush=True)
            except OSError:  # its reader is gone, or the disk is full
                _silence(stream.fileno())


class _ToFile(logging.FileHandler):
    """Ignores a full disk, which is reported elsewhere: logging would print a traceback for every line."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass
