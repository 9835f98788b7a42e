"""The lock on a run directory: one live process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import threading
import time
from pathlib import Path

from resilient_train.errors import DirectoryInUse
from resilient_train.files import read_plain

LOCK = ".lock"
_LOOK_EVERY_S = 1.0

_log = logging.getLogger("resilient_train")
_changing = threading.Lock()
_held: set[int] = set()  # descriptors of this process's locks


def _release_in_child() -> None:
    """A forked data worker inherits the descriptor and would keep the lock after the run was killed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()
    _changing.release()


os.register_at_fork(before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_release_in_child)


class DirectoryLock:
    """A lock that the kernel releases when the process ends, however it ends: there is nothing to clean up.

    It is on the directory itself, which cannot be replaced unnoticed, and on the file that names the process. On some
    network file systems other hosts see only the lock on the file: a thread restores that when the file is removed.
    """

    def __init__(self, directory: Path) -> None:
        """Take the lock, or raise DirectoryInUse naming who holds it."""
        self._path = directory / LOCK
        with contextlib.ExitStack() as opened:  # the directory first: the holder may lack the file
            self._whole = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            opened.callback(os.close, self._whole)
            self._require(_taken(self._whole))
            self._file = self._open()
            opened.callback(os.close, self._file)
            self._require(_taken(self._file))
            self._sign()
            opened.pop_all()
        _held.update((self._whole, self._file))
        self._over = threading.Event()
        threading.Thread(target=self._keep, name="lock", daemon=True).start()

    def release(self) -> None:
        """Release it, once: a closed descriptor may soon belong to another file."""
        with _changing:
            if self._over.is_set():
                return
            self._over.set()
            for descriptor in {self._whole, self._file} & _held:
                _held.discard(descriptor)
                os.close(descriptor)

    def _require(self, is_ours: bool) -> None:
        if not is_ours:
            advice = "wait for it to end, or start another run with run.name=..."
            raise DirectoryInUse(self._path.parent, _holder(self._path), advice)

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)

    def _sign(self) -> None:
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _keep(self) -> None:
        """Lock the file again when it was removed or replaced: two writers would ruin the run."""
        while not self._over.wait(_LOOK_EVERY_S):
            with _changing, contextlib.suppress(OSError):
                if self._over.is_set():
                    return
                try:
                    is_there = os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._file))
                except FileNotFoundError:
                    is_there = False
                if is_there or not any(self._path.parent.iterdir()):
                    continue
                file = self._open()
                if not _taken(file):
                    other = _holder(self._path)
                    _log.error("%s was removed, and %s has the run now: this process ends", self._path, other)
                    os._exit(1)
                _log.warning("%s was removed during the run: it is locked again", self._path)
                _held.add(file)
                _held.discard(self._file)
                os.close(self._file)
                self._file = file
                self._sign()


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
    """Return who holds the lock on a directory; None if it is free."""
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
