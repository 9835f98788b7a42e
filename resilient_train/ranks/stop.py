"""Requests to stop: SIGTERM, Ctrl-C, a scheduler's early signal, the hours that a run may take."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from resilient_train.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_ONE_REQUEST_S = 3.0  # a launcher and its group get the same Ctrl-C, and pass it on

_listening: list[StopRequests] = []


def _deaf_in_child() -> None:
    """A process that is forked, by a pool perhaps, ends at the first SIGTERM, and tells nobody."""
    for requests in _listening:
        requests.give_back()
    _listening.clear()


os.register_at_fork(after_in_child=_deaf_in_child)


class StopRequests:
    """Notes requests to stop. Inside the loop that is all: an update is finished first. Elsewhere Stopped is raised.

    A second Ctrl-C, some seconds after the first request, is a KeyboardInterrupt at once; where what is left to do
    `may_be_left`, the first one is.
    """

    def __init__(self, max_hours: float | None = None, *, is_in_loop: bool = True) -> None:
        self._deadline = None if max_hours is None else time.monotonic() + 3600 * max_hours
        self._before: dict[int, Any] = {}
        self._wakeup: int | None = None
        self._read = -1
        self.since: float | None = None  # when the first request came, on the monotonic clock
        self.by = ""
        self.is_in_loop = is_in_loop
        self.may_be_left = False

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():  # no other may, nor gets any signal
            self._read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
            _listening.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self.give_back()
        if self in _listening:
            _listening.remove(self)

    def give_back(self) -> None:
        """Let signals mean what they meant before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            os.close(signal.set_wakeup_fd(-1 if self._wakeup is None else self._wakeup))
            os.close(self._read)
            self._read = -1
        self._before = {}

    def asked(self) -> bool:
        """Say whether the run is to stop."""
        if self.since is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self.since, self.by = time.monotonic(), "run.max_hours"
        return self.since is not None

    def arrived(self) -> bool:
        """Say whether a request has come, asked from another thread: also while the main thread handles no signals."""
        if self.since is None and self._read >= 0:
            with contextlib.suppress(OSError):
                numbers = {number for number in os.read(self._read, 64) if number in SIGNALS}
                if numbers:
                    self.since, self.by = time.monotonic(), signal.Signals(min(numbers)).name
        return self.since is not None

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now, is_first = time.monotonic(), self.since is None
        if is_first:
            self.since, self.by = now, signal.Signals(number).name
        if not self.is_in_loop:
            raise Stopped(f"asked to stop by {self.by}")
        is_another = self.since is not None and now - self.since > _ONE_REQUEST_S
        if number == signal.SIGINT and (is_another or (is_first and self.may_be_left)):
            raise KeyboardInterrupt
