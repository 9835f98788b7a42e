"""What snapshots and checkpoints cost: a run whose intervals are dear says so once, with one that is not."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from resilient_train.wording import log

_CHEAP, _DEAR = 0.01, 0.03  # of a run's time
_WORTH_SAYING_S = 30.0  # lost so far: a run of seconds is not the place to save 3 %
_FEW, _MANY = 8, 64  # ordinary updates that are compared with
_SAMPLES = 5  # newest costs that count


@dataclass
class CopyCost:
    """The seconds that each copy of one kind, made `every` so many steps, kept training from its work."""

    key: str
    every: int
    costs: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    lost: float = 0.0
    was_said: bool = False

    def add(self, seconds: float, step_seconds: float) -> None:
        """Note what one more copy cost, next to an ordinary step."""
        self.costs.append(max(0.0, seconds))
        self.lost += self.costs[-1]
        if self.was_said or not self.every or len(self.costs) < _SAMPLES or self.lost < _WORTH_SAYING_S:
            return
        each = median(self.costs)
        if (share := each / (self.every * step_seconds + each)) > _DEAR:
            self.was_said = True
            cheap = float(f"{each / (_CHEAP * step_seconds):.2g}")
            why = "%s=%d costs %.0f %% of the time; %d would cost 1 %%"
            log.warning(why, self.key, self.every, 100 * share, cheap)


class CopyCosts:
    """Measures what snapshots in memory and checkpoints on disk cost."""

    def __init__(self, memory: int, disk: int, now: Callable[[], float] = time.perf_counter) -> None:
        """`memory` and `disk` are the steps between two of each kind."""
        self._memory = CopyCost("memory.every", memory)
        self._disk = CopyCost("disk.every", disk)
        self._now = now
        self._ordinary: deque[float] = deque(maxlen=_MANY)  # seconds of updates without a copy
        self._last = (-1, 0.0)  # tick and time of the last healthy update
        self._saving: float | None = None  # seconds that the checkpoint being written cost so far

    def updated(self, tick: int, *, has_copied: bool, is_saving: bool, copying: float | None = None) -> None:
        """After each healthy update.

        `copying` is how long the host copied, if that is all that a snapshot costs: what a loop does of its own at the
        same steps, such as an evaluation, is no cost of a snapshot.
        """
        (last, then), now = self._last, self._now()
        self._last = (tick, now)
        if last != tick - 1:
            return  # there was an incident in between
        if not has_copied and not is_saving and self._saving is None:
            self._ordinary.append(now - then)
        elif len(self._ordinary) >= _FEW:
            self._measure(now - then, has_copied=has_copied, is_saving=is_saving, copying=copying)

    def _measure(self, seconds: float, *, has_copied: bool, is_saving: bool, copying: float | None) -> None:
        ordinary = median(self._ordinary)
        more = seconds - ordinary
        if not has_copied:
            self._saving = (self._saving or 0.0) + more
        elif not is_saving:
            self._memory.add(more if copying is None else copying, ordinary)
        if not is_saving and self._saving is not None:
            self._disk.add(self._saving, ordinary)
            self._saving = None
