"""Output that may no longer have a reader: the pipe was closed, or the terminal ended with its ssh session.

A run continues without output; a command that only prints something ends.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.ECONNRESET)  # a pipe, a terminal, a device, a socket


def fail_safe(stream: IO[str] | None) -> IO[str] | None:
    """Return a stream that never fails: its reader may disappear, its disk may be full."""
    return stream if stream is None or isinstance(stream, _FailSafe) else cast("IO[str]", _FailSafe(stream))


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
    else:
        return code
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _redirect_to_null(stream)
    return 0


class _FailSafe:
    """A stream that writes to nowhere once its reader is gone, as do programs that only have its descriptor."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._failed(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def _failed(self, error: OSError) -> None:
        if error.errno in _GONE:  # a full disk may have room later
            _redirect_to_null(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _redirect_to_null(stream: IO[str]) -> None:
    """Redirect the descriptor of a stream, and what its buffer still holds, to the null device."""
    with suppress(OSError, ValueError):  # it may have no descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)
        stream.flush()
