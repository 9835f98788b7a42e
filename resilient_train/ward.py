"""The rooms that remedies reach into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from resilient_train.data.samples import Samples, Slicing
from resilient_train.diagnose.search import Search
from resilient_train.ranks.world import World
from resilient_train.state.ring import Held, Ring
from resilient_train.state.run_state import Clock, RunState
from resilient_train.update.updater import Precision, Updater
from resilient_train.watch.checks import Checks
from resilient_train.watch.scans import Scans


@dataclass
class Ward:
    """The rooms of a run, as far as remedies reach."""

    world: World
    clock: Clock
    samples: Samples
    slicing: Slicing
    state: RunState
    updater: Updater
    ring: Ring
    panel: Checks
    scans: Scans
    precision: Precision
    search: Search | None  # None where a step cannot be replayed
    beat: Callable[[], None] = lambda: None  # called whenever a diagnosis has got on


class OnDisk(Protocol):
    """The proven states that outlive the process."""

    def has_proven(self, since: int) -> bool:
        """Say whether there is one not after `since`."""

    def restore(self, since: int) -> int | None:
        """Go back to it; return its step. None: it cannot be read."""

    def distrust(self, since: int) -> None:
        """Take note that nothing after `since` is to be trusted."""

    def rewound(self, step: int) -> None:
        """Take note that the run went back to `step`."""

    def leave(self, held: Held) -> Path | None:
        """Write a state for good."""

    def leave_alone(self, held: Held) -> Path | None:
        """The same of this process alone, while nothing may be asked of others."""
