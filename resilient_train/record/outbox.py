"""What MLflow is to show, written to disk first, whether MLflow can be reached or not.

Each line is an entry with a checksum, as in the journal:

    {"at": 1767225600000, "kind": "metrics", "tick": 400, "values": {"loss": 2.31}, "crc": "5f3a9c01"}

Each process of a run writes one that `began`, with a unique key and the parameters, and then `metrics`. A separate
process uploads them, now or later.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilient_train.files import read_plain
from resilient_train.record.journal import Entry, WriteAttempts, append_lines, plain, seal, size_of

OUTBOX = "outbox.jsonl"  # its name in a run directory
BEGAN, METRICS = "began", "metrics"

MOST_WAITING = 50_000  # entries that a full disk does not take, about 1 KB each: newer ones are dropped
WRITE_EVERY_S, TRY_AGAIN_S = 0.25, 2.0
_TAIL_BYTES = 2**20  # more than any entry has

_log = logging.getLogger("resilient_train")


class Outbox:
    """Takes entries in a microsecond, and writes them in a thread a few times a second.

    The calling thread would wait for the disk while a checkpoint is synced, or for the interpreter if each entry woke
    a thread.
    """

    def __init__(self, path: Path, also: Callable[[], None] = lambda: None) -> None:
        """Write to `path`; `also` is called each time, in the same thread."""
        self.path, self._also = path, also
        self.dropped = 0
        self._waiting: deque[Entry] = deque()
        self._lines: list[bytes] = []  # entries that are sealed and not on disk yet
        self._closing = threading.Event()
        self._end = -1  # where the next line goes; unknown before the file is read
        self._attempts = WriteAttempts(path, "what MLflow is to show is kept in memory, and a kill would lose it")
        self._thread = threading.Thread(target=self._main, name="outbox", daemon=True)
        self._thread.start()

    def put(self, kind: str, /, **fields: Any) -> None:
        """Add an entry. It never waits and never raises."""
        if len(self._waiting) + len(self._lines) < MOST_WAITING:
            self._waiting.append({"at": time.time_ns() // 1_000_000, "kind": kind, **fields})
        else:
            self.dropped += 1

    def close(self, within_s: float = 10.0) -> bool:
        """Write the rest in at most `within_s`; say whether everything is on disk."""
        self._closing.set()
        self._thread.join(within_s)
        is_whole = not (self._thread.is_alive() or self._waiting or self._lines or self.dropped)
        if not is_whole:
            _log.warning("%s is not complete: the disk did not take all of it", self.path)
        return is_whole

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(TRY_AGAIN_S if self._attempts.has_failed else WRITE_EVERY_S)
            if self._waiting or self._lines:
                with self._attempts.attempt():
                    self._write(is_last)
            if not self._closing.is_set():
                self._also()

    def _write(self, is_last: bool) -> None:
        if self._end < 0 or size_of(self.path) < self._end:  # not read yet, or it was removed
            tail = read_plain(self.path, last=_TAIL_BYTES) if self.path.exists() else b""
            self._end = size_of(self.path) - len(tail) + tail.rfind(b"\n") + 1
        # One by one: the training thread may add to them meanwhile. Each is sealed once, however full the disk is.
        for _ in range(len(self._waiting)):
            self._lines.append(seal(json.dumps(plain(self._waiting.popleft()))))
        self._end = append_lines(self.path, self._lines, self._end, sync=is_last)  # before, whoever uploads them syncs
        self._lines.clear()
