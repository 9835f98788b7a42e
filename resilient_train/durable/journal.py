"""The journal of a run: what a kill, a full disk or a damaged file must not make it forget.

Each entry is one line of JSON with its own checksum:

    {"n": 17, "at": 1767225600000, "kind": "incident_opened", "format": 2, "incident": {...}, "crc": "5f3a9c01"}

`n` counts the entries, `at` is in milliseconds since 1970, `crc` is the CRC-32 of the line up to the comma before it.
The outbox has the same kind of lines.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from resilient_train.ground import files
from resilient_train.ground.errors import TrainError
from resilient_train.ground.files import commit_text, sync_directory, write_all
from resilient_train.ground.secrets import masked_tree
from resilient_train.ground.wording import counted, log

JOURNAL = "journal.jsonl"  # its name in a run directory

Entry = dict[str, Any]

_FORMAT = 2
_SEALED = re.compile(rb'(?P<body>\{.*), "crc": "(?P<crc>[0-9a-f]{8})"\}')


class WriteAttempts:
    """Attempts to write a file: a failure is reported once, until one succeeds again."""

    def __init__(self, path: Path | None, meanwhile: str) -> None:
        """`meanwhile` says what a failure means."""
        self._path, self._meanwhile = path, meanwhile
        self.has_failed = False  # the newest

    @contextmanager
    def attempt(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self.has_failed:
                log.warning("%s cannot be written (%s): %s", self._path, error.strerror or error, self._meanwhile)
            self.has_failed = True
        else:
            if self.has_failed:
                log.info("%s is written again", self._path)
            self.has_failed = False


class Journal:
    """An append-only file that its one writer opens; all others call `read`."""

    def __init__(self, path: Path) -> None:
        """Raises TrainError if it cannot be read: what it holds is unknown, so nothing may be written over it."""
        self.path = path
        try:
            lines, size = list(entries(path)), size_of(path)
        except OSError as error:
            why = f"cannot be read ({error.strerror}): make it readable, or move it away to forget it"
            raise TrainError(f"{path} {why if error.strerror else error}") from error
        self.entries = [entry for entry, _ in lines if entry is not None]
        self._number: int = self.entries[-1]["n"] if self.entries else 0
        self._end = max((end for entry, end in lines if entry is not None), default=0)
        self.waiting: list[bytes] = []  # lines that the disk did not take yet
        self._attempts = WriteAttempts(path, "entries are kept in memory and tried again, but a kill would lose them")
        self._lock = threading.Lock()  # a watchdog may write as well
        # Entries after a damaged line are kept: each has its own checksum, and a drill that is forgotten fires again.
        # The damaged line stays in the file; a person may look at it.
        if damaged := sum(entry is None and end < self._end for entry, end in lines):
            log.warning("%s: damaged and left out: %s", path, counted(damaged, "line"))
        if tail := size - self._end:
            log.warning("%s: the next entry replaces the last %d bytes, which are no complete entry", path, tail)

    def write(self, kind: str, /, **fields: Any) -> None:
        """Add an entry. It is on disk when this returns; if the disk does not take it, later writes try again."""
        with self._lock:
            self._number += 1
            head = {"n": self._number, "at": time.time_ns() // 1_000_000, "kind": kind, "format": _FORMAT}
            entry = {**head, **masked_tree(plain(fields))}
            self.entries.append(entry)
            self.waiting.append(seal(json.dumps(entry)))
            self._flush()

    def close(self) -> None:
        with self._lock:
            if self.waiting:
                self._flush()
            if left := len(self.waiting):
                log.error("%s lacks the last %s: the disk did not take them", self.path, counted(left, "entry"))

    def _flush(self) -> None:
        with self._attempts.attempt():
            is_new = not self.path.exists()
            self._end = append_lines(self.path, self.waiting, self._end)
            if is_new:
                with suppress(OSError):  # some file systems cannot: the entry itself is synced
                    sync_directory(self.path.parent)
            self.waiting.clear()


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def append_lines(path: Path, lines: Iterable[bytes], start: int, *, sync: bool = True) -> int:
    """Write lines at byte `start` of a file with one writer, and return where they end.

    What stands there is replaced: a kill or a full disk has left it half written, or it could not be synced.
    """
    file = files.disk.open(path)
    try:
        if (size := os.fstat(file).st_size) > start:
            files.disk.truncate(file, start)
        start = start if size >= start else 0  # it was emptied meanwhile
        end = start + write_all(file, b"".join(lines), start)
        if sync:
            files.disk.sync(file)
    finally:
        os.close(file)
    return end


def read(path: Path) -> list[Entry]:
    """Return the complete entries of a journal, which may be in use. Raises OSError, also if the version differs."""
    return [entry for entry, _ in entries(path) if entry is not None]


def entries(path: Path, start: int = 0) -> Iterator[tuple[Entry | None, int]]:
    """Yield the entries after byte `start`, each with where it ends; None for a damaged line."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        end = start if 0 <= start <= os.fstat(file.fileno()).st_size else 0
        file.seek(end)
        for line in file:
            if not line.endswith(b"\n"):  # it is being written, or was when a kill came
                return
            end += len(line)
            entry = unseal(line[:-1])
            if entry is not None and (form := entry.get("format", _FORMAT)) != _FORMAT:
                what = f"is of format {form!s:.20}, where this version reads {_FORMAT}"
                raise OSError(f"{what}: resume the run with the version of resilient_train that wrote it")
            yield entry, end


def plain(value: Any) -> Any:
    """Return the nearest value that every reader of JSON accepts: NaN, infinities and other objects become text."""
    match value:
        case None | bool():
            return value
        case str():
            return str(value)  # of an enum only its text
        case Mapping():
            return {str(key): plain(one) for key, one in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(one) for one in value]
        case Integral():  # numpy's too
            return int(value)
        case Real():
            number = float(value)
            return number if math.isfinite(number) else str(number)
    return str(value)


def commit_json(path: Path, tree: Any) -> None:
    """Replace a file by what every reader of JSON accepts, without secrets."""
    commit_text(path, json.dumps(masked_tree(plain(tree)), indent=2) + "\n")


def seal(text: str) -> bytes:
    """Return the line of an entry, which is given as JSON, with its checksum."""
    body = text.encode()[:-1]  # without its closing brace
    return b'%b, "crc": "%08x"}\n' % (body, zlib.crc32(body))


def unseal(line: bytes) -> Entry | None:
    """Return the entry of a line, which is given without its newline; None if it is damaged."""
    sealed = _SEALED.fullmatch(line)
    if sealed is None or zlib.crc32(sealed["body"]) != int(sealed["crc"], 16):
        return None
    entry: Entry = json.loads(sealed["body"] + b"}")
    return entry


OUTBOX = "outbox.jsonl"  # its name in a run directory
BEGAN, METRICS, ENDED = "began", "metrics", "ended"

WRITE_EVERY_S, TRY_AGAIN_S = 0.25, 2.0
_TAIL_BYTES = 2**20  # more than any entry has


class Outbox:
    """Takes entries without a wait, and writes them in a thread a few times a second.

    The calling thread would wait for the disk while a checkpoint is synced, or for the interpreter if each entry woke
    a thread.
    """

    def __init__(self, path: Path, also: Callable[[], None] = lambda: None) -> None:
        """Write to `path`; `also` is called each time, in the same thread."""
        self.path, self._also = path, also
        self._waiting: deque[bytes] = deque()  # lines that are not on disk yet
        self._closing = threading.Event()
        self._end = -1  # where the next line goes; unknown before the file is read
        self._attempts = WriteAttempts(path, "what MLflow is to show is kept in memory, and a kill would lose it")
        self._thread = threading.Thread(target=self._main, name="outbox", daemon=True)
        self._thread.start()

    def put(self, kind: str, /, **fields: Any) -> None:
        """Add an entry. It never waits and never raises."""
        entry = {"at": time.time_ns() // 1_000_000, "kind": kind, **fields}
        self._waiting.append(seal(json.dumps(plain(entry))))

    def close(self, within_s: float = 10.0) -> bool:
        """Write the rest in at most `within_s`; say whether everything is on disk."""
        self._closing.set()
        self._thread.join(within_s)
        is_whole = not (self._thread.is_alive() or self._waiting)
        if not is_whole:
            log.warning("%s is not complete: the disk did not take all of it", self.path)
        return is_whole

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(TRY_AGAIN_S if self._attempts.has_failed else WRITE_EVERY_S)
            if self._waiting:
                with self._attempts.attempt():
                    self._write(is_last)
            if not self._closing.is_set():
                self._also()

    def _write(self, is_last: bool) -> None:
        if self._end < 0:  # not read yet
            with open(self.path, "a+b") as file:
                file.seek(max(0, size_of(self.path) - _TAIL_BYTES))
                start, tail = file.tell(), file.read()
            self._end = start + tail.rfind(b"\n") + 1
        lines = [*self._waiting]
        self._end = append_lines(self.path, lines, self._end, sync=is_last)  # before, whoever uploads them syncs
        for _ in lines:  # the training thread may have added to them meanwhile
            self._waiting.popleft()
