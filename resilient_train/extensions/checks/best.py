"""The best level that the loss has had: the lowest mean of blocks of accepted losses, within the present regime."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite, log, sqrt
from statistics import fmean, stdev
from typing import Any, ClassVar, NamedTuple

from resilient_train.core.checks import Check, References
from resilient_train.core.episode import Reference
from resilient_train.core.limit import LimitConfig
from resilient_train.core.loss import Alarm, JumpConfig, without_top
from resilient_train.data.history import Rise
from resilient_train.ground.types import Vitals

BLOCK = 50  # accepted losses
_FAR = 0.75  # of the best level: a run without incidents that ends so far above it is not called well


class Block(NamedTuple):
    start: int
    stop: int  # the step of the last one
    mean: float
    scatter: float
    number: int  # of the blocks up to this one: the lowest of many is low by chance

    @property
    def level(self) -> float:
        """Its mean, without what chance has taken from the lowest of so many."""
        return self.mean + self.scatter * sqrt(2 * log(self.number) / BLOCK)


class BestLevel(Check):
    saved = ("_losses", "_lowest", "_newest", "_number", "step", "has_negative", "_former")

    def __init__(self, config: JumpConfig) -> None:
        self.config = config
        self._lowest: list[Any] = []  # plain data, as in checkpoints
        self.forget()

    def forget(self, limit: float = inf) -> None:
        """Begin a new regime; but one that ends above the `limit` has not learned, and is compared with the old one."""
        self._former: Any = [self._lowest[-1], limit] if self._lowest and limit < inf else None
        self._losses: list[float] = []
        self._lowest = []  # blocks, each lower than the one before
        self._newest: Any = None
        self._number = 0
        self.step = 0  # the last of the newest block at the best level
        self.has_negative = False

    def landed(self, step: int, vitals: Vitals, reference: References, *, is_learned: bool) -> Alarm | None:
        loss = vitals.loss
        self._losses.append(loss)
        self.has_negative |= loss < 0
        if len(self._losses) < BLOCK:
            return None
        self._number += 1
        kept = without_top(self._losses)
        block = Block(step - BLOCK + 1, step, fmean(kept), stdev(kept), self._number)
        self._losses.clear()
        self._newest = list(block)
        if not self._lowest or block.mean < Block(*self._lowest[-1]).mean:
            self._lowest.append(list(block))
        if not self.is_above(block.mean, block.scatter, step, self.config.share):
            self.step = step
        return None

    def trusted(self, then: Reference, since: int) -> int:
        """No step is trusted at which the loss was far above the best level of the run already."""
        best = self.until(since)
        is_above = best is not None and self.is_above(then.level, then.scatter, since, self.config.share)
        return best.stop if best is not None and is_above else since

    def until(self, step: int) -> Block | None:
        return next((Block(*one) for one in reversed(self._lowest) if one[1] <= step), None)

    def is_above(self, mean: float, scatter: float, until: int, share: float) -> bool:
        """Say whether losses are above the lowest block up to a step, by a share of it and by more than noise."""
        best = self.until(until)  # losses below zero measure something else
        if best is None or self.has_negative or not self.config.every:
            return False
        noise = max(best.scatter, scatter) * sqrt(2 / BLOCK)
        return mean - best.level > max(self.config.sigmas * noise, share * abs(best.level))

    def limit(self, height: float) -> float:
        """Return what a run has to end below after a change that raised the loss to `height`, to have learned it."""
        best = Block(*self._lowest[-1]) if self._lowest else None
        if best is None or self.has_negative or not isfinite(height):
            return inf
        return best.level + max(_FAR * abs(best.level), LEARNED * (height - best.level))

    def left(self, *, had_incidents: bool) -> Block | None:
        """Return the best block if the newest losses are far above it; after incidents, if out of its range."""
        if self._newest is None:
            return None
        newest = Block(*self._newest)
        if self._former is not None and newest.mean > self._former[1] and not self.has_negative:
            return Block(*self._former[0])
        share = self.config.share if had_incidents else _FAR
        return self.until(newest.stop) if self.is_above(newest.mean, newest.scatter, newest.stop, share) else None


PROBE_RATE = 0.1  # of the rate, around the step of a rise that was undone
_BEFORE, _AFTER = 2, 12  # steps around a jump that are made at that rate
LEARNED = 0.25  # of a rise
_LONGEST = 200  # steps of a climb
_ALIKE = 0.25  # of the higher of two rises, by which they may differ
_NEAR, _NEAR_SHARE = 2, 0.25  # steps, and share of the way from the rewind, by which their steps may differ


class Probe(NamedTuple):
    """A rise that a rewind has undone, and the steps in which the rate is a tenth.

    A rise that comes again there, as high, with other samples, was made by none of weights, rate and samples. So it is,
    with any samples, if it comes at once at the weights of a verified state.
    """

    rise: Rise
    rewound_to: int
    first: int
    last: int
    came_again: bool = False  # there, but not as high

    @classmethod
    def of(cls, rise: Rise, noticed: int, rewound_to: int, *, is_jump: bool, came_again: bool = False) -> Probe:
        """Of a climb most of the way from the rewind is made at the lower rate."""
        first = rise.step - _BEFORE if is_jump else max(rewound_to, noticed - _LONGEST)
        return cls(rise, rewound_to, first, (rise.step if is_jump else noticed) + _AFTER, came_again)

    def covers(self, step: int) -> bool:
        return self.first <= step <= self.last

    def is_at(self, step: int) -> bool:
        return self.is_near(step) or step == self.rewound_to + 1

    def is_near(self, step: int) -> bool:
        near = max(_NEAR, round(_NEAR_SHARE * (self.rise.step - self.rewound_to)))
        return abs(step - self.rise.step) <= near

    def confirms(self, again: Rise, step: int, *, was_low: bool) -> bool:
        """Say whether it is the same rise; `was_low`: the loss was, at the state which the run was rewound to."""
        is_alike = abs(again.height - self.rise.height) <= _ALIKE * max(again.height, self.rise.height)
        if again.grows or not (is_alike or self.came_again):
            return False
        if again.step == self.rewound_to + 1:
            return was_low and is_alike
        return self.is_near(again.step) and self.covers(step) and again.start != self.rise.start

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Probe:
        return cls(Rise(*plain[0]), *plain[1:])


class Experiment(Check):
    """The probe of a rise that may be on purpose: around it the rate is a tenth, and no limit hides what comes."""

    persistent = ("probe",)
    records: ClassVar = {"probe": Probe.from_plain}

    def __init__(self, config: LimitConfig) -> None:
        self._lasts = config.regime_of  # steps after it
        self.probe: Probe | None = None

    def landed(self, step: int, vitals: Vitals, reference: References, *, is_learned: bool) -> Alarm | None:
        if self.probe is not None and step > self.probe.last + self._lasts:
            self.probe = None
        return None

    def lifts_limits(self, step: int) -> bool:
        return self.probe is not None and self.probe.is_at(step)

    def rate_factor(self, step: int) -> float:
        return PROBE_RATE if self.probe is not None and self.probe.covers(step) else 1.0

    def forget(self, limit: float = inf) -> None:
        self.probe = None
