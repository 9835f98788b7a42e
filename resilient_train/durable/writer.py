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
    began: float = 0.0  # when, on the monotonic clock
    entry: Entry | None = None  # the checkpoint that it wrote
    error: Exception | None = None


class Writer:
    """Writes one thing at a time: that takes the lock, and releases it at its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.writing: Job | None = None
        self.finished: deque[Job] = deque()  # whoever reads one removes it

    def offer(self, job: Job) -> None:
        """Write this in a new thread, so that no thread is left after the run."""
        self._take(job)
        # No daemon: the interpreter would end it in the middle of torch's code, which aborts the process.
        threading.Thread(target=self._execute, args=(job,), name="checkpoint-writer").start()

    def write_now(self, job: Job) -> None:
        """Wait for the current job, then write this."""
        self._take(job)
        self._execute(job)

    def wait(self) -> None:
        with at_disk(), self._lock:
            pass

    def _take(self, job: Job) -> None:
        with at_disk():
            self._lock.acquire()
        job.began, self.writing = time.monotonic(), job

    def _execute(self, job: Job) -> None:
        try:
            job.entry = job.write()
        except Exception as error:  # whatever goes wrong, training continues
            job.error = error
        finally:
            self.finished.append(job)
            self.writing = None
            self._lock.release()
