"""Anomalies, policies and incidents that are made up, and a run in miniature that does nothing but count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from resilient_train.core.checks import ChecksConfig
from resilient_train.core.decide import decide
from resilient_train.core.episode import ReferenceConfig
from resilient_train.core.knobs import Knobs
from resilient_train.core.limit import LimitConfig
from resilient_train.core.loss import JumpConfig
from resilient_train.core.policy import Policy
from resilient_train.core.remedies import Case, is_mild, remedy
from resilient_train.durable.incident_log import IncidentLog
from resilient_train.ground.types import Anomaly, Cause, Decision, Diagnosis, Facts, Incident, Outcome, Signal

Diagnose = Callable[[Anomaly], Diagnosis]


def refused(step: int, tick: int | None = None, signal: Signal = Signal.NONFINITE_LOSS) -> Anomaly:
    return Anomaly(signal, step, step if tick is None else tick, step - 1, landed=False)


def landed(step: int, tick: int | None = None, signal: Signal = Signal.DIVERGENCE) -> Anomaly:
    return Anomaly(signal, step, step if tick is None else tick, max(0, step - 5), landed=True)


def unknown(anomaly: Anomaly) -> Diagnosis:
    return Diagnosis(Cause.UNKNOWN)


ANY = Case(refused(9), unknown(refused(9)), snapshots=4, rows=10_000)


def met(policy: Policy, anomalies: Iterable[Anomaly], can: Case = ANY, diagnose: Diagnose = unknown) -> list[Incident]:
    """What becomes of a series, until it is given up."""
    history: list[Incident] = []
    in_a_row = 0
    for anomaly in anomalies:
        is_next = bool(history) and history[-1].anomaly.step == anomaly.step and not history[-1].anomaly.landed
        in_a_row = in_a_row + 1 if is_next and not anomaly.landed else 0
        case = replace(can, anomaly=anomaly, diagnosis=diagnose(anomaly), refused_in_a_row=in_a_row)
        history.append(Incident(len(history) + 1, anomaly, case.diagnosis, decide(policy, case, tuple(history))))
        if history[-1].decision.gave_up is not None:
            break
    return history


def decisions(*given: Any, **more: Any) -> list[Decision]:
    return [incident.decision for incident in met(*given, **more)]


def rungs(made: Sequence[Decision]) -> list[int | Facts]:
    """The rungs that were taken, and why it was given up."""
    return [decision.gave_up or decision.rung for decision in made]


def default(*rungs: Any, **more: Any) -> dict[str, Any]:
    """A policy with one ladder for all causes."""
    return {"ladders": {"default": list(rungs)}, **more}


def core_checks(**more: Any) -> ChecksConfig:
    """The checks of the core, with the settings of `conf/checks/default.yaml`."""
    limit = LimitConfig(8, 128, 32, 10, 100, 1000, 6, 12)
    return ChecksConfig(limit, JumpConfig(8, 256, 64, 4, 0.35, 5, 8), ReferenceConfig(1, 50, 0.03, 4), [], **more)


@dataclass
class Run:
    """A run that does nothing but count; a state is proven every ten steps."""

    knobs: Knobs = field(default_factory=Knobs)
    lasting: Any = None
    step: int = 0
    tick: int = 0
    position: int = 0
    done: list[str] = field(default_factory=list)
    anomaly: Anomaly = field(default_factory=lambda: refused(1))
    rewound_to: int | None = None

    def rewind(self, older: int = 0, steps: int = 0) -> None:
        there = [step for step in range(0, self.anomaly.since + 1, 10) if step <= self.anomaly.step - steps] or [0]
        back = self.step - there[max(0, len(there) - 1 - older)]
        self.step, self.position = self.step - back, self.position - back
        self.rewound_to = self.step
        self.done.append("rewind")

    def skip(self, updates: int | None = None) -> None:
        self.position += 1 if updates is None else updates
        self.done.append("skip")

    def extension(self, kind: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.done.append(name)


Fault = Callable[[Run], Anomaly | None]


def trained(
    policy: Policy,
    fault: Fault,
    steps: int = 600,
    most_ticks: int = 6_000,
    like: Case = ANY,
    diagnose: Diagnose = unknown,
) -> tuple[Run, IncidentLog]:
    """Run to the end, whichever it is. `fault` says what befalls the update that the run is about to make."""
    run, history, in_a_row = Run(Knobs(relax_after=policy.relax_after)), IncidentLog(None), 0
    while run.step < steps:
        run.tick += 1
        assert run.tick <= most_ticks, "it does not end"
        anomaly = fault(run)
        if anomaly is None or anomaly.landed:
            run.step, run.position, in_a_row = run.step + 1, run.position + 1, 0
        if anomaly is None:
            run.knobs.advance()
            history.update_accepted(run.step, recovered_after=50, loss_is_off=False)
            continue
        run.anomaly, run.rewound_to = anomaly, None
        case = replace(like, anomaly=anomaly, diagnosis=diagnose(anomaly), refused_in_a_row=in_a_row)
        decision = decide(policy, case, history.incidents)
        incident = history.open(anomaly, case.diagnosis, decision)
        if decision.gave_up is not None:
            return run, history
        if not is_mild(decision.actions):
            run.knobs.trouble()
        for action in decision.actions:
            remedy(action).apply(cast(Any, run))
        in_a_row = 0 if anomaly.landed or run.rewound_to is not None else in_a_row + 1
        history.record_treatment(replace(incident, rewound_to=run.rewound_to))
    history.close_all(Outcome.RECOVERED)
    return run, history
