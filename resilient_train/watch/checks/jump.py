"""Sudden changes of the loss."""

from __future__ import annotations

from collections import deque
from statistics import median

from resilient_train.watch.checks.level import Level
from resilient_train.watch.checks.memory import Remembers
from resilient_train.watch.config import JumpConfig, OutlierConfig


class Jump(Remembers):
    """The loss left its usual range and stays out of it.

    Losses outside do not enter the range, or it would follow the damage. If most losses lie outside for long and
    rise no more, they are the new range.
    """

    remembered = ("_flags", "_steps", "_outside", "_quiet")

    def __init__(self, config: JumpConfig, level: Level) -> None:
        self.config, self.level = config, level
        self._flags: deque[bool] = deque(maxlen=config.regime_of)
        self._steps: deque[int] = deque(maxlen=config.regime_of)
        self._outside: list[float] = []
        self._quiet = 0

    def is_outside(self, loss: float) -> bool:
        level = self.level
        if not self.config.every or not level.ready:
            return False
        over = loss - level.median
        return over > self.config.sigmas * level.spread and over > self.config.share * level.scale

    def see(self, step: int, loss: float, outside: bool) -> int | None:
        """The step of the first loss outside, when there are enough."""
        if self._quiet:
            self._quiet -= 1
        if not outside:
            if self._outside:
                self._flags.append(False)
                self._steps.append(step)
                if not any(self._flags):
                    self.forget()
            return None
        self._flags.append(True)
        self._steps.append(step)
        self._outside.append(loss)
        del self._outside[: -self.config.regime_of]
        recent = list(self._flags)[-self.config.flagged_of :]
        if self._quiet or sum(recent) < self.config.flagged:
            return None
        self._quiet = 2 * self.config.flagged_of
        return list(self._steps)[-len(recent) :][recent.index(True)]

    def new_range(self) -> list[float] | None:
        """The losses of a new range, when most have been outside for long and rise no more."""
        if sum(self._flags) < self.config.regime:
            return None
        losses = self._outside[-self.config.regime :]
        half = len(losses) // 2
        before, after = median(losses[:half]), median(losses[half:])
        return losses if after - before <= self.config.share * max(abs(before), self.level.scale) else None

    def forget(self) -> None:
        self._flags.clear()
        self._steps.clear()
        self._outside.clear()
        self._quiet = 0


class Outliers(Remembers):
    """Single losses far outside the usual range: told, not more often than every so many updates, never treated."""

    remembered = ("_told_at", "_untold")

    def __init__(self, config: OutlierConfig, level: Level) -> None:
        self.config, self.level = config, level
        self._told_at: int | None = None
        self._untold = 0

    def see(self, step: int, loss: float) -> str | None:
        level = self.level
        if not self.config.every or loss - level.median <= self.config.sigmas * level.spread or not level.ready:
            return None
        if self._told_at is not None and 0 <= step - self._told_at < self.config.every:
            self._untold += 1
            return None
        more = f" ({self._untold} more since step {self._told_at})" if self._untold else ""
        self._told_at, self._untold = step, 0
        return f"single loss {loss:.4g} where up to {level.highest:.4g} was usual{more}"
