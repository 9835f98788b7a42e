"""Remedies: small classes with settings that change a run. `KNOWN` lists those that a policy can name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from resilient_train.ground.reader import limited as limited  # remedies of others import it from here
from resilient_train.ground.types import OBSERVE, Action, Anomaly, Diagnosis

if TYPE_CHECKING:  # it has torch
    from resilient_train.core.controls import Controls


@dataclass(frozen=True, slots=True)
class Case:
    """An incident, and what remedies need to know about the run at this moment; the same on every rank."""

    anomaly: Anomaly
    diagnosis: Diagnosis
    rewinds: bool = False  # another remedy of the same rung rewinds to a verified state
    snapshots: int = 1  # verified states that can be restored and are not newer than the anomaly's `since`
    rows: int = 0  # rows of the data set that have an index; 0: none has one
    quarantined: int = 0  # of these, already in quarantine
    at_start: bool = False  # the only verified state is the one that the run began with
    own_rates: bool = False  # an optimizer finds its rates itself, as Adafactor does
    sgd: bool = False  # every optimizer is torch's SGD, whose updates are as large as the gradients
    refused_in_a_row: int = 0  # updates right before this one, in this process
    facts: Mapping[str, Any] = field(default_factory=dict)  # what remedies of extensions need to know


class Remedy:
    """An action against an incident. Those of extensions are frozen dataclasses that inherit from this class."""

    order: ClassVar[int] = 100  # the lower, the earlier it is applied among those of a rung
    is_mild: ClassVar[bool] = False  # it changes neither weights nor knobs
    is_main: ClassVar[bool] = False  # a rung that names it is left out where it does not apply

    def applies(self, case: Case) -> bool:
        """Say whether it makes sense here; otherwise it is left out and costs no strike."""
        return True

    def settings_for(self, case: Case) -> dict[str, Any]:
        """Return the settings that follow from the case, which replace those of the policy."""
        return {}

    def apply(self, run: Controls) -> None:
        """Change the run."""


@dataclass(frozen=True)
class Rewind(Remedy):
    """Rewind to the last verified state, or to an older one. Knobs, history and tick stay."""

    order = 0
    older: int = limited(0, at_least=0)  # so many verified states before the last one
    steps: int = limited(0, at_least=0)  # at least so many steps back

    def applies(self, case: Case) -> bool:
        return case.snapshots > 0

    def apply(self, run: Controls) -> None:
        run.rewind(self.older, self.steps)


@dataclass(frozen=True)
class Skip(Remedy):
    """Skip the suspect samples, or a window of updates; they come again in the next epoch."""

    order = 10
    updates: int | None = limited(None, at_least=1)  # the window; null: the suspect samples

    def applies(self, case: Case) -> bool:
        """Samples that landed are behind the run unless it rewinds; then known bad rows go into quarantine instead."""
        if self.updates is not None or not case.anomaly.landed:
            return True
        return case.rewinds and not (case.diagnosis.rows and case.rows)

    def apply(self, run: Controls) -> None:
        run.skip(self.updates)


@dataclass(frozen=True)
class Repeat(Remedy):
    """Retry the refused update with the same samples: for faults that come and go."""

    order, is_mild = 30, True

    def applies(self, case: Case) -> bool:
        return not case.anomaly.landed


@dataclass(frozen=True)
class Report(Remedy):
    """Report what reached the weights, and continue. A refused update that is only reported would recur forever."""

    order, is_mild = 40, True

    def applies(self, case: Case) -> bool:
        return case.anomaly.landed


@dataclass(frozen=True)
class LowerLr(Remedy):
    """Multiply the learning rate, and let it climb there from zero; it relaxes by itself. With 1 it only warms up."""

    order = 60
    factor: float = limited(0.5, above=0, at_most=1)
    rewarm: int = limited(0, at_least=0)  # steps of the climb
    lasting: bool = False  # relax as late as possible: the configured rate never worked

    def applies(self, case: Case) -> bool:
        return not case.own_rates

    def apply(self, run: Controls) -> None:
        run.knobs.turn_lr(self.factor, self.rewarm, lasting=self.lasting)


@dataclass(frozen=True)
class TightenClip(Remedy):
    """Multiply the limits of the gradient clip; they relax by themselves."""

    order = 80
    factor: float = limited(0.5, above=0, at_most=1)

    def apply(self, run: Controls) -> None:
        run.knobs.turn_clip(self.factor)


# By name. Extensions add theirs.
KNOWN: dict[str, type[Remedy]] = {
    "rewind": Rewind,
    "skip": Skip,
    "repeat": Repeat,
    "report": Report,
    "lower_lr": LowerLr,
    "tighten_clip": TightenClip,
}


def remedy(action: Action) -> Remedy:
    """Build the remedy that an action of a policy names."""
    return KNOWN[action.remedy](**action.settings)


def applicable(actions: Sequence[Action], case: Case) -> tuple[Action, ...]:
    """Select the actions that apply, and replace the settings that follow from the case."""
    kept = [(action, one) for action in actions if (one := remedy(action)).applies(case)]
    return tuple(replace(action, settings={**action.settings, **one.settings_for(case)}) for action, one in kept)


def is_mild(actions: Iterable[Action]) -> bool:
    """Say whether actions change neither weights nor knobs, and skip or replace no more than the suspect samples."""
    kinds = {one.remedy: KNOWN[one.remedy] for one in actions if one.remedy in KNOWN}
    mild = {OBSERVE, *(name for name, kind in kinds.items() if kind.is_mild)}
    return all(one.remedy in mild or (one.remedy == "skip" and not one.settings) for one in actions)
