"""What the guard does with each update besides its story."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from resilient_train.core.parts import RunParts
from resilient_train.core.protocols import Hook
from resilient_train.core.recovery import Recovery
from resilient_train.core.transaction import Transaction
from resilient_train.record.progress import Progress
from resilient_train.watch.examination import Examination
from resilient_train.wording import log


class NotePlace(Hook):
    """Notes which samples are in use: if the process dies, they may be to blame."""

    def __init__(self, parts: RunParts, progress: Progress) -> None:
        self._clock, self._samples, self._progress = parts.clock, parts.samples, progress
        self._noted = 0, 0

    def before_update(self) -> None:
        start = self._samples.next_start  # before they are fetched: a data set may hang
        self._note(start, start + self._samples.slicing.samples)

    @contextmanager
    def around_compute(self, update: Transaction) -> Iterator[None]:
        start, stop = update.update.start, update.update.stop
        if (start, stop) != self._noted:  # samples before them are left out
            self._note(start, stop)
        yield

    def _note(self, start: int, stop: int) -> None:
        self._noted = start, stop
        self._progress.updating(self._clock.tick + 1, self._clock.step, start, stop)


class FirstUpdate(Hook):
    """Looks at the first healthy update of a process: optimizers have created their state in it."""

    def __init__(self, recovery: Recovery, examination: Examination) -> None:
        self._recovery, self._examination = recovery, examination
        self._is_over = False

    def accepted(self, update: Transaction) -> None:
        if self._is_over:
            return
        self._is_over = True
        parts, is_first_step = self._recovery.parts, self._recovery.parts.clock.step == 1
        self._recovery.keeper.check()
        if is_first_step or not parts.checks.knows_usual_batches:
            self._examination.learn_usual_batches(update.inputs)
        if is_first_step:
            log.info("%s", parts.ring.describe())  # its size is known now that the optimizer has its moments
