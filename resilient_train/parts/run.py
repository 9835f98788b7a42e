"""A run that is put together: what extensions get, and add to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from resilient_train.core.controls import Controls
from resilient_train.core.mark import Marks
from resilient_train.core.randomness import Seeds
from resilient_train.core.recovery import Recovery
from resilient_train.data.run_parts import RunParts
from resilient_train.data.samples import Slicing
from resilient_train.durable.incident_log import IncidentLog
from resilient_train.durable.keeper import CheckpointKeeper
from resilient_train.ground.types import Facts
from resilient_train.parts.best import BestLevel
from resilient_train.parts.computation import Computation
from resilient_train.parts.modes import BufferWatch


@dataclass(kw_only=True)
class Run(RunParts):
    settings: Any  # of all checks by their names
    best: BestLevel
    own_weights: Collection[str] | None  # those that DDP does not synchronize; None if the model is not replicated
    # Leaves rows out for the rest of the run, with the reason and the number of the incident; says whether it could.
    leave_out: Callable[[Sequence[int], Facts, int], bool] = lambda rows, reason, incident: False
    sinks: list[Any] = field(default_factory=list)  # an `extensions.Sink` each
    is_patched: Callable[[str, int, str], bool] = lambda file, line, op: False  # whether what breaks there is repaired
    handled_lines: set[tuple[str, int, str]] = field(default_factory=set)  # of operations: patched, or cannot be
    backend: Computation
    buffers: BufferWatch
    marks: Marks
    seeds: Seeds
    incident_log: IncidentLog
    planned: Callable[[], int | None]  # the steps that the run plans, if that is known
    stop: Callable[[], bool]  # whether it was asked to stop
    settle: Callable[[], bool]  # waits for the verdict on the newest update
    keeper: CheckpointKeeper = field(init=False)
    # From when all extensions are built.
    controls: Controls = field(init=False)
    recovery: Recovery = field(init=False)

    def slice_as(self, slicing: Slicing) -> bool:
        """Slice updates into other micro-batches from now on; False if these samples cannot be."""
        if not self.samples.slice_as(slicing):
            return False
        self.world.accelerator.gradient_accumulation_steps = self.samples.slicing.accumulation
        return True
