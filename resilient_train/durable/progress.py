"""The position of a run, written before every update at the cost of one system call.

The kernel keeps what was written, however the process ends. If the machine goes down, an older record is read, or none.
Not a memory map: a file that is cut short, or a server that is gone, would end the process with SIGBUS.
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

_LENGTH = 128  # bytes of a record, so that a newer one replaces all of it


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
        self.last = Position() if directory is None else position_of(directory)  # of the previous process
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
        record = seal(json.dumps({"position": position})).ljust(_LENGTH)
        with self._attempts.attempt():
            if self._file < 0:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            os.pwrite(self._file, record, 0)
            if position.doing is Doing.ENDED:
                self.close()


def position_of(run_dir: Path) -> Position:
    """Return where the newest process of a run is or was; the beginning if that is not known."""
    record = None
    with suppress(OSError):
        record = unseal((run_dir / PROGRESS).read_bytes().rstrip())
    if record is None:
        return Position()
    doing, *rest = record["position"]
    return Position(Doing(doing), *rest)
