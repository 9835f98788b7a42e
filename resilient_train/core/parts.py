"""The parts of a run that its story is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from resilient_train.core.checks import Checks
from resilient_train.core.copies import BufferWatch
from resilient_train.core.protocols import Data, History, Ranks, Scans
from resilient_train.core.ring import Ring
from resilient_train.core.state import Clock, RunState
from resilient_train.core.updater import Precision, Updater


@dataclass(frozen=True)
class Parts:
    """None of them knows a policy, an incident or a file."""

    world: Ranks
    clock: Clock
    samples: Data
    state: RunState
    updater: Updater
    ring: Ring
    checks: Checks
    scans: Scans
    updates: History
    buffers: BufferWatch
    precision: Precision

    def checks_state(self) -> dict[str, Any]:
        return {"panel": self.checks.state_dict(), "scans": self.scans.state_dict()}

    def restore_checks_state(self, state: Mapping[str, Any]) -> list[str]:
        """Restore what checks and scans had learned; return those that another version did not save."""
        return self.checks.load_state_dict(state["panel"]) + self.scans.load_state_dict(state["scans"])
