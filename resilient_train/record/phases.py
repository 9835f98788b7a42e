"""The parts of a treatment as they pass: detect, diagnose, decide, rewind, remedy; resume is known later."""

from __future__ import annotations

import time
from collections.abc import Sequence

Timed = tuple[str, int, int]  # the name of a part, when it began and when it ended, in milliseconds since 1970

DETECT, DIAGNOSE, DECIDE = "detect", "diagnose", "decide"
REWIND, REMEDY, RESUME = "rewind", "remedy", "resume"


class Phases:
    """Measures them one after the other. A clock that is set anew meanwhile does not make them longer or shorter."""

    def __init__(self, began: float | None = None) -> None:
        """Something was noticed just now, in an update that began at `began` of the monotonic clock, if one did."""
        self._turn = time.monotonic()
        self._ahead = time.time() - self._turn  # of the clock on the wall
        self._parts: list[tuple[str, float, float]] = []
        if began is not None:
            self._parts.append((DETECT, min(began, self._turn), self._turn))

    def ended(self, name: str) -> None:
        """Note that what went on since the last part ended was this one, or more of it."""
        began, self._turn = self._turn, time.monotonic()
        if self._parts and self._parts[-1][0] == name:
            began = self._parts.pop()[1]
        self._parts.append((name, began, self._turn))

    def lasted(self) -> None:
        """Note that the last part took until now."""
        if self._parts:
            self.ended(self._parts[-1][0])

    @property
    def timed(self) -> Sequence[Timed]:
        """What there was so far."""
        return [(name, self._ms(began), self._ms(ended)) for name, began, ended in self._parts]

    def _ms(self, moment: float) -> int:
        return int(1e3 * (moment + self._ahead))
