"""What is saved when a GPU is lost: a failed check is reported later, anywhere, and ends all computing there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from resilient_train.core.protocols import OnError
from resilient_train.core.transaction import Transaction
from resilient_train.extensions import Extension
from resilient_train.ground.errors import in_one_line, text_of
from resilient_train.ground.types import fact
from resilient_train.ground.wording import log, say
from resilient_train.parts.run import Run
from resilient_train.processes.world import is_lost_device


class LostDevice(Extension, OnError):
    """Writes the newest verified state, which is in the host's memory, before the process ends with the error."""

    def build(self, run: Run) -> None:
        self._run, self._is_known = run, False
        run.on_error.append(self)

    @contextmanager
    def around_compute(self, update: Transaction) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a batch that is copied to the device may be the first to notice
            self.escaped(error)
            raise

    def escaped(self, error: BaseException) -> None:
        if self._is_known or not is_lost_device(error):
            return
        self._is_known, run = True, self._run
        said = say(fact("lost_gpu", error=text_of(error).splitlines()[0], times=run.policy.crashes))
        error.add_note(f"resilient_train: {said}")
        log.error("%s", said)
        try:
            run.ring.copier.give_up()
            _, write = run.keeper.rescue()
            write()
            run.keeper.progress.stays()
        except Exception as failed:  # the error that the loop gets is the first one
            log.error("the newest verified state could not be written: %s", in_one_line(failed))
