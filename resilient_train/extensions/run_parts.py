"""The parts of a run that everything outside of its story knows as what they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from resilient_train.core.protocols import Parts
from resilient_train.data.history import UpdateHistory
from resilient_train.data.samples import Samples
from resilient_train.extensions.checks.rate import Panel
from resilient_train.extensions.diagnosis.search import Search
from resilient_train.extensions.scans.scans import Scans
from resilient_train.processes.world import World


@dataclass(frozen=True)
class RunParts(Parts):
    world: World
    samples: Samples
    scans: Scans
    updates: UpdateHistory
    panel: Panel
    search: Search | None  # None if a step cannot be replayed
    beat: Callable[[], None]  # called during long work, to show the watchdog its progress
