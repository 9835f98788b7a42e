"""The beginning of a run, where nothing is usual yet."""

from __future__ import annotations

from collections import deque
from statistics import median

from resilient_train.watch.checks.memory import Remembers
from resilient_train.watch.config import OvershootConfig

_FLAT = 0.01  # of the first gradient norm: thrown so far that nothing leads back
_WATCHED = 4  # times as many updates are compared after an alarm; three of four of them may not lose ...
_LOST = 0.25  # ... so much of the way that the loss has come
_WORSE = 0.5  # nor become worse than the best by this share of it


class Overshoot(Remembers):
    """The first updates threw the loss far above where it began: the rate is wrong by orders of magnitude.

    The other checks learn what is usual from the first updates, and would take the wreck for it. Medians are
    judged, since one may be a hard batch; and of their slopes as well, since a loss may begin near zero.

    A rate that was too high once is watched more closely, until the other checks know what is usual: then it is enough
    that much of what was learned is lost again. No healthy run comes there.
    """

    remembered = ("_first", "_which", "_losses", "_norms", "_level", "_best", "_good_at")

    def __init__(self, config: OvershootConfig) -> None:
        self.config = config
        self._first: list[float] = []  # loss and gradient norm of weights that nothing has changed yet
        self._which = -1  # the newest update, by where its samples lie
        self._losses: deque[float] = deque(maxlen=_WATCHED * config.updates)
        self._norms: deque[float] = deque(maxlen=config.updates)
        self._level: float | None = None  # median of the first losses that are compared
        self._best = 0.0  # the lowest such median
        self._good_at = 0  # the newest step whose losses were near it
        self.is_suspect = False  # there was an alarm; this does not rewind
        self._is_over = not config.every

    @property
    def first_norm(self) -> float | None:
        """Of the gradient before the first update."""
        return self._first[1] if self._first else None

    def see(self, step: int, which: int, loss: float, norm: float) -> tuple[int, str] | None:
        """The newest step to be trusted and the evidence, when it is one. Of an update tried again the last counts."""
        is_watched = self.is_suspect and step <= self.config.watched
        if self._is_over or not (is_watched or step <= self.config.window):
            return None
        if which == self._which and self._losses:  # refused, and other rows may stand in the places of guilty ones now
            self._losses.pop()
            self._norms.pop()
        self._which = which
        if step == 1:
            self._first = [loss, norm]
            return None
        if not self._first:  # a run that is taken up in its middle does not begin here
            return None
        self._losses.append(loss)
        self._norms.append(norm)
        evidence = self._thrown() or (self._lost(step) if is_watched else None)
        if evidence is None:
            return None
        self.is_suspect = True
        self._losses.clear()  # what was done about it gets time before it is said again
        self._norms.clear()
        return self._good_at, evidence

    def _thrown(self) -> str | None:
        """Loss and gradient far above the first."""
        if len(self._norms) < self.config.updates:
            return None
        (first, first_norm), times = self._first, self.config.times
        loss, norm = median(list(self._losses)[-self.config.updates :]), median(self._norms)
        is_far = loss - first > (times - 1) * abs(first)
        if not is_far or _FLAT * first_norm <= norm <= times * first_norm:
            return None
        return f"loss {loss:.4g}, gradient norm {norm:.4g} where the run began with {first:.4g}, {first_norm:.4g}"

    def _lost(self, step: int) -> str | None:
        """Much of what was learned, or of what there was to lose."""
        if len(self._losses) < _WATCHED * self.config.updates:
            return None
        middle, most = median(self._losses), sorted(self._losses)[len(self._losses) // 4]
        if self._level is None:
            self._level = self._best = middle
        self._best = best = min(self._best, middle)
        room = max(_LOST * (self._level - best), _WORSE * abs(best))
        if middle - best <= room / 2:
            self._good_at = step - len(self._losses)
        if most - best <= room:
            return None
        return f"loss {middle:.4g} where it began with {self._level:.4g} and had come to {best:.4g}"

    def forget(self) -> None:
        """Where something changes on purpose, the beginning is no measure any more."""
        self._is_over = True
