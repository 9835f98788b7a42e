"""Further checks: of a loss that is high since the rate rose, and of the loss scale."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, ClassVar

from resilient_train.core.checks import Check, References
from resilient_train.core.episode import Reference, ReferenceConfig, Standing, line
from resilient_train.core.loss import FEW, Alarm, Every, without_top
from resilient_train.extensions import Extension
from resilient_train.ground.reader import limited
from resilient_train.ground.types import Facts, Vitals, fact


@dataclass
class RateConfig(ReferenceConfig):
    times: float = limited(above=1)
    earlier: int = limited(at_least=1)
    lately: int = limited(at_least=8)
    first: int = limited(at_least=3)
    look: int = limited(at_least=3)


@dataclass
class ScaleConfig(Every):
    lowest: float = limited(at_least=0)


_COMPARED = 16  # losses before a rate rose that those since are compared with
_CLEAR_SIGMAS = 3.0  # of a sum of ranks


class RateRise(Check):
    """The learning rate rose far above what it was, and the loss is above where it was before.

    A rate that rises, as in a warm-up, is no trouble. The loss is compared more closely: no jump is waited for.
    """

    saved = ("_paces", "_usual", "reference", "_since", "_losses", "_base", "_lately", "_before")
    records: ClassVar = {"reference": lambda plain: Reference(**plain)}

    def __init__(self, config: RateConfig) -> None:
        self.config = config
        self._paces: deque[float] = deque(maxlen=config.lately)  # recent rates, as multiples of the configured one
        self._usual = 0.0  # the highest rate before those
        self.reference: Reference | None = None  # the losses before the rate rose; None if it did not
        self._since = 0  # the step before the rate rose
        self._losses: deque[float] = deque(maxlen=2 * config.look)
        self._base = 1.0  # the rate that it rose from
        self._lately: deque[float] = deque(maxlen=_COMPARED)  # the newest losses
        self._before: list[float] = []  # those before it rose

    def landed(self, step: int, vitals: Vitals, reference: References, *, is_learned: bool) -> Alarm | None:
        config, loss, ratio = self.config, vitals.loss, vitals.lr_ratio
        if not config.every or not ratio > 0:
            return None
        alarm = None
        if self.reference is not None:
            self._losses.append(loss)
            seen = step - self._since - 1
            if seen >= config.window:  # no harm in all that time: the rate is usual now
                self._usual = max([self._usual, *self._paces])
                self.reference = None
            elif seen == config.first or not seen % config.look:
                alarm = self._compare(step)
        if len(self._paces) == self._paces.maxlen:
            self._usual = max(self._usual, self._paces[0])
        elif len(self._paces) < config.earlier:
            self._usual = max(self._usual, ratio)
        before = self._paces[-1] if self._paces else ratio
        self._paces.append(ratio)
        # A warm-up climbs to 1 in small steps.
        is_high = ratio >= config.times * self._usual and (ratio > 1.0 or ratio >= config.times * before)
        if self.reference is None and is_high and step > config.earlier:
            self.reference, self._since = reference(step), step - 1
            self._base = max(min(before, self._usual), 1e-12)
            self._before = as_of_now([*self._lately, loss])
            self._losses.clear()
        self._lately.append(loss)
        return alarm

    def _compare(self, step: int) -> Alarm | None:
        assert self.reference is not None
        losses = list(self._losses)
        losses = [median(losses)] * len(losses) if len(losses) < FEW else losses  # of few the highest are not left out
        standing = self.reference.standing(step, losses, sigmas=self.config.sigmas, share=self.config.share)
        if standing is not Standing.OFF or not are_higher(self._losses, self._before):
            return None
        times, level = max(self._paces) / self._base, self.reference.expected(step)
        mean = fmean(without_top(losses))
        evidence = fact("off_since_rate", count=len(losses), mean=mean, level=level, times=times)
        self.reference = None
        return Alarm(self._since, evidence)

    def forget(self, limit: float = inf) -> None:
        self.reference = None
        self._losses.clear()


def as_of_now(losses: Sequence[float]) -> list[float]:
    """Return losses as if they had not fallen: each as far from the line through them, at its end."""
    if len(losses) < FEW:
        return list(losses)
    slope = min(0.0, line(losses)[0])
    return [loss + slope * (len(losses) - 1 - place) for place, loss in enumerate(losses)]


def are_higher(losses: Collection[float], before: Collection[float]) -> bool:
    """Whether losses are above those before by more than chance, whatever their distribution: by their ranks."""
    above = sum(loss > other for loss in losses for other in before)
    pairs = len(losses) * len(before)
    return above - pairs / 2 >= _CLEAR_SIGMAS * sqrt(pairs * (len(losses) + len(before) + 1) / 12) and pairs > 0


class ScaleCollapse(Check):
    """The loss scale keeps falling: no update lands, or only with a scale too small to help. From its start, 2**16, ten
    overflows in a row, each of which halves it, are ordinary.
    """

    def __init__(self, config: ScaleConfig) -> None:
        self.config = config

    def overflowed(self, vitals: Vitals) -> Facts | None:
        scale = vitals.loss_scale
        if not self.config.every or scale is None or scale >= self.config.lowest:
            return None
        return fact("scale_fell", scale=scale)


class LossChecks(Extension):
    settings = MappingProxyType({"rate": RateConfig, "scale": ScaleConfig})

    def checks(self, settings: Any) -> Mapping[str, Check]:
        return {"rate": RateRise(settings.rate), "scale": ScaleCollapse(settings.scale)}
