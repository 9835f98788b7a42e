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
from dataclasses import dataclass
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
    start: int = 0  # of the samples at work
    stop: int = 0


class Progress:
    """The one record of a run; on ranks without the run directory it is written nowhere."""

    def __init__(self, directory: Path | None) -> None:
        self.last = Position()  # of the previous process
        self._position = Position()
        self._number, self._file, self._is_failing = 0, -1, False
        self._first: int | None = None  # tick of this process
        self._path = None if directory is None else directory / PROGRESS
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            self._recall(read_plain(self._path))
        self._position = self.last

    def updating(self, tick: int, step: int, start: int, stop: int) -> None:
        """Note the update that is about to be attempted, and its samples."""
        self._first = tick if self._first is None else self._first
        self._note(Position(Doing.FIRST if tick == self._first else Doing.UPDATING, tick, step, start, stop))

    def turned_to(self, doing: Doing, tick: int | None = None) -> None:
        """Note that the process does something else now; `tick` updates were attempted."""
        position = self._position
        tick = position.tick if tick is None else tick
        self._note(Position(doing, tick, position.step, position.start, position.stop))

    @property
    def is_updating(self) -> bool:
        """Say whether an update is under way."""
        return self._position.doing in (Doing.UPDATING, Doing.FIRST)

    def close(self) -> None:
        """Let go of the file."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._path = -1, None

    def _note(self, position: Position) -> None:
        self._position = position
        if self._path is None:
            return
        self._number += 1
        record = _RECORD.pack(self._number, position.doing, position.tick, position.step, position.start, position.stop)
        slot = (record + zlib.crc32(record).to_bytes(4, "little")).ljust(_SLOT, b"\0")
        try:
            if self._file < 0 or not os.fstat(self._file).st_nlink:  # it was removed
                self._open(self._path)
            os.pwrite(self._file, slot, self._number % 2 * _SLOT)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                _log.warning("%s cannot be written: %s", self._path, error.strerror)
            self._is_failing = True

    def _open(self, path: Path) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        if os.fstat(self._file).st_size > 2 * _SLOT:  # of something else
            os.ftruncate(self._file, 2 * _SLOT)

    def _recall(self, content: bytes) -> None:
        for slot in (content[:_SLOT], content[_SLOT : 2 * _SLOT]):
            record = slot[: _RECORD.size]
            if len(slot) < _RECORD.size + 4 or zlib.crc32(record) != int.from_bytes(slot[_RECORD.size :][:4], "little"):
                continue
            number, doing, *rest = _RECORD.unpack(record)
            if number > self._number and doing in set(Doing):
                self._number, self.last = number, Position(Doing(doing), *rest)


def position_of(run_dir: Path) -> Position | None:
    """Return where the newest process of a run is or was; None where it is not known."""
    try:
        content = read_plain(run_dir / PROGRESS)
    except OSError:
        return None
    progress = Progress(None)
    progress._recall(content)
    return progress.last
