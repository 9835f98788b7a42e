"""Remedies: small things with a name, settings, and what they do to a run. `KNOWN` lists those a policy can name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from resilient_train.recover.own import imported
from resilient_train.recover.patient import Applicable, Case, Patient, Remedy
from resilient_train.types import Action

__all__ = ["KNOWN", "Applicable", "Case", "Patient", "Remedy", "limited", "passes_over", "remedy"]


_DEEPEST = 0.01  # that a rate is multiplied by at once


def limited(default: Any, **limits: float) -> Any:
    """Declare a setting with its limits: `at_least`, `at_most`, `above`."""
    return dataclasses.field(default=default, metadata=limits)


@dataclass(frozen=True)
class Rewind(Remedy):
    """Everything that rewinds goes back; knobs, history and tick stay."""

    name: ClassVar[str] = "rewind"
    about: ClassVar[str] = "go back to the last state that is proven good, or to an older one"
    older: int = limited(0, at_least=0)  # so many proven states before the last one
    steps: int = limited(0, at_least=0)  # at least so many steps back

    def applies(self, case: Case) -> bool:
        """There has to be a state that is still to be trusted."""
        return case.can.snapshots > 0

    def apply(self, patient: Patient) -> None:
        """Go back."""
        patient.rewind(self.older, self.steps)

    def undo(self, patient: Patient) -> str | None:
        """The way from there is made anew."""
        return "rewinding cannot be undone, and needs not: the run comes by there again"


@dataclass(frozen=True)
class Skip(Remedy):
    """The samples to blame are not met again in this epoch."""

    name: ClassVar[str] = "skip"
    about: ClassVar[str] = "pass over the samples to blame, or over a window of updates"
    updates: int | None = limited(None, at_least=1)  # the window; null: the samples to blame

    def applies(self, case: Case) -> bool:
        """Samples that landed lie behind the run, unless it goes back; then their bad rows are known, or all go."""
        if case.anomaly.landed and case.diagnosis.rows and case.can.rows:
            return self.updates is not None
        return case.can.skip and (not case.anomaly.landed or case.rewinds or self.updates is not None)

    def apply(self, patient: Patient) -> None:
        """Pass over them."""
        patient.skip(self.updates)

    def undo(self, patient: Patient) -> str | None:
        """The cursor moves on only."""
        return "skipping cannot be undone, and needs not: the samples come by again in the next epoch"


@dataclass(frozen=True)
class Quarantine(Remedy):
    """Others stand in the places of the guilty rows, so a refused update can be made again."""

    name: ClassVar[str] = "quarantine"
    about: ClassVar[str] = "take the guilty rows out of the data for the rest of the run"

    def applies(self, case: Case) -> bool:
        """There have to be guilty rows, and an index to know them by; what landed has to be undone as well."""
        return bool(case.diagnosis.rows) and case.can.rows > 0 and (not case.anomaly.landed or case.rewinds)

    def apply(self, patient: Patient) -> None:
        """Take them out."""
        patient.quarantine()

    def undo(self, patient: Patient) -> str | None:
        """What was trained on in their places has been trained on."""
        return "rows are not brought back into a run: mend them, and they are in the data of the next one"


@dataclass(frozen=True)
class LowerLr(Remedy):
    """The knob relaxes by itself; a factor of 1 only warms up anew."""

    name: ClassVar[str] = "lower_lr"
    about: ClassVar[str] = "multiply the learning rate, and let it climb there from zero"
    factor: float = limited(0.5, above=0, at_most=1)
    rewarm: int = limited(0, at_least=0)  # steps of the climb
    regain: float = limited(0.0, at_least=0, at_most=1)  # the share of the rate before that it is soon back at
    by_loss: bool = False  # the farther the loss is above where it was, the deeper

    def settled(self, case: Case) -> dict[str, float]:
        """The factor is the mildest that is taken."""
        return {"factor": cut(self.factor, case.can.off)} if self.by_loss else {}

    def apply(self, patient: Patient) -> None:
        """Turn the knob; where the loss says how deep, several cuts together come to no more than the deepest."""
        least = min(1.0, _DEEPEST / patient.knobs.lr) if self.by_loss else 0.0
        patient.knobs.turn_lr(max(self.factor, least), self.rewarm, self.regain)

    def undo(self, patient: Patient) -> str | None:
        """Turn it back by as much."""
        patient.knobs.turn_lr(1 / self.factor)
        return None


def cut(mildest: float, off: float) -> float:
    """What the rate is multiplied by where the loss is `off` sizes above where it was: half of it where it doubled."""
    deepest = 1.0 / (1.0 + off) if off > 0 else 1.0
    return min(mildest, max(_DEEPEST, float(f"{deepest:.2g}")))


@dataclass(frozen=True)
class LimitLr(Remedy):
    """Low through all of a stretch in which the schedule asks for more; it relaxes by itself after that."""

    name: ClassVar[str] = "limit_lr"
    about: ClassVar[str] = "let no learning rate through above what it was before it rose"
    to: float = limited(0.0, at_least=0)  # times the configured rate; 0: what it was
    leapt_to: float = limited(0.0, at_least=0)  # the same of what it rose to at once; as that falls, so does the limit

    def settled(self, case: Case) -> dict[str, float]:
        """What it was is known only now."""
        return {} if self.to else {"to": case.can.usual_rate, "leapt_to": case.can.leapt_to}

    def applies(self, case: Case) -> bool:
        """It has to be known what it was."""
        return self.to > 0 or case.can.usual_rate > 0

    def apply(self, patient: Patient) -> None:
        """Set the knob."""
        patient.knobs.limit_lr(self.to, self.leapt_to)

    def undo(self, patient: Patient) -> str | None:
        """It lifts by itself."""
        return "a limit needs not be lifted: it relaxes by itself"


@dataclass(frozen=True)
class TightenClip(Remedy):
    """The knob relaxes by itself."""

    name: ClassVar[str] = "tighten_clip"
    about: ClassVar[str] = "multiply the limits of the gradient clip"
    factor: float = limited(0.5, above=0, at_most=1)

    def apply(self, patient: Patient) -> None:
        """Turn the knob."""
        patient.knobs.turn_clip(self.factor)

    def undo(self, patient: Patient) -> str | None:
        """Turn it back by as much."""
        patient.knobs.turn_clip(1 / self.factor)
        return None


@dataclass(frozen=True)
class RaiseEps(Remedy):
    """One knob for every epsilon; it relaxes by itself."""

    name: ClassVar[str] = "raise_eps"
    about: ClassVar[str] = "multiply epsilon, the optimizer's and that of safe operations"
    factor: float = limited(100.0, at_least=1)

    def apply(self, patient: Patient) -> None:
        """Turn the knob."""
        patient.knobs.turn_eps(self.factor)

    def undo(self, patient: Patient) -> str | None:
        """Turn it back by as much."""
        patient.knobs.turn_eps(1 / self.factor)
        return None


@dataclass(frozen=True)
class ResetMoments(Remedy):
    """Best with some re-warming: the first estimates are rough."""

    name: ClassVar[str] = "reset_moments"
    about: ClassVar[str] = "forget the optimizer's moments"

    def apply(self, patient: Patient) -> None:
        """Forget them."""
        patient.reset_moments()

    def undo(self, patient: Patient) -> str | None:
        """New ones come of themselves."""
        return "moments that were reset cannot be brought back, and need not: they build up again"


@dataclass(frozen=True)
class MendEps(Remedy):
    """An epsilon of 1e-8 is 0 in half precision, and an update divides by it."""

    name: ClassVar[str] = "mend_eps"
    about: ClassVar[str] = "raise an optimizer's epsilon that is lost in its type to what the type can hold"

    def applies(self, case: Case) -> bool:
        """There has to be one."""
        return case.can.lost_eps

    def apply(self, patient: Patient) -> None:
        """Raise it for the rest of the run."""
        patient.mend_eps()

    def undo(self, patient: Patient) -> str | None:
        """It was no epsilon before."""
        return "an epsilon that is lost in its type cannot be brought back, and needs not: it was none"


@dataclass(frozen=True)
class PutOnArmor(Remedy):
    """All elements that do not break stay what they are, to the last bit."""

    name: ClassVar[str] = "armor"
    about: ClassVar[str] = "guard the operation that broke, in its own line and there only, for the rest of the run"

    def applies(self, case: Case) -> bool:
        """The line has to be known, and not armored yet; what landed broke elsewhere."""
        return case.can.armor and not case.anomaly.landed and case.diagnosis.culprit is not None

    def apply(self, patient: Patient) -> None:
        """Put it on."""
        patient.armor()

    def undo(self, patient: Patient) -> str | None:
        """It acts only where there would be no number."""
        return "armor needs not be taken off: it does nothing where the operation does not break"


@dataclass(frozen=True)
class LowerLossScale(Remedy):
    """The scaler finds its way down alone, an update at a time; this is at once."""

    name: ClassVar[str] = "lower_loss_scale"
    about: ClassVar[str] = "multiply the loss scale of half precision"
    factor: float = limited(0.0625, above=0, at_most=1)

    def applies(self, case: Case) -> bool:
        """There has to be a loss scale."""
        return case.can.loss_scaler

    def apply(self, patient: Patient) -> None:
        """Lower it."""
        patient.lower_loss_scale(self.factor)

    def undo(self, patient: Patient) -> str | None:
        """The scaler does it."""
        return "a loss scale needs not be raised again by hand: the scaler grows it by itself"


@dataclass(frozen=True)
class HigherPrecision(Remedy):
    """Slower, and out of reach of what overflows in half precision."""

    name: ClassVar[str] = "higher_precision"
    about: ClassVar[str] = "train without autocast for a stretch"
    steps: int = limited(50, at_least=1)

    def applies(self, case: Case) -> bool:
        """There has to be something higher."""
        return case.can.mixed_precision

    def apply(self, patient: Patient) -> None:
        """Turn the knob."""
        patient.knobs.turn_precision(self.steps)

    def undo(self, patient: Patient) -> str | None:
        """Come back at once."""
        patient.knobs.turn_precision(0)
        return None


@dataclass(frozen=True)
class Repeat(Remedy):
    """For faults that come and go."""

    name: ClassVar[str] = "repeat"
    about: ClassVar[str] = "make the refused update once more, of the same samples"

    def applies(self, case: Case) -> bool:
        """What landed cannot be made once more."""
        return not case.anomaly.landed

    def apply(self, patient: Patient) -> None:
        """A refused update that nothing skips is made again."""

    def undo(self, patient: Patient) -> str | None:
        """There is nothing to take back."""
        return None


@dataclass(frozen=True)
class Report(Remedy):
    """Of a refused update there is more to do than to tell it: it would come again for ever."""

    name: ClassVar[str] = "report"
    about: ClassVar[str] = "tell what reached the weights, and go on"

    def applies(self, case: Case) -> bool:
        """Only what landed can be left as it is."""
        return case.anomaly.landed

    def apply(self, patient: Patient) -> None:
        """It is told with every incident."""

    def undo(self, patient: Patient) -> str | None:
        """There is nothing to take back."""
        return None


# In the order in which the remedies of a rung are applied; those of a user's own come last.
_ALL: tuple[type[Remedy], ...] = (
    *(Rewind, Skip, Quarantine, Repeat, Report, ResetMoments, LowerLr, LimitLr, TightenClip),
    *(RaiseEps, MendEps, PutOnArmor, LowerLossScale, HigherPrecision),
)
KNOWN: dict[str, type[Remedy]] = {kind.name: kind for kind in _ALL}
ORDER = {name: place for place, name in enumerate(KNOWN)}


def remedy(action: Action) -> Remedy:
    """Return the remedy that an action of a policy names. Not for actions from a file: a dotted name is imported."""
    kind = KNOWN.get(action.remedy) or imported(action.remedy, action.remedy)
    built: Remedy = kind(**action.settings)
    return built


def passes_over(actions: Iterable[Action]) -> bool:
    """Say whether a decision leaves the run as it was, but for samples that it passes over or replaces."""
    passing = (Quarantine.name, Repeat.name, Report.name)
    return all(one.remedy in passing or (one.remedy == Skip.name and not one.settings) for one in actions)
