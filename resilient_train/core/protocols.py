"""What the story of a run asks of everything else: each is called from one line of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from resilient_train.core.checks import Checks, Finding
from resilient_train.core.mark import Mark
from resilient_train.core.policy import Policy
from resilient_train.core.ring import Ring, Snapshot
from resilient_train.core.state import Clock, RunState
from resilient_train.core.transaction import Transaction, Update
from resilient_train.core.updater import Updater
from resilient_train.core.vitals import Metrics
from resilient_train.ground.types import Anomaly, Diagnosis, Facts, Incident, Signal, Vitals, by_signal

T = TypeVar("T")
Computed = tuple[torch.Tensor, Metrics]  # a loss whose backward was made, and what the objective reports
Retry = Callable[[], None]  # called once the update was given up; then it is retried


class Hook:
    """Takes part in every update."""

    def before_update(self) -> None:
        """Called before anything of the next update is done. It may settle the last one, and change the state."""

    def around_compute(self, update: Transaction) -> AbstractContextManager[None]:
        """Surround forward and backward of a micro-batch, `update.inputs[-1]`, which it may replace; of losses in turn,
        those of the first.
        """
        return nullcontext()

    def rate_factor(self) -> float:
        """Return what multiplies the learning rate of the update at hand."""
        return 1.0

    def accepted(self, update: Transaction) -> None:
        """Called after an update was accepted."""


class OnError(Hook):
    """Knows what to do about an exception."""

    def loss_instead(self, error: Exception, open_updates: Sequence[Transaction]) -> Computed | Retry | None:
        """Return what takes the place of the loss, or that the update is to be retried; None: another may know.

        The newest of the open updates raised it. If it is noted in `raised` there, the update will not land.
        """
        return None

    def escaped(self, error: BaseException) -> None:
        """Called when an exception leaves the guard."""


class NewRegime(Exception):
    """No loss from before can be compared with one of now: something was changed on purpose."""

    def __init__(self, what: Facts, limit: float = inf) -> None:
        """A run whose loss does not come below the `limit` afterwards has not learned what is new."""
        super().__init__(what)
        self.what, self.limit = what, limit


class Diagnoser:
    """Finds the cause of an anomaly; this one knows nothing but the signal. Every rank makes each call."""

    def trusted(self, signal: Signal, since: int, has_landed: bool) -> int:
        """Return the newest step that can still be trusted: `since`, or one before it."""
        return since

    def explain(
        self, anomaly: Anomaly, update: Update, refused: Transaction | None, history: Sequence[Incident]
    ) -> Diagnosis:
        """Return the cause; raises NewRegime."""
        return by_signal(anomaly)


class Intentions:
    """Knows what was changed on purpose; this one takes all for damage. Every rank makes each call."""

    def reviewed(self, vitals: Vitals, finding: Finding) -> Finding:
        """Return what the checks have found, unless weights that were just written on purpose explain it."""
        return finding

    def resumed(self) -> None: ...
    def learn_again(self, anomaly: Anomaly, why: NewRegime) -> None: ...
    def is_on_purpose(self, anomaly: Anomaly, diagnosis: Diagnosis) -> bool:
        """Say whether a rise of the loss that has landed has proved to be on purpose: the run has accepted it then."""
        return False

    def before_treatment(self, step: int, tick: int) -> None: ...
    def treated(self, incident: Incident) -> None: ...


class Ranks(Protocol):
    rank: int
    size: int
    is_main: bool
    device: torch.device

    def on_device(self, batch: Any) -> Any: ...
    def without_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Leave gradients unreduced: more are to be added."""

    def on_main(self, decide: Callable[[], T]) -> T: ...


class Data(Protocol):
    position: int
    rows: int  # that have an index; 0: none has
    is_fed: bool  # a trainer fetches them, and makes its updates itself

    @property
    def quarantined(self) -> int:
        """The number of rows that are left out for the rest of the run."""

    @property
    def slicing(self) -> Any:
        """How an update is split: `samples` are all of it."""

    def go_back(self, update: Update) -> None: ...
    def skip(self, start: int, stop: int) -> None: ...
    def forget_before(self, position: int) -> None: ...


class Backend(Protocol):
    """How an update is computed where that takes no loop."""

    @property
    def model(self) -> torch.nn.Module:
        """As the training calls it."""

    @property
    def objective(self) -> Any:
        """None: the loop hands over its losses."""

    def compute(self, batch: Any) -> Computed:
        """Run forward and backward of a batch on the device."""


class Examiner:
    """Scans of the state: measured when they are due, judged an update later. This one has none."""

    def launch(self, before: Mark) -> None:
        """Measure what is due, with the buffers of `before`."""

    def verdict(self) -> Anomaly | None:
        return None

    def examine_now(self) -> Anomaly | None:
        """Measure everything, and wait for it."""
        return None

    def refined(self, anomaly: Anomaly, update: Transaction, *, is_scanned: bool) -> Anomaly:
        """Say more precisely what is wrong with a bad update. Every rank comes."""
        return anomaly


class Scans:
    """What scans know of the updates. These have none."""

    accepted: Facts | None = None  # weights that the loop wrote were newly taken for intended

    @property
    def clean_step(self) -> int:
        """The newest step that every scan has seen and found clean."""
        return sys.maxsize

    def landed(self, step: int, groups: Any, norm: float | None, times: int = 1) -> None: ...
    def rebase(self) -> None: ...  # take the state as it is for intended
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        return {}


class Store(Protocol):
    """Checkpoints: the verified states of the run on disk."""

    def verified(self) -> None:
        """Write the newest verified state if a checkpoint is due."""

    def distrust(self, since: int) -> None: ...
    def restore(self, since: int) -> Path | None: ...
    def has_verified(self, since: int) -> bool: ...
    def save(self, snapshot: Snapshot) -> Path | None: ...


@dataclass
class Parts:
    """What a run consists of. Extensions replace the second half, and add to the lists, before it begins."""

    world: Ranks
    clock: Clock
    samples: Data
    state: RunState
    updater: Updater
    ring: Ring
    checks: Checks
    updates: Any  # a data.history.UpdateHistory
    policy: Policy
    scans: Scans = field(default_factory=Scans)
    examiner: Examiner = field(default_factory=Examiner)
    diagnoser: Diagnoser = field(default_factory=Diagnoser)
    intentions: Intentions = field(default_factory=Intentions)
    across_rewind: Callable[[], AbstractContextManager[None]] = nullcontext  # surrounds each rewind
    hooks: list[Hook] = field(default_factory=list)
    on_error: list[OnError] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    extensions: list[Any] = field(default_factory=list)

    def checks_state(self) -> dict[str, Any]:
        return {"panel": self.checks.state_dict(), "scans": self.scans.state_dict()}

    def restore_checks_state(self, state: Mapping[str, Any]) -> None:
        self.checks.load_state_dict(state["panel"])
        self.scans.load_state_dict(state["scans"])


@dataclass(frozen=True)
class Effect:
    """What a remedy has changed, and lasts. Of a list the journal notes what was added: it may have thousands."""

    name: str
    state: Callable[[], Any]  # plain data without secrets: it goes into files
    restore: Callable[[Any], object]  # an earlier process's state; raises if it is damaged; true if some was dropped
    undo: Callable[[Any], object] = lambda state: None  # goes back to an earlier state; else it stays
    agreed: Callable[[], Any] = lambda: None  # what has to be the same on all ranks
    noted: Callable[[], None] = lambda: None  # called when the journal has what was changed
