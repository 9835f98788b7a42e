"""Sudden changes of the loss."""

from __future__ import annotations

from collections import deque

from resilient_train.watch.checks.level import Level, deviation
from resilient_train.watch.checks.memory import Remembers
from resilient_train.watch.config import JumpConfig, OutlierConfig

_FAR = 2.0  # times as many spreads, and times the size of the losses: a young run changes fast
_YOUNG = 12  # losses that tell what is far above all of them, as long as there are not many more


class Jump(Remembers):
    """The loss left its usual range and stays out of it.

    Losses outside do not enter the range, or it would follow the damage. A young run has no range yet: there only
    what lies far above every loss so far is outside.
    """

    remembered = ("_flags", "_trusted", "_usual_at", "_quiet")

    def __init__(self, config: JumpConfig, level: Level) -> None:
        self.config, self.level = config, level
        self._flags: deque[bool] = deque(maxlen=config.flagged_of)
        self._trusted: deque[int] = deque(maxlen=config.flagged_of)  # the newest good state as each flag was raised
        self._usual_at = 0
        self._quiet = 0

    def is_outside(self, loss: float) -> bool:
        level = self.level
        if not self.config.every or len(level.losses) < _YOUNG:
            return False
        if not level.ready:
            lately = list(level.losses)[-_YOUNG:]
            over, usual = loss - max(lately), sorted(lately)[_YOUNG // 2]
            spread, size = deviation(sorted(lately), usual), max(abs(usual), level.scale)
            return over > _FAR * self.config.sigmas * spread and over > _FAR * size
        over = loss - level.median
        return over > self.config.sigmas * level.spread and over > self.config.share * level.scale

    def see(self, step: int, loss: float, outside: bool) -> int | None:
        """The newest step still to be trusted, when the loss has jumped.

        That is the state which produced the last loss below the median, before the first one outside: damage may
        grow for a while before it shows.
        """
        if self._quiet:
            self._quiet -= 1
        if not outside:
            if loss <= self.level.median or len(self.level.losses) < _YOUNG:
                self._usual_at = step
            if self._flags:
                self._note(False)
                if True not in self._flags:
                    self.forget()
            return None
        self._note(True)
        recent = list(self._flags)
        if self._quiet or sum(recent) < self.config.flagged:
            return None
        self._quiet = 2 * self.config.flagged_of  # what was done about it gets time before it is said again
        return self._trusted[recent.index(True)]

    def _note(self, outside: bool) -> None:
        self._flags.append(outside)
        self._trusted.append(max(0, self._usual_at - 1))

    def forget(self) -> None:
        self._flags.clear()
        self._trusted.clear()
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
        if not self.config.every or not level.ready or loss - level.median <= self.config.sigmas * level.spread:
            return None
        if self._told_at is not None and 0 <= step - self._told_at < self.config.every:
            self._untold += 1
            return None
        more = f" ({self._untold} more since step {self._told_at})" if self._untold else ""
        self._told_at, self._untold = step, 0
        return f"a single loss of {loss:.4g} at step {step} where {level.usual}{more}"
