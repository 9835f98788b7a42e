"""What remedies are made for: a run as they see it, a case, and what they have to know of themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from resilient_train.recover.knobs import Knobs
from resilient_train.types import Anomaly, Diagnosis


@dataclass(frozen=True, slots=True)
class Applicable:
    """What can be done in this run at this moment; the same on every rank."""

    snapshots: int = 1  # proven states in reach that are not newer than the anomaly's `since`
    skip: bool = True  # the data can be passed over
    mixed_precision: bool = False
    loss_scaler: bool = False
    rows: int = 0  # of the data set, that have an index; 0: none has
    quarantined: int = 0  # of them, already
    armor: bool = False  # the guilty line is known and has none
    at_start: bool = False  # no state is proven but the one that the run began with
    lost_eps: bool = False  # an optimizer's epsilon is 0 in the type of its weights
    off: float = 0.0  # how far the loss is above where it was, in sizes of such losses: 1 is twice as high
    usual_rate: float = 0.0  # of learning before it rose, as a multiple of the configured one; 0: it did not
    leapt_to: float = 0.0  # what it rose to at once; 0: not at once


@dataclass(frozen=True, slots=True)
class Case:
    """What a remedy may know when it says whether it applies."""

    anomaly: Anomaly
    diagnosis: Diagnosis
    can: Applicable
    rewinds: bool  # another remedy of the same rung goes back to a good state


class Patient(Protocol):
    """What remedies may do to a run. Where nothing skips, a refused update is made again, of the same samples."""

    @property
    def knobs(self) -> Knobs:
        """What the run trains with."""

    def rewind(self, older: int = 0, steps: int = 0) -> None:
        """Go back to the newest proven state not after `since`, `older` ones before it, at least `steps` steps back.

        Where there is nothing so old, to the oldest.
        """

    def skip(self, updates: int | None = None) -> None:
        """Pass over the samples from what is to blame up to the anomaly, or a window of `updates` from here."""

    def quarantine(self) -> None:
        """Put others in the places of the guilty rows for the rest of the run; where nothing skips, in this update."""

    def reset_moments(self) -> None:
        """Let the optimizers begin anew."""

    def armor(self) -> None:
        """Guard the operation that broke."""

    def mend_eps(self) -> None:
        """Raise an optimizer's epsilon to what its type can hold."""

    def lower_loss_scale(self, factor: float) -> None:
        """Multiply the loss scale."""


@runtime_checkable
class Remedy(Protocol):
    """Something to do about an incident. Write your own as a frozen dataclass that inherits from this."""

    name: ClassVar[str]
    about: ClassVar[str]  # one line for a person

    def applies(self, case: Case) -> bool:
        """Say whether it makes sense here; what does not is passed over, without a strike."""
        return True

    def settled(self, case: Case) -> dict[str, float]:
        """Return the settings that follow from the case: they take the place of those that the policy has."""
        return {}

    def apply(self, patient: Patient) -> None:
        """Do it."""

    def undo(self, patient: Patient) -> str | None:
        """Take it back, or say why that cannot be."""
        return "cannot be undone"
