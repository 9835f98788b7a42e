"""How a process ends: requests to stop, exit codes for launchers, the end of a parent. Torch-free: it loads first."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
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


_NOT_TO_BE_RESTARTED = (2, 3, 75)  # they would end the same way again, or somebody asked for them
_LAUNCH = "TORCHELASTIC_RUN_ID"  # that an elastic agent sets for its processes
_LOOK_S = 1.0
_STAYS_S = 3.0
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def as_seen_by_agent(code: int) -> int:
    """What to end with: an elastic agent with restarts left starts again whatever did not end with 0."""
    made, allowed = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    has_restarts = made.isdigit() and allowed.isdigit() and int(made) < int(allowed)
    return 0 if has_restarts and code in _NOT_TO_BE_RESTARTED else code


def leave_when_asked() -> None:
    """Let a request to stop end this process at once, as long as nothing is begun that would have to be finished."""
    mine = os.getpid()

    def leave(number: int, frame: FrameType | None) -> None:
        if os.getpid() != mine:  # a worker that was forked: the request means what it means to any process
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        with suppress(Exception):  # it may be in the midst of a line
            sys.stdout.flush()
        os._exit(as_seen_by_agent(75))

    for number in SIGNALS:
        signal.signal(number, leave)


def ignore_requests() -> None:
    """From here on the process ends by itself: a request to do so must not change how."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def say_who_stays() -> None:
    """Should the process not end within seconds, name the threads it waits for: those of user code, mostly."""

    def say() -> None:
        ones = [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
        if ones:
            names = ", ".join(one.name for one in ones)
            print(f"the run has ended; its process waits for a thread that is no daemon: {names}", file=sys.stderr)

    timer = threading.Timer(_STAYS_S, say)
    timer.daemon = True
    with suppress(RuntimeError):  # no thread is left for it
        timer.start()


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Let a request end the process also while its main thread waits in C, where no handler of Python's has its turn.

    An agent asks before it starts the processes again, and kills those that are not gone half a minute later.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(write, False)

    def look() -> None:
        while number := os.read(read, 1):
            if number[0] in SIGNALS:
                os._exit(as_seen_by_agent(75))

    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    looking = threading.Thread(target=look, name="leaving", daemon=True)
    looking.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)
        looking.join()
        os.close(read)


def end_with_agent() -> None:
    """Let the kernel end this process as soon as the elastic agent has gone that started it, however it went.

    Only under an agent: others may start a run from a thread, and go on after that has ended, or may mean it to stay.
    """
    if _LAUNCH not in os.environ:
        return
    parent = os.getppid()
    is_sure = end_with_parent()
    if os.getppid() != parent or _has_gone(parent):  # before the kernel knew
        os._exit(1)
    line = _line_to_agent()
    if not is_sure or len(line) > 2:  # a script between the two would stay, and this process with it
        threading.Thread(target=_watch, args=(line,), name="agent", daemon=True).start()


def end_with_parent() -> bool:
    """Let the kernel end this process as soon as the thread has gone that started it; False if it does not know how."""
    try:
        return ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL) == 0  # type: ignore[no-any-return]
    except (AttributeError, OSError, TypeError):
        return False


def has_lost_sibling() -> bool:
    """Say whether fewer processes are left on this host than its agent has started: then that is why it asks to stop.

    Only where this can be told: by Linux, and of children that the agent itself has started.
    """
    started, agent = os.environ.get("LOCAL_WORLD_SIZE", ""), os.getppid()
    if _LAUNCH not in os.environ or not started.isdigit():
        return False
    alive = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            alive += int(parent) == agent and state not in "ZX"
    return 0 < alive < int(started)


def _has_gone(parent: int) -> bool:
    """Say whether a parent is what takes up orphans. In a container an agent, too, may be the first process."""
    if parent != 1:
        return False
    try:
        return "python" not in os.readlink("/proc/1/exe")
    except OSError:  # another user's: no agent that could have started this
        return True


def _line_to_agent() -> list[int]:
    """This process, those above it that the agent has started as well, and last the agent itself."""
    line = [os.getpid(), os.getppid()]
    while line[-1] > 1:
        try:
            environment = Path(f"/proc/{line[-1]}/environ").read_bytes().split(b"\0")
            if not any(word.startswith(f"{_LAUNCH}=".encode()) for word in environment):
                break
            line.append(_parent_of(line[-1]))
        except OSError:
            break
    return line


def _parent_of(process: int) -> int:
    if process == os.getpid():
        return os.getppid()
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def _watch(line: Sequence[int]) -> None:
    """End this process when one above it has gone: the next one below has another parent then."""
    while True:
        for process, parent in pairwise(line):
            try:
                is_broken = _parent_of(process) != parent
            except (FileNotFoundError, ProcessLookupError):
                is_broken = True
            except OSError:  # such as no descriptor left
                is_broken = False
            if is_broken:
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(_LOOK_S)
