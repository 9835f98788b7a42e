"""Ends a process that does not go on, and says where it stood."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import resource
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
_LAST_WORDS_S = 3.0  # to write down where it stood, and to begin to save what can be saved
_BACKSTOP_S = 4.0  # behind the limit: for code that never lets another thread run
_TICKS = 4  # seconds behind that, in which the process itself has to run
_LEAP_S = 1.0  # that a thread looks later than it meant to
_SWITCHES = 4  # of this thread in a second: one that waits for Python's lock is woken 200 times, a stopped one never


class Phase(StrEnum):
    """What the run is at."""

    START = "start"
    STEP = "step"
    SAVE = "save"


@dataclass(frozen=True, slots=True)
class Hang:
    """A process that did not go on."""

    phase: Phase
    seconds: float
    frames: list[FrameType]  # of the main thread, the innermost last
    stacks: str  # of all threads
    stop_asked: bool = False


class Watchdog:
    """A thread that looks at the clock. The run calls `beat` whenever it has got on; a limit of 0 is none."""

    def __init__(
        self,
        limits: dict[Phase, float],
        requests: StopRequests,
        grace: float,
        saving_since: Callable[[], float | None],
        last_words: Callable[[Hang], int],
        log: IO[str] | None,
    ) -> None:
        """`last_words` writes down what happened and returns the exit code; `log` takes stacks if nothing else can."""
        self._limits, self._requests, self._grace = limits, requests, grace
        self._saving_since, self._last_words, self._log = saving_since, last_words, log
        self._phase, self._since = Phase.START, time.monotonic()
        self._main = threading.main_thread().ident
        self._stops: list[tuple[float, float]] = []  # until when the process stood still, and for how long
        self._countdown = _Countdown.made() if log is not None else None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._arm_backstop()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()
        self._disarm_backstop()

    def beat(self, phase: Phase = Phase.STEP) -> None:
        """The run got on."""
        is_other, self._phase, self._since = phase is not self._phase, phase, time.monotonic()
        if is_other:
            self._arm_backstop()

    def _watch(self) -> None:
        before, switches = time.monotonic(), _switches()
        while not self._over.wait(_LOOK_S):
            leap = time.monotonic() - before - _LOOK_S
            if leap > _LEAP_S and _switches() - switches < _SWITCHES * leap:
                self._stops.append((before + leap, leap))  # by SIGSTOP, `docker pause`, a scheduler
                _log.info("the process was stopped for %.0f s: that is no hang", leap)
            before, switches = time.monotonic(), _switches()
            self._arm_backstop()
            if (hang := self._hang()) is not None and not self._over.is_set():
                self._end(hang)

    def _passed(self, since: float) -> float:
        """How long the process has been running since a moment."""
        return time.monotonic() - since - sum(seconds for until, seconds in self._stops if until > since)

    def _hang(self) -> Hang | None:
        waiting = at_disk_since(self._main)
        if waiting is not None:  # the disk has a limit of its own, and the time is not an update's
            self._since = time.monotonic()
        phase, since = self._phase, self._since
        limit = self._limits[phase]
        if limit and (passed := self._passed(since)) > limit:
            return self._seen(phase, passed)
        for began in (waiting, self._saving_since()):
            if began is not None and self._is_late(passed := self._passed(began)):
                return self._seen(Phase.SAVE, passed)
        asked = self._requests.since if self._requests.arrived() else None
        if asked is not None and self._passed(asked) > self._grace:
            return self._seen(phase, self._passed(since), stop_asked=True)
        return None

    def _is_late(self, saving_s: float) -> bool:
        return 0 < self._limits[Phase.SAVE] < saving_s

    def _seen(self, phase: Phase, seconds: float, *, stop_asked: bool = False) -> Hang:
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
        """Leave, whatever becomes of the last words; a state that they write is waited for."""
        code: list[int] = []
        words = threading.Thread(target=lambda: code.append(self._last_words(hang)), daemon=True)
        words.start()
        words.join(_LAST_WORDS_S)
        while words.is_alive() and (began := self._saving_since()) is not None:
            if self._is_late(time.monotonic() - began):
                break
            self._arm_backstop()
            words.join(_LOOK_S)
        os._exit(code_for_agent(code[0]) if code else 1)

    def _arm_backstop(self) -> None:
        """Have C end the process should this thread never get its turn again: some code keeps Python's lock."""
        limit = self._limits[self._phase]
        if self._log is None:
            return
        if not limit:
            self._disarm_backstop()  # that of the phase before
            return
        left = max(limit - self._passed(self._since), 0.0) + _BACKSTOP_S
        faulthandler.dump_traceback_later(left, exit=self._countdown is None, file=self._log)
        if self._countdown is not None:
            self._countdown.begin_in(left)

    def _disarm_backstop(self) -> None:
        if self._log is not None:
            faulthandler.cancel_dump_traceback_later()
        if self._countdown is not None:
            self._countdown.begin_in(0.0)


def _switches() -> int:
    """How often this thread has gone to sleep by itself, which it does not while the process is stopped."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if hasattr(resource, "RUSAGE_THREAD") else 0


class _Countdown:
    """Ends the process from C after `_TICKS` seconds in which it was running, unless it is begun again before.

    A timer alone ends a process that was stopped as soon as it continues, since its time is over then. But a timer that
    repeats expires only once for all the time that was missed. So each expiry reads one byte of a stream, by `getc`,
    and what the stream calls to read on when its bytes are used up is `_exit`. All of that is done by glibc, whatever
    keeps Python's lock.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises OSError, or AttributeError where the C library is another."""
        library.fopencookie.restype = ctypes.c_void_p
        library.fopencookie.argtypes = [ctypes.c_void_p, ctypes.c_char_p, _Calls]
        library.ungetc.argtypes = [ctypes.c_int, ctypes.c_void_p]
        self._library, self._timer, self._begins = library, ctypes.c_void_p(), 0.0
        self._stream = library.fopencookie(1, b"r", _Calls(read=ctypes.cast(library._exit, ctypes.c_void_p)))
        event = _Event(self._stream, 0, _SIGEV_THREAD, ctypes.cast(library.getc, ctypes.c_void_p))
        places = ctypes.byref(event), ctypes.byref(self._timer)
        if not self._stream or library.timer_create(time.CLOCK_MONOTONIC, *places):
            raise OSError("no timer")
        self._fill()

    @staticmethod
    def made() -> _Countdown | None:
        """Return one, where the C library is glibc."""
        try:
            return _Countdown(ctypes.CDLL("librt.so.1"))  # before glibc 2.34 timers are there
        except (OSError, AttributeError):
            return None

    def begin_in(self, seconds: float) -> None:
        """Begin to count so much later, and not as it was told before; 0: never."""
        times = (ctypes.c_long * 4)(1, 0, int(seconds), int(seconds % 1 * 1e9))  # how often, and first
        self._library.timer_settime(self._timer, 0, ctypes.byref(times), None)
        now = time.monotonic()
        if self._begins and now >= self._begins:  # the process was stopped: some of the bytes have been read
            self._fill()
        self._begins = now + seconds if seconds else 0.0

    def _fill(self) -> None:
        for _ in range(_TICKS):
            self._library.ungetc(0, self._stream)


class _Calls(ctypes.Structure):  # cookie_io_functions_t
    _fields_ = [(name, ctypes.c_void_p) for name in ("read", "write", "seek", "close")]


class _Event(ctypes.Structure):  # struct sigevent
    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("rest", ctypes.c_char * 40),
    ]


_SIGEV_THREAD = 2
