"""How a process ends: requests to stop, exit codes, the end of its parent. Imported first: must not import torch."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from resilient_train.ground.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

_ONE_REQUEST_S = 3.0  # within it, signals are one request: Ctrl-C comes directly, and again from the launcher
_FINAL_CODES = (2, 3, 75)  # a restart would end the same way, or the end was requested
_AGENT = "TORCHELASTIC_RUN_ID"  # an elastic agent sets it for its processes
_PR_SET_PDEATHSIG = 1


class StopRequests:
    """Notes requests to stop: SIGTERM, Ctrl-C, a scheduler's early signal, the hours that a run may take.

    In the loop they are only noted, so that the update is finished first; elsewhere Stopped is raised. A second Ctrl-C
    some seconds after the first request raises KeyboardInterrupt; so does the first one if `may_interrupt` is set.
    """

    def __init__(self, max_hours: float | None = None, *, is_in_loop: bool = True) -> None:
        self._deadline = None if max_hours is None else time.monotonic() + 3600 * max_hours
        self._before: dict[int, Any] = {}
        self._process = os.getpid()
        self._since: float | None = None  # when the first request came, on the monotonic clock
        self.by = ""
        self.is_in_loop = is_in_loop
        self.may_interrupt = False  # nothing is lost by an interrupt now

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():  # only it gets signals and may set handlers
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def asked(self) -> bool:
        if self._since is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self._since, self.by = time.monotonic(), "run.max_hours"
        return self._since is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked one, perhaps of a pool, ends like any other
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
            return
        now = time.monotonic()
        if self._since is None:
            self._since, self.by = now, signal.Signals(number).name
        if not self.is_in_loop:
            raise Stopped(f"asked to stop by {self.by}")
        if number == signal.SIGINT and (self.may_interrupt or now - self._since > _ONE_REQUEST_S):
            raise KeyboardInterrupt


def code_for_agent(code: int) -> int:
    """Return the exit code to use: an elastic agent with restarts left restarts whatever did not end with 0."""
    restarts, allowed = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return 0 if int(restarts) < int(allowed) and code in _FINAL_CODES else code


def exit_with_agent() -> None:
    """Let the kernel end this process as soon as the elastic agent that started it has ended, however it did."""
    if _AGENT not in os.environ:  # other parents may start a run from a thread that ends first, or want it to stay
        return
    parent = os.getppid()
    exit_with_parent()
    if os.getppid() != parent:  # it had ended before the kernel was asked
        os._exit(1)


def exit_with_parent(worker: int = 0) -> None:
    """Let the kernel end this process as soon as the thread that started it has ended. Only Linux can."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
