"""The best level that the loss has had: the lowest mean of blocks of accepted losses, within the present regime."""

from __future__ import annotations

from math import inf, isfinite, log, sqrt
from statistics import fmean, stdev
from typing import Any, NamedTuple

from resilient_train.core.checks import Check, References
from resilient_train.core.episode import Reference
from resilient_train.core.loss import Alarm, JumpConfig, without_top
from resilient_train.ground.types import Vitals

BLOCK = 50  # accepted losses
LEARNED = 0.25  # of a rise
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
