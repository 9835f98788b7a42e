"""How long each part of an incident took, and what was measured around it: `incidents/0003.csv` in the run directory.

Every update that was attempted has a row, the refused ones too. Ticks always grow; where steps go back, the run was
rewound. The table is written once the incident was treated, and again when it is known what followed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from resilient_train import files
from resilient_train.files import own_directory, read_plain, sweep, temporary
from resilient_train.types import Incident, Vitals

FOLDER = "incidents"  # its name in a run directory
BEFORE = AFTER = 100  # attempted updates
_MOST_BYTES = 2**20  # of a table: it usually has a fortieth of that

DETECT, DIAGNOSE, DECIDE, REWIND, REMEDY = "detect", "diagnose", "decide", "rewind", "remedy"
RESUME = "resume"  # known later than the others

Timed = tuple[str, int, int]  # the name of a part, when it began and when it ended, in milliseconds since 1970

_log = logging.getLogger("resilient_train")


class Phases:
    """Times the parts of an incident one after the other; setting the system clock makes them no longer or shorter."""

    def __init__(self, began: float | None = None) -> None:
        """Something was noticed just now, in an update that began at `began` of the monotonic clock, if in one."""
        self._turn = time.monotonic()
        self._ahead = time.time() - self._turn  # of the system clock
        self._parts: list[tuple[str, float, float]] = []
        if began is not None:
            self._parts.append((DETECT, min(began, self._turn), self._turn))

    def ended(self, name: str) -> None:
        """Note that the time since the last part ended went into this one, or into more of it."""
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
        """The parts so far."""
        return [(name, self._ms(began), self._ms(ended)) for name, began, ended in self._parts]

    def _ms(self, moment: float) -> int:
        return int(1e3 * (moment + self._ahead))


class Point(NamedTuple):
    """What one attempted update measured."""

    tick: int
    step: int  # accepted updates, this one included if it was accepted
    loss: float
    grad_norm: float
    lr: float
    accepted: bool
    refused: str = ""  # what for


@dataclass
class _Window:
    """The incident whose table is not complete yet."""

    incident: Incident
    written: int = -1  # the tick of the newest row on disk

    @property
    def last(self) -> int:
        return self.incident.anomaly.tick + AFTER


class Surroundings:
    """Keeps the latest measurements; on ranks without the run directory it writes nothing."""

    def __init__(self, directory: Path | None, incidents: Sequence[Incident] = ()) -> None:
        """Continue the table of the last of the incidents, if the previous process left it unfinished."""
        self._folder = None if directory is None else directory / FOLDER
        self._lately: deque[Vitals | Point] = deque(maxlen=BEFORE + 1 + AFTER)
        self._window: _Window | None = None
        self._is_failing = False
        if directory is not None and self._folder is not None and incidents:
            sweep(self._folder)
            points, window = around(directory, incidents[-1].id), _Window(incidents[-1])
            self._lately.extend(points)
            if incidents[-1].outcome is None and (not points or points[-1].tick < window.last):
                window.written = points[-1].tick if points else -1
                self._window = window

    def heard(self, vitals: Vitals) -> None:
        """Note an update that was attempted."""
        self._lately.append(vitals)
        if self._window is not None and vitals.tick >= self._window.last:
            self.close()

    def treated(self, incident: Incident) -> None:
        """Write what was before an incident. What followed the previous one is known by now, too."""
        self.close()
        if self._folder is not None:
            self._window = _Window(incident)
            self._write(self._window)

    def closed(self, incident: Incident) -> None:
        """Write what followed an incident, now that its outcome is known."""
        if self._window is not None and self._window.incident.id == incident.id:
            self.close()

    def close(self) -> None:
        """Write what followed the last incident as far as it is known."""
        window, self._window = self._window, None
        if window is not None:
            self._write(window)

    def _write(self, window: _Window) -> None:
        folder, tick = self._folder, window.incident.anomaly.tick
        points = [one for one in self._lately.copy() if tick - BEFORE <= one.tick <= tick + AFTER]
        if folder is None or not points or points[-1].tick == window.written:
            return
        try:
            own_directory(folder)
            # Not synced: no step should wait for a table that only people read.
            path = surroundings_of(folder.parent, window.incident.id)
            unfinished = temporary(path)
            unfinished.write_text("".join(_row(one) for one in (Point._fields, *map(_point, points))), "utf-8")
            files.disk.rename(unfinished, path)
        except OSError as error:
            sweep(folder)
            if not self._is_failing:
                why = error.strerror or error
                _log.warning("the measurements around incident %d cannot be written (%s)", window.incident.id, why)
            self._is_failing = True
        else:
            window.written, self._is_failing = points[-1].tick, False


def around(run_dir: Path, incident_id: int) -> tuple[Point, ...]:
    """Return what was measured around an incident, in the order of ticks; of a damaged table what can be read."""
    file = surroundings_of(run_dir, incident_id)
    try:
        text = read_plain(file).decode("utf-8", "replace") if file.stat().st_size <= _MOST_BYTES else ""
    except OSError:
        return ()
    points: list[Point] = []
    for line in text.split("\n")[:-1]:  # a row without its end may lack digits as well
        point = _read(line)
        if point is not None and (not points or point.tick > points[-1].tick):
            points.append(point)
    return tuple(points)


def surroundings_of(run_dir: Path, incident_id: int) -> Path:
    return run_dir / FOLDER / f"{incident_id:04}.csv"


def _point(one: Vitals | Point) -> Point:
    if isinstance(one, Point):
        return one
    refused = str(one.refused or ("overflow" if one.overflowed else ""))
    return Point(one.tick, one.step, one.loss, one.grad_norm, one.lr, one.accepted, refused)


def _row(cells: Sequence[object]) -> str:
    flat = (int(one) if isinstance(one, bool) else one for one in cells)
    # Nine digits are as exact as what the device measured.
    return ",".join(f"{one:.9g}" if isinstance(one, float) else str(one) for one in flat) + "\n"


def _read(line: str) -> Point | None:
    try:
        tick, step, loss, grad_norm, lr, accepted, refused = line.rstrip("\r").split(",")
        was_accepted = {"0": False, "1": True}[accepted]
        return Point(int(tick), int(step), float(loss), float(grad_norm), float(lr), was_accepted, refused)
    except (ValueError, KeyError):
        return None
