"""Writes checkpoints in a thread, so that training does not wait for the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from resilient_train.core.ring import Snapshot
from resilient_train.durable.store import Entry, Store
from resilient_train.ground.errors import in_one_line
from resilient_train.ground.files import at_disk
from resilient_train.ground.wording import log

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 120.0  # between two attempts on a disk that fails
_NICE = 10  # training has priority
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(eq=False)
class Job:
    """One thing to write, and how that went."""

    step: int
    write: Callable[[], Entry | None]  # None: it was not a checkpoint
    snapshot: Snapshot | None = None  # that it reads
    entry: Entry | None = None  # the checkpoint that it wrote
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.counts_as = self.step  # an earlier step, if the run was rewound to that meanwhile

    @property
    def trouble(self) -> str:
        assert self.error is not None
        return getattr(self.error, "strerror", None) or in_one_line(self.error)

    @property
    def is_disk_full(self) -> bool:
        return getattr(self.error, "errno", None) in _NO_ROOM


class Writer:
    """Writes one checkpoint at a time, then prunes older ones; pauses for a while after a failure."""

    def __init__(
        self, store: Store, *, keep: int, keep_every: int, reference: Callable[[], int | None] = lambda: None
    ) -> None:
        """`reference` returns the step that the run is measured against, if any: its checkpoint is kept."""
        self._store, self._keep, self._keep_every, self._reference = store, keep, keep_every, reference
        self._changed = threading.Condition()
        self.writing: Job | None = None
        self.began: float | None = None  # when, on the monotonic clock
        self.finished: deque[Job] = deque()  # whoever reads one removes it
        self._pause, self._not_before = 0.0, 0.0

    @property
    def is_free(self) -> bool:
        return self.writing is None and time.monotonic() >= self._not_before

    def offer(self, job: Job) -> None:
        """Write this in a new thread, so that no thread is left after the run."""
        with self._changed:
            assert self.writing is None
            self.writing = job

        def write() -> None:
            with contextlib.suppress(OSError, AttributeError):  # on Linux, only of this thread
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            self._execute(job)

        try:
            # No daemon: the interpreter would end it in the middle of torch's code, which aborts the process.
            threading.Thread(target=write, name="checkpoint-writer").start()
        except RuntimeError as error:  # the machine has no thread left
            self._fail(job, error)
            self._end(job)

    def write_now(self, job: Job) -> Job:
        """Wait for the current job, then write this, even during a pause."""
        with at_disk(), self._changed:  # two at a time would write to the same directory
            self._changed.wait_for(lambda: self.writing is None)
            self.writing = job
        self._execute(job)
        return job

    def wait(self, seconds: float | None = None) -> bool:
        with at_disk(), self._changed:
            return self._changed.wait_for(lambda: self.writing is None, seconds)

    def _execute(self, job: Job) -> None:
        self.began = time.monotonic()
        try:
            job.entry = job.write()
            self._pause = self._not_before = 0.0
            if job.entry is not None:
                self._prune()
        except Exception as error:  # whatever goes wrong, training continues
            self._fail(job, error)
        finally:
            self.began = None
            self._end(job)

    def _fail(self, job: Job, error: Exception) -> None:
        job.error = error
        self._pause = min(max(_FIRST_PAUSE_S, 2 * self._pause), _LONGEST_PAUSE_S)
        self._not_before = time.monotonic() + self._pause

    def _end(self, job: Job) -> None:
        if job.snapshot is not None:
            job.snapshot.is_being_written = False
        self.finished.append(job)
        with self._changed:
            self.writing = None
            self._changed.notify_all()

    def _prune(self) -> None:
        """Remove old checkpoints behind a new one, which was read back before it was committed."""
        try:
            self._store.prune(self._keep, self._keep_every, self._reference())
        except Exception as error:  # the new one is complete nevertheless
            log.error("older checkpoints could not be removed: %s", in_one_line(error))
