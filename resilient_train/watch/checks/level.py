"""Where the losses usually lie."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from resilient_train.watch.checks.memory import Remembers
from resilient_train.watch.config import JumpConfig

_USUAL_EVERY = 8
_FIRST = 8  # losses that tell where the run began
_OF_THE_WAY = 0.02  # a loss near zero is judged by this share of the way it has come


class Level(Remembers):
    """Where the accepted losses usually lie: their median, their spread upwards, and what is large for them.

    The spread is the largest of four, since losses are skewed: median + k·MAD alone flags dozens of healthy ones in
    a thousand. Looked at every few losses only, because it moves slowly and every step pays for it.
    """

    remembered = ("losses", "ready", "median", "spread", "scale", "highest", "first", "best", "_seen", "_fresh")

    def __init__(self, config: JumpConfig) -> None:
        self.every = config.every or _USUAL_EVERY
        self.warmup = config.warmup
        self.losses: deque[float] = deque(maxlen=config.window)
        self.ready = False
        self.median = self.spread = self.scale = self.highest = 0.0
        self.first = 0.0
        self.best: float | None = None
        self._seen = self._fresh = 0

    def learn(self, loss: float) -> None:
        self.losses.append(loss)
        if self._seen < _FIRST:
            self.first += (loss - self.first) / (self._seen + 1)
            self._seen += 1
        self._fresh += 1
        if self._fresh >= self.every:
            self.refresh()

    def forget(self, losses: Sequence[float] = ()) -> None:
        """Begin again, with these losses."""
        self.losses.clear()
        self.losses.extend(losses)
        self.best = None
        self.refresh()

    def refresh(self) -> None:
        self._fresh = 0
        ranked = sorted(self.losses)
        count = len(ranked)
        self.ready = count >= self.warmup
        if not count:
            return
        self.median = median = ranked[count // 2]
        self.highest = ranked[-1]
        self.best = median if self.best is None else min(self.best, median)
        self.scale = max(abs(median), _OF_THE_WAY * (self.first - self.best))
        self.spread = max(
            1.4826 * deviation(ranked, median),
            (ranked[int(0.95 * (count - 1))] - median) / 1.645,
            (self.highest - median) / 3,
            1e-3 * abs(median),
        )


def deviation(ranked: Sequence[float], center: float) -> float:
    """The median distance of ranked values from `center`, found by bisection."""
    middle = bisect_left(ranked, center)
    below, above = (
        middle,
        len(ranked) - middle,
    )  # distances below: center - ranked[middle - 1 - i], above: ranked[middle + i] - center
    wanted = (len(ranked) + 1) // 2
    least, most = max(0, wanted - above), min(wanted, below)
    while least < most:  # how many of the nearest `wanted` values lie below
        taken = (least + most) // 2
        if center - ranked[middle - 1 - taken] < ranked[middle + wanted - taken - 1] - center:
            least = taken + 1
        else:
            most = taken
    distances = []
    if least:
        distances.append(center - ranked[middle - least])
    if wanted > least:
        distances.append(ranked[middle + wanted - least - 1] - center)
    return max(distances, default=0.0)
