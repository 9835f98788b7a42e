"""An update on its way: begun by the loop, then sent to the gate, until its verdict is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from resilient_train.data.samples import Update
from resilient_train.state.copies import Attributes, Backup
from resilient_train.state.ring import Snapshot
from resilient_train.types import Vitals
from resilient_train.update.objective import Metrics
from resilient_train.update.updater import Attempt
from resilient_train.watch.gradient_norms import GradientNorms
from resilient_train.watch.vitals import Sent, read_vitals, versions


@dataclass
class StartedUpdate:
    """An update whose forward and backward are under way."""

    update: Update
    tick: int
    step: int  # its number if it is accepted
    backup: Backup  # of the buffers before it
    inputs: list[Any]  # its micro-batches, as the model saw them
    started_at: float  # on the monotonic clock
    attributes: Attributes = ()  # of the model's modules before its first forward; none where the loop calls the model
    raised: list[str] = field(default_factory=list)  # exceptions of its forwards and backwards, each in one line
    versions: list[Any] = field(default_factory=list)  # Tensor._version of each tensor before the forward pass


@dataclass
class InFlight:
    """An update that went through the gate on the device, and whose verdict is pending."""

    begun: StartedUpdate
    attempt: Attempt
    limits: tuple[float, float]
    sent: Sent
    metrics: Metrics
    is_open: bool  # the gate was: it has landed, whatever it measured
    snapshot: Snapshot | None = None  # of the state after it, if one was taken
    gradients: GradientNorms = field(init=False)

    def __post_init__(self) -> None:
        self.gradients = GradientNorms(self.attempt.norms, is_recorded=self.attempt.records_norms)

    @property
    def was_modified(self) -> bool:
        """Whether its batches were changed in place after the model got them."""
        return self.begun.versions != [versions(batch) for batch in self.begun.inputs]

    def vitals(self, step: int, *, has_scale: bool) -> Vitals:
        """Read what it measured, the same on every rank, after `step` accepted updates. Waits for the device."""
        update, attempt = self.begun.update, self.attempt
        return read_vitals(
            *(self.begun.tick, step, update.start, update.stop, attempt.settings[0]["lr"] or 0.0),
            *(self.sent.read(), self.limits),
            has_scale=has_scale,
            is_busy=attempt.is_busy,
            lr_ratio=attempt.lr_ratio,
            by_rank=attempt.rows_by_rank,
        )
