"""What is said when nobody is there to hear it: the pipe was closed, the terminal is gone with its ssh session.

A run says nothing more then and goes on; a command that only tells something ends.
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


def lasting(stream: IO[str] | None) -> IO[str] | None:
    """Return a stream that never fails: what it leads to may go, or be full."""
    return stream if stream is None or isinstance(stream, _Lasting) else cast("IO[str]", _Lasting(stream))


@contextmanager
def outlived() -> Iterator[None]:
    """Let the process go on without its terminal, whoever prints meanwhile: we, a user's code or a library."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = lasting(before[0]), lasting(before[1])
    is_ours = _is_ours_to_ignore(signal.SIGHUP)
    if is_ours:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what a shell sends to all that it started when it goes
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _Lasting):
                stream.flush()  # what Python flushes on its way out would end the process with a complaint and 120
        sys.stdout, sys.stderr = before


def _is_ours_to_ignore(number: signal.Signals) -> bool:
    """Say whether nobody else minds: an elastic agent passes it on and kills who has not ended half a minute later."""
    if "TORCHELASTIC_RUN_ID" in os.environ or threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(number) is signal.SIG_DFL


def while_heard(tell: Callable[[], int]) -> int:
    """Call what only tells something; return its exit code, or 0 as soon as nobody reads on."""
    try:
        code = tell()
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in _GONE:
            raise
    else:
        return code
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
            continue
        _lead_nowhere(stream)
    return 0


class _Lasting:
    """A stream whose reader may go: from then on it leads nowhere, also for those who know only its descriptor."""

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
        """A disk that is full may have room later, and takes what comes then."""
        if error.errno in _GONE:
            _lead_nowhere(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _lead_nowhere(stream: IO[str]) -> None:
    """Let the descriptor of a stream lead to where everything is forgotten, what it still holds included."""
    with suppress(OSError, ValueError):  # it may have none
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
        stream.flush()
