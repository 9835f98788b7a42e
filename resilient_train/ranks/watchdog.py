"""Ends a process that does not go on, and says where it stood."""

from __future__ import annotations

import faulthandler
import os
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
from resilient_train.ranks.leaving import as_seen_by_agent
from resilient_train.ranks.stop import StopRequests

_LOOK_S = 0.5
_LAST_WORDS_S = 3.0  # to write down where it stood, and to begin to save what can be saved
_BACKSTOP_S = 4.0  # behind the limit: for code that never lets another thread run


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
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._arm_backstop()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()
        if self._log is not None:
            faulthandler.cancel_dump_traceback_later()

    def beat(self, phase: Phase = Phase.STEP) -> None:
        """The run got on."""
        is_other, self._phase, self._since = phase is not self._phase, phase, time.monotonic()
        if is_other:
            self._arm_backstop()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            self._arm_backstop()
            if (hang := self._hang()) is not None and not self._over.is_set():
                self._end(hang)

    def _hang(self) -> Hang | None:
        now, waiting = time.monotonic(), at_disk_since(self._main)
        if waiting is not None:  # the disk has a limit of its own, and the time is not an update's
            self._since = now
        phase, since = self._phase, self._since
        limit = self._limits[phase]
        if limit and now - since > limit:
            return self._seen(phase, now - since)
        for began in (waiting, self._saving_since()):
            if began is not None and self._is_late(now - began):
                return self._seen(Phase.SAVE, now - began)
        asked = self._requests.since if self._requests.arrived() else None
        if asked is not None and now - asked > self._grace:
            return self._seen(phase, now - since, stop_asked=True)
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
            words.join(_LOOK_S)
        os._exit(as_seen_by_agent(code[0]) if code else 1)

    def _arm_backstop(self) -> None:
        """Have C end the process should this thread never get its turn again: some code keeps Python's lock."""
        limit = self._limits[self._phase]
        if self._log is None:
            return
        if not limit:
            faulthandler.cancel_dump_traceback_later()  # that of the phase before
            return
        left = limit - (time.monotonic() - self._since) + _BACKSTOP_S
        faulthandler.dump_traceback_later(max(left, _BACKSTOP_S), exit=True, file=self._log)
