"""The updates that were attempted lately: what is to blame when something shows later."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from statistics import median
from typing import NamedTuple

from resilient_train.events import Anomaly, Vitals

_KEPT = 10_000
_REMEMBERED = 2048  # in a checkpoint: further back than a ring of snapshots goes
_TREND = 32  # accepted updates
_RECENT = 50  # accepted losses that the final one is the median of


class Passed(NamedTuple):
    """An update that was attempted: which it would be, where its samples lie, and what it measured."""

    step: int
    start: int
    stop: int
    accepted: bool
    loss: float
    norm: float


class PassedUpdates:
    """Remembers them, on the way that the run is on: a rewind takes back what came after."""

    def __init__(self) -> None:
        self._passed: deque[Passed] = deque(maxlen=_KEPT)

    def add(self, vitals: Vitals) -> None:
        """Note one."""
        accepted, step = vitals.accepted, vitals.step + (not vitals.accepted)
        self._passed.append(Passed(step, vitals.start, vitals.stop, accepted, vitals.loss, vitals.grad_norm))

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

    def lately(self) -> tuple[list[float], list[float]]:
        """Losses and gradient norms of the last accepted updates, and of the one that was not."""
        lately = [*[one for one in self._passed if one.accepted][-_TREND:], self._passed[-1]]
        return [one.loss for one in lately], [one.norm for one in lately]

    @property
    def recent_loss(self) -> float | None:
        """The median of the last accepted losses, whichever process made them."""
        accepted = (one.loss for one in reversed(self._passed) if one.accepted)
        losses = list(islice(accepted, _RECENT))
        return median(losses) if losses else None

    def copy(self) -> PassedUpdates:
        """What is remembered now, for another thread to read."""
        copied = PassedUpdates()
        copied._passed = self._passed.copy()
        return copied

    def until(self, step: int) -> list[list[float]]:
        """The latest ones up to a step, as plain data."""
        return [list(map(float, one)) for one in self._passed if one.step <= step][-_REMEMBERED:]

    def recall(self, passed: Iterable[Sequence[float]]) -> None:
        """Remember what an earlier process did."""
        self._passed.clear()
        for step, start, stop, accepted, loss, norm in passed:
            self._passed.append(Passed(int(step), int(start), int(stop), bool(accepted), float(loss), float(norm)))
