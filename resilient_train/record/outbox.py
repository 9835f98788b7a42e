"""What to upload to an experiment tracker, written to disk first, whether the tracker can be reached or not.

Each line is an entry with a checksum, as in the journal:

    {"n": 17, "at": 1767225600000, "kind": "metrics", "tick": 400, "values": {"loss": 2.31}, "crc": "5f3a9c01"}

The first one, `opened`, holds a unique key; `began` and `ended` mark the processes of a run; `metrics`, `params` and
`artifact` are what to show. A separate process uploads them, now or later.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
import uuid
from collections import deque
from pathlib import Path
from typing import Any

from resilient_train import files
from resilient_train.files import write_all
from resilient_train.record.journal import Entry, plain, seal, unseal

OUTBOX = "outbox.jsonl"  # its name in a run directory
OPENED, BEGAN, ENDED, METRICS, PARAMS, ARTIFACT = "opened", "began", "ended", "metrics", "params", "artifact"

MOST_WAITING = 50_000  # entries that a full disk does not take, about 1 KB each: newer ones are dropped
WRITE_EVERY_S, TRY_AGAIN_S, SYNC_EVERY_S = 0.25, 2.0, 5.0
_TAIL_BYTES = 2**20
_CHECKSUM = re.compile(rb'"([0-9a-f]{8})"\}\n\Z')

_log = logging.getLogger("resilient_train")


class Outbox:
    """Takes entries in a microsecond, and writes them in a thread a few times a second.

    The calling thread would wait for the disk whenever a checkpoint is being synced. Waking a thread for each entry
    would keep the training thread from the interpreter on a busy machine.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0
        self._waiting: deque[Entry] = deque()
        self._sealed: list[bytes] = []  # lines that are not on disk yet
        self._wake, self._is_closing = threading.Event(), False
        self._end = -1  # where the next line goes; unknown before the file is read
        self._number = 0  # of the last entry
        self._synced_at = 0.0
        self._is_failing = False
        self._thread = threading.Thread(target=self._main, name="outbox", daemon=True)
        self._thread.start()

    def put(self, kind: str, /, **fields: Any) -> None:
        """Add an entry. It never waits and never raises."""
        waiting = len(self._waiting) + len(self._sealed)
        if waiting < MOST_WAITING or kind == ENDED:
            self._waiting.append({"at": time.time_ns() // 1_000_000, "kind": kind, **fields})
            if waiting == MOST_WAITING // 2:
                self._wake.set()
        else:
            self.dropped += 1

    def close(self, within_s: float) -> bool:
        """Write the rest in at most `within_s`; say whether everything is on disk."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(within_s)
        return not (self._thread.is_alive() or self._waiting or self._sealed or self.dropped)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        while not self._is_closing:
            self._wake.wait(TRY_AGAIN_S if self._is_failing else WRITE_EVERY_S)
            self._wake.clear()
            self._flush(is_last=self._is_closing)
        self._flush(is_last=True)

    def _flush(self, *, is_last: bool) -> None:
        if not (self._waiting or self._sealed):
            return
        try:
            self._write(is_last)
        except OSError as error:
            if not self._is_failing:
                what = "what MLflow is to show is kept in memory, and a kill would lose it"
                _log.warning("%s cannot be written (%s): %s", self.path, error.strerror or error, what)
            self._is_failing = True
        else:
            self._is_failing = False

    def _write(self, is_last: bool) -> None:
        """Write the waiting entries after the last complete one."""
        file = files.disk.open(self.path)
        try:
            size = os.fstat(file).st_size
            if self._end < 0 or size < self._end:  # not read yet, or it was removed
                self._number, self._end = _last(file, size)
            if self._end == 0 and not self._sealed:
                began = self._waiting[0]["at"]  # not later than the first entry
                self._waiting.appendleft({"at": began, "kind": OPENED, "key": uuid.uuid4().hex})
            if size > self._end:  # a kill or a full disk left it half written
                files.disk.truncate(file, self._end)
            # One by one: the training thread may add to them meanwhile. Each is sealed once, however full the disk is.
            for _ in range(len(self._waiting)):
                self._number += 1
                self._sealed.append(seal(json.dumps(plain({"n": self._number, **self._waiting.popleft()}))))
            self._end += write_all(file, b"".join(self._sealed), self._end)
            self._sealed.clear()
            if is_last or time.monotonic() - self._synced_at > SYNC_EVERY_S:
                self._synced_at = time.monotonic()
                files.disk.sync(file)
        finally:
            os.close(file)


def seal_before(path: Path, end: int) -> str | None:
    """Return the checksum of the line that ends at byte `end`; None if no line does."""
    try:
        with open(path, "rb") as file:
            start = max(0, end - _TAIL_BYTES)
            file.seek(start)
            lines = file.read(end - start)
    except OSError:
        return None
    found = _CHECKSUM.search(lines) if len(lines) == end - start else None
    return found[1].decode() if found else None


def _last(file: int, size: int) -> tuple[int, int]:
    """Return the number of the last complete entry, and where it ends."""
    start = max(0, size - _TAIL_BYTES)
    *lines, rest = os.pread(file, size - start, start).split(b"\n")
    end = size - len(rest)
    for line in reversed(lines):
        if (entry := unseal(line)) is not None:
            return entry["n"], end
        end -= len(line) + 1
    return 0, size - len(rest) if start else 0  # what is longer and cannot be read is kept
