"""Writes checkpoints in a thread, so that training does not wait for the disk."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from resilient_train.durable.manifest import Entry
from resilient_train.ground.files import at_disk


@dataclass(eq=False)
class Job:
    """One thing to write, and how that went."""

    step: int
    write: Callable[[], Entry]
    began: float | None = None  # when, on the monotonic clock
    entry: Entry | None = None  # the checkpoint that it wrote
    error: Exception | None = None


class Writer:
    """Writes one thing at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.writing: Job | None = None
        self.finished: deque[Job] = deque()  # whoever reads one removes it

    def offer(self, job: Job) -> None:
        """Write this in a new thread, so that no thread is left after the run."""
        with self._changed:
            assert self.writing is None
            self.writing = job

        # No daemon: the interpreter would end it in the middle of torch's code, which aborts the process.
        threading.Thread(target=self._execute, args=(job,), name="checkpoint-writer").start()

    def write_now(self, job: Job) -> Job:
        """Wait for the current job, then write this."""
        with at_disk(), self._changed:  # two at a time would write to the same directory
            self._changed.wait_for(lambda: self.writing is None)
            self.writing = job
        self._execute(job)
        return job

    def wait(self, seconds: float | None = None) -> bool:
        with at_disk(), self._changed:
            return self._changed.wait_for(lambda: self.writing is None, seconds)

    def _execute(self, job: Job) -> None:
        job.began = time.monotonic()
        try:
            job.entry = job.write()
        except Exception as error:  # whatever goes wrong, training continues
            job.error = error
        self.finished.append(job)
        with self._changed:
            self.writing = None
            self._changed.notify_all()
