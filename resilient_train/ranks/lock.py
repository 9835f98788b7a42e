"""One live process to a run directory."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from resilient_train.errors import DirectoryInUse

LOCK = ".lock"


class DirectoryLock:
    """A lock that the kernel lets go of with its process, however that ends: there is nothing to clean up."""

    def __init__(self, directory: Path) -> None:
        """Take the lock, or raise DirectoryInUse naming who holds it."""
        self._file = open(directory / LOCK, "a+")  # noqa: SIM115  # held for the life of the run
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise DirectoryInUse(
                f"{directory} is in use by {holder}: wait for it to end, or start another run with run.name=..."
            ) from None
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def release(self) -> None:
        """Let the next process in."""
        self._file.close()
