"""When to try lower rates, and the arithmetic of trials: which rate did best."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf, isclose, isfinite, sqrt
from statistics import fmean, stdev

from resilient_train.core.checks import Check, References
from resilient_train.core.episode import falls
from resilient_train.core.loss import Alarm, Every, without_top
from resilient_train.data.history import FIRST_LOSSES, beginning
from resilient_train.ground.reader import limited
from resilient_train.ground.types import Facts, Vitals, fact

_NEVER = 2**53  # steps
_THROWN = 0.2  # of that: by so much the first updates have raised the loss


@dataclass
class NoProgressConfig(Every):
    window: int = limited(at_least=16)
    share: float = limited(above=0)
    travel: float = limited(above=0)


class NoProgress(Check):
    """The losses have not fallen since a quarter of the run, and are still near those that it began with.

    Or they fall only since the first updates threw them up; or they stand, or fall slowly at later looks, while the
    weights still change by much of their norm. No alarm, as many healthy losses stand: it asks for a trial of rates.
    """

    saved = ("_losses", "_began", "_seen")
    persistent = ("next_look",)

    def __init__(self, config: NoProgressConfig) -> None:
        self.config = config
        self.next_look = config.every  # the step
        self._began: list[float] = []  # the first losses
        self.evidence: Facts = ()
        self._losses: deque[float] = deque(maxlen=config.window)
        self._seen = 0

    def landed(self, step: int, vitals: Vitals, reference: References, *, is_learned: bool) -> Alarm | None:
        self._seen += 1
        if self._seen <= FIRST_LOSSES:
            self._began.append(vitals.loss)
        self._losses.append(vitals.loss)
        return None

    @property
    def first(self) -> float:
        """Where it began."""
        return beginning(self._began)[0]

    @property
    def age(self) -> int:
        """How many updates were accepted since it began, or the loss was changed on purpose."""
        return self._seen

    def asks(self, step: int, travelled: Callable[[], float]) -> bool:
        """Say whether to try lower learning rates.

        `travelled`, called at few steps and by all ranks: how far the weights moved lately, relative to their norm.
        """
        if not self.config.every or step < self.next_look:
            return False
        newer = list(self._losses)[-(3 * self._seen // 4) :]
        level = fmean(without_top(newer)) if newer else 0.0
        first, mean = beginning(self._began)
        is_thrown = mean - first > _THROWN * abs(first)
        still_fall = falls(newer) and not is_thrown
        how = "thrown" if is_thrown else "falls" if still_fall else "stands"
        seen = {"count": len(newer), "mean": level, how: True, "first": first}
        self.evidence = fact("plateau", **seen)
        # In the first updates the weights of a loss that falls may change by any amount.
        if self._seen >= self.config.every * (2 if still_fall else 1):
            if not still_fall and first - level < self.config.share * abs(first):
                return True
            if (travel := travelled()) >= self.config.travel:
                self.evidence = fact("plateau", **seen, travel=travel)
                return True
        self.next_look = step + max(self.config.every, step // 4)
        return False

    def tried(self, step: int, *, is_tried: bool) -> None:
        """Note what became of a trial: where none could be made, it asks again before long."""
        if self.next_look < _NEVER:
            self.next_look = 2 * step if is_tried else step + self.config.every

    def more_is_trained(self) -> None:
        self.next_look = _NEVER  # the beginning is no measure any more

    def forget(self, limit: float = inf) -> None:
        self._losses.clear()
        self._began, self._seen = [], 0


JUDGED = 16  # later updates whose losses are compared
_NOISE = 2.0  # standard errors of a mean difference
_NEARLY_ALL, _ENOUGH = 15 / 16, 8  # of the losses that are compared, and so many at least
_FAR = 0.4  # of the loss: at the same age, noise and a falling rate explain less
_LEARNED = 0.1  # of the first loss
_LEAST_GAIN = 0.01  # of the loss: less is no reason to change anything


@dataclass(frozen=True, slots=True)
class Arm:
    rate: float  # as a multiple of the run's
    since: int | None  # the step at which it begins; None: the run as it is
    anomalies: int  # updates that did not land
    losses: tuple[float, ...]  # of the later updates that all arms are judged on, after it

    @property
    def loss(self) -> float:
        return fmean(self.losses) if self.losses and all(map(isfinite, self.losses)) else inf

    def equals(self, other: Arm) -> bool:
        """Whether it has the losses of another. If not after the same updates, the program keeps state of its own."""
        pairs = zip(self.losses, other.losses, strict=True)
        return all(isclose(one, two, rel_tol=1e-6) for one, two in pairs)


def best_of(arms: Sequence[Arm]) -> Arm:
    """Return the first arm that no other is below by more than noise."""
    return next((one for one in arms if not any(is_lower(other, one) for other in arms)), arms[0])


def beats(arm: Arm, control: Arm, now: Arm, first: float) -> bool:
    """Say whether a lower rate beats the run, and the present rate that made as many updates from the same state.

    Where a loss grows with training, younger states look better than `now`: it has to gain more, unless none learned.
    """
    if arm.anomalies or not (is_lower(arm, now) and is_lower(arm, control) and learns(arm, first)):
        return False
    by_age = now.loss - control.loss if isfinite(now.loss) else 0.0
    return not learns(control, first) or control.loss - arm.loss > by_age


def is_ahead(arm: Arm, now: Arm, first: float) -> bool:
    """Say whether an arm that is as old as the run is below the first loss, and far below the run, or has learned where
    that has not.
    """
    has_learned = learns(arm, first) and not learns(now, first)
    return arm.anomalies == 0 and arm.loss < first and is_lower(arm, now, _LEAST_GAIN if has_learned else _FAR)


def learns(arm: Arm, first: float) -> bool:
    """Say whether an arm is well below the `first` loss, which that of a GAN only stays near, at a low rate."""
    return first - arm.loss > _LEARNED * abs(first)


def cost_of(updates: int, forwards: int) -> int:
    """Return what a trial costs, in updates: a forward costs about a third of one."""
    return updates + ceil(forwards / 3)


def is_lower(arm: Arm, other: Arm, share: float = _LEAST_GAIN) -> bool:
    """Say whether losses are lower by a share of the other's, and by more than noise: the mean, or nearly all."""
    if not (isfinite(arm.loss) and isfinite(other.loss)):
        return isfinite(arm.loss)
    gains = [theirs - mine for mine, theirs in zip(arm.losses, other.losses, strict=True)]
    noise = _NOISE * stdev(gains) / sqrt(len(gains)) if len(gains) > 1 else inf
    is_sure = fmean(gains) > noise or sum(gain > 0 for gain in gains) >= max(_NEARLY_ALL * len(gains), _ENOUGH)
    return is_sure and fmean(gains) > share * abs(other.loss)
