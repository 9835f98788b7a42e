"""Where the run stands, written before every update at the cost of writing to memory.

The kernel keeps what was written to a mapped file, however the process ends. Only with the machine itself the last
seconds may be lost: then the older of two records is read, or none.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import yaml

from resilient_train.files import read_plain
from resilient_train.record.endings import CONFIG
from resilient_train.record.loop import loop_of

PROGRESS = "progress"  # its name in a run directory

_RECORD = struct.Struct("<6q")  # number, doing, tick, step, start, stop
_SLOT = 64  # bytes
_log = logging.getLogger("resilient_train")


class Doing(IntEnum):
    """What the process was at."""

    ENDED = 0  # in order
    UPDATING = 1
    BETWEEN = 2  # two updates: evaluating, saving
    HUNG = 3  # in the midst of an update it was ended because it did not go on


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a process was."""

    doing: Doing = Doing.ENDED
    tick: int = 0
    step: int = 0  # accepted updates
    start: int = 0  # of the samples at work
    stop: int = 0


class Progress:
    """The one record of a run; on ranks without the run directory it is written nowhere."""

    def __init__(self, directory: Path | None) -> None:
        self.last = Stand()  # of the process before this one
        self._stand = Stand()
        self._number, self._map = 0, None
        if directory is None:
            return
        try:
            file = os.open(directory / PROGRESS, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                if os.fstat(file).st_size != 2 * _SLOT:
                    os.ftruncate(file, 0)
                    os.pwrite(file, bytes(2 * _SLOT), 0)  # a hole would need room later: SIGBUS on a full disk
                self._map = mmap.mmap(file, 2 * _SLOT)
            finally:
                os.close(file)
        except OSError as error:
            _log.warning("where the run stands cannot be written down: %s", error.strerror)
            return
        for place in (0, 1):
            self._recall(self._map[place * _SLOT : (place + 1) * _SLOT])
        self._stand = self.last

    def updating(self, tick: int, step: int, start: int, stop: int) -> None:
        """Note what is about to be attempted."""
        self._note(Stand(Doing.UPDATING, tick, step, start, stop))

    def turned_to(self, doing: Doing, tick: int | None = None) -> None:
        """Note that the process is at something else now; `tick` updates were attempted."""
        stand = self._stand
        tick = stand.tick if tick is None else tick
        self._note(Stand(doing, tick, stand.step, stand.start, stand.stop))

    @property
    def is_updating(self) -> bool:
        """Say whether an update is under way."""
        return self._stand.doing is Doing.UPDATING

    def close(self) -> None:
        """Let go of the file."""
        if self._map is not None:
            with contextlib.suppress(BufferError, ValueError):
                self._map.close()
            self._map = None

    def _note(self, stand: Stand) -> None:
        self._stand = stand
        if self._map is None:
            return
        self._number += 1
        record = _RECORD.pack(self._number, stand.doing, stand.tick, stand.step, stand.start, stand.stop)
        place = self._number % 2 * _SLOT
        self._map[place : place + _RECORD.size + 4] = record + zlib.crc32(record).to_bytes(4, "little")

    def _recall(self, slot: bytes) -> None:
        record = slot[: _RECORD.size]
        if zlib.crc32(record) != int.from_bytes(slot[_RECORD.size : _RECORD.size + 4], "little"):
            return
        number, doing, *rest = _RECORD.unpack(record)
        if number > self._number and doing in set(Doing):
            self._number, self.last = number, Stand(Doing(doing), *rest)


def stand_of(run_dir: Path) -> Stand | None:
    """Where the newest process of a run was, also while it is at work; None where nothing tells."""
    try:
        content = read_plain(run_dir / PROGRESS)
    except OSError:
        return None
    progress = Progress(None)
    with contextlib.suppress(struct.error):  # of another length
        for slot in (content[: len(content) // 2], content[len(content) // 2 :]):
            progress._recall(slot)
    return progress.last


def steps_wanted(run_dir: Path) -> int | None:
    """How many updates a run is configured to make; None where its configuration does not say."""
    if (loop := loop_of(run_dir)) is not None:
        return loop.steps
    try:
        node = yaml.safe_load(read_plain(run_dir / CONFIG).decode("utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    run = node.get("run") if isinstance(node, dict) else None
    steps = run.get("steps") if isinstance(run, dict) else None
    return steps if type(steps) is int else None
