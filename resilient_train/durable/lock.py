"""The lock on a run directory: one live process at a time."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from pathlib import Path

from resilient_train.ground.errors import DirectoryInUse
from resilient_train.ground.files import read_plain

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

    On the directory, which stays if the file is removed, and on the file: some network file systems lock only files.
    """

    def __init__(self, directory: Path) -> None:
        file = directory / LOCK
        self._descriptors: list[int] = []
        try:  # the directory first: the holder may lack the file
            self._take(directory, os.open(directory, os.O_RDONLY | os.O_DIRECTORY))
            self._take(directory, signed := os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666))
            os.ftruncate(signed, 0)
            os.pwrite(signed, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BaseException:
            self.release()
            raise

    def _take(self, directory: Path, descriptor: int) -> None:
        self._descriptors.append(descriptor)
        _held.add(descriptor)
        if not _taken(descriptor):
            advice = "wait for it to end, or choose another directory"
            raise DirectoryInUse(directory, _holder(directory / LOCK), advice)

    def release(self) -> None:
        """Release it, once: a closed descriptor may soon belong to another file."""
        for descriptor in _held.intersection(self._descriptors):
            _held.discard(descriptor)
            os.close(descriptor)
        self._descriptors.clear()


def _taken(descriptor: int) -> bool:
    """Try to lock it, more than once: `holder_of` takes the lock for a moment."""
    for pause in (0.02, 0.05, 0.0):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(pause)
        except OSError:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):  # as on NFS: the lock on the file must do
                return True
            raise
        else:
            return True
    return False


def holder_of(directory: Path) -> str | None:
    for path in (directory, directory / LOCK):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _holder(directory / LOCK)
        except OSError:
            continue
        finally:
            os.close(descriptor)
    return None


def _holder(path: Path) -> str:
    try:
        return read_plain(path, last=200).decode(errors="replace").strip() or "another process"
    except OSError:
        return "another process"
