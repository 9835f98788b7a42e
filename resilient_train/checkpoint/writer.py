"""The thread that writes checkpoints, so that training does not wait for the disk."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from resilient_train.checkpoint import manifest as manifests
from resilient_train.checkpoint.manifest import Damaged
from resilient_train.checkpoint.safetensors_files import is_share
from resilient_train.checkpoint.store import Entry, Store
from resilient_train.errors import in_one_line
from resilient_train.files import at_disk

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 120.0  # between two tries on a disk that takes nothing
_NICE = 10  # training goes first
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

_log = logging.getLogger("resilient_train")


@dataclass
class DiskConfig:
    every: int = field(default=0, metadata={"at_least": 0})
    keep: int = field(default=3, metadata={"at_least": 1})
    keep_every: int = field(default=0, metadata={"at_least": 0})


@dataclass(frozen=True, slots=True)
class Job:
    """One checkpoint to be written."""

    step: int
    tick: int
    write: Callable[[], Entry | None]  # None: it was no checkpoint
    done: Callable[[], None] = lambda: None  # called in any case, when its memory is no longer read


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one."""

    job: Job
    entry: Entry | None  # the checkpoint, if it was one
    trouble: str = ""  # why it could not be written
    error: Exception | None = None

    @property
    def is_room(self) -> bool:
        """Say whether the disk has no room for it, or may only be read."""
        return isinstance(self.error, OSError) and self.error.errno in _NO_ROOM


class Writer:
    """Writes one checkpoint at a time, prunes behind it, and keeps away for a while from what fails."""

    def __init__(
        self, store: Store, *, keep: int, keep_every: int, reference: Callable[[], int | None] = lambda: None
    ) -> None:
        """`reference` says which step the run is measured against, if it is: the checkpoint of that stays."""
        self._store, self._keep, self._keep_every, self._reference = store, keep, keep_every, reference
        self._wanted = threading.Condition()
        self._job: Job | None = None
        self._outcomes: deque[Outcome] = deque()
        self._pause, self._not_before = 0.0, 0.0
        self.began: float | None = None  # at what time on the monotonic clock the write under way did

    @property
    def is_free(self) -> bool:
        """Say whether it would take a job now."""
        return self._job is None and time.monotonic() >= self._not_before

    @property
    def is_failing(self) -> bool:
        """Say whether the disk did not take the last one."""
        return self._pause > 0

    def offer(self, job: Job) -> None:
        """Write this in the background: in a thread of its own, so that none is left behind by a run."""
        with self._wanted:
            assert self._job is None
            self._job = job
        thread = threading.Thread(target=self._main, args=(job,), name="checkpoint-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the machine has no thread left for now
            self._outcomes.append(self._failed(job, error))
            job.done()
            self._free()

    def write_now(self, job: Job) -> Outcome:
        """Write this before anything else goes on, whatever the disk said lately; what is under way comes first."""
        with at_disk(), self._wanted:  # two at a time would write to the same place
            self._wanted.wait_for(lambda: self._job is None)
            self._job = job
        try:
            return self._carry_out(job)
        finally:
            self._free()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing is being written."""
        with at_disk(), self._wanted:
            return self._wanted.wait_for(lambda: self._job is None, seconds)

    @property
    def writing(self) -> int | None:
        """The step of what is being written."""
        job = self._job
        return job.step if job is not None else None

    def heard(self) -> Outcome | None:
        """The next outcome that nobody has heard of."""
        return self._outcomes.popleft() if self._outcomes else None

    def _main(self, job: Job) -> None:
        with contextlib.suppress(OSError, AttributeError):  # Linux: of this thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            self._outcomes.append(self._carry_out(job))
        finally:
            self._free()

    def _free(self) -> None:
        with self._wanted:
            self._job = None
            self._wanted.notify_all()

    def _carry_out(self, job: Job) -> Outcome:
        self.began = time.monotonic()
        try:
            entry = job.write()
        except Exception as error:  # whatever goes wrong, the run goes on
            return self._failed(job, error)
        else:
            self._pause = self._not_before = 0.0
            if entry is not None:
                self._prune(entry)
            return Outcome(job, entry)
        finally:
            self.began = None
            job.done()

    def _failed(self, job: Job, error: Exception) -> Outcome:
        self._pause = min(max(_FIRST_PAUSE_S, 2 * self._pause), _LONGEST_PAUSE_S)
        self._not_before = time.monotonic() + self._pause
        said = error.strerror if isinstance(error, OSError) else None
        return Outcome(job, None, said or in_one_line(error), error)

    def _prune(self, entry: Entry) -> None:
        """Let old ones go, after the new one was read back."""
        try:
            # What each rank has written of it is not read by one of them: that would take as long as all of them.
            is_of_one = not any(map(is_share, entry.manifest.files if entry.manifest else ()))
            manifests.verify(entry.path, is_read=is_of_one)
            self._store.prune(self._keep, self._keep_every, self._reference())
        except Damaged as why:
            _log.error("%s %s: older checkpoints are kept", entry.path, why)
        except Exception as error:  # the new one is there all the same
            said = error.strerror if isinstance(error, OSError) else None
            _log.error("older checkpoints could not be removed: %s", said or in_one_line(error))
