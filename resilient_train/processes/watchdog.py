"""Ends a process that hangs, and reports where it hung."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import FrameType

from resilient_train.ground.files import at_disk_since
from resilient_train.processes.process_exit import StopRequests, code_for_agent

_LOOK_S = 0.5
_REPORT_S = 3.0  # to write down where it hangs, and to begin to save what can be saved
_LATE_S = 1.0  # if a look comes so much later, the process was stopped, as by `docker pause`: limits begin again


class Phase(StrEnum):
    START = "start"
    STEP = "step"
    SAVE = "save"


@dataclass(frozen=True, slots=True)
class Hang:
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
    ) -> None:
        """`report` writes down what happened and returns the exit code."""
        self._limits, self._requests, self._grace = limits, requests, grace
        self._saving_since, self._report = saving_since, report
        self._phase, self._since = Phase.START, time.monotonic()
        self._main = threading.main_thread().ident
        self._woke = 0.0  # after it was stopped
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def beat(self, phase: Phase = Phase.STEP) -> None:
        self._phase, self._since = phase, time.monotonic()

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(_LOOK_S):
            before, looked = looked, time.monotonic()
            if looked - before > _LOOK_S + _LATE_S:
                self._woke = looked
            hang = self._hang()
            if hang is not None and not self._over.is_set():
                self._end(hang)

    def _hang(self) -> Hang | None:
        now = time.monotonic()

        def lasts(since: float | None) -> float:
            return 0.0 if since is None else now - max(since, self._woke)

        waiting = at_disk_since(self._main)
        if waiting is not None:  # it has its own limit below, and does not count for an update
            self._since = now
        phase, limit = self._phase, self._limits[self._phase]
        update, save, disk = lasts(self._since), lasts(self._saving_since()), lasts(waiting)
        stop = lasts(self._requests.since if self._requests.arrived() else None)
        if limit and update > limit:
            return self._found(phase, update)
        if self._is_late(late := max(save, disk)):
            return self._found(Phase.SAVE, late)
        return self._found(phase, update, stop_asked=True) if stop > self._grace else None

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
        frames = [] if main is None else [frame for frame, _ in traceback.walk_stack(main)]
        return Hang(phase, seconds, frames[::-1], "\n".join(stacks), stop_asked)

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
            reporting.join(_LOOK_S)
        os._exit(code_for_agent(code[0]) if code else 1)
