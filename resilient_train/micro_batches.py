"""How an update's samples are split into micro-batches that fit into memory, over any number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch

from resilient_train.checkpoint.keeper import CheckpointKeeper
from resilient_train.core.policy import Policy
from resilient_train.core.protocols import Retry
from resilient_train.core.transaction import Transaction
from resilient_train.errors import TrainError, text_of
from resilient_train.ranks.world import is_out_of_memory
from resilient_train.record import progress
from resilient_train.record.progress import OutOfMemory
from resilient_train.remedial import AllControls
from resilient_train.run_parts import RunParts
from resilient_train.types import ProcessIncident, Signal, fact
from resilient_train.wording import log

_SMALLER = "use a smaller batch_size with more gradient accumulation, or activation checkpointing"
_HALVED = "the same command, or a restart by the launcher, resumes with micro-batches of half the rows"


def memory_evidence(error: BaseException) -> str:
    return " ".join(text_of(error).split()).split(" Of the allocated memory")[0][:200] or type(error).__name__


class MicroBatchSizer:
    """Retries an update that ran out of memory with smaller micro-batches."""

    def __init__(self, parts: RunParts, policy: Policy, controls: AllControls, keeper: CheckpointKeeper) -> None:
        self._world, self._samples, self._policy, self._controls = parts.world, parts.samples, policy, controls
        self._keeper, self._place = keeper, keeper.incident_log.run_dir
        self._notes: list[OutOfMemory] = []  # of previous processes that ran out of memory

    def previous_ran_out(self) -> bool:
        """Say whether previous processes ran out of memory. All ranks must call it."""
        found = self._world.all_of(progress.found(self._place, OutOfMemory))
        self._notes = sorted({one for some in found for one in some})
        return bool(self._notes)

    def as_before(self, samples: int) -> None:
        """Make updates of as many samples as the previous processes did, in micro-batches that fit into memory."""
        if samples:
            now, size = self._samples.slicing, self._world.size
            sliced = now.for_samples(samples)
            if sliced is None or (sliced != now and not self._samples.slice_as(sliced)):
                why = f"{samples} samples per update do not divide over {size} processes"
                raise TrainError(f"{why}: resume with a number that divides them, and with data that has an index")
            self._has_changed()
            shape = sliced.batch_size, sliced.accumulation, size
            log.info("an update stays %d samples: %d rows x %d micro-batches x %d processes", samples, *shape)
        self._fit_into(self._controls.micro_batch or self._samples.slicing.batch_size)
        for one in self._notes[:1]:  # of the rank with the least room
            if self._fit_into(one.batch_size - 1):
                self.note_smaller(one.step, one.evidence, (one.rank,))
        progress.clear(self._place, OutOfMemory)

    def loss_instead(self, error: Exception, open_updates: Sequence[Transaction]) -> Retry | None:
        if not is_out_of_memory(error):
            return None
        step, evidence = open_updates[-1].step, memory_evidence(error)
        self.make_smaller(step, evidence)
        return partial(self.note_smaller, step, evidence)

    def make_smaller(self, step: int, evidence: str) -> None:
        """Halve the micro-batches. Of several processes, leave a note and raise: the others wait in a collective."""
        what, halved = f"out of memory in update {step}: {evidence}", self._samples.slicing.halved()
        incidents = self._keeper.incident_log.incidents
        is_exhausted = sum(one.anomaly.signal is Signal.OUT_OF_MEMORY for one in incidents) >= self._policy.halvings
        if halved is None or is_exhausted or not self._samples.slice_as(halved):
            raise TrainError(f"{what}; {_SMALLER}")
        if self._world.size > 1:
            advice = _SMALLER
            if self._place is not None:
                with suppress(OSError):  # this host may not have the directory
                    progress.leave(self._place, OutOfMemory(halved.batch_size * 2, step, self._world.rank, evidence))
                    advice = _HALVED
            raise TrainError(f"{what}; {advice}")

    def note_smaller(self, step: int, reason: str, ranks: tuple[int, ...] = ()) -> None:
        self._has_changed()
        self._controls.micro_batch = rows = self._samples.slicing.batch_size
        evidence = fact("smaller_batch", why=reason, rows=rows)
        found = ProcessIncident(Signal.OUT_OF_MEMORY, step, step - 1, evidence, "smaller_batch", ranks=ranks)
        self._controls.note(partial(self._keeper.note_incident, found))

    def _fit_into(self, rows: int) -> bool:
        """Halve micro-batches to at most so many rows, as far as possible; say whether they are smaller now."""
        before = self._samples.slicing
        while self._samples.slicing.batch_size > rows and (halved := self._samples.slicing.halved()):
            if not self._samples.slice_as(halved):
                break
            self._has_changed()
        return self._samples.slicing is not before

    def _has_changed(self) -> None:
        self._world.accelerator.gradient_accumulation_steps = self._samples.slicing.accumulation
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()
