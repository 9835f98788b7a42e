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


class Watchdog:
    """A thread that ends the process if the run does not call `beat` within a limit in seconds; 0 is no limit."""

    def __init__(
        self, limits: dict[Phase, float], saving_since: Callable[[], float | None], report: Callable[[Hang], object]
    ) -> None:
        """`report` writes down what happened."""
        self._limits, self._saving_since, self._report = limits, saving_since, report
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
        now, disk = time.monotonic(), at_disk_since(self._main)
        if disk is not None:  # it has its own limit, and does not count for an update
            self._since = now
        for phase, since in ((self._phase, self._since), (Phase.SAVE, self._saving_since()), (Phase.SAVE, disk)):
            if since is not None and 0 < self._limits[phase] < (seconds := now - max(since, self._woke)):
                main = sys._current_frames().get(self._main or 0)
                return Hang(phase, seconds, [frame for frame, _ in traceback.walk_stack(main)][::-1] if main else [])
        return None

    def _end(self, hang: Hang) -> None:
        """Exit, even if the report hangs as well. A state that it saves is waited for."""
        reporting = threading.Thread(target=self._report, args=(hang,), daemon=True)
        reporting.start()
        until = time.monotonic() + _REPORT_S
        while reporting.is_alive() and time.monotonic() < until:
            if (began := self._saving_since()) is not None:
                if 0 < self._limits[Phase.SAVE] < time.monotonic() - began:
                    break
                until = time.monotonic() + _REPORT_S  # another save may follow, and the summary
            reporting.join(_LOOK_S)
        os._exit(1)
