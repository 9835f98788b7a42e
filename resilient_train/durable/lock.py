"""The lock on a run directory: one live process at a time."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from resilient_train.ground.errors import DirectoryInUse

LOCK = ".lock"

_held: set[int] = set()  # descriptors of this process's locks


def _release_in_child() -> None:
    """A forked data worker inherits the descriptors and would keep the lock after the run was killed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)


class DirectoryLock:
    """A lock that the kernel releases when the process ends, however it ends: there is nothing to clean up.

    On a file, as some network file systems lock only files.
    """

    def __init__(self, directory: Path) -> None:
        self._descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        _held.add(self._descriptor)
        try:
            if not _taken(self._descriptor):
                advice = "wait for it to end, or choose another directory"
                raise DirectoryInUse(directory, _holder(directory), advice)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release it, once: a closed descriptor may soon belong to another file."""
        if self._descriptor in _held:
            _held.discard(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = -1


def _taken(descriptor: int) -> bool:
    """Try to lock it, more than once: `holder_of` takes the lock for a moment."""
    for pause in (0.02, 0.05, 0.0):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(pause)
        else:
            return True
    return False


def holder_of(directory: Path) -> str | None:
    with suppress(OSError), open(directory / LOCK, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _holder(directory)
    return None


def _holder(directory: Path) -> str:
    with suppress(OSError):
        return (directory / LOCK).read_text(errors="replace").strip() or "another process"
    return "another process"
