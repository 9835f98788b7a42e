"""How a process ends, for whoever started it. Light, because it is there before anything heavy is imported."""

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
from pathlib import Path
from types import FrameType

from resilient_train.ranks.stop import SIGNALS

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
