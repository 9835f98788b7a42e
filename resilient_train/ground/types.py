"""Immutable records that subpackages pass to each other. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import isfinite
from typing import Any, NamedTuple

# What is known, as data: each fact has its kind under "fact", a key of `sentences.SENTENCES`, and the numbers and names
# that belong to it. `wording.say` makes sentences of them. Facts add up.
Facts = tuple[Mapping[str, Any], ...]


def fact(kind: str, /, **values: Any) -> Facts:
    """Make one. A number that is not finite is given by its name, as JSON has it: what is read equals what was made."""
    return ({"fact": str(kind), **{name: _finite(value) for name, value in values.items()}},)


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not isfinite(value) else value


NO_LIMIT = 3.4028234663852886e38  # of a loss or norm: the largest float32
LARGEST_NORM = 2.0**63  # its square is near the end of float32: beyond it moments would be infinite
_MAY_LAND = ("accepted", "pending")


class UpdateResult(int):
    """What became of an update, for the loop: true if it has landed, or may still land."""

    # "accepted", "refused", "accumulating": no update yet; "pending": known at the next one, or after `guard.settle()`
    status: str
    _loss: Any

    def __new__(cls, status: str, loss: Any = None) -> UpdateResult:
        result = super().__new__(cls, status in _MAY_LAND)  # as a number it stays what it is: loops add up attempts
        result.status, result._loss = status, loss
        return result

    def __bool__(self) -> bool:
        return self.status in _MAY_LAND

    def __repr__(self) -> str:
        return f"UpdateResult({self.status!r})"

    @property
    def loss(self) -> Any:
        """The loss, detached and on its device, of an update that has landed or may still land; else None."""
        return self._loss if self else None


class Signal(StrEnum):
    """What was noticed."""

    NONFINITE_BATCH = "nonfinite_batch"
    NONFINITE_LOSS = "nonfinite_loss"
    NONFINITE_GRAD = "nonfinite_grad"
    NONFINITE_WEIGHTS = "nonfinite_weights"
    NONFINITE_OPTIMIZER = "nonfinite_optimizer"
    LOSS_SPIKE = "loss_spike"
    GRAD_SPIKE = "grad_spike"
    DIVERGENCE = "divergence"
    WEIGHTS_JUMP = "weights_jump"
    OPTIMIZER_RANGE = "optimizer_range"
    SCALE_COLLAPSE = "scale_collapse"
    EXCEPTION = "exception"
    OUT_OF_MEMORY = "out_of_memory"
    HANG = "hang"
    CRASH = "crash"
    DISK_FULL = "disk_full"
    CHECKPOINT_FAILED = "checkpoint_failed"
    CHECKPOINT_DAMAGED = "checkpoint_damaged"
    RANK_MISMATCH = "rank_mismatch"
    NOT_RECOVERED = "not_recovered"
    NO_PROGRESS = "no_progress"


OBSERVE = "observe"  # the action of a policy that only observes
ACCEPTED = "accepted"  # the action that ends an incident whose cause was a change on purpose
SPIKES = (Signal.LOSS_SPIKE, Signal.GRAD_SPIKE)  # updates that a limit refused
OF_THE_LOSS = (Signal.LOSS_SPIKE, Signal.DIVERGENCE, Signal.NOT_RECOVERED)


class Cause(StrEnum):
    """What was behind it."""

    DATA = "data"
    OPERATION = "operation"
    OVERFLOW = "overflow"
    EXPLOSION = "explosion"
    RATE = "rate"
    OPTIMIZER = "optimizer"
    CORRUPTION = "corruption"
    TRANSIENT = "transient"
    PROCESS = "process"
    UNKNOWN = "unknown"


class Outcome(StrEnum):
    RECOVERED = "recovered"
    RECURRED = "recurred"
    UNRECOVERED = "unrecovered"  # the loss did not return, or saving failed until the end
    GAVE_UP = "gave_up"
    OBSERVED = "observed"  # by policy it was only reported


class Vitals(NamedTuple):
    """The measurements of one update. A tuple, since one is made for every update."""

    tick: int  # attempted updates, never goes back
    step: int  # accepted updates, this one included if it was accepted
    accepted: bool
    loss: float  # fp32 mean over ranks and micro-batches, before any scaling
    grad_norm: float  # before clipping
    lr: float  # of the first parameter group
    start: int = 0  # its samples are at positions [start, stop) of the stream
    stop: int = 0
    refused: Signal | None = None  # why the gate refused it
    overflowed: bool = False  # refused by the loss scale of half precision, as usual
    loss_scale: float | None = None
    ranks: tuple[int, ...] = ()  # where it began, if only on some ranks
    stop_asked: bool = False  # on any rank: all stop together
    lr_ratio: float = 0.0  # its learning rate as a multiple of the configured one; 0: unknown
    clipped: bool = False  # the gradient was shortened by a norm


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A fault that was noticed and needs treatment."""

    signal: Signal
    step: int  # number of the update it was noticed at; a refused update has the number it would have had
    tick: int
    since: int  # the newest step whose state is still trusted
    evidence: Facts = ()
    landed: bool = True  # the weights contain it already
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Culprit:
    """The line of code where a fault began."""

    phase: str  # forward, backward
    op: str  # the name of torch's function: log, div, softmax
    module: str
    file: str
    line: int
    inputs: tuple[Mapping[str, Any], ...] = ()

    @property
    def place(self) -> dict[str, Any]:
        return {"op": self.op, "file": self.file, "line": self.line}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause of an anomaly, as far as it is known."""

    cause: Cause
    advice: Facts = ()  # what to do
    culprit: Culprit | None = None
    rows: tuple[int, ...] = ()
    # The failing operation may be patched; not if it overflowed to a single number, which leaves no healthy element.
    patchable: bool = False
    reasons: Mapping[int, Facts] = field(default_factory=dict, compare=False)  # of rows, if each has a different one
    ranks: tuple[int, ...] = ()  # where a replay showed it, if only on some
    # The operation that failed this time, if only because of values from the patched culprit.
    symptom: Culprit | None = None
    suspects: tuple[int, ...] = ()  # rows without which the batch is ordinary, and none of which is known to be bad
    usual_rate: float = field(default=0.0, compare=False)  # of a rate that rose: the highest before, relative
    leapt_to: float = field(default=0.0, compare=False)  # what it rose to in one step; 0: not in one step

    @property
    def broken(self) -> Culprit | None:
        return self.symptom or self.culprit


_BY_CAUSE = {  # what signals suggest by themselves
    Cause.DATA: "nonfinite_batch",
    Cause.UNKNOWN: "nonfinite_loss nonfinite_grad loss_spike grad_spike exception",  # spikes that were refused
    Cause.CORRUPTION: "nonfinite_weights weights_jump rank_mismatch",
    Cause.OPTIMIZER: "nonfinite_optimizer optimizer_range",
    Cause.EXPLOSION: "divergence not_recovered",
    Cause.RATE: "no_progress",
    Cause.OVERFLOW: "scale_collapse",
    Cause.PROCESS: "out_of_memory hang crash disk_full checkpoint_failed checkpoint_damaged",
}
_CAUSES = {Signal(signal): cause for cause, signals in _BY_CAUSE.items() for signal in signals.split()}


def by_signal(anomaly: Anomaly) -> Diagnosis:
    # Else it jumped in one update, which has landed where all are only observed.
    if anomaly.signal is Signal.LOSS_SPIKE and any("stays" in one for one in anomaly.evidence):
        return Diagnosis(Cause.EXPLOSION, fact("spike_landed"))
    return Diagnosis(_CAUSES[anomaly.signal], fact(anomaly.signal))


@dataclass(frozen=True, slots=True)
class Action:
    """One remedy as a policy prescribes it: `Action("lower_lr", {"factor": 0.5, "rewarm": 20})`."""

    remedy: str
    settings: Mapping[str, Any] = field(default_factory=dict)


OUTSIDE = 1_000_000  # rung of a decision that no ladder made: no strike of theirs is used up


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy prescribes: remedies that are applied together, or the end of the run and why."""

    actions: tuple[Action, ...] = ()
    rung: int = 0  # of the ladder, from 0
    gave_up: Facts | None = None


@dataclass(frozen=True, slots=True)
class Tried:
    """One arm of a trial: the rate that was tried, and how training went with it."""

    rate: float  # as a multiple of the run's
    since: int | None  # the step at which it began; None: the run as it is
    anomalies: int  # updates that did not land
    loss: float  # the mean on later samples, the same for each arm, on which none of them was trained
    won: bool = False


@dataclass(frozen=True, slots=True)
class Incident:
    """A fault from its first sign to its outcome."""

    id: int  # from 1, in the order in which they occurred
    anomaly: Anomaly
    diagnosis: Diagnosis
    decision: Decision
    rewound_to: int | None = None
    steps_lost: int = 0
    seconds: float = 0.0
    outcome: Outcome | None = None  # None while it is open
    further: int = 0  # anomalous updates that followed, and were observed or skipped like the first one
    again: tuple[tuple[int, int], ...] = ()  # tick and step of those that were skipped
    tried: tuple[Tried, ...] = ()  # the arms of its trial, if there was one
    at: int = field(default=0, compare=False)  # when it was opened, in ms since 1970, as far as that is known

    @property
    def kind(self) -> tuple[object, ...]:
        return kind_of(self.anomaly.signal, self.diagnosis)

    @property
    def is_observed(self) -> bool:
        return any(action.remedy == OBSERVE for action in self.decision.actions)

    @property
    def is_interrupted(self) -> bool:
        return not self.decision.actions and self.decision.gave_up is None

    @property
    def is_accepted(self) -> bool:
        return any(action.remedy == ACCEPTED for action in self.decision.actions)

    @property
    def reached_weights(self) -> bool:
        """Say whether untrusted updates have landed: this one, or some before it."""
        return self.anomaly.landed or self.anomaly.since < self.anomaly.step - 1

    @property
    def last_step(self) -> int:
        return self.again[-1][1] if self.again else self.anomaly.step

    @property
    def each(self) -> list[Incident]:
        """Itself, and what followed as incidents of their own: strikes and budgets count updates."""
        if not self.again:
            return [self]
        steps = [(self.anomaly.tick, self.anomaly.step), *self.again]
        return [replace(self, anomaly=replace(self.anomaly, tick=tick, step=step), again=()) for tick, step in steps]

    @property
    def left_damage(self) -> bool:
        """Say whether it is over only when the loss is back: bad updates landed, which no rewind has undone exactly."""
        cause = self.diagnosis.cause
        is_undone = cause is Cause.CORRUPTION and self.rewound_to is not None
        return self.reached_weights and cause is not Cause.PROCESS and not is_undone


def kind_of(signal: Signal, diagnosis: Diagnosis) -> tuple[object, ...]:
    """Return what incidents of a kind share: cause, and line or rows; where the cause says little, also the signal."""
    culprit = diagnosis.culprit
    line = culprit and (culprit.phase, culprit.op, culprit.module, culprit.file, culprit.line)
    needs_signal = diagnosis.cause in (Cause.UNKNOWN, Cause.PROCESS, Cause.TRANSIENT)
    return diagnosis.cause, line, diagnosis.rows, signal if needs_signal else None
