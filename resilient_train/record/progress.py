"""The position of a run, written before every update at the cost of one system call.

The kernel keeps what was written, however the process ends. Only if the machine itself goes down, the last seconds may
be lost: then the older of two records is read, or none. Not a memory map: a file that is cut short, a full
copy-on-write disk or a server that is gone would end the process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import zlib
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from resilient_train.files import read_plain

PROGRESS = "progress"  # its name in a run directory

_RECORD = struct.Struct("<6q")  # number, doing, tick, step, start, stop
_SLOT = 64  # bytes
_log = logging.getLogger("resilient_train")


class Doing(IntEnum):
    """What the process was doing."""

    ENDED = 0  # in order
    UPDATING = 1
    BETWEEN = 2  # two updates: evaluating, saving
    HUNG = 3  # in an update, and was ended by its watchdog
    FIRST = 4  # the first update after its start


@dataclass(frozen=True, slots=True)
class Position:
    """Where a process was in the run."""

    doing: Doing = Doing.ENDED
    tick: int = 0
    step: int = 0  # accepted updates
    start: int = 0  # of the samples in use
    stop: int = 0


class Progress:
    """The position of this process; without a run directory it is written nowhere."""

    def __init__(self, directory: Path | None) -> None:
        self._path = None if directory is None else directory / PROGRESS
        self._number, self.last = 0, Position()  # of the previous process
        if directory is not None:
            with contextlib.suppress(OSError):
                self._number, self.last = _read(directory)
        self._position = self.last
        self._file, self._is_failing = -1, False
        self._first: int | None = None  # tick of this process

    def updating(self, tick: int, step: int, start: int, stop: int) -> None:
        """Note the update that is about to be attempted, and its samples."""
        self._first = tick if self._first is None else self._first
        self._note(Position(Doing.FIRST if tick == self._first else Doing.UPDATING, tick, step, start, stop))

    def turned_to(self, doing: Doing, tick: int | None = None) -> None:
        """Note that the process does something else now, after `tick` attempted updates if that changed."""
        self._note(replace(self._position, doing=doing, tick=self._position.tick if tick is None else tick))

    @property
    def is_updating(self) -> bool:
        """Say whether an update is being made."""
        return self._position.doing in (Doing.UPDATING, Doing.FIRST)

    def _note(self, position: Position) -> None:
        self._position = position
        if self._path is None:
            return
        self._number += 1
        record = _RECORD.pack(self._number, position.doing, position.tick, position.step, position.start, position.stop)
        slot = (record + zlib.crc32(record).to_bytes(4, "little")).ljust(_SLOT, b"\0")
        try:
            if self._file >= 0 and not os.fstat(self._file).st_nlink:  # it was removed
                os.close(self._file)
                self._file = -1
            if self._file < 0:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
                if os.fstat(self._file).st_size > 2 * _SLOT:  # it was no record
                    os.ftruncate(self._file, 2 * _SLOT)
            os.pwrite(self._file, slot, self._number % 2 * _SLOT)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                _log.warning("%s cannot be written: %s", self._path, error.strerror)
            self._is_failing = True


def position_of(run_dir: Path) -> Position | None:
    """Return where the newest process of a run is or was; None if that is not known."""
    try:
        return _read(run_dir)[1]
    except OSError:
        return None


def _read(run_dir: Path) -> tuple[int, Position]:
    """Return the newer of the two records, and its number; 0 if both are damaged. Raises OSError."""
    newest, position, content = 0, Position(), read_plain(run_dir / PROGRESS)
    for slot in (content[:_SLOT], content[_SLOT : 2 * _SLOT]):
        record, crc = slot[: _RECORD.size], slot[_RECORD.size : _RECORD.size + 4]
        if len(crc) == 4 and zlib.crc32(record) == int.from_bytes(crc, "little"):
            number, doing, *rest = _RECORD.unpack(record)
            if number > newest and doing in set(Doing):
                newest, position = number, Position(Doing(doing), *rest)
    return newest, position
