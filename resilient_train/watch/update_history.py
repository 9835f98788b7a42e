"""The attempted updates of the last while: the suspects when damage shows only later."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from statistics import fmean, median
from typing import NamedTuple
from zlib import crc32

from resilient_train.types import Anomaly, Vitals

_KEPT = 10_000  # updates in memory
_IN_CHECKPOINT = 2048  # updates: further back than the memory snapshots of a run reach
_TREND = 32  # accepted updates that show a trend of losses and gradient norms
_RECENT_STEPS = 64  # a rise of the learning rate within these may be the cause of trouble
_FIRST_PACES = 8  # updates whose rate is the usual one where the run has no older ones
_LEAP_AFTER = 2  # updates: the second update of a warm-up has twice the rate of the first
_LEAP = 2.0  # times the highest rate before, at once or within the recent steps: far above what it was
_RISE_BEGINS = 1.1  # times the usual rate: where a slow rise began
_WARM_UP_STAGE = (
    10.0  # times the highest rate before: too much for a stage of a warm-up, even below the configured rate
)
_LEAST_PACE = 1e-12  # with a smaller share of the configured rate nothing is learned
_FIRST_LOSSES = 8  # accepted losses whose mean is the loss at the beginning of the run
_LAST_LOSSES = 50  # accepted losses whose median is the final loss of the run
WILD = 5.0  # ratio of the 90th to the 10th percentile of gradient norms from which norms differ wildly
FEW = 5  # updates that a diagnosis replays or inspects


class PastUpdate(NamedTuple):
    """An attempted update: its step, the range of its samples, and what it measured."""

    step: int
    start: int
    stop: int
    accepted: bool
    loss: float
    norm: float
    pace: float = 0.0  # its learning rate as a multiple of the configured one

    @property
    def has_samples(self) -> bool:
        """Whether it is known which samples it used."""
        return self.stop > self.start


class Leap(NamedTuple):
    """A learning rate that rose far above what it was."""

    step: int  # the first update that was made with it
    factor: float
    usual: float  # the rate before, as a multiple of the configured one
    is_sudden: bool


class UpdateHistory:
    """Keeps the latest updates on the run's present course: a rewind removes those after its step."""

    def __init__(self) -> None:
        self._passed: deque[PastUpdate] = deque(maxlen=_KEPT)
        self._first: dict[int, PastUpdate] = {}  # the first accepted updates of the run, by step

    def add(self, vitals: Vitals) -> None:
        step = vitals.step + (not vitals.accepted)
        measured = vitals.loss, vitals.grad_norm, vitals.pace
        self._append(PastUpdate(step, vitals.start, vitals.stop, vitals.accepted, *measured))

    def _append(self, update: PastUpdate) -> None:
        self._passed.append(update)
        if update.accepted and update.step <= _FIRST_LOSSES:
            self._first[update.step] = update

    def rewound(self, step: int) -> None:
        """Forget the updates after a step."""
        while self._passed and self._passed[-1].step > step:
            self._passed.pop()

    def first_to_blame(self, anomaly: Anomaly, start: int) -> int:
        """Return the first of the samples that may be the cause.

        For a refused update these are its own, which begin at `start`; for damage that landed, those of all updates
        since the newest trusted step.
        """
        starts = [one.start for one in self._passed if one.step > anomaly.since] if anomaly.landed else []
        return min([*starts, start])

    def around(self, since: int) -> tuple[list[PastUpdate], list[PastUpdate]]:
        """Return the latest updates after step `since`, and the latest accepted ones up to it, a few of each."""
        after = [one for one in self._passed if one.step > since and one.has_samples]
        before = [one for one in self._passed if one.step <= since and one.accepted and one.has_samples]
        return after[-FEW:], before[-FEW:]

    def next_after(self, step: int) -> PastUpdate | None:
        """Return the update made right after a step, if it was accepted."""
        updates = (one for one in self._passed if one.step == step + 1 and one.accepted and one.has_samples)
        return next(updates, None)

    def recent(self) -> list[PastUpdate]:
        """Return the latest updates, refused ones included."""
        return [one for one in self._passed if one.has_samples][-_RECENT_STEPS:]

    def wildest(self) -> tuple[list[PastUpdate], list[PastUpdate]]:
        """Return the updates with the largest gradients, or none if gradients differ little; and all accepted ones."""
        known = sorted((one for one in self._passed if one.accepted and one.has_samples), key=lambda one: one.norm)
        if not known or not known[9 * len(known) // 10].norm > WILD * known[len(known) // 10].norm:
            return [], known
        return known[-FEW:], known

    def recent_measurements(self) -> tuple[list[float], list[float]]:
        """Return losses and gradient norms of the last accepted updates, followed by those of the newest update."""
        recent = [*[one for one in self._passed if one.accepted][-_TREND:], self._passed[-1]]
        return [one.loss for one in recent], [one.norm for one in recent]

    def leap(self) -> Leap | None:
        """Find a rise of the learning rate in the recent steps: sudden, or slow and beyond the configured rate."""
        known = [one for one in self._passed if one.pace > _LEAST_PACE]
        if len(known) <= _LEAP_AFTER:
            return None
        first_recent, highest = known[-1].step - _RECENT_STEPS + 1, 0.0
        for place, one in enumerate(known):
            is_candidate = one.step >= first_recent and place >= _LEAP_AFTER
            if is_candidate and one.pace >= (_LEAP if one.pace > 1.0 else _WARM_UP_STAGE) * highest:
                return Leap(one.step, max(other.pace for other in known[place:]) / highest, highest, True)
            highest = max(highest, one.pace)
        older = [one.pace for one in known if one.step < first_recent]
        usual = max(older or [one.pace for one in known[:_FIRST_PACES]])
        first = next((one.step for one in known if one.step >= first_recent and one.pace > usual * _RISE_BEGINS), None)
        if first is None or highest < _LEAP * usual or highest <= 1.0:  # up to the configured rate it is a warm-up
            return None
        return Leap(first, highest / usual, usual, False)

    def trace(self, step: int) -> int:
        """Return a digest of the measurements after a step; it is equal only if each of them was, to the last bit."""
        cells = [cell for one in self._passed if one.step > step for cell in (one.step, one.loss, one.norm)]
        return crc32(array("d", cells).tobytes())

    @property
    def first_loss(self) -> float | None:
        """The mean of the run's first accepted losses, earlier processes included."""
        return fmean(one.loss for one in self._first.values()) if self._first else None

    @property
    def recent_loss(self) -> float | None:
        """The median of the last accepted losses, earlier processes included."""
        losses = list(islice((one.loss for one in reversed(self._passed) if one.accepted), _LAST_LOSSES))
        return median(losses) if losses else None

    def copy(self) -> UpdateHistory:
        """Return a copy for another thread to read."""
        copied = UpdateHistory()
        copied._passed, copied._first = self._passed.copy(), self._first.copy()
        return copied

    def state_dict(self, step: int) -> list[list[float]]:
        """Return the latest updates up to a step as plain data."""
        latest = [one for one in self._passed if one.step <= step][-_IN_CHECKPOINT:]
        first = [one for one in self._first.values() if one.step <= step and one not in latest]
        return [list(map(float, one)) for one in (*first, *latest)]

    def load_state_dict(self, state: Iterable[Sequence[float]]) -> None:
        self._passed.clear()
        for step, start, stop, accepted, *measured in state:
            loss, norm, pace = (*map(float, measured), 0.0)[:3]
            self._append(PastUpdate(int(step), int(start), int(stop), bool(accepted), loss, norm, pace))
