"""The journal of a run: what a kill, a full disk or a damaged file must not make it forget.

Each entry is one line of JSON with its own checksum:

    {"n": 17, "at": 1767225600000, "kind": "incident_opened", "format": 3, "incident": {...}, "crc": "5f3a9c01"}

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
from collections.abc import Iterator, Mapping
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

_FORMAT = 3
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
            self.has_failed = False


class LineFile:
    """Appends lines to a file with one writer. What the disk does not take waits, and is written with the next ones."""

    def __init__(self, path: Path, meanwhile: str) -> None:
        self.path, self.attempts = path, WriteAttempts(path, meanwhile)
        self.waiting: deque[bytes] = deque()  # lines that are not on disk yet
        self._end = -1  # where the next line goes; unknown before the file was opened

    def flush(self, *, sync: bool) -> None:
        with self.attempts.attempt():
            is_new = not self.path.exists()
            file = files.disk.open(self.path)
            try:
                size = os.fstat(file).st_size
                if not 0 <= self._end <= size:  # at the first write, or it was emptied meanwhile
                    self._end = size
                    if size and os.pread(file, 1, size - 1) != b"\n":
                        self.waiting.appendleft(b"\n")  # ends a line that a kill has left half written
                end = self._end + write_all(file, b"".join(self.waiting), self._end)
                if sync:
                    files.disk.sync(file)
            finally:
                os.close(file)
            if is_new and sync:
                with suppress(OSError):  # some file systems cannot: the entry itself is synced
                    sync_directory(self.path.parent)
            self._end = end
            self.waiting.clear()


class Journal(LineFile):
    """An append-only file that its one writer opens; all others call `read`."""

    def __init__(self, path: Path) -> None:
        """Raises TrainError if it cannot be read: what it holds is unknown, so nothing may be written over it."""
        super().__init__(path, "entries are kept in memory and tried again, but a kill would lose them")
        try:
            found = [entry for entry, _ in entries(path)]
        except OSError as error:
            raise TrainError(f"{path} cannot be read: {error.strerror or error}") from error
        self.entries = [entry for entry in found if entry is not None]
        self._number: int = self.entries[-1]["n"] if self.entries else 0
        self._lock = threading.Lock()  # a watchdog may write as well
        # Entries after a damaged line are kept: each has its own checksum, and a drill that is forgotten fires again.
        # The damaged line stays in the file; a person may look at it.
        if damaged := len(found) - len(self.entries):
            log.warning("%s: damaged and left out: %s", path, counted(damaged, "line"))

    def write(self, kind: str, /, **fields: Any) -> None:
        """Add an entry. It is on disk when this returns; if the disk does not take it, later writes try again."""
        with self._lock:
            self._number += 1
            head = {"n": self._number, "at": time.time_ns() // 1_000_000, "kind": kind, "format": _FORMAT}
            entry = {**head, **masked_tree(plain(fields))}
            self.entries.append(entry)
            self.waiting.append(seal(json.dumps(entry)))
            self.flush(sync=True)

    def close(self) -> None:
        with self._lock:
            if self.waiting:
                self.flush(sync=True)
            if left := len(self.waiting):
                log.error("%s lacks the last %s: the disk did not take them", self.path, counted(left, "entry"))


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
            entry = unseal(line.removesuffix(b"\n"))
            if entry is None and not line.endswith(b"\n"):  # it is being written, or was when a kill came
                return
            end += len(line)
            if entry is not None and (form := entry.get("format", _FORMAT)) != _FORMAT:
                what = f"it is of format {form!s:.20}, where this version reads {_FORMAT}"
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


class Outbox(LineFile):
    """What MLflow is to show. The kernel keeps what was written if the process ends; whoever uploads it syncs."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "what MLflow is to show is kept in memory, and a kill would lose it")

    def put(self, kind: str, /, **fields: Any) -> None:
        """Add an entry. It never raises; what the disk does not take waits for the next one."""
        entry = {"at": time.time_ns() // 1_000_000, "kind": kind, **fields}
        self.waiting.append(seal(json.dumps(plain(entry))))
        self.flush(sync=kind == ENDED)
