"""Further remedies that a policy can name, and the arithmetic of trials. Importing it makes them known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, isclose, isfinite, sqrt
from statistics import fmean, stdev
from typing import Any

from resilient_train.core.policy import actions_of, each_of
from resilient_train.core.remedies import KNOWN, Case, Remedy, applicable, limited
from resilient_train.ground.errors import unusable
from resilient_train.ground.types import Action, Tried


@dataclass(frozen=True, slots=True)
class FullCase(Case):
    """What further remedies need to know, too."""

    loss_scaler: bool = False
    armor: bool = False  # the line that broke is known and not patched yet; after updates that landed it is not
    share: float = 0.0  # of the norm of the weights, that updates are limited to; 0: they are not
    lost_eps: bool = False  # an optimizer's epsilon is 0 in the type of its weights
    trial_updates: int = 0  # that trials may still make; 0: none can be made here


_TRIED = ("tighten_clip", "limit_update", "raise_eps")  # not lower_lr, which nearly always looks better for a while
JUDGED = 16  # later updates whose losses are compared
_NOISE = 2.0  # standard errors of a mean difference
_NEARLY_ALL, _ENOUGH = 15 / 16, 8  # of the losses that are compared, and so many at least
_BEHIND = 0.1  # of the way that the run has come
_SLOWER = 0.4  # the same, of an arm that is tried for longer: it had half of the updates or fewer
_RISEN = 0.2  # of the loss
_FAR = 0.4  # of the loss: at the same age, noise and a falling rate explain less
_LEARNED = 0.1  # of the first loss
_LEAST_GAIN = 0.01  # of the loss: less is no reason to change anything


@dataclass(frozen=True, slots=True)
class Arm:
    actions: tuple[Action, ...]
    anomalies: int  # updates that did not land
    losses: tuple[float, ...]  # of the later updates that all arms are judged on, after it

    @property
    def loss(self) -> float:
        return fmean(self.losses) if self.losses and all(map(isfinite, self.losses)) else inf

    @property
    def cut(self) -> float:
        return float(self.actions[0].settings["factor"]) if self.actions else 1.0

    def equals(self, other: Arm) -> bool:
        """Whether it has the losses of another. If not after the same updates, the program keeps state of its own."""
        pairs = zip(self.losses, other.losses, strict=True)
        return all(isclose(one, two, rel_tol=1e-6) or (one != one and two != two) for one, two in pairs)

    def risen_from(self, before: Arm) -> Arm:
        """Count one anomaly more if its loss has risen: then something is broken, though every update landed."""
        return replace(self, anomalies=self.anomalies + is_lower(before, self, _RISEN))


def table(arms: Sequence[Arm], won: int) -> tuple[Tried, ...]:
    return tuple(Tried(one.actions, one.anomalies, one.loss, place == won) for place, one in enumerate(arms))


def best_arm(arms: Sequence[Arm]) -> int:
    """Return the place of the arm with the fewest anomalies, then the lowest loss; of equals the first, the mildest."""
    least = min(one.anomalies for one in arms)
    left = [place for place, one in enumerate(arms) if one.anomalies == least]
    return next((one for one in left if not any(is_lower(arms[place], arms[one]) for place in left)), left[0])


def fastest(arms: Sequence[Arm]) -> int:
    """Return the place of the lowest loss, of equals the highest rate; 0, the arm left as it is, if none is ahead."""
    least = min(one.anomalies for one in arms)
    ahead = [place for place, one in enumerate(arms) if one.anomalies == least and is_lower(one, arms[0])]
    best = min(ahead, key=lambda place: arms[place].loss, default=0)
    close = [place for place in ahead if not is_lower(arms[best], arms[place])]
    return max(close, key=lambda place: arms[place].cut, default=0)


def holds(arm: Arm, control: Arm, now: Arm, first: float) -> bool:
    """Say whether a lower rate also beats the present one, which made as many updates from the same state: `control`.

    Where a loss grows with training, younger states look better than `now`: it has to gain more, unless none learned.
    """
    if arm.anomalies > control.anomalies or not is_lower(arm, control) or not learns(arm, first):
        return False
    if not learns(control, first):
        return True
    by_age = now.loss - control.loss if isfinite(now.loss) else 0.0
    return control.loss - arm.loss > by_age


def is_ahead(arm: Arm, now: Arm, first: float) -> bool:
    """Say whether an arm that is as old as the run has a far lower loss, or has learned where the run has not."""
    has_learned = learns(arm, first) and not learns(now, first)
    return arm.anomalies == 0 and is_lower(arm, now, _LEAST_GAIN if has_learned else _FAR)


def learns(arm: Arm, first: float) -> bool:
    """Say whether an arm is well below the `first` loss, which that of a GAN only stays near, at a low rate."""
    return first - arm.loss > _LEARNED * abs(first)


def cost_of(updates: int, forwards: int) -> int:
    """Return what a trial costs, in updates: a forward costs about a third of one."""
    return updates + ceil(forwards / 3)


def may_win(arms: Sequence[Arm], first: float) -> bool:
    """Say whether to try more where none is ahead: the first rate nearly is, or the loss is far above the `first`."""
    now = arms[0].loss
    is_thrown = now - first > 2 * abs(first)  # then any rate that is low enough does better
    if len(arms) < 2 or is_thrown:
        return True
    return len(arms) == 2 and arms[1].loss <= now + _BEHIND * max(0.0, first - now)


def on_its_way(arms: Sequence[Arm], first: float) -> int:
    """Return the place of the best of the lower rates if it came most of the way from the `first` loss; else 0."""
    best = min(range(1, len(arms)), key=lambda place: arms[place].loss, default=0)
    return best if best and arms[best].loss <= arms[0].loss + _SLOWER * max(0.0, first - arms[0].loss) else 0


def is_lower(arm: Arm, other: Arm, share: float = _LEAST_GAIN) -> bool:
    """Say whether losses are lower by a share of the other's, and by more than noise: the mean, or nearly all."""
    if not (isfinite(arm.loss) and isfinite(other.loss)):
        return isfinite(arm.loss)
    gains = [theirs - mine for mine, theirs in zip(arm.losses, other.losses, strict=True)]
    noise = _NOISE * stdev(gains) / sqrt(len(gains)) if len(gains) > 1 else inf
    is_sure = fmean(gains) > noise or sum(gain > 0 for gain in gains) >= max(_NEARLY_ALL * len(gains), _ENOUGH)
    return is_sure and fmean(gains) > share * abs(other.loss)


@dataclass(frozen=True)
class Quarantine(Remedy):
    """Replace the guilty rows for the rest of the run, and retry the update with the replacements."""

    def applies(self, case: FullCase) -> bool:
        """Rows must be known by an index; updates with them that landed must be undone as well."""
        return bool(case.diagnosis.rows) and case.rows > 0 and (not case.anomaly.landed or case.rewinds)

    def apply(self, run: Any) -> None:
        run.quarantine()


@dataclass(frozen=True)
class ResetMoments(Remedy):
    """Reset the optimizer's moments. Best with some re-warming: the first estimates are rough."""

    def apply(self, run: Any) -> None:
        run.reset_moments()


@dataclass(frozen=True)
class LimitLr(Remedy):
    """Keep the learning rate at the highest before it rose. The last one before would be lower than the schedule's."""

    to: float = limited(0.0, at_least=0)  # a multiple of the configured rate; 0: the highest that it had
    leapt_to: float = limited(0.0, at_least=0)  # what the rate rose to in one step; as that falls, so does the limit

    def settings_for(self, case: FullCase) -> dict[str, float]:
        return {} if self.to else {"to": case.diagnosis.usual_rate, "leapt_to": case.diagnosis.leapt_to}

    def applies(self, case: FullCase) -> bool:
        return self.to > 0 or case.diagnosis.usual_rate > 0

    def apply(self, run: Any) -> None:
        run.knobs.limit_lr(self.to, self.leapt_to)


@dataclass(frozen=True)
class LimitUpdate(Remedy):
    """Clip the gradient so that an update of SGD changes the weights by at most a share of their norm, which falls."""

    share: float = limited(0.1, above=0, at_most=1)

    def settings_for(self, case: FullCase) -> dict[str, float]:
        """Where updates are limited already, begin with a third of what is left of that."""
        return {"share": min(self.share, float(f"{case.share / 3:.2g}"))} if case.share else {}

    def applies(self, case: FullCase) -> bool:
        return case.sgd

    def apply(self, run: Any) -> None:
        run.lasting.share, run.lasting.limited = self.share, 0


@dataclass(frozen=True)
class LowerDecay(Remedy):
    """Multiply the weight decay, for the rest of the run."""

    factor: float = limited(0.0, at_least=0, at_most=1)

    def apply(self, run: Any) -> None:
        run.lasting.decay *= self.factor


@dataclass(frozen=True)
class MendEps(Remedy):
    """Raise an optimizer's epsilon that its type rounds to 0, as half precision does with 1e-8."""

    def applies(self, case: FullCase) -> bool:
        return case.lost_eps

    def apply(self, run: Any) -> None:
        run.lasting.mends_eps = True


@dataclass(frozen=True)
class PatchOperation(Remedy):
    """Patch the operation that broke, in its own line only, for the rest of the run; healthy elements stay as is."""

    def applies(self, case: FullCase) -> bool:
        return case.armor

    def apply(self, run: Any) -> None:
        run.patch_line()


@dataclass(frozen=True)
class LowerLossScale(Remedy):
    """Multiply the loss scale of half precision at once; the scaler alone lowers it update by update."""

    factor: float = limited(0.0625, above=0, at_most=1)

    def applies(self, case: FullCase) -> bool:
        return case.loss_scaler

    def apply(self, run: Any) -> None:
        run.lower_loss_scale(self.factor)


def _arms(key: str, nodes: Any) -> tuple[tuple[Action, ...], ...]:
    return each_of(_arm, key, nodes, "must be a list of at least two arms, such as [[tighten_clip], [raise_eps]]", 2)


def _arm(key: str, nodes: Any) -> tuple[Action, ...]:
    actions = actions_of(key, nodes)
    if odd := sorted({action.remedy for action in actions} - {*_TRIED}):
        raise unusable(key, f"{odd[0]} cannot be tried: what can is {', '.join(_TRIED)}")
    return actions


@dataclass(frozen=True)
class Trial(Remedy):
    """Try several remedies from the same state on the same samples, and apply those of the best arm."""

    of: tuple[tuple[Action, ...], ...] = field(metadata={"read": _arms})  # the mildest first
    steps: int = limited(30, at_least=1)  # updates of each arm

    def settings_for(self, case: FullCase) -> dict[str, Any]:
        """Leave out what makes no sense here: remedies of an arm, and arms of which nothing is left."""
        return {"of": tuple(arm for arm in (applicable(arm, case) for arm in self.of) if arm)}

    def applies(self, case: FullCase) -> bool:
        arms = self.settings_for(case)["of"]
        cost = cost_of(len(arms) * self.steps, (len(arms) + 2) * JUDGED)  # twice before the arms
        return len(arms) > 1 and cost <= case.trial_updates

    def apply(self, run: Any) -> None:
        run.try_arms(self.of, self.steps)


KNOWN |= {
    "quarantine": Quarantine,
    "reset_moments": ResetMoments,
    "limit_lr": LimitLr,
    "limit_update": LimitUpdate,
    "lower_decay": LowerDecay,
    "mend_eps": MendEps,
    "armor": PatchOperation,
    "lower_loss_scale": LowerLossScale,
    "trial": Trial,
}
# All of them in the order in which those of a rung are applied, custom ones last. What stands next to a trial in a rung
# holds for all of its arms.
_ORDER = (
    "rewind skip quarantine repeat report reset_moments lower_lr limit_lr tighten_clip limit_update lower_decay "
    "raise_eps mend_eps armor lower_loss_scale trial"
)
KNOWN |= {name: KNOWN.pop(name) for name in _ORDER.split()}
