"""How an update's samples are cut up: into micro-batches that fit into memory, over as many processes as there are."""

from __future__ import annotations

import torch

from resilient_train.errors import TrainError, text_of
from resilient_train.record import notes
from resilient_train.record.notes import OutOfMemory
from resilient_train.recovery import Recovery
from resilient_train.wording import log

_SMALLER = "use a smaller data.batch_size with more accelerate.gradient_accumulation_steps, or activation checkpointing"

_ON_THE_HOST = ("can't allocate memory", "not enough memory", "std::bad_alloc")
_GIB = 2**30


class MicroBatchSizer:
    """Cuts the same samples of an update in another way, when that has to be."""

    def __init__(self, recovery: Recovery) -> None:
        self._recovery, self._place = recovery, recovery.incident_log.run_dir
        self._world, self._samples = recovery.parts.world, recovery.parts.samples
        self._lacking: list[OutOfMemory] = []

    def previous_ran_out(self) -> bool:
        """Say whether the previous processes ran out of memory. Every rank comes here."""
        found = self._world.all_of(notes.found(self._place, OutOfMemory))
        self._lacking = sorted({one for some in found for one in some})
        return bool(self._lacking)

    def as_before(self, samples: int) -> None:
        """Make updates of as many samples as the previous processes did, in as much memory as there was."""
        if samples:
            self._keep(samples)
        self._fit_into(self._recovery.controls.micro_batch or self._samples.slicing.batch_size)
        for one in self._lacking[:1]:  # of several ranks the one with the least room
            if self._fit_into(one.batch_size - 1):
                self._recovery.note_shrunk(one.step, f"rank {one.rank}: {one.evidence}; {self._now()}", (one.rank,))
        notes.clear(self._place, OutOfMemory)

    def make_smaller(self, step: int, evidence: str) -> None:
        """Make smaller micro-batches from now on, as an update did not fit. Raises TrainError where that cannot be.

        Of several processes the others wait in a collective, where they cannot be reached: all of them have to end.
        """
        what, slimmer = f"out of memory in update {step}: {evidence}", self._samples.slicing.halved()
        if slimmer is None or not self._recovery.may_shrink_batches() or not self._samples.slice_as(slimmer):
            raise TrainError(f"{what}; {_SMALLER}")
        if self._world.size > 1:
            raise TrainError(f"{what}; {self._leave_for_next(slimmer.batch_size * 2, step, evidence)}")

    def note_smaller(self, step: int, evidence: str, *, began: float) -> None:
        """Write that down, for the sake of the update that `began` then on the monotonic clock."""
        self._has_changed()
        self._recovery.note_shrunk(step, f"{evidence}; {self._now()}", began=began)

    def _leave_for_next(self, rows: int, step: int, evidence: str) -> str:
        """Leave a note for the next start, which makes smaller micro-batches on all ranks; return what to do now."""
        if self._place is None:
            return _SMALLER
        try:
            notes.leave(self._place, OutOfMemory(rows, step, self._world.rank, evidence))
        except OSError as error:
            return f"{_SMALLER} ({self._place} could not take a note: {error.strerror})"
        return "the same command, or a restart by the launcher, resumes with micro-batches of half the rows"

    def _fit_into(self, room: int) -> bool:
        """Make micro-batches of so many rows at most, if that can be; say whether they are smaller now."""
        before = self._samples.slicing
        while self._samples.slicing.batch_size > room and (slimmer := self._samples.slicing.halved()):
            if not self._samples.slice_as(slimmer):
                break
            self._has_changed()
        return self._samples.slicing is not before

    def _keep(self, samples: int) -> None:
        """Make updates of as many samples as before, now that other processes make them."""
        now, size = self._samples.slicing, self._world.size
        sliced = now.for_samples(samples)
        if sliced is None or (sliced != now and not self._samples.slice_as(sliced)):
            why = f"{samples} samples per update do not divide over {size} processes"
            raise TrainError(f"{why}: resume with a number of them that divides it, and with data that has an index")
        self._has_changed()
        over = f"{_several(sliced.accumulation, 'micro-batch')} x {_several(size, 'process')}"
        log.info("an update stays %d samples, as %d rows x %s", samples, sliced.batch_size, over)

    def _has_changed(self) -> None:
        self._world.accelerator.gradient_accumulation_steps = self._samples.slicing.accumulation
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _now(self) -> str:
        return f"micro-batches of {self._samples.slicing.batch_size} rows from now on"


def _several(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}es"


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error is that the memory of a device, or of the host, is used up."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in text_of(error) for words in _ON_THE_HOST)


def memory_evidence(error: BaseException, device: torch.device) -> str:
    """Tell it with its numbers."""
    said = " ".join(text_of(error).split()).split(" Of the allocated memory")[0][:200] or type(error).__name__
    if device.type != "cuda":
        return said
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.max_memory_allocated(device)
    return f"{said}; at most {held / _GIB:.2f} GiB were in use, {free / _GIB:.2f} of {total / _GIB:.2f} GiB are free"
