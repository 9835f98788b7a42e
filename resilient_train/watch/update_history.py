"""The updates that were attempted lately: what is to blame when something shows later."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from statistics import fmean, median
from typing import NamedTuple
from zlib import crc32

from resilient_train.types import Anomaly, Vitals

_KEPT = 10_000
_REMEMBERED = 2048  # in a checkpoint: further back than a ring of snapshots goes
_TREND = 32  # accepted updates
_LATELY, _EARLIER = 64, 8  # steps in which a rise of the rate may be behind trouble, and updates to rise above
_FIRST_LEAP = 2  # updates before it: a warm-up doubles the rate with the second one
_LEAP, _SLOWLY, _RISES = 2.0, 2.0, 1.1  # times the highest rate before: a leap; in some steps; and where that began
_WARM_UP = 10.0  # times it: no stage of a warm-up, though it leads no further than to the configured rate
_NO_RATE = 1e-12  # times the configured one: with so little nothing is learned
WILD = 5.0  # times one in ten of the gradient norms: one in ten that is so much larger
FEW = 5  # updates that are looked at again
_FIRST = 8  # accepted losses that tell where the run began
_RECENT = 50  # accepted losses that the final one is the median of


class Passed(NamedTuple):
    """An update that was attempted: which it would be, where its samples lie, and what it measured."""

    step: int
    start: int
    stop: int
    accepted: bool
    loss: float
    norm: float
    pace: float = 0.0  # its learning rate, as a multiple of the configured one


class Leap(NamedTuple):
    """A learning rate that rose far above what it was."""

    step: int  # the first update that was made with it
    factor: float
    usual: float  # what it was before, as a multiple of the configured one
    is_sudden: bool


class UpdateHistory:
    """PlainState them, on the way that the run is on: a rewind takes back what came after."""

    def __init__(self) -> None:
        self._passed: deque[Passed] = deque(maxlen=_KEPT)
        self._first: dict[int, Passed] = {}  # accepted ones that the run began with, by step

    def add(self, vitals: Vitals) -> None:
        """Note one."""
        accepted, step = vitals.accepted, vitals.step + (not vitals.accepted)
        seen = vitals.loss, vitals.grad_norm, vitals.pace
        passed = Passed(step, vitals.start, vitals.stop, accepted, *seen)
        self._passed.append(passed)
        if accepted and step <= _FIRST:
            self._first[step] = passed

    def rewound(self, step: int) -> None:
        """Forget what came after a step."""
        while self._passed and self._passed[-1].step > step:
            self._passed.pop()

    def first_to_blame(self, anomaly: Anomaly, start: int) -> int:
        """Where the samples to blame begin: at `start`, those of the update that was refused.

        Of what landed, all since the newest step to be trusted.
        """
        starts = [one.start for one in self._passed if one.step > anomaly.since] if anomaly.landed else []
        return min([*starts, start])

    def around(self, since: int) -> tuple[list[Passed], list[Passed]]:
        """A few updates after a step, the latest of them, and as many up to it."""
        after = [one for one in self._passed if one.step > since and one.stop > one.start]
        before = [one for one in self._passed if one.step <= since and one.accepted and one.stop > one.start]
        return after[-FEW:], before[-FEW:]

    def after(self, step: int) -> Passed | None:
        """The update that was made right after a step, if it landed."""
        return next(
            (one for one in self._passed if one.step == step + 1 and one.accepted and one.stop > one.start), None
        )

    def lately_made(self) -> list[Passed]:
        """The updates that were made lately, those included that were refused."""
        return [one for one in self._passed if one.stop > one.start][-_LATELY:]

    def wildest(self) -> tuple[list[Passed], list[Passed]]:
        """The updates whose gradients are largest, if gradients differ much, and all of them."""
        known = sorted((one for one in self._passed if one.accepted and one.stop > one.start), key=lambda one: one.norm)
        if not known or not known[9 * len(known) // 10].norm > WILD * known[len(known) // 10].norm:
            return [], known
        return known[-FEW:], known

    def lately(self) -> tuple[list[float], list[float]]:
        """Losses and gradient norms of the last accepted updates, and of the one that was not."""
        lately = [*[one for one in self._passed if one.accepted][-_TREND:], self._passed[-1]]
        return [one.loss for one in lately], [one.norm for one in lately]

    def leap(self) -> Leap | None:
        """Say how far the rate rose within the last steps: at once, or slowly and beyond the configured one."""
        known = [one for one in self._passed if one.pace > _NO_RATE]
        if len(known) <= _FIRST_LEAP:
            return None
        newest, highest = known[-1].step, 0.0
        for place, one in enumerate(known):
            is_lately = newest - one.step < _LATELY and place >= _FIRST_LEAP
            if is_lately and one.pace >= (_LEAP if one.pace > 1.0 else _WARM_UP) * highest:
                return Leap(one.step, max(other.pace for other in known[place:]) / highest, highest, True)
            highest = max(highest, one.pace)
        earlier = [one.pace for one in known if newest - one.step >= _LATELY] or [one.pace for one in known[:_EARLIER]]
        usual = max(earlier)
        first = next((one.step for one in known if one.pace > usual * _RISES and newest - one.step < _LATELY), None)
        if first is None or highest < _SLOWLY * usual or highest <= 1.0:  # a warm-up
            return None
        return Leap(first, highest / usual, usual, False)

    def trace(self, step: int) -> int:
        """Digest what was measured after a step: two ways with the same digest were the same to the last digit."""
        cells = [cell for one in self._passed if one.step > step for cell in (one.step, one.loss, one.norm)]
        return crc32(array("d", cells).tobytes())

    @property
    def first_loss(self) -> float | None:
        """The mean of the losses that the run began with, whichever process made them."""
        return fmean(one.loss for one in self._first.values()) if self._first else None

    @property
    def recent_loss(self) -> float | None:
        """The median of the last accepted losses, whichever process made them."""
        accepted = (one.loss for one in reversed(self._passed) if one.accepted)
        losses = list(islice(accepted, _RECENT))
        return median(losses) if losses else None

    def copy(self) -> UpdateHistory:
        """What is remembered now, for another thread to read."""
        copied = UpdateHistory()
        copied._passed, copied._first = self._passed.copy(), self._first.copy()
        return copied

    def until(self, step: int) -> list[list[float]]:
        """The latest ones up to a step, as plain data."""
        latest = [one for one in self._passed if one.step <= step][-_REMEMBERED:]
        first = [one for one in self._first.values() if one.step <= step and one not in latest]
        return [list(map(float, one)) for one in (*first, *latest)]

    def recall(self, passed: Iterable[Sequence[float]]) -> None:
        """Remember what an earlier process did."""
        self._passed.clear()
        for step, start, stop, accepted, *seen in passed:
            loss, norm, pace = (*map(float, seen), 0.0)[:3]
            one = Passed(int(step), int(start), int(stop), bool(accepted), loss, norm, pace)
            self._passed.append(one)
            if one.accepted and one.step <= _FIRST:
                self._first[one.step] = one
