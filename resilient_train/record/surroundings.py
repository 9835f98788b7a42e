"""How long each phase of an incident took, and what was measured around it, for its picture."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

AROUND = 100  # attempted updates before an incident, and after it
MOST_MEASURED = 50  # incidents; what is measured around later ones is not kept

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


class Point(NamedTuple):
    """What one attempted update measured. Ticks always grow; where steps go back, the run was rewound."""

    tick: int
    step: int  # accepted updates, this one included if it was accepted
    loss: float
    grad_norm: float
    accepted: bool


def points_of(written: Any) -> tuple[Point, ...]:
    """Read points from an entry of the journal, where infinities and NaN are text."""
    return tuple(
        Point(tick, step, float(loss), float(norm), accepted) for tick, step, loss, norm, accepted in written or ()
    )
