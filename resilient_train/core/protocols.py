"""What the story of a run asks of everything else: each is called from one line of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from resilient_train.core.checks import Checks
from resilient_train.core.mark import Mark
from resilient_train.core.ring import Ring, Snapshot
from resilient_train.core.state import Clock, RunState
from resilient_train.core.transaction import Transaction, Update
from resilient_train.core.updater import Updater
from resilient_train.core.vitals import Metrics
from resilient_train.ground.types import Anomaly, Decision, Diagnosis, Facts, Incident, Outcome, Signal, Vitals

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


class OnError(Protocol):
    """Knows what to do about an exception that forward or backward raised."""

    def loss_instead(self, error: Exception, open_updates: Sequence[Transaction]) -> Computed | Retry | None:
        """Return what takes the place of the loss, or that the update is to be retried; None: another may know.

        The newest of the open updates raised it. If it is noted in `raised` there, the update will not land.
        """


class NewRegime(Exception):
    """No loss from before can be compared with one of now: the samples had a low one as they had just been learned."""

    def __init__(self, what: Facts, limit: float = inf) -> None:
        """A run whose loss does not come below the `limit` afterwards has not learned what is new."""
        super().__init__(what)
        self.what, self.limit = what, limit


class Diagnoser(Protocol):
    """Finds the cause of an anomaly, and whether something was changed on purpose. Every rank makes each call."""

    def reviewed(self, vitals: Vitals, finding: Any) -> Any:
        """Return what the checks have found, unless weights that were just written on purpose explain it."""

    def noticed(self, update: Transaction, vitals: Vitals) -> Anomaly | None:
        """Return what no check has noticed in an update."""

    def trusted(self, signal: Signal, since: int, has_landed: bool) -> int:
        """Return the newest step that can still be trusted: `since`, or one before it."""

    def explain(
        self, anomaly: Anomaly, update: Update, refused: Transaction | None, history: Sequence[Incident]
    ) -> Diagnosis:
        """Return the cause; raises NewRegime."""

    def learn_again(self, anomaly: Anomaly, why: NewRegime) -> None: ...

    def is_on_purpose(self, anomaly: Anomaly, diagnosis: Diagnosis) -> bool:
        """Say whether a rise of the loss that has landed has proved to be on purpose: the run has accepted it then."""

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
    keeps_places: bool  # after a resume the same samples are at a position

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

    def why_no_gradient(self, loss: torch.Tensor, weights: Sequence[torch.Tensor]) -> str: ...


class Examiner(Protocol):
    """Scans of the state: measured when they are due, judged an update later."""

    def launch(self, before: Mark) -> None: ...
    def verdict(self) -> Anomaly | None: ...
    def examine_now(self) -> Anomaly | None: ...
    def refined(self, anomaly: Anomaly, update: Transaction, *, is_scanned: bool) -> Anomaly:
        """Say more precisely what is wrong with a bad update. Every rank comes."""


class Scans(Protocol):
    """What scans know of the updates."""

    @property
    def clean_step(self) -> int:
        """The newest step that every scan has seen and found clean."""

    def landed(self, step: int, groups: Any, clipped_norm: float | None, times: int = 1) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Buffers(Protocol):
    """What was lost in buffers, and a rewind had to restore."""

    def across_rewind(self) -> AbstractContextManager[None]: ...
    def spoil(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss as it is, or NaN if it is lost again."""


class History(Protocol):
    """The latest updates on the present course."""

    has_turns: bool

    def add(self, vitals: Vitals) -> None: ...
    def rewound(self, step: int) -> None: ...
    def first_to_blame(self, since: int | None, start: int) -> int: ...


class Store(Protocol):
    """Checkpoints: the verified states of the run on disk."""

    def verified(self) -> None:
        """Write the newest verified state if a checkpoint is due."""

    def distrust(self, since: int) -> None: ...
    def rewound(self, step: int) -> None: ...
    def restore(self, since: int) -> Path | None: ...
    def has_verified(self, since: int) -> bool: ...
    def save(self, snapshot: Snapshot) -> Path | None: ...


class Log(Protocol):
    """The incidents of the run, from opening to outcome. Each change is written as it happens."""

    @property
    def is_observing(self) -> bool:
        """Say whether an incident that is only observed is open."""

    @property
    def incidents(self) -> list[Incident]: ...

    def open(
        self, anomaly: Anomaly, diagnosis: Diagnosis, decision: Decision, *, is_off: bool = False, effects: Any = None
    ) -> Incident: ...
    def continued(self, signal: Signal, diagnosis: Diagnosis, decision: Decision) -> Incident | None: ...
    def record_treatment(self, incident: Incident, *, effects: Any = None, ongoing: bool = False) -> None: ...
    def count_again(self, incident: Incident, anomaly: Anomaly, *, effects: Any = None) -> None: ...
    def observe(self, incident: Incident, step: int) -> None: ...
    def counts_on(self, step: int) -> bool:
        """Count an anomalous update into the incident that is observed; False if there is none."""

    def end_observed(self) -> None: ...
    def note_effects(self, *, effects: Any) -> None: ...
    def update_accepted(self, step: int, recovered_after: int, *, loss_is_off: bool) -> None: ...
    def close(self, incident: Incident, outcome: Outcome | None = None) -> None: ...
    def close_all(self, outcome: Outcome, *, healthy_since: int | None = None) -> None: ...


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
    buffers: Buffers

    def checks_state(self) -> dict[str, Any]:
        return {"panel": self.checks.state_dict(), "scans": self.scans.state_dict()}

    def restore_checks_state(self, state: Mapping[str, Any]) -> None:
        self.checks.load_state_dict(state["panel"])
        self.scans.load_state_dict(state["scans"])
