"""How an update's samples are cut up: into micro-batches that fit into memory, over as many processes as there are."""

from __future__ import annotations

import torch

from resilient_train.data.samples import Slicing
from resilient_train.errors import TrainError
from resilient_train.record import notes
from resilient_train.record.notes import OutOfMemory
from resilient_train.recovery import Treatment
from resilient_train.wording import log

_SMALLER = "use a smaller data.batch_size with more accelerate.gradient_accumulation_steps, or activation checkpointing"


class Portions:
    """Cuts updates of the same samples in another way, when that has to be."""

    def __init__(self, treatment: Treatment) -> None:
        self._treatment, self._ward = treatment, treatment.ward
        self._lacking: list[OutOfMemory] = []

    def look(self) -> bool:
        """See whether the processes before these ran out of memory. Every rank comes here."""
        found = self._ward.world.all_of(notes.found(self._treatment.book.place, OutOfMemory))
        self._lacking = sorted({one for some in found for one in some})
        return bool(self._lacking)

    def as_before(self, samples: int) -> None:
        """Make updates of as many samples as before these processes, if those were others, in the room there was."""
        if samples:
            self._keep(samples)
        self._fit_into(self._treatment.micro_batch or self._ward.slicing.batch_size)
        for one in self._lacking[:1]:  # of several ranks the one with the least room
            if self._fit_into(one.batch_size - 1):
                self._treatment.slimmed(one.step, f"rank {one.rank}: {one.evidence}; {self._told()}", (one.rank,))
        notes.clear(self._treatment.book.place, OutOfMemory)

    def slimmer(self, step: int, evidence: str) -> Slicing:
        """Return how to make an update once more that did not fit into memory. Raises TrainError where that cannot be.

        Of several processes the others wait in a collective, where nobody can fetch them: all of them have to end.
        """
        what, slimmer = f"out of memory in update {step}: {evidence}", self._ward.slicing.halved()
        if slimmer is None or not self._treatment.may_slim() or not self._ward.samples.slice_as(slimmer):
            raise TrainError(f"{what}; {_SMALLER}")
        if self._ward.world.size > 1:
            raise TrainError(f"{what}; {self._left_for_next(step, evidence)}")
        return slimmer

    def slim(self, slimmer: Slicing, step: int, evidence: str) -> None:
        """Make smaller micro-batches from now on."""
        self._take(slimmer)
        self._treatment.slimmed(step, f"{evidence}; {self._told()}")

    def _left_for_next(self, step: int, evidence: str) -> str:
        """Leave word for the next start, which makes smaller micro-batches on all ranks; return what to do now."""
        place = self._treatment.book.place
        if place is None:
            return _SMALLER
        try:
            notes.leave(place, OutOfMemory(self._ward.slicing.batch_size, step, self._ward.world.rank, evidence))
        except OSError as error:
            return f"{_SMALLER} ({place} could not take a note: {error.strerror})"
        return "the same command, or a restart by the launcher, goes on with micro-batches of half the rows"

    def _fit_into(self, room: int) -> bool:
        """Make micro-batches of so many rows at most, if that can be; say whether they are smaller now."""
        ward, before = self._ward, self._ward.slicing
        while ward.slicing.batch_size > room and (slimmer := ward.slicing.halved()):
            if not ward.samples.slice_as(slimmer):
                break
            self._take(slimmer)
        return ward.slicing is not before

    def _keep(self, samples: int) -> None:
        """Make updates of as many samples as before, now that other processes make them."""
        ward, size = self._ward, self._ward.world.size
        sliced = ward.slicing.for_samples(samples)
        if sliced is None or (sliced != ward.slicing and not ward.samples.slice_as(sliced)):
            why = f"an update is made of {samples} samples, which cannot be dealt out to {size} processes"
            raise TrainError(f"{why}: go on with a number of them that divides it, and with data that has an index")
        self._take(sliced)
        over = f"{_several(sliced.accumulation, 'micro-batch')} x {_several(size, 'process')}"
        log.info("an update stays %d samples, as %d rows x %s", samples, sliced.batch_size, over)

    def _take(self, slicing: Slicing) -> None:
        ward = self._ward
        ward.slicing = slicing
        ward.world.accelerator.gradient_accumulation_steps = slicing.accumulation
        if ward.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _told(self) -> str:
        return f"micro-batches of {self._ward.slicing.batch_size} rows from now on"


def _several(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}es"
