"""The position of a run, written before every update at the cost of one system call.

The kernel keeps what was written, however the process ends. If the machine goes down, the older of two records is read,
or none. Not a memory map: a file that is cut short, or a server that is gone, would end the process with SIGBUS.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from resilient_train.durable.journal import WriteAttempts, seal, unseal

PROGRESS = "progress"  # its name in a run directory

_SLOT = 128  # bytes


class Doing(IntEnum):
    ENDED = 0  # in order
    UPDATING = 1
    BETWEEN = 2  # two updates: evaluating, saving
    HUNG = 3  # in an update, and was ended by its watchdog


class Position(NamedTuple):
    doing: Doing = Doing.ENDED
    tick: int = 0
    step: int = 0  # accepted updates
    start: int = 0  # of the samples in use
    stop: int = 0


class Progress:
    """The position of this process; without a run directory it is written nowhere."""

    def __init__(self, directory: Path | None) -> None:
        self._path = None if directory is None else directory / PROGRESS
        self._number, self.last = (0, Position()) if directory is None else _read(directory)  # of the previous process
        self._position = self.last
        self._file = -1
        self._attempts = WriteAttempts(self._path, "a crash would be explained by an older position")
        self._stays = False

    def updating(self, tick: int, step: int, start: int, stop: int) -> None:
        self._note(Position(Doing.UPDATING, tick, step, start, stop))

    def turned_to(self, doing: Doing, tick: int | None = None) -> None:
        """Note that the process does something else now, after `tick` attempted updates if that changed."""
        self._note(self._position._replace(doing=doing, tick=self._position.tick if tick is None else tick))

    def stays(self) -> None:
        """Note nothing more: the process ends, and the samples in use may be to blame."""
        self._stays = True

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    @property
    def is_updating(self) -> bool:
        return self._position.doing is Doing.UPDATING

    def _note(self, position: Position) -> None:
        if self._stays:
            return
        self._position = position
        if self._path is None:
            return
        self._number += 1
        record = seal(json.dumps({"n": self._number, "position": position})).ljust(_SLOT)
        with self._attempts.attempt():
            if self._file < 0:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            os.pwrite(self._file, record, self._number % 2 * _SLOT)
            if position.doing is Doing.ENDED:
                self.close()


def position_of(run_dir: Path) -> Position:
    """Return where the newest process of a run is or was; the beginning if that is not known."""
    return _read(run_dir)[1]


def _read(run_dir: Path) -> tuple[int, Position]:
    """Return the newer of the two records, and its number; 0 if there is none, or both are damaged."""
    content = b""
    with suppress(OSError):
        content = (run_dir / PROGRESS).read_bytes()
    slots = (unseal(slot.rstrip()) for slot in (content[:_SLOT], content[_SLOT : 2 * _SLOT]))
    newest = max(filter(None, slots), key=lambda one: one["n"], default=None)
    if newest is None:
        return 0, Position()
    doing, *rest = newest["position"]
    return newest["n"], Position(Doing(doing), *rest)
