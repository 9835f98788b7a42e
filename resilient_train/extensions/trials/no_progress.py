"""Where the loss stands, and a trial of lower rates may help."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from statistics import fmean

from resilient_train.core.checks import Check, References
from resilient_train.core.episode import falls
from resilient_train.core.loss import Alarm, Every, without_top
from resilient_train.data.history import FIRST_LOSSES, beginning
from resilient_train.ground.reader import limited
from resilient_train.ground.types import Facts, Vitals, fact

_NEVER = 2**53  # steps
_THROWN = 0.2  # of that: by so much the first updates have raised the loss


@dataclass
class NoProgressConfig(Every):
    window: int = limited(at_least=16)
    share: float = limited(above=0)
    travel: float = limited(above=0)


class NoProgress(Check):
    """The losses have not fallen since a quarter of the run, and are still near those that it began with.

    Or they fall only since the first updates threw them up; or they stand, or fall slowly at later looks, while the
    weights still change by much of their norm. No alarm, as many healthy losses stand: it asks for a trial of rates.
    """

    saved = ("_losses", "_began", "_seen")
    persistent = ("next_look",)

    def __init__(self, config: NoProgressConfig) -> None:
        self.config = config
        self.next_look = config.every  # the step
        self._began: list[float] = []  # the first losses
        self.evidence: Facts = ()
        self._losses: deque[float] = deque(maxlen=config.window)
        self._seen = 0

    def landed(self, step: int, vitals: Vitals, reference: References, *, is_learned: bool) -> Alarm | None:
        self._seen += 1
        if self._seen <= FIRST_LOSSES:
            self._began.append(vitals.loss)
        self._losses.append(vitals.loss)
        return None

    @property
    def first(self) -> float:
        """Where it began."""
        return beginning(self._began)[0]

    def asks(self, step: int, travelled: Callable[[], float]) -> bool:
        """Say whether to try lower learning rates.

        `travelled`, called at few steps and by all ranks: how far the weights moved lately, relative to their norm.
        """
        if not self.config.every or step < self.next_look:
            return False
        newer = list(self._losses)[-(3 * self._seen // 4) :]
        level = fmean(without_top(newer)) if newer else 0.0
        first, mean = beginning(self._began)
        is_thrown = mean - first > _THROWN * abs(first)
        still_fall = falls(newer) and not is_thrown
        how = "thrown" if is_thrown else "falls" if still_fall else "stands"
        seen = {"count": len(newer), "mean": level, how: True, "first": first}
        self.evidence = fact("plateau", **seen)
        # In the first updates the weights of a loss that falls may change by any amount.
        if self._seen >= self.config.every * (2 if still_fall else 1):
            if not still_fall and first - level < self.config.share * abs(first):
                return True
            if (travel := travelled()) >= self.config.travel:
                self.evidence = fact("plateau", **seen, travel=travel)
                return True
        self.next_look = step + max(self.config.every, step // 4)
        return False

    def tried(self, step: int, *, is_tried: bool) -> None:
        """Note what became of a trial: where none could be made, it asks again before long."""
        if self.next_look < _NEVER:
            self.next_look = 2 * step if is_tried else step + self.config.every

    def stop(self) -> None:
        self.next_look = _NEVER

    def more_is_trained(self) -> None:
        self.stop()  # the beginning is no measure any more

    def forget(self, limit: float = inf) -> None:
        self._losses.clear()
        self._began, self._seen = [], 0
