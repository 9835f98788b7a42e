"""An update that runs out of memory is retried with smaller micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from resilient_train.core.protocols import Effect, OnError, Retry
from resilient_train.core.transaction import Transaction
from resilient_train.extensions import Extension
from resilient_train.ground.errors import TrainError, in_one_line
from resilient_train.ground.types import Anomaly, Signal, fact
from resilient_train.parts.run import Run
from resilient_train.processes.world import is_out_of_memory

_SMALLER = "use a smaller batch_size with more gradient accumulation, or activation checkpointing"


class SmallerBatches(Extension, OnError):
    def build(self, run: Run) -> None:
        self._run = run
        self._rows = 0  # of a micro-batch that fit into memory, where it was made smaller
        run.on_error.append(self)
        run.effects.append(Effect("micro_batch", lambda: self._rows, self._restore))

    def _restore(self, rows: Any) -> None:
        self._rows, samples = int(rows), self._run.samples
        while samples.slicing.batch_size > self._rows > 0 and (halved := samples.slicing.halved()):
            if not self._run.slice_as(halved):
                break

    def loss_instead(self, error: Exception, open_updates: Sequence[Transaction]) -> Retry | None:
        """Halve the micro-batches. Several processes end: the others wait in a collective."""
        if not is_out_of_memory(error):
            return None
        step, evidence, samples = open_updates[-1].step, in_one_line(error)[:200], self._run.samples
        what, halved = f"out of memory in update {step}: {evidence}", samples.slicing.halved()
        incidents = self._run.incident_log.incidents
        is_exhausted = sum(one.anomaly.signal is Signal.OUT_OF_MEMORY for one in incidents) >= self._run.policy.halvings
        if halved is None or is_exhausted or self._run.world.size > 1 or not self._run.slice_as(halved):
            raise TrainError(f"{what}; {_SMALLER}")
        return partial(self.note_smaller, step, evidence)

    def note_smaller(self, step: int, reason: str) -> None:
        """Called once nothing refers to what the forward held any more."""
        if self._run.world.device.type == "cuda":
            torch.cuda.empty_cache()
        self._rows = rows = self._run.samples.slicing.batch_size
        evidence = fact("smaller_batch", why=reason, rows=rows)
        anomaly = Anomaly(Signal.OUT_OF_MEMORY, step, self._run.clock.tick, step - 1, evidence)
        self._run.controls.note(partial(self._run.keeper.note_incident, anomaly, "smaller_batch"))
