"""How long each phase of an incident took."""

from __future__ import annotations

import time
from collections.abc import Sequence

DETECT, DIAGNOSE, DECIDE, REWIND, REMEDY = "detect", "diagnose", "decide", "rewind", "remedy"
RESUME = "resume"  # until the first accepted update

Timed = tuple[str, int, int]  # the name of a phase, when it began and when it ended, in milliseconds since 1970


class Phases:
    """Times the phases of an incident, one after the other. Setting the system clock does not change how long they are.

    With `began`, on the monotonic clock, the first one is the update in which something was noticed just now.
    """

    def __init__(self, began: float | None = None) -> None:
        self._turn = time.monotonic()
        self._ahead = time.time() - self._turn  # of the system clock
        self._phases: list[tuple[str, float, float]] = []
        if began is not None:
            self._phases.append((DETECT, min(began, self._turn), self._turn))

    def ended(self, name: str) -> None:
        """End a phase that began where the last one ended; the same one again is extended."""
        began, self._turn = self._turn, time.monotonic()
        if self._phases and self._phases[-1][0] == name:
            began = self._phases.pop()[1]
        self._phases.append((name, began, self._turn))

    def extend_last(self) -> None:
        """Let the last phase end now."""
        if self._phases:
            self.ended(self._phases[-1][0])

    @property
    def timed(self) -> Sequence[Timed]:
        """The phases so far."""
        ahead = self._ahead
        return [(name, int(1e3 * (began + ahead)), int(1e3 * (ended + ahead))) for name, began, ended in self._phases]
