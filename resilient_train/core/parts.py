"""The parts of a run that recovery, checkpoints and controls share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from resilient_train.core.checks import Checks
from resilient_train.core.copies import BufferWatch
from resilient_train.core.ring import Ring
from resilient_train.core.state import Clock, RunState
from resilient_train.core.updater import Precision, Updater
from resilient_train.core.vitals import UpdateHistory
from resilient_train.data.samples import Samples
from resilient_train.diagnose.search import Search
from resilient_train.ranks.world import World
from resilient_train.watch.scans import Scans


@dataclass(frozen=True)
class RunParts:
    """The parts of a run. None of them knows a policy, an incident or a file."""

    world: World
    clock: Clock
    samples: Samples
    state: RunState
    updater: Updater
    ring: Ring
    checks: Checks
    scans: Scans
    buffers: BufferWatch
    precision: Precision
    updates: UpdateHistory
    search: Search | None  # None if a step cannot be replayed
    beat: Callable[[], None]  # called during long work, to show the watchdog its progress

    def checks_state(self) -> dict[str, Any]:
        return {"panel": self.checks.state_dict(), "scans": self.scans.state_dict()}

    def restore_checks_state(self, state: Mapping[str, Any]) -> list[str]:
        """Restore what checks and scans had learned; return those that another version did not save."""
        return self.checks.load_state_dict(state["panel"]) + self.scans.load_state_dict(state["scans"])
