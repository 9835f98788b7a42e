"""The parts of a run that recovery, checkpoints and controls reach into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from resilient_train.data.samples import Samples
from resilient_train.diagnose.search import Search
from resilient_train.ranks.world import World
from resilient_train.state.ring import Ring
from resilient_train.state.run_state import Clock, RunState
from resilient_train.update.updater import Precision, Updater
from resilient_train.watch.checks import Checks
from resilient_train.watch.scans import Scans
from resilient_train.watch.vitals import UpdateHistory


@dataclass(frozen=True)
class RunParts:
    """What a run is made of. Nothing here knows a policy, an incident or a file."""

    world: World
    clock: Clock
    samples: Samples
    state: RunState
    updater: Updater
    ring: Ring
    checks: Checks
    scans: Scans
    precision: Precision
    updates: UpdateHistory
    search: Search | None  # None where a step cannot be replayed
    beat: Callable[[], None]  # called whenever something that takes long gets further

    def statistics(self) -> dict[str, Any]:
        """What checks and scans have learned, as a snapshot keeps it."""
        return {"panel": self.checks.state_dict(), "scans": self.scans.state_dict()}

    def restore_statistics(self, statistics: Mapping[str, Any]) -> list[str]:
        """Let checks and scans know what they knew then; return those that another version kept nothing of."""
        return self.checks.load_state_dict(statistics["panel"]) + self.scans.load_state_dict(statistics["scans"])
