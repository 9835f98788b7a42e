"""Remedies: small things with a name, settings, and what they do to a run. `KNOWN` lists those a policy can name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from resilient_train.errors import ConfigError
from resilient_train.imports import Unimportable, find
from resilient_train.reader import limited
from resilient_train.recover.knobs import Knobs
from resilient_train.types import Action, Anomaly, Diagnosis

__all__ = ["KNOWN", "Case", "Circumstances", "Remedy", "RunControl", "limited", "only_skips", "remedy"]

_DEEPEST = 0.01  # that a rate is multiplied by at once


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What remedies need to know about a run at this moment; the same on every rank."""

    snapshots: int = 1  # verified states in reach that are not newer than the anomaly's `since`
    skip: bool = True  # the data can be skipped
    mixed_precision: bool = False
    loss_scaler: bool = False
    rows: int = 0  # of the data set, that have an index; 0: none has
    quarantined: int = 0  # of them, already
    armor: bool = False  # the guilty line is known and not patched yet
    at_start: bool = False  # no state is verified but the one that the run began with
    lost_eps: bool = False  # an optimizer's epsilon is 0 in the type of its weights
    off: float = 0.0  # how far the loss is above where it was, relative to its level there: 1 is twice as high
    usual_rate: float = 0.0  # learning rate before it rose, as a multiple of the configured one; 0: it did not
    leapt_to: float = 0.0  # what it rose to at once; 0: not at once


@dataclass(frozen=True, slots=True)
class Case:
    """What a remedy may know when it says whether it applies."""

    anomaly: Anomaly
    diagnosis: Diagnosis
    facts: Circumstances
    rewinds: bool  # another remedy of the same rung goes back to a good state


class RunControl(Protocol):
    """What remedies may do to a run. Where nothing is skipped, a refused update is retried with the same samples."""

    @property
    def knobs(self) -> Knobs:
        """What the run trains with."""

    def rewind(self, older: int = 0, steps: int = 0) -> None:
        """Go back to the newest verified state not after `since`, `older` ones before it, at least `steps` steps back.

        Where there is nothing so old, to the oldest.
        """

    def skip(self, updates: int | None = None) -> None:
        """Skip the samples from what is to blame up to the anomaly, or a window of `updates` from here."""

    def quarantine(self) -> None:
        """Replace the guilty rows by others for the rest of the run; where nothing is skipped, in this update too."""

    def reset_moments(self) -> None:
        """Reset the state of the optimizers."""

    def armor(self) -> None:
        """Patch the line of the operation that broke."""

    def mend_eps(self) -> None:
        """Raise an optimizer's epsilon to what its type can hold."""

    def lower_loss_scale(self, factor: float) -> None:
        """Multiply the loss scale."""


class Remedy:
    """Something to do about an incident. Write your own as a frozen dataclass that inherits from this."""

    name: ClassVar[str]

    def applies(self, case: Case) -> bool:
        """Say whether it makes sense here; one that does not is left out, without a strike."""
        return True

    def settings_for(self, case: Case) -> dict[str, float]:
        """Return the settings that follow from the case, which replace those of the policy."""
        return {}

    def apply(self, run: RunControl) -> None:
        """Do it."""


@dataclass(frozen=True)
class Rewind(Remedy):
    """Go back to the last verified state, or to an older one. Knobs, history and tick stay."""

    name: ClassVar[str] = "rewind"
    older: int = limited(0, at_least=0)  # so many verified states before the last one
    steps: int = limited(0, at_least=0)  # at least so many steps back

    def applies(self, case: Case) -> bool:
        return case.facts.snapshots > 0

    def apply(self, run: RunControl) -> None:
        run.rewind(self.older, self.steps)


@dataclass(frozen=True)
class Skip(Remedy):
    """Skip the samples to blame, or a window of updates; they come again in the next epoch."""

    name: ClassVar[str] = "skip"
    updates: int | None = limited(None, at_least=1)  # the window; null: the samples to blame

    def applies(self, case: Case) -> bool:
        """Samples that landed lie behind the run, unless it rewinds; then their bad rows are known, or all go."""
        if case.anomaly.landed and case.diagnosis.rows and case.facts.rows:
            return self.updates is not None
        return case.facts.skip and (not case.anomaly.landed or case.rewinds or self.updates is not None)

    def apply(self, run: RunControl) -> None:
        run.skip(self.updates)


@dataclass(frozen=True)
class Quarantine(Remedy):
    """Take the guilty rows out of the data for the rest of the run: others replace them, so an update is retried."""

    name: ClassVar[str] = "quarantine"

    def applies(self, case: Case) -> bool:
        """There are guilty rows, and an index to know them by; what landed is undone as well."""
        return bool(case.diagnosis.rows) and case.facts.rows > 0 and (not case.anomaly.landed or case.rewinds)

    def apply(self, run: RunControl) -> None:
        run.quarantine()


@dataclass(frozen=True)
class Repeat(Remedy):
    """Retry the refused update with the same samples: for faults that come and go."""

    name: ClassVar[str] = "repeat"

    def applies(self, case: Case) -> bool:
        return not case.anomaly.landed


@dataclass(frozen=True)
class Report(Remedy):
    """Report what reached the weights, and continue. A refused update that is only reported would come for ever."""

    name: ClassVar[str] = "report"

    def applies(self, case: Case) -> bool:
        return case.anomaly.landed


@dataclass(frozen=True)
class ResetMoments(Remedy):
    """Reset the optimizer's moments. Best with some re-warming: the first estimates are rough."""

    name: ClassVar[str] = "reset_moments"

    def apply(self, run: RunControl) -> None:
        run.reset_moments()


@dataclass(frozen=True)
class LowerLr(Remedy):
    """Multiply the learning rate, and let it climb there from zero; it relaxes by itself. With 1 it only warms up."""

    name: ClassVar[str] = "lower_lr"
    factor: float = limited(0.5, above=0, at_most=1)
    rewarm: int = limited(0, at_least=0)  # steps of the climb
    regain: float = limited(0.0, at_least=0, at_most=1)  # the share of the previous rate that it is soon back at
    by_loss: bool = False  # the farther the loss is above where it was, the deeper; `factor` is the mildest

    def settings_for(self, case: Case) -> dict[str, float]:
        return {"factor": cut(self.factor, case.facts.off)} if self.by_loss else {}

    def apply(self, run: RunControl) -> None:
        """Turn the knob; with `by_loss` several cuts together come to no more than the deepest single one."""
        least = min(1.0, _DEEPEST / run.knobs.lr) if self.by_loss else 0.0
        run.knobs.turn_lr(max(self.factor, least), self.rewarm, self.regain)


def cut(mildest: float, off: float) -> float:
    """What the rate is multiplied by where the loss is `off` of its level above it: half where it doubled."""
    deepest = 1.0 / (1.0 + off) if off > 0 else 1.0
    return min(mildest, max(_DEEPEST, float(f"{deepest:.2g}")))


@dataclass(frozen=True)
class LimitLr(Remedy):
    """Keep the learning rate at what it was before it rose, for as long as the schedule asks for more."""

    name: ClassVar[str] = "limit_lr"
    to: float = limited(0.0, at_least=0)  # times the configured rate; 0: what it was
    leapt_to: float = limited(0.0, at_least=0)  # the same of what it rose to at once; as that falls, so does the limit

    def settings_for(self, case: Case) -> dict[str, float]:
        return {} if self.to else {"to": case.facts.usual_rate, "leapt_to": case.facts.leapt_to}

    def applies(self, case: Case) -> bool:
        return self.to > 0 or case.facts.usual_rate > 0

    def apply(self, run: RunControl) -> None:
        run.knobs.limit_lr(self.to, self.leapt_to)


@dataclass(frozen=True)
class TightenClip(Remedy):
    """Multiply the limits of the gradient clip; they relax by themselves."""

    name: ClassVar[str] = "tighten_clip"
    factor: float = limited(0.5, above=0, at_most=1)

    def apply(self, run: RunControl) -> None:
        run.knobs.turn_clip(self.factor)


@dataclass(frozen=True)
class RaiseEps(Remedy):
    """Multiply epsilon, the optimizer's and that of safe operations; it relaxes by itself."""

    name: ClassVar[str] = "raise_eps"
    factor: float = limited(100.0, at_least=1)

    def apply(self, run: RunControl) -> None:
        run.knobs.turn_eps(self.factor)


@dataclass(frozen=True)
class MendEps(Remedy):
    """Raise an optimizer's epsilon that its type rounds to 0, as half precision does with 1e-8."""

    name: ClassVar[str] = "mend_eps"

    def applies(self, case: Case) -> bool:
        return case.facts.lost_eps

    def apply(self, run: RunControl) -> None:
        run.mend_eps()


@dataclass(frozen=True)
class PatchOperation(Remedy):
    """Patch the operation that broke, in its own line only, for the rest of the run; healthy elements stay as is."""

    name: ClassVar[str] = "armor"

    def applies(self, case: Case) -> bool:
        """The line is known, and not patched yet; what landed broke elsewhere."""
        return case.facts.armor and not case.anomaly.landed and case.diagnosis.culprit is not None

    def apply(self, run: RunControl) -> None:
        run.armor()


@dataclass(frozen=True)
class LowerLossScale(Remedy):
    """Multiply the loss scale of half precision. The scaler gets there alone, an update at a time; this is at once."""

    name: ClassVar[str] = "lower_loss_scale"
    factor: float = limited(0.0625, above=0, at_most=1)

    def applies(self, case: Case) -> bool:
        return case.facts.loss_scaler

    def apply(self, run: RunControl) -> None:
        run.lower_loss_scale(self.factor)


@dataclass(frozen=True)
class HigherPrecision(Remedy):
    """Train without autocast for some steps: slower, but out of reach of what overflows in half precision."""

    name: ClassVar[str] = "higher_precision"
    steps: int = limited(50, at_least=1)

    def applies(self, case: Case) -> bool:
        return case.facts.mixed_precision

    def apply(self, run: RunControl) -> None:
        run.knobs.turn_precision(self.steps)


# In the order in which the remedies of a rung are applied; custom ones come last.
_ALL: tuple[type[Remedy], ...] = (
    *(Rewind, Skip, Quarantine, Repeat, Report, ResetMoments, LowerLr, LimitLr, TightenClip),
    *(RaiseEps, MendEps, PatchOperation, LowerLossScale, HigherPrecision),
)
KNOWN: dict[str, type[Remedy]] = {kind.name: kind for kind in _ALL}


def remedy(action: Action) -> Remedy:
    """Return the remedy that an action of a policy names. Not for actions from a file: a dotted name is imported."""
    kind: Any = KNOWN.get(action.remedy) or custom_remedy(action.remedy, action.remedy)
    built: Remedy = kind(**action.settings)
    return built


def custom_remedy(path: str, key: str) -> type[Remedy]:
    """Import the remedy that a dotted path names; `key` is where it stands in the policy.

    Anything else that it names, such as `os.system`, is refused here, before it is called.
    """
    try:
        kind = find(path)
    except Unimportable as error:
        raise ConfigError(key, path, f"cannot be imported: {error}") from error.__cause__
    if not isinstance(kind, type) or not issubclass(kind, Remedy):
        what = f"a {type(kind).__name__}" if not isinstance(kind, type) else "another class"
        raise ConfigError(key, path, f"is not a remedy: it is {what}; inherit from {Remedy.__module__}.Remedy")
    return kind


def only_skips(actions: Iterable[Action]) -> bool:
    """Say whether a decision leaves the run as it was, except for samples that it skips or replaces."""
    passing = (Quarantine.name, Repeat.name, Report.name)
    return all(one.remedy in passing or (one.remedy == Skip.name and not one.settings) for one in actions)
