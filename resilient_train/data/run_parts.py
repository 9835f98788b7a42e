"""The parts of a run that everything outside of its story knows as what they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from resilient_train.core.protocols import Parts
from resilient_train.data.history import UpdateHistory
from resilient_train.data.rows import no_watchdog
from resilient_train.data.samples import Samples
from resilient_train.processes.world import World


@dataclass(kw_only=True)
class RunParts(Parts):
    world: World
    samples: Samples
    updates: UpdateHistory = field(default_factory=UpdateHistory)
    beat: Callable[[], None] = no_watchdog  # called during long work, to show the watchdog its progress
