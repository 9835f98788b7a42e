"""What was measured around each incident: `incidents/0003.csv` in the run directory, a table that a person can open.

Every update that was attempted has a row, the refused ones too. Ticks go on and on; where steps go back, the run was
rewound. The table is written when something was done about the incident, and once more when it is known what followed.
"""

from __future__ import annotations

import logging
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
_MOST_BYTES = 2**20  # of a table: one of ours has a fortieth of that

_log = logging.getLogger("resilient_train")


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
    """The incident whose table is not whole yet."""

    number: int
    first: int  # ticks
    last: int
    written: int = -1  # the tick of the newest row on disk


class Surroundings:
    """Keeps what was measured lately; on ranks without the run directory it writes nothing."""

    def __init__(self, directory: Path | None, incidents: Sequence[Incident] = ()) -> None:
        """Go on with the table of the last of the incidents, if the process before this one left it unfinished."""
        self._folder = None if directory is None else directory / FOLDER
        self._lately: deque[Vitals | Point] = deque(maxlen=BEFORE + 1 + AFTER)
        self._window: _Window | None = None
        self._is_failing = False
        if directory is not None and self._folder is not None and incidents:
            sweep(self._folder)
            self._take_up(directory, incidents[-1])

    def heard(self, vitals: Vitals) -> None:
        """Note an update that was attempted."""
        self._lately.append(vitals)
        if self._window is not None and vitals.tick >= self._window.last:
            self.close()

    def treated(self, incident: Incident) -> None:
        """Write what was before an incident. What followed the one before it is known by now, too."""
        self.close()
        if self._folder is not None:
            self._window = _window(incident)
            self._write(self._window)

    def closed(self, incident: Incident) -> None:
        """Write what followed an incident, now that its outcome is known."""
        if self._window is not None and self._window.number == incident.id:
            self.close()

    def close(self) -> None:
        """Write what followed the last incident as far as it is known."""
        window, self._window = self._window, None
        if window is not None:
            self._write(window)

    def _take_up(self, directory: Path, incident: Incident) -> None:
        points, window = around(directory, incident.id), _window(incident)
        self._lately.extend(points)
        if incident.outcome is None and (not points or points[-1].tick < window.last):
            window.written = points[-1].tick if points else -1
            self._window = window

    def _write(self, window: _Window) -> None:
        folder = self._folder
        points = [one for one in self._lately.copy() if window.first <= one.tick <= window.last]
        if folder is None or not points or points[-1].tick == window.written:
            return
        try:
            own_directory(folder)
            # Not synced: no step should wait for a table that is for eyes only.
            path = surroundings_of(folder.parent, window.number)
            beside = temporary(path)
            beside.write_text("".join(_row(one) for one in (_HEAD, *map(_point, points))), "utf-8")
            files.disk.rename(beside, path)
        except OSError as error:
            sweep(folder)
            if not self._is_failing:
                why = error.strerror or error
                _log.warning("what was measured around incident %d cannot be written (%s)", window.number, why)
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


_HEAD = Point._fields


def surroundings_of(run_dir: Path, incident_id: int) -> Path:
    return run_dir / FOLDER / f"{incident_id:04}.csv"


def _window(incident: Incident) -> _Window:
    tick = incident.anomaly.tick
    return _Window(incident.id, tick - BEFORE, tick + AFTER)


def _point(one: Vitals | Point) -> Point:
    if isinstance(one, Point):
        return one
    refused = str(one.refused or ("overflow" if one.overflowed else ""))
    return Point(one.tick, one.step, one.loss, one.grad_norm, one.lr, one.accepted, refused)


def _row(cells: Sequence[object]) -> str:
    return ",".join(_cell(one) for one in cells) + "\n"


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:.9g}" if isinstance(value, float) else str(value)  # as exact as what the device measured


def _read(line: str) -> Point | None:
    try:
        tick, step, loss, grad_norm, lr, accepted, refused = line.rstrip("\r").split(",")
        was_accepted = {"0": False, "1": True}[accepted]
        return Point(int(tick), int(step), float(loss), float(grad_norm), float(lr), was_accepted, refused)
    except (ValueError, KeyError):
        return None
