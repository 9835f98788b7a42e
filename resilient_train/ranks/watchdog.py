"""Ends a process that hangs, and reports where it hung."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import logging
import os
import resource
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import FrameType
from typing import IO

from resilient_train.files import at_disk_since
from resilient_train.ranks.process_exit import StopRequests, code_for_agent

_log = logging.getLogger("resilient_train")

_LOOK_S = 0.5
_REPORT_S = 3.0  # to write down where it hangs, and to begin to save what can be saved
_BACKSTOP_S = 4.0  # after the limit the backstop in C acts: some code never lets another thread run
_RUNNING = 4  # seconds after that in which the process has to be running, not stopped
_STACKS = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else 0  # the signal that writes down all stacks
_LATE_S = 1.0  # a look that comes so much later than planned: the process may have been stopped
_SWITCHES = 4  # of this thread in a second: one that waits for Python's lock is woken 200 times, a stopped one never


class Phase(StrEnum):
    """What the run is doing."""

    START = "start"
    STEP = "step"
    SAVE = "save"


@dataclass(frozen=True, slots=True)
class Hang:
    """A process that made no progress."""

    phase: Phase
    seconds: float
    frames: list[FrameType]  # of the main thread, the innermost last
    stacks: str  # of all threads
    stop_asked: bool = False


class Watchdog:
    """A thread that ends the process if the run does not call `beat` within a limit in seconds; 0 is no limit."""

    def __init__(
        self,
        limits: dict[Phase, float],
        requests: StopRequests,
        grace: float,
        saving_since: Callable[[], float | None],
        report: Callable[[Hang], int],
        log: IO[str] | None,
    ) -> None:
        """`report` writes down what happened and returns the exit code; `log` takes stacks if nothing else can."""
        self._limits, self._requests, self._grace = limits, requests, grace
        self._saving_since, self._report, self._log = saving_since, report, log
        self._phase, self._since = Phase.START, time.monotonic()
        self._main = threading.main_thread().ident
        self._stops: list[tuple[float, float]] = []  # until when the process was stopped, and for how long
        self._backstop: _Backstop | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        if self._log is not None:
            self._backstop = _Backstop(self._log, self._thread.native_id or 0)
        self._arm_backstop()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()
        if self._backstop is not None:
            self._backstop.close()

    def beat(self, phase: Phase = Phase.STEP) -> None:
        """Note that the run made progress."""
        is_new, self._phase, self._since = phase is not self._phase, phase, time.monotonic()
        if is_new:
            self._arm_backstop()

    def _watch(self) -> None:
        before, switches = time.monotonic(), _switches()
        while not self._over.wait(_LOOK_S):
            late = time.monotonic() - before - _LOOK_S
            if late > _LATE_S and _switches() - switches < _SWITCHES * late:
                self._stops.append((before + late, late))  # by SIGSTOP, `docker pause`, a scheduler
                _log.info("the process was stopped for %.0f s: that is no hang", late)
            before, switches = time.monotonic(), _switches()
            self._arm_backstop()
            if (hang := self._hang()) is not None and not self._over.is_set():
                self._end(hang)

    def _passed(self, since: float) -> float:
        """Return how long the process has been running since a moment, not counting when it was stopped."""
        return time.monotonic() - since - sum(seconds for until, seconds in self._stops if until > since)

    def _hang(self) -> Hang | None:
        waiting = at_disk_since(self._main)
        if waiting is not None:  # it has its own limit below, and does not count for an update
            self._since = time.monotonic()
        phase, since = self._phase, self._since
        limit = self._limits[phase]
        if limit and (passed := self._passed(since)) > limit:
            return self._found(phase, passed)
        for began in (waiting, self._saving_since()):
            if began is not None and self._is_late(passed := self._passed(began)):
                return self._found(Phase.SAVE, passed)
        asked = self._requests.since if self._requests.arrived() else None
        if asked is not None and self._passed(asked) > self._grace:
            return self._found(phase, self._passed(since), stop_asked=True)
        return None

    def _is_late(self, saving_s: float) -> bool:
        return 0 < self._limits[Phase.SAVE] < saving_s

    def _found(self, phase: Phase, seconds: float, *, stop_asked: bool = False) -> Hang:
        threads = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks, main = [], None
        for number, frame in sys._current_frames().items():
            if number == threading.get_ident():
                continue
            main = frame if number == self._main else main
            stacks.append(f"thread {threads.get(number, number)}\n{''.join(traceback.format_stack(frame))}")
        frames: list[FrameType] = []
        while main is not None:
            frames.insert(0, main)
            main = main.f_back
        return Hang(phase, seconds, frames, "\n".join(stacks), stop_asked)

    def _end(self, hang: Hang) -> None:
        """Exit, even if the report hangs as well. A state that it saves is waited for."""
        code: list[int] = []
        reporting = threading.Thread(target=lambda: code.append(self._report(hang)), daemon=True)
        reporting.start()
        until = time.monotonic() + _REPORT_S
        while reporting.is_alive() and time.monotonic() < until:
            if (began := self._saving_since()) is not None:
                if self._is_late(time.monotonic() - began):
                    break
                until = time.monotonic() + _REPORT_S  # another save may follow, and the summary
            self._arm_backstop()
            reporting.join(_LOOK_S)
        os._exit(code_for_agent(code[0]) if code else 1)

    def _arm_backstop(self) -> None:
        """Let C end the process if this thread never runs again, as some code keeps Python's lock."""
        if self._backstop is None:
            return
        limit = self._limits[self._phase]
        self._backstop.start_in(max(limit - self._passed(self._since), 0.0) + _BACKSTOP_S if limit else 0.0)


def _switches() -> int:
    """Return how often this thread went to sleep by itself, which it does not while the process is stopped."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if hasattr(resource, "RUSAGE_THREAD") else 0


class _Backstop:
    """Ends the process from C, with all stacks in the log, unless it is started again in time.

    `faulthandler.dump_traceback_later` is only for C libraries other than glibc: its time is over as soon as a process
    that was stopped (SIGSTOP, `docker pause`) continues, and to read the stacks of threads that run may crash the
    process. Here stacks are read once the process has been running for some seconds beyond its time.
    """

    def __init__(self, log: IO[str], thread: int) -> None:
        """The stacks are written by a `thread` of this native id, which waits for Python's lock then."""
        self._log = log
        self._timers: list[_RunningTimer] = []
        self._pipe: tuple[int, ...] = ()
        with contextlib.suppress(OSError, AttributeError):
            self._pipe = reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            timers = [_RunningTimer("write", writing, _RUNNING - 1), _RunningTimer("_exit", 1, _RUNNING)]
            # Threads of timers block signals, so what they write into a pipe sends one. Not to the main thread: that
            # would interrupt what hangs there, or never arrive.
            fcntl.fcntl(reading, 15, struct.pack("ii", 0, thread))  # F_SETOWN_EX, F_OWNER_TID
            fcntl.fcntl(reading, fcntl.F_SETSIG, _STACKS)
            faulthandler.register(_STACKS, log)
            fcntl.fcntl(reading, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
            self._timers = timers

    def start_in(self, seconds: float) -> None:
        """Start to count in so many seconds, replacing an earlier start; 0: never."""
        for timer in self._timers:
            timer.start_in(seconds)
        if not self._timers:
            if seconds:
                faulthandler.dump_traceback_later(seconds, exit=True, file=self._log)
            else:
                faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        """Never end the process."""
        self.start_in(0.0)  # a timer that has expired gets new bytes, so it does not write into a pipe that is closed
        if self._timers:
            faulthandler.unregister(_STACKS)
        for end in self._pipe:
            os.close(end)


class _RunningTimer:
    """Calls a function of C once the process has been running for some seconds, unless it is started again before.

    A timer that repeats expires only once for all the time in which the process was stopped. So each expiry reads one
    byte of a stream by `getc`, and when the bytes are used up the stream calls the function, as the one that reads
    more. glibc does all of that, also while code keeps Python's lock.
    """

    def __init__(self, function: str, argument: int, seconds: int) -> None:
        """Raises OSError, or AttributeError where the C library is another."""
        self._library = library = ctypes.CDLL("librt.so.1")  # before glibc 2.34 timers are there
        library.fopencookie.restype = ctypes.c_void_p
        library.fopencookie.argtypes = [ctypes.c_void_p, ctypes.c_char_p, _StreamFunctions]
        library.ungetc.argtypes = [ctypes.c_int, ctypes.c_void_p]
        self._timer, self._starts, self._seconds = ctypes.c_void_p(), 0.0, seconds
        functions = _StreamFunctions(read=ctypes.cast(getattr(library, function), ctypes.c_void_p))
        self._stream = library.fopencookie(argument, b"r", functions)
        getc = ctypes.cast(library.getc, ctypes.c_void_p).value
        event = struct.pack("PiiP40x", self._stream or 0, 0, 2, getc)  # struct sigevent; 2 is SIGEV_THREAD
        if not self._stream or library.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(self._timer)):
            raise OSError("no timer")
        self._fill()

    def start_in(self, seconds: float) -> None:
        """Start to count in so many seconds, replacing an earlier start; 0: never."""
        times = (ctypes.c_long * 4)(1, 0, int(seconds), int(seconds % 1 * 1e9))  # how often, and first
        self._library.timer_settime(self._timer, 0, ctypes.byref(times), None)
        now = time.monotonic()
        if self._starts and now >= self._starts:  # the process was stopped: some of the bytes have been read
            self._fill()
        self._starts = now + seconds if seconds else 0.0

    def _fill(self) -> None:
        for _ in range(self._seconds):
            self._library.ungetc(0, self._stream)


class _StreamFunctions(ctypes.Structure):  # cookie_io_functions_t
    _fields_ = [(name, ctypes.c_void_p) for name in ("read", "write", "seek", "close")]
