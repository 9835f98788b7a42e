"""Further checks of the loss: thrown up by the first updates, high since the rate rose, standing, climbing slowly."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb, inf, log, sqrt
from statistics import fmean, median, median_high, pstdev, stdev
from typing import ClassVar

from resilient_train.core.checks import Check, Checks
from resilient_train.core.episode import Reference, Standing, falls, line
from resilient_train.core.loss import FEW, Alarm, Level, deviation, without_top
from resilient_train.types import Facts, Vitals, fact
from resilient_train.watch.best import BestLevel, Experiment
from resilient_train.watch.config import (
    ChecksConfig,
    CreepConfig,
    NoProgressConfig,
    OvershootConfig,
    RateConfig,
    ScaleConfig,
)

_MAD_TO_SIGMA = 1.4826  # standard deviation / median absolute deviation, of normal noise
_MOST_PER_BLOCK = 8.0  # spreads that one block counts for at most, so that an alarm takes two blocks or more
_NORMAL_BLOCK = 1.0  # spreads above the median up to which a block shows no climb
_STUCK = 20  # overflows in a row of a scaler that does not lower its scale
_CERTAIN = 9.2  # minus the logarithm of a chance of 1 in 10,000, as there are many looks
_FEWEST = 4  # losses that show a scatter
_LEAST_SCATTER = 0.15  # of the logarithm of losses that hardly differ
_FAR_SIGMAS = 6.0  # standard deviations that no noise explains
_FLAT = 0.01  # of the first gradient norm: the weights are in a plateau from which nothing leads back
_KEPT = 4  # times as many losses are kept as are compared, to see how much they scatter
_COMPARED = 16  # losses before a rate rose that those since are compared with
_NOISY = 0.3  # of the mean of losses: their standard deviation
_CLEAR_SIGMAS = 3.0  # of a sum of ranks


References = Callable[[int], Reference | None]


class EarlyDivergence(Check):
    """The first updates threw the loss far above its first value: the rate is wrong by orders of magnitude.

    Others would learn it as usual. The lowest of a few losses counts, as batches may be hard; and the median of the
    gradient norms, since a loss may begin near zero.
    """

    saved = ("_first", "_which", "_losses", "_norms")
    persistent = ("is_suspect", "is_over")

    def __init__(self, config: OvershootConfig) -> None:
        self.config = config
        self._first: list[float] = []  # loss and gradient norm before the first update
        self._which = -1  # what identifies the newest update
        self._losses: deque[float] = deque(maxlen=_KEPT * config.updates)
        self._norms: deque[float] = deque(maxlen=config.updates)
        self.is_suspect = False  # there was an alarm
        self.can_compare = False  # an alarm is compared with the loss of its samples at the first weights
        self.is_thrown = False  # the newest update is far above the first loss, which may have been low by chance
        self.is_over = False  # something has changed on purpose: the beginning of the run is no measure any more

    @property
    def usual_norm(self) -> float | None:  # type: ignore[override]
        return self._first[1] if self._first else None

    def see(self, step: int, which: int, vitals: Vitals) -> Alarm | None:
        """Judge an attempted update: of one that is retried the last attempt counts."""
        self.is_thrown, loss, norm = False, vitals.loss, vitals.grad_norm
        if self.is_over or not self.config.every or step > self.config.window:
            return None
        if which == self._which and self._losses:  # retried, perhaps with other rows in place of bad ones
            self._losses.pop()
            self._norms.pop()
        self._which = which
        if step == 1:
            self._first = [loss, norm]
            return None
        if not self._first:  # the process resumed later than the first step
            return None
        self._losses.append(loss)
        self._norms.append(norm)
        evidence = self._thrown()
        if evidence is None:
            return None
        self.is_suspect = self.is_thrown = True
        self._losses.clear()  # gives a treatment time before the next alarm
        self._norms.clear()
        return Alarm(0, evidence)

    def forget(self, limit: float = inf) -> None:
        self.is_over = True

    def begins_with(self, loss: float) -> None:
        """Take the loss that samples have at the first weights for the first one, which is one number."""
        self._first[0], self.is_suspect = loss, False

    def _thrown(self) -> Facts | None:
        if len(self._norms) < self.config.updates:
            return None
        (first, first_norm), times = self._first, self.config.times
        loss, norm = min(list(self._losses)[-self.config.updates :]), median(self._norms)
        is_far = loss - first > (times - 1) * abs(first)
        if not is_far or _FLAT * first_norm <= norm <= times * first_norm:
            return None
        if not self.can_compare and self._may_be_chance():
            return None
        return fact("far_from_first", loss=loss, norm=norm, first=first, first_norm=first_norm)

    def _may_be_chance(self) -> bool:
        """Whether the first losses may be so far below the newest ones by noise alone.

        The newest ones show how noisy losses are, by the scatter of their logarithms from one to the next, which few of
        them underestimate. The lower tail is that of a gamma distribution: as heavy as that of the square of an error.
        """
        first, losses = self._first[0], list(self._losses)
        count = next((place for place, loss in enumerate(reversed(losses)) if loss <= self.config.times * first), None)
        newest = losses if count is None else losses[len(losses) - count :]
        before, count = [first, *losses[: len(losses) - len(newest)]], len(newest)
        if count < _FEWEST:
            return True
        if first <= 0 or not max(newest) < inf:
            return min(newest) - first <= _FAR_SIGMAS * pstdev(newest)
        before = before if max(before) < min(newest) else before[:1]
        logs = list(map(log, newest))
        scatter = max(_LEAST_SCATTER, stdev(b - a for a, b in pairwise(logs)) / sqrt(2)) * (1 + 2 / sqrt(count))
        chance = (min(logs) - log(max(before))) / max(scatter, scatter**2) + log(comb(len(before) + count, count))
        return chance < _CERTAIN


class RateRise(Check):
    """The learning rate rose far above what it was, and the loss is above where it was before.

    A rate that rises, as in a warm-up, is no trouble. The loss is compared more closely: no jump is waited for.
    """

    saved = ("_paces", "_usual", "reference", "_since", "_losses", "_seen", "_base", "_lately", "_before")
    records: ClassVar = {"reference": lambda plain: Reference(**plain)}

    def __init__(self, config: RateConfig) -> None:
        self.config = config
        self._paces: deque[float] = deque(maxlen=config.lately)  # recent rates, as multiples of the configured one
        self._usual = 0.0  # the highest rate before those
        self.reference: Reference | None = None  # the losses before the rate rose; None if it did not
        self._since = 0  # the step before the rate rose
        self._losses: deque[float] = deque(maxlen=2 * config.look)
        self._seen = 0  # losses since the rate rose
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
            self._seen += 1
            if self._seen >= config.window:  # no harm in all that time: the rate is usual now
                self._usual = max([self._usual, *self._paces])
                self.reference = None
            elif self._seen == config.first or not self._seen % config.look:
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
            self._seen = 0
        self._lately.append(loss)
        return alarm

    def _compare(self, step: int) -> Alarm | None:
        assert self.reference is not None
        losses = list(self._losses)
        losses = [median(losses)] * len(losses) if len(losses) < FEW else losses  # of few the highest are not left out
        standing = self.reference.standing(step, losses, sigmas=self.config.sigmas, share=self.config.share)
        if standing is not Standing.OFF or (is_noisy(self._before) and not are_higher(self._losses, self._before)):
            return None
        times, level = max(self._paces) / self._base, self.reference.expected(step)
        mean = fmean(without_top(losses))
        evidence = fact("off_since_rate", count=len(losses), mean=mean, level=level, times=times)
        self.reference = None
        return Alarm(self._since, evidence)

    def forget(self, limit: float = inf) -> None:
        self.reference = None
        self._losses.clear()


def is_noisy(losses: Sequence[float]) -> bool:
    """Whether a mean of such losses may be anything: they differ much, or are too few to know."""
    return len(losses) < FEW or pstdev(losses) > _NOISY * abs(fmean(losses))


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


_FIRST_LOSSES = 8  # that show the level at which the run began
_NEVER = 2**53  # steps
_THROWN = 0.2  # of that: by so much the first updates have raised the loss


class NoProgress(Check):
    """The losses have not fallen since a quarter of the run, and are still near those that it began with.

    Or they fall only since the first updates threw them up; or they stand, or fall slowly at later looks, while the
    weights still change by much of their norm. No alarm, as many healthy losses stand: it asks for a trial of rates.
    """

    saved = ("_losses", "first", "_mean", "_seen")
    persistent = ("next_look",)

    def __init__(self, config: NoProgressConfig) -> None:
        self.config = config
        self.next_look = config.every  # the step
        self.first = self._mean = 0.0  # where it began; the mean of the first losses
        self.evidence: Facts = ()
        self._losses: deque[float] = deque(maxlen=config.window)
        self._seen = 0

    def landed(self, step: int, vitals: Vitals, reference: References, *, is_learned: bool) -> Alarm | None:
        loss = vitals.loss
        self._seen += 1
        if self._seen <= _FIRST_LOSSES:  # the very first one was measured before any update: others may be far above
            self._mean += (loss - self._mean) / self._seen
            self.first = self._mean if self._seen == 1 else min(self.first, self._mean)
        self._losses.append(loss)
        return None

    def asks(self, step: int, travelled: Callable[[], float], *, is_suspect: bool = False) -> bool:
        """Say whether to try lower learning rates; at the first look also where the first updates threw the loss up.

        `travelled`, called at few steps and by all ranks: how far the weights moved lately, relative to their norm.
        """
        if not self.config.every or step < self.next_look:
            return False
        newer = list(self._losses)[-(3 * self._seen // 4) :]
        level = fmean(without_top(newer)) if newer else 0.0
        is_thrown = self._mean - self.first > _THROWN * abs(self.first)
        still_fall = falls(newer) and not is_thrown
        how = "thrown" if is_thrown else "falls" if still_fall else "stands"
        seen = {"count": len(newer), "mean": level, how: True, "first": self.first}
        self.evidence = fact("plateau", **seen)
        if is_suspect and self.next_look == self.config.every <= self._seen:
            self.evidence = fact("plateau", **seen, doubted=True)
            return True
        # In the first updates the weights of a loss that falls may change by any amount.
        if self._seen >= self.config.every * (2 if still_fall else 1):
            if not still_fall and self.first - level < self.config.share * abs(self.first):
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

    def stop(self) -> None:
        self.next_look = _NEVER

    def more_is_trained(self) -> None:
        self.stop()  # the beginning is no measure any more

    def forget(self, limit: float = inf) -> None:
        self._losses.clear()
        self._seen, self.first, self._mean = 0, 0.0, 0.0


class Creep(Check):
    """The loss climbs from block to block, though no single step is a jump."""

    saved = ("_block", "_means", "_sum", "_since")
    yields_to_jump = True

    def __init__(self, config: CreepConfig, level: Level) -> None:
        self.config, self.level = config, level
        self._block: list[float] = []
        self._means: deque[float] = deque(maxlen=config.blocks + config.lag)  # of the blocks before
        self._sum = 0.0  # sum of the spreads by which blocks were too high
        self._since = 0  # the newest step at which no climb showed

    def landed(self, step: int, vitals: Vitals, reference: References, *, is_learned: bool) -> Alarm | None:
        config, loss = self.config, vitals.loss
        if not config.every or not is_learned:
            return None
        self._block.append(loss)
        if len(self._block) < config.every:
            return None
        mean = fmean(without_top(self._block))
        self._block.clear()
        if len(self._means) == self._means.maxlen:
            usual = list(self._means)[: config.blocks]
            middle = median_high(usual)
            spread = max(
                _MAD_TO_SIGMA * deviation(usual, middle),
                (max(usual) - middle) / 2,  # skewed losses have skewed blocks
                config.share * self.level.scale,
            )
            z = (mean - middle) / spread if spread else 0.0  # the spread of a loss that is always 0 is 0
            z = max(-_MOST_PER_BLOCK, min(_MOST_PER_BLOCK, z))
            if z <= _NORMAL_BLOCK:
                self._since = step - 2 * config.every  # the climb may have begun within this block
            self._sum = max(0.0, self._sum + z - config.slack)
        self._means.append(mean)
        if self._sum <= config.alarm:
            return None
        self.forget()
        since = max(0, self._since)
        return Alarm(since, fact("loss_climbs", loss=loss, since=since, **self.level.usual_range))

    def forget(self, limit: float = inf) -> None:
        self._block.clear()
        self._means.clear()
        self._sum = 0.0


class ScaleCollapse(Check):
    """The loss scale keeps falling, or is not lowered: no update lands, or only with a scale too small to help. From
    its start, 2**16, ten overflows in a row, each of which halves it, are ordinary.
    """

    def __init__(self, config: ScaleConfig) -> None:
        self.config = config
        self._scale, self._tick, self._times = 0.0, 0, 0  # the scale, and how often it overflowed in a row

    def overflowed(self, vitals: Vitals) -> Facts | None:
        if not self.config.every:
            return None
        scale = vitals.loss_scale
        if scale is None:
            return None
        is_stuck = scale == self._scale and vitals.tick == self._tick + 1
        self._scale, self._tick, self._times = scale, vitals.tick, self._times + 1 if is_stuck else 1
        if self._times >= _STUCK:
            return fact("scale_stays", scale=scale, times=self._times)
        return fact("scale_fell", scale=scale) if scale < self.config.lowest else None


@dataclass(frozen=True)
class Panel:
    """The checks, and those of them that others ask as well."""

    checks: Checks
    best: BestLevel
    early_divergence: EarlyDivergence
    no_progress: NoProgress
    experiment: Experiment

    @classmethod
    def of(cls, config: ChecksConfig) -> Panel:
        level, best = Level(config.jump), BestLevel(config.jump)
        early_divergence, no_progress = EarlyDivergence(config.overshoot), NoProgress(config.no_progress)
        experiment = Experiment(config.limit)
        checks = Checks(
            config,
            level,
            best=best,
            experiment=experiment,
            early_divergence=early_divergence,
            no_progress=no_progress,
            rate=RateRise(config.rate),
            creep=Creep(config.creep, level),
            scale=ScaleCollapse(config.scale),
        )
        return cls(checks, best, early_divergence, no_progress, experiment)
