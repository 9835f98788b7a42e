"""The loss stands where a lower learning rate may not let it stand, though nothing spikes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import fmean

from resilient_train.watch.config import NoProgressConfig
from resilient_train.watch.loss import PlainState
from resilient_train.watch.reference import falls, without_top

_FIRST_LOSSES = 8  # that show the level at which the run began
_NEVER = 2**53  # steps
_THROWN = 0.2  # of that: by so much the first updates have raised the loss


class NoProgress(PlainState):
    """The losses have not fallen since a quarter of the run, and are still near those that it began with.

    Or they fall, but only since the first updates have thrown them far up. Or they stand anywhere while the weights
    still change by much of their norm: in healthy runs these have nearly settled by then. At later looks the losses may
    fall meanwhile, as they do at a rate that is far too high, more slowly.
    That is no alarm: many healthy losses stand. It asks for a trial of lower learning rates. The look
    after one is at twice as many updates; after one that finds nothing to try, a quarter later.
    """

    saved = ("_losses", "first", "_mean", "_seen")

    def __init__(self, config: NoProgressConfig) -> None:
        self.config = config
        self.next_look = config.every  # the step. Does not rewind
        self.first = self._mean = 0.0  # where it began; the mean of the first losses
        self.evidence = ""
        self._losses: deque[float] = deque(maxlen=config.window)
        self._seen = 0

    def see(self, loss: float) -> None:
        """Take the loss of an accepted update."""
        self._seen += 1
        if self._seen <= _FIRST_LOSSES:  # the very first one was measured before any update: others may be far above
            self._mean += (loss - self._mean) / self._seen
            self.first = self._mean if self._seen == 1 else min(self.first, self._mean)
        self._losses.append(loss)

    def asks(self, step: int, travelled: Callable[[], float]) -> bool:
        """Say whether lower learning rates should be tried after `step` accepted updates.

        `travelled` is called at few steps, on all ranks alike. It returns how far the weights moved lately, relative to
        their norm.
        """
        if not self.config.every or step < self.next_look:
            return False
        is_asked = self._is_asked(travelled)
        if not is_asked:
            self.next_look = step + max(self.config.every, step // 4)
        return is_asked

    def tried(self, step: int, *, is_tried: bool) -> None:
        """Note what became of a trial that it asked for: where none could be made, it asks again before long."""
        if self.next_look < _NEVER:
            self.next_look = 2 * step if is_tried else step + self.config.every

    def stop(self) -> None:
        """Never ask again."""
        self.next_look = _NEVER

    def _is_asked(self, travelled: Callable[[], float]) -> bool:
        newer = list(self._losses)[-(3 * self._seen // 4) :]
        level = fmean(without_top(newer)) if newer else 0.0
        is_thrown = self._mean - self.first > _THROWN * abs(self.first)
        still_fall = falls(newer) and not is_thrown
        # In the first updates the weights of a loss that falls may change by any amount.
        if self._seen < self.config.every * (2 if still_fall else 1):
            return False
        how = "after the first updates had thrown it up" if is_thrown else "and do not fall"
        how = "and fall" if still_fall else how
        begin = f"where it began with {self.first:.4g}"
        self.evidence = f"the last losses ({len(newer)}) average {level:.4g} {how}, {begin}"
        if not still_fall and self.first - level < self.config.share * abs(self.first):
            return True
        if (travel := travelled()) < self.config.travel:
            return False
        self.evidence += f", and the weights still change by {travel:.2g} of their norm in 25 updates"
        return True

    def forget(self) -> None:
        self._losses.clear()
        self._seen, self.first, self._mean = 0, 0.0, 0.0
