"""One live process to a run directory."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

from resilient_train.errors import DirectoryInUse

LOCK = ".lock"
_PAUSES_S = (0.02, 0.05, 0.0)


_held: set[int] = set()  # descriptors of this process's locks


def _let_go_in_child() -> None:
    """A data worker inherits the descriptor, and with it the lock, which would outlive a run that is killed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


class DirectoryLock:
    """A lock that the kernel lets go of with its process, however that ends: there is nothing to clean up."""

    def __init__(self, directory: Path) -> None:
        """Take the lock, or raise DirectoryInUse naming who holds it."""
        self._descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        if not self._taken():
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(self._descriptor)
            advice = "wait for it to end, or start another run with run.name=..."
            raise DirectoryInUse(directory, holder, advice) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        _held.add(self._descriptor)

    def _taken(self) -> bool:
        """Try more than once: who only asks where the run stands holds it for a moment."""
        for pause in _PAUSES_S:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(pause)
            else:
                return True
        return False

    def release(self) -> None:
        """Let the next process in."""
        if self._descriptor in _held:
            _held.discard(self._descriptor)
            os.close(self._descriptor)
