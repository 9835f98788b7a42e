"""How a process ends: requests to stop, exit codes, the end of its parent. Imported first: must not import torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

import psutil

from resilient_train.ground.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

_ONE_REQUEST_S = 3.0  # within it, signals are one request: Ctrl-C comes directly, and again from the launcher
_FINAL_CODES = (2, 3, 75)  # a restart would end the same way, or the end was requested
_AGENT = "TORCHELASTIC_RUN_ID"  # an elastic agent sets it for its processes
_PR_SET_PDEATHSIG = 1

_listening: list[StopRequests] = []


# Let a forked process, perhaps of a pool, end at the first SIGTERM like any other.
def _restore_in_child() -> None:
    for requests in [*_listening]:
        requests.__exit__()


os.register_at_fork(after_in_child=_restore_in_child)


class StopRequests:
    """Notes requests to stop: SIGTERM, Ctrl-C, a scheduler's early signal, the hours that a run may take.

    In the loop they are only noted, so that the update is finished first; elsewhere Stopped is raised. A second Ctrl-C
    some seconds after the first request raises KeyboardInterrupt; so does the first one if `may_interrupt` is set.
    """

    def __init__(self, max_hours: float | None = None, *, is_in_loop: bool = True) -> None:
        self._deadline = None if max_hours is None else time.monotonic() + 3600 * max_hours
        self._before: dict[int, Any] = {}
        self._wakeup = self._read = -1  # descriptors: the earlier wake-up, and the end of a pipe that signals arrive at
        self.since: float | None = None  # when the first request came, on the monotonic clock
        self.by = ""
        self.is_in_loop = is_in_loop
        self.may_interrupt = False  # nothing is lost by an interrupt now

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():  # only it gets signals and may set handlers
            self._read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
            _listening.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            os.close(signal.set_wakeup_fd(self._wakeup))
            os.close(self._read)
            self._read, self._before = -1, {}
            _listening.remove(self)

    def asked(self) -> bool:
        if self.since is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self.since, self.by = time.monotonic(), "run.max_hours"
        return self.since is not None

    def arrived(self) -> bool:
        """Say the same from another thread, even while the main thread runs C code."""
        if self.since is None and self._read >= 0:
            with suppress(OSError):
                if numbers := {number for number in os.read(self._read, 64) if number in SIGNALS}:
                    self.since, self.by = time.monotonic(), signal.Signals(min(numbers)).name
        return self.since is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now, is_first = time.monotonic(), self.since is None
        if is_first:
            self.since, self.by = now, signal.Signals(number).name
        if not self.is_in_loop:
            raise Stopped(f"asked to stop by {self.by}")
        is_another = now - (self.since or now) > _ONE_REQUEST_S
        if number == signal.SIGINT and (is_another or (is_first and self.may_interrupt)):
            raise KeyboardInterrupt


def code_for_agent(code: int) -> int:
    """Return the exit code to use: an elastic agent with restarts left restarts whatever did not end with 0."""
    restarts, allowed = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    has_restarts = restarts.isdigit() and allowed.isdigit() and int(restarts) < int(allowed)
    return 0 if has_restarts and code in _FINAL_CODES else code


def exit_on_request() -> None:
    """Let a request to stop end this process at once, while nothing has begun that has to be finished."""

    def leave(number: int, frame: FrameType | None) -> None:
        with suppress(Exception):  # it may be in the middle of a line
            sys.stdout.flush()
        os._exit(code_for_agent(75))

    for number in SIGNALS:
        signal.signal(number, leave)


def ignore_requests() -> None:
    """Ignore requests from here on: the process is ending, and they must not change how."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


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


def has_lost_sibling() -> bool:
    """Say whether fewer processes are left on this host than the agent started: that is why it asks to stop."""
    started = os.environ.get("LOCAL_WORLD_SIZE", "")
    if _AGENT not in os.environ or not started.isdigit():
        return False
    alive = 0
    with suppress(psutil.Error, OSError):
        for child in psutil.Process(os.getppid()).children():
            with suppress(psutil.Error):
                alive += child.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return 0 < alive < int(started)
