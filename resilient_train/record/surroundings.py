"""How long each phase of an incident took, and what was measured around it: `incidents/0003.csv` in the run directory.

Each attempted update has a row, also if it was refused. Ticks always grow; where steps go back, the run was rewound.
The table is written when the incident was treated, and again with what followed it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from resilient_train import files
from resilient_train.files import own_directory, read_plain, sweep, temporary
from resilient_train.types import Incident, Vitals

FOLDER = "incidents"  # its name in a run directory
BEFORE = AFTER = 100  # attempted updates
MOST_TABLES = 1000  # later incidents have none
_MOST_BYTES = 2**20  # of a table: it usually has a fortieth of that

DETECT, DIAGNOSE, DECIDE, REWIND, REMEDY = "detect", "diagnose", "decide", "rewind", "remedy"
RESUME = "resume"  # until the first accepted update

Timed = tuple[str, int, int]  # the name of a phase, when it began and when it ended, in milliseconds since 1970

_log = logging.getLogger("resilient_train")


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
    """What one attempted update measured."""

    tick: int
    step: int  # accepted updates, this one included if it was accepted
    loss: float
    grad_norm: float
    lr: float
    accepted: bool
    refused: str = ""  # what for


class Surroundings:
    """Keeps the latest measurements, and writes them into the tables of incidents if it has a run directory."""

    def __init__(self, directory: Path | None, incidents: Sequence[Incident] = ()) -> None:
        """Continue the table of the last of the incidents if the previous process left it unfinished."""
        self._directory = directory
        self._points: deque[Point] = deque(maxlen=BEFORE + 1 + AFTER)
        self._layers: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=AFTER)  # gradient norms, by tick
        self._incident: Incident | None = None  # whose table is not complete yet
        self._written = -1  # the tick of the newest row of that table on disk
        self._is_failing = False
        if directory is not None and incidents:
            sweep(directory / FOLDER)
            last = incidents[-1]
            self._points.extend(around(directory, last.id))
            newest = self._points[-1].tick if self._points else -1
            if last.outcome is None and newest < last.anomaly.tick + AFTER and last.id <= MOST_TABLES:
                self._incident, self._written = last, newest

    def add(self, vitals: Vitals, norms: Mapping[str, float] | None = None) -> None:
        """Add an update that was attempted, with the gradient norms of its layers if they are recorded."""
        if norms:
            self._layers.append((vitals.tick, norms))
        refused = str(vitals.refused or ("overflow" if vitals.overflowed else ""))
        loss, grad_norm, lr = vitals.loss, vitals.grad_norm, vitals.lr
        self._points.append(Point(vitals.tick, vitals.step, loss, grad_norm, lr, vitals.accepted, refused))
        if self._incident is not None and vitals.tick >= self._incident.anomaly.tick + AFTER:
            self.write_last()

    def begin(self, incident: Incident) -> None:
        """Write what was measured before an incident, and what followed the one before it."""
        self.write_last()
        if self._directory is not None and incident.id <= MOST_TABLES:
            self._incident, self._written = incident, -1
            self._write(self._directory, incident)

    def end(self, incident: Incident) -> None:
        """Write what followed an incident, as its outcome is known."""
        if self._incident is not None and self._incident.id == incident.id:
            self.write_last()

    def write_last(self) -> None:
        """Write what followed the last incident up to now."""
        incident, self._incident = self._incident, None
        if incident is not None and self._directory is not None:
            self._write(self._directory, incident)

    def _write(self, run_dir: Path, incident: Incident) -> None:
        tick, folder = incident.anomaly.tick, run_dir / FOLDER
        points = [one for one in self._points.copy() if tick - BEFORE <= one.tick <= tick + AFTER]
        if not points or points[-1].tick == self._written:
            return
        try:
            own_directory(folder)
            _write(surroundings_of(run_dir, incident.id), (Point._fields, *points))
            if layers := [one for one in self._layers if tick - BEFORE <= one[0] <= tick + AFTER]:
                names = [*dict.fromkeys(name for _, norms in layers for name in norms)]
                rows = [(when, *(norms.get(name, "") for name in names)) for when, norms in layers]
                titles = [name.replace(",", " ") for name in names]
                path = folder / f"{incident.id:04}-layers.csv"
                if layers[0][0] <= tick or not path.exists():  # else an earlier process wrote the rows before it
                    _write(path, (("tick", *titles), *rows))
        except OSError as error:
            sweep(folder)
            if not self._is_failing:
                why = error.strerror or error
                _log.warning("the measurements around incident %d cannot be written (%s)", incident.id, why)
            self._is_failing = True
        else:
            self._written, self._is_failing = points[-1].tick, False


def around(run_dir: Path, incident_id: int) -> tuple[Point, ...]:
    """Return what was measured around an incident, in the order of ticks; rows that cannot be read are left out."""
    file = surroundings_of(run_dir, incident_id)
    try:
        text = read_plain(file).decode("utf-8", "replace") if file.stat().st_size <= _MOST_BYTES else ""
    except OSError:
        return ()
    points: list[Point] = []
    for line in text.split("\n")[:-1]:  # a row without its end may lack digits as well
        try:
            tick, step, loss, grad_norm, lr, accepted, refused = line.rstrip("\r").split(",")
            was_accepted = {"0": False, "1": True}[accepted]
            point = Point(int(tick), int(step), float(loss), float(grad_norm), float(lr), was_accepted, refused)
        except (ValueError, KeyError):
            continue
        if not points or point.tick > points[-1].tick:
            points.append(point)
    return tuple(points)


def surroundings_of(run_dir: Path, incident_id: int) -> Path:
    return run_dir / FOLDER / f"{incident_id:04}.csv"


def _write(path: Path, rows: Sequence[Sequence[object]]) -> None:
    """Write a table. Not synced: no step should wait for what only people read."""
    unfinished = temporary(path)
    unfinished.write_text("".join(map(_row, rows)), "utf-8")
    files.disk.rename(unfinished, path)


def _row(cells: Sequence[object]) -> str:
    flat = (int(one) if isinstance(one, bool) else one for one in cells)
    # Nine digits are as exact as what the device measured.
    return ",".join(f"{one:.9g}" if isinstance(one, float) else str(one) for one in flat) + "\n"
