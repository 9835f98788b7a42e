"""Where the losses usually lie."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from resilient_train.watch.checks.memory import Remembers
from resilient_train.watch.config import JumpConfig

_USUAL_EVERY = 8
_FIRST = 8  # losses that tell where the run began
_BEGINNING = 2  # windows
_OF_THE_WAY = 0.02  # a loss near zero is judged by this share of the way it has come


class Level(Remembers):
    """Where the accepted losses usually lie: their median, their spread upwards, and what is large for them.

    The spread is the largest of four, since losses are skewed: median + k·MAD alone flags dozens of healthy ones in
    a thousand. Looked at every few losses only, because it moves slowly and every step pays for it.
    """

    remembered = (
        "losses", "ready", "median", "spread", "scale", "low", "high", "first", "best", "_seen", "_fresh",
    )  # fmt: skip

    def __init__(self, config: JumpConfig) -> None:
        self.every = config.every or _USUAL_EVERY
        self.warmup = config.warmup
        self.losses: deque[float] = deque(maxlen=config.window)
        self.ready = False
        self.median = self.spread = self.scale = 0.0
        self.low = self.high = 0.0  # nine of ten lie between
        self.first = 0.0
        self.best: float | None = None
        self._seen = self._fresh = 0

    @property
    def usual(self) -> str:
        """For a person."""
        known = list(self.losses)
        low, high = (self.low, self.high) if self.ready or not known else (min(known), max(known))
        return f"{low:.4g} to {high:.4g} was usual"

    def learn(self, loss: float) -> bool:
        """Take one more; whether the level was looked at anew."""
        self.losses.append(loss)
        self._seen += 1
        if self._seen <= _FIRST:
            self.first += (loss - self.first) / self._seen
        self._fresh += 1
        if self._fresh < self.every:
            return False
        self.refresh()
        return True

    def forget(self, losses: Sequence[float] = ()) -> None:
        """Begin again, with these losses. The way from the first loss still tells what is small."""
        self.losses.clear()
        self.losses.extend(losses)
        self.best = None
        self.ready = False
        self.refresh()

    def _drop_descent(self) -> None:
        """Forget the descent that a run begins with: it says nothing about how far losses stray once it is behind.

        Only then: later on, a level that falls and rises again may be in the nature of the data.
        """
        while len(self.losses) >= self.warmup:
            losses = list(self.losses)
            older, newer = sorted(losses[: len(losses) // 2]), sorted(losses[len(losses) // 2 :])
            middle = newer[len(newer) // 2]
            if older[len(older) // 2] - middle <= 1.4826 * deviation(newer, middle):
                return
            self.losses = deque(losses[len(losses) // 2 :], maxlen=self.losses.maxlen)

    def refresh(self) -> None:
        self._fresh = 0
        self.ready = self.ready or len(self.losses) >= self.warmup
        if self._seen < _BEGINNING * (self.losses.maxlen or 0):
            self._drop_descent()
        ranked = sorted(self.losses)
        count = len(ranked)
        if not count:
            return
        self.median = median = ranked[count // 2]
        self.low, self.high = ranked[count // 20], ranked[int(0.95 * (count - 1))]
        self.best = median if self.best is None else min(self.best, median)
        self.scale = max(abs(median), _OF_THE_WAY * (self.first - self.best))
        self.spread = max(
            1.4826 * deviation(ranked, median),
            (self.high - median) / 1.645,
            (ranked[-1] - median) / 3,
            1e-3 * abs(median),
        )


def deviation(ranked: Sequence[float], center: float) -> float:
    """The median distance of ranked values from `center`, by bisection: a sort of the distances costs ten times more.

    The nearest half of the values is a stretch around the center: it is found how many of them lie below.
    """
    middle = bisect_left(ranked, center)
    wanted = (len(ranked) + 1) // 2
    least, most = max(0, wanted - (len(ranked) - middle)), min(wanted, middle)
    while least < most:
        below = (least + most) // 2
        if center - ranked[middle - 1 - below] < ranked[middle + wanted - below - 1] - center:
            least = below + 1
        else:
            most = below
    from_below = center - ranked[middle - least] if least else 0.0
    from_above = ranked[middle + wanted - least - 1] - center if wanted > least else 0.0
    return max(from_below, from_above)
