"""How a process ends: requests to stop, exit codes for launchers, the end of its parent. Torch-free: it loads first."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from types import FrameType
from typing import Any

import psutil

from resilient_train.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

_ONE_REQUEST_S = 3.0  # a launcher and its group get the same Ctrl-C, and pass it on
_NOT_TO_BE_RESTARTED = (2, 3, 75)  # they would end the same way again, or the end was requested
_LAUNCH = "TORCHELASTIC_RUN_ID"  # that an elastic agent sets for its processes
_LOOK_S = 1.0
_STAYS_S = 3.0
_PR_SET_PDEATHSIG = 1

_listening: list[StopRequests] = []


def _restore_in_child() -> None:
    """A forked process, perhaps of a pool, ends at the first SIGTERM as any other process."""
    for requests in _listening:
        requests.restore_handlers()
    _listening.clear()


os.register_at_fork(after_in_child=_restore_in_child)


class StopRequests:
    """Notes requests to stop: SIGTERM, Ctrl-C, a scheduler's early signal, the hours that a run may take.

    Inside the loop that is all: an update is finished first. Elsewhere Stopped is raised. A second Ctrl-C, some seconds
    after the first request, is a KeyboardInterrupt at once; so is the first one where `may_interrupt`.
    """

    def __init__(self, max_hours: float | None = None, *, is_in_loop: bool = True) -> None:
        self._deadline = None if max_hours is None else time.monotonic() + 3600 * max_hours
        self._before: dict[int, Any] = {}
        self._wakeup: int | None = None
        self._read = -1
        self.since: float | None = None  # when the first request came, on the monotonic clock
        self.by = ""
        self.is_in_loop = is_in_loop
        self.may_interrupt = False  # nothing is lost by an interrupt now

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():  # no other gets signals, or may set handlers
            self._read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
            _listening.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self.restore_handlers()
        if self in _listening:
            _listening.remove(self)

    def restore_handlers(self) -> None:
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
        is_another = self.since is not None and now - self.since > _ONE_REQUEST_S
        if number == signal.SIGINT and (is_another or (is_first and self.may_interrupt)):
            raise KeyboardInterrupt


def code_for_agent(code: int) -> int:
    """What to end with: an elastic agent with restarts left restarts whatever did not end with 0."""
    made, allowed = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    has_restarts = made.isdigit() and allowed.isdigit() and int(made) < int(allowed)
    return 0 if has_restarts and code in _NOT_TO_BE_RESTARTED else code


def exit_on_request() -> None:
    """Let a request to stop end this process at once, as long as nothing has begun that would have to be finished."""
    mine = os.getpid()

    def leave(number: int, frame: FrameType | None) -> None:
        if os.getpid() != mine:  # a forked worker: the signal means what it means to any process
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        with suppress(Exception):  # it may be in the middle of a line
            sys.stdout.flush()
        os._exit(code_for_agent(75))

    for number in SIGNALS:
        signal.signal(number, leave)


def ignore_requests() -> None:
    """From here on the process ends by itself: a request must not change how."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def warn_of_running_threads() -> None:
    """Should the process not end within seconds, name the threads it waits for: mostly those of user code."""

    def warn() -> None:
        running = [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
        if running:
            names = ", ".join(one.name for one in running)
            print(f"the run has ended; its process waits for non-daemon threads: {names}", file=sys.stderr)

    timer = threading.Timer(_STAYS_S, warn)
    timer.daemon = True
    with suppress(RuntimeError):  # no thread can be started
        timer.start()


@contextmanager
def exit_on_request_in_c() -> Iterator[None]:
    """Let a request end the process also while its main thread waits in C, where no Python handler can run.

    An agent asks before it restarts the processes, and kills those that are still there half a minute later.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(write, False)

    def wait() -> None:
        while number := os.read(read, 1):
            if number[0] in SIGNALS:
                os._exit(code_for_agent(75))

    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    waiting = threading.Thread(target=wait, name="exit-on-request", daemon=True)
    waiting.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)
        waiting.join()
        os.close(read)


def exit_with_agent() -> None:
    """Let the kernel end this process as soon as the elastic agent that started it has gone, however it went.

    Only under an agent: others may start a run from a thread that ends before it, or may mean it to stay.
    """
    if _LAUNCH not in os.environ:
        return
    parent = os.getppid()
    is_sure = exit_with_parent()
    if os.getppid() != parent or _is_orphan(parent):  # the agent had gone before the kernel was asked
        os._exit(1)
    ancestors = _up_to_agent()
    if not is_sure or len(ancestors) > 2:  # a script between the two would stay, and this process with it
        threading.Thread(target=_watch, args=(ancestors,), name="agent", daemon=True).start()


def exit_with_parent() -> bool:
    """Let the kernel end this process as soon as the thread that started it has gone; False where it cannot."""
    try:
        return ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0  # type: ignore[no-any-return]
    except (AttributeError, OSError, TypeError):
        return False


def has_lost_sibling() -> bool:
    """Say whether fewer processes are left on this host than its agent has started: then that is why it asks to stop.

    Known only of children that the agent itself has started.
    """
    started = os.environ.get("LOCAL_WORLD_SIZE", "")
    if _LAUNCH not in os.environ or not started.isdigit():
        return False
    alive = 0
    with suppress(psutil.Error, OSError):
        for child in psutil.Process(os.getppid()).children():
            with suppress(psutil.Error):
                alive += child.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return 0 < alive < int(started)


def _is_orphan(parent: int) -> bool:
    """Say whether the parent is the process that adopts orphans. In a container an agent may be the first process."""
    if parent != 1:
        return False
    try:
        return "python" not in os.readlink("/proc/1/exe")
    except OSError:  # another user's: no agent that could have started this
        return True


def _up_to_agent() -> list[int]:
    """This process, those above it that the agent has started as well, and last the agent itself."""
    line = [os.getpid(), os.getppid()]
    with suppress(psutil.Error, OSError):
        while line[-1] > 1 and _LAUNCH in psutil.Process(line[-1]).environ():
            line.append(psutil.Process(line[-1]).ppid())
    return line


def _watch(line: Sequence[int]) -> None:
    """Kill this process when one above it has gone: the next one below has another parent then."""
    while True:
        for process, parent in pairwise(line):
            is_broken = False
            with suppress(OSError, psutil.AccessDenied):  # such as no descriptor left
                try:
                    is_broken = psutil.Process(process).ppid() != parent
                except psutil.NoSuchProcess:
                    is_broken = True
            if is_broken:
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(_LOOK_S)
