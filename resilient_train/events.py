"""What rooms say to each other. Frozen, and free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Vitals:
    """What one update measured, read back from the device."""

    tick: int  # attempted updates, never goes back
    step: int  # accepted updates, this one included if it was accepted
    accepted: bool
    loss: float  # fp32 mean over ranks and micro-batches, before any scaling
    grad_norm: float  # before clipping
    lr: float  # of the first parameter group
    metrics: Mapping[str, float] = field(default_factory=dict)
