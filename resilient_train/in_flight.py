"""An update under way, and one whose verdict is pending."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from resilient_train.data.samples import Update
from resilient_train.state.copies import Backup
from resilient_train.state.ring import Snapshot
from resilient_train.update.objective import Metrics
from resilient_train.update.updater import Attempt
from resilient_train.watch.vitals import Sent


@dataclass
class StartedUpdate:
    """An update whose forward and backward are under way."""

    update: Update
    tick: int
    step: int  # its number if it is accepted
    backup: Backup  # of the buffers before it
    inputs: list[Any]  # its micro-batches, as the model saw them
    started_at: float  # on the monotonic clock
    versions: list[Any] = field(default_factory=list)  # Tensor._version of each tensor before the forward pass


@dataclass
class InFlight:
    """An update that went through the gate on the device, and whose verdict is pending."""

    begun: StartedUpdate
    attempt: Attempt
    loss: torch.Tensor  # of this rank
    limits: tuple[float, float]
    sent: Sent
    metrics: Metrics
    is_open: bool  # the gate was: it has landed, whatever it measured
    snapshot: Snapshot | None = None  # of the state after it, if one was taken
