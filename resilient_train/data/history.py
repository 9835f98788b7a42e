"""The latest updates of a run, and what they show of its learning rate and its losses."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf, isfinite, log, sqrt
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from resilient_train.core.checks import IN_CHECKPOINT, REMEMBERED, Check, References
from resilient_train.core.episode import Reference
from resilient_train.core.loss import Alarm, JumpConfig, without_top
from resilient_train.ground.types import Vitals

_TREND = 32  # accepted updates that show a trend of losses and gradient norms
_RECENT_STEPS = 64  # a rise of the learning rate within these may be the cause of trouble
_FIRST_PACES = 8  # updates whose rate is the usual one where the run has no older ones
_LEAP_AFTER = 2  # updates: the second update of a warm-up has twice the rate of the first
_LEAP = 2.0  # times the highest rate before, at once or within the recent steps: far above what it was
_RISE_BEGINS = 1.1  # times the usual rate: where a slow rise began
_WARM_UP_STAGE = 10.0  # times that: too much for a stage of a warm-up, even below the configured rate
_LEAST_PACE = 1e-12  # with a smaller share of the configured rate nothing is learned
FIRST_LOSSES = 8  # accepted losses whose mean is the loss at the beginning of the run
_NOISY = 0.1  # standard error of the first loss, as a share of it
_THROWN = 2.0  # times the size of the loss: a rise by that is no noise
_LAST_LOSSES = 50  # accepted losses whose median is the final loss of the run
_GROWN = 2.0  # times as large: gradient norms that grow with a loss
FEW = 5  # updates that a diagnosis replays or inspects


def beginning(losses: Sequence[float]) -> tuple[float, float]:
    """Return where losses began, and their mean. The very first was measured before any update: others may be far above
    it, and it above others.
    """
    means = [fmean(losses[:count]) for count in range(1, len(losses) + 1)] or [0.0]
    return min(means), means[-1]


class PastUpdate(NamedTuple):
    step: int
    start: int
    stop: int
    accepted: bool
    loss: float
    norm: float
    lr_ratio: float = 0.0  # its learning rate as a multiple of the configured one


class Leap(NamedTuple):
    step: int  # the first update that was made with it
    factor: float
    usual: float  # the highest rate before, as a multiple of the configured one
    is_sudden: bool


class Rise(NamedTuple):
    """How the loss rose."""

    step: int  # the first update with it
    start: int  # of its samples
    height: float  # above the level
    grows: bool  # gradient norms grow with it


class UpdateHistory:
    """Keeps the latest updates on the run's present course: a rewind removes those after its step."""

    def __init__(self) -> None:
        self._passed: deque[PastUpdate] = deque(maxlen=REMEMBERED)
        self._first: dict[int, PastUpdate] = {}  # the first accepted updates of the run, by step
        self.rewinds = 0
        self.has_turns = False  # several losses were stepped in turn: the loss is their sum

    def add(self, vitals: Vitals) -> None:
        step, measured = vitals.step + (not vitals.accepted), (vitals.loss, vitals.grad_norm, vitals.lr_ratio)
        self._append(PastUpdate(step, vitals.start, vitals.stop, vitals.accepted, *measured))

    def _append(self, update: PastUpdate) -> None:
        self._passed.append(update)
        if update.accepted and update.step <= FIRST_LOSSES:
            self._first[update.step] = update

    def rewound(self, step: int) -> None:
        self.rewinds += 1
        while self._passed and self._passed[-1].step > step:
            self._passed.pop()

    def first_to_blame(self, since: int | None, start: int) -> int:
        """Return the first sample that may be the cause: of damage that landed, the first after step `since`."""
        starts = [one.start for one in self._passed if one.step > since] if since is not None else []
        return min([*starts, start])

    def around(self, since: int) -> tuple[list[PastUpdate], list[PastUpdate]]:
        """Return the latest updates after step `since`, and the latest accepted ones up to it, a few of each."""
        known = [one for one in self._passed if one.stop > one.start]  # whose samples are known
        after = [one for one in known if one.step > since]
        before = [one for one in known if one.step <= since and one.accepted]
        return after[-FEW:], before[-FEW:]

    def recent_measurements(self) -> tuple[list[float], list[float]]:
        """Return losses and gradient norms of the last accepted updates, followed by those of the newest update."""
        recent = [*[one for one in self._passed if one.accepted][-_TREND:], self._passed[-1]]
        return [one.loss for one in recent], [one.norm for one in recent]

    def leap(self, since: int | None = None) -> Leap | None:
        """Find a rise of the learning rate: sudden; or slow and beyond the configured rate, maybe from `since` on."""
        known = [one for one in self._passed if one.lr_ratio > _LEAST_PACE]
        if len(known) <= _LEAP_AFTER:
            return None
        first_recent, highest = known[-1].step - _RECENT_STEPS + 1, 0.0
        for place, one in enumerate(known):
            is_candidate = one.step >= first_recent and place >= _LEAP_AFTER
            if is_candidate and one.lr_ratio >= (_LEAP if one.lr_ratio > 1.0 else _WARM_UP_STAGE) * highest:
                farthest = max(other.lr_ratio for other in known[place:])
                return Leap(one.step, farthest / highest, highest, True)
            highest = max(highest, one.lr_ratio)
        first_recent = first_recent if since is None else min(first_recent, since + 1)
        older = [one.lr_ratio for one in known if one.step < first_recent]
        usual = max(older or [one.lr_ratio for one in known[:_FIRST_PACES]])
        risen = (one.step for one in known if one.step >= first_recent and one.lr_ratio > usual * _RISE_BEGINS)
        first = next(risen, None)
        if first is None or highest < _LEAP * usual or highest <= 1.0:  # up to the configured rate it is a warm-up
            return None
        return Leap(first, highest / usual, usual, False)

    def rise(self, since: int, level: float) -> Rise | None:
        """Return how the loss rose from its `level` after step `since`; None if the newest losses are not above it."""
        after = [one for one in self._passed if one.step > since]
        height = median(one.loss for one in after[-FEW:]) - level if after else 0.0
        if not 0 < height < inf:
            return None
        high = [one for one in after if one.loss - level > height / 2]
        norms = [one.norm for one in high]
        half = len(norms) // 2
        grows = half > 0 and median(norms[half:]) > _GROWN * median(norms[:half])
        return Rise(high[0].step, high[0].start, height, grows)

    @property
    def first_loss(self) -> float | None:
        """The mean of the first accepted losses, or of the first few if those after them threw it far up."""
        if not self._first:
            return None
        lowest, mean = beginning([self._first[step].loss for step in sorted(self._first)])
        return lowest if mean - lowest > _THROWN * abs(lowest) else mean

    @property
    def first_at_most(self) -> float | None:
        """The first loss; where losses are noisy it may be low by chance, and two standard errors are added."""
        first, losses = self.first_loss, [one.loss for one in self._first.values() if isfinite(one.loss)]
        error = stdev(losses) / sqrt(len(losses)) if len(losses) > 1 else 0.0
        return first if first is None or error <= _NOISY * abs(first) else first + 2 * error

    @property
    def recent_loss(self) -> float | None:
        """The median of the last accepted losses, earlier processes included."""
        losses = list(islice((one.loss for one in reversed(self._passed) if one.accepted), _LAST_LOSSES))
        return median(losses) if losses else None

    def state_dict(self, step: int) -> list[list[float]]:
        latest = [one for one in self._passed if one.step <= step][-IN_CHECKPOINT:]
        first = [one for one in self._first.values() if one.step <= step and one not in latest]
        return [list(map(float, one)) for one in (*first, *latest)]

    def load_state_dict(self, state: Iterable[Sequence[float]]) -> None:
        self._passed.clear()
        for step, start, stop, accepted, *measured in state:
            self._append(PastUpdate(int(step), int(start), int(stop), bool(accepted), *map(float, measured)))


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
