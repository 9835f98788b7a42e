"""Ctrl-C, which must not get lost."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupt:
    """Raises KeyboardInterrupt at once, and once more at the next `check`.

    Where the first one is raised is anywhere: in a finalizer or a callback of C code Python prints it and goes on.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # no other may, nor gets any signal
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raise what was swallowed."""
        if self._asked:
            raise KeyboardInterrupt

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        raise KeyboardInterrupt
