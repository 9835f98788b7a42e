"""The losses before trouble as a reference, and the check whether the run is back there after a rewind."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, sqrt
from statistics import fmean, median, stdev
from sys import float_info
from typing import Any, ClassVar

from resilient_train.core.loss import FEW, Every, PlainState, without_top
from resilient_train.ground.reader import limited
from resilient_train.ground.types import Facts, fact

WINDOW = 48  # losses that make a reference
_LATEST = 8  # losses whose median is the level where they fell, and whose size thresholds in shares refer to
_SIGNIFICANT = 3.0  # standard errors from which a slope is not noise
_SCATTER_OF_FEW = 0.1  # of the size of the losses, where there are too few of them to measure their scatter
_RISE_OVER_FEW = 2.0  # of their size
_LOOKS = 4  # within a window, once that is full
_UNKNOWN = float_info.max  # no loss is above it
_LONGEST_WAY = 2.0  # times as many steps as before; a lower learning rate allows for no more


@dataclass
class ReferenceConfig(Every):
    window: int = limited(at_least=8)
    share: float = limited(above=0)
    sigmas: float = limited(above=0)


class Standing(StrEnum):
    BACK = "back"
    OFF = "off"
    UNDECIDED = "undecided"  # there are no losses yet, or they are above it and fall


@dataclass(frozen=True, slots=True)
class Reference:
    """The losses up to a trusted step: their level there, their scatter, and their trend if they rose."""

    step: int
    level: float
    scatter: float  # standard deviation of single losses around the level
    slope: float  # per step; 0 if the losses did not rise, since a run that fell has to be no worse than it was
    size: float  # of the losses, for thresholds in shares
    count: int  # losses that it was made from

    @classmethod
    def of(cls, losses: Mapping[int, float], until: int, size: float = 0.0) -> Reference | None:
        steps = sorted(step for step in losses if step <= until)[-WINDOW:]
        everything = [losses[step] for step in steps]
        values = without_top(everything)
        if not values:
            return None
        latest = everything[-_LATEST:]
        size = max(size, abs(median(latest)))
        if len(values) < FEW:
            return cls(steps[-1], median(latest), _SCATTER_OF_FEW * size, 0.0, size, len(values))
        slope, error, residual = line(values)
        if not abs(slope) > _SIGNIFICANT * error:
            return cls(steps[-1], fmean(values), stdev(everything), 0.0, size, len(values))
        level = fmean(values) + slope * (len(values) - 1) / 2
        if slope < 0:  # the line is straight and losses are not: it may lead below the last ones
            level = max(level, fmean(without_top(latest)))
        scatter = max(residual, line(everything)[2])  # of all losses, the highest included
        return cls(steps[-1], level, scatter, max(0.0, slope), size, len(values))

    def expected(self, step: int) -> float:
        """Return the loss at a later step of a run that is back: the level, or where its trend leads."""
        return self.level + self.slope * max(0, step - self.step)

    def standing(self, step: int, losses: Sequence[float], *, sigmas: float, share: float) -> Standing:
        """Compare the mean of losses up to `step` with it; the noise of both and a share of the size are allowed."""
        if not losses:
            return Standing.UNDECIDED
        values = without_top(losses)
        noise = self.scatter * sqrt(1 / self.count + 1 / len(values))
        is_back = fmean(values) <= self.expected(step) + max(sigmas * noise, share * self.size)
        return Standing.BACK if is_back else Standing.OFF


def falls(losses: Sequence[float]) -> bool:
    """Whether losses fall by more than noise explains."""
    values = without_top(losses)
    if len(values) < FEW:
        return False
    slope, error, _ = line(values)
    return slope < -_SIGNIFICANT * error


def line(values: Sequence[float]) -> tuple[float, float, float]:
    """Fit a straight line. Returns its slope, the standard error of that, and the standard deviation from the line."""
    count, middle = len(values), (len(values) - 1) / 2
    mean = fmean(values)
    square = sum((place - middle) ** 2 for place in range(count))
    slope = sum((place - middle) * (value - mean) for place, value in enumerate(values)) / square
    rest = sum((value - mean - slope * (place - middle)) ** 2 for place, value in enumerate(values))
    residual = sqrt(max(0.0, rest) / max(1, count - 2))
    return slope, residual / sqrt(square), residual


class Episode(PlainState):
    """From damage on, compares the run with the reference, until its loss was there for a whole window.

    The window begins at `goal`, the step that the run had reached. The losses rewind with the run, reference and goal
    do not: whatever state it goes back to, it is compared with the same place.
    """

    saved = ("_losses",)
    persistent = (
        "reference",
        "goal",
        "reached",
        "came_from",
        "stands_on",
        "ceiling",
        "has_stayed",
        "took",
        "is_only_reported",
    )
    records: ClassVar = {"reference": lambda plain: Reference(**plain)}

    def __init__(self, config: ReferenceConfig) -> None:
        self.config = config
        self._losses: deque[float] = deque(maxlen=config.window)
        self.end()

    def end(self) -> None:
        """Stop comparing: the run is back, or its loss was changed on purpose."""
        self.reference: Reference | None = None
        self.goal = 0  # the step that has to be reached again, later if a lower rate takes longer
        self.reached = 0  # the step that was reached before the rewind
        self.came_from: int | None = None  # the earliest step that the run was rewound to; None: it was not
        self.stands_on: int | None = None  # the verified step that the run was rewound to last
        self.ceiling: float | None = None  # the highest loss on the way from there, until the run is back
        self.has_stayed = False  # the newest treatment could not rewind ...
        self.took = 0  # ... and so many steps were lost before it
        self.is_only_reported = False  # the policy does nothing about the damage, so one alarm about it is enough
        self._losses.clear()

    @property
    def is_open(self) -> bool:
        return self.reference is not None

    @property
    def is_silent(self) -> bool:
        return self.is_open and self.is_only_reported

    def begin(self, reference: Reference | None, goal: int, since: int, *, is_only_reported: bool = False) -> None:
        """Compare with `reference` from now on, unless an older one is trusted: one from before a rewind, unless the
        damage began before the two courses parted. All after `since` is damaged.
        """
        parted_before = self.came_from is not None and since >= self.came_from
        is_trusted = self.reference is not None and (self.reference.step <= since or parted_before)
        if not is_trusted:
            self.reference = reference
            self.came_from = self.stands_on = self.ceiling = None
            self.took, self.has_stayed = 0, False
        self.is_only_reported = is_only_reported
        self.goal = self.reached = max(self.reached if is_trusted else 0, goal)
        self._losses.clear()

    def rewound(self, step: int, way: Mapping[int, float], rate: float = 1.0) -> None:
        """Note a rewind to `step`. `way` has the trusted losses by step; with a lower learning rate it takes longer."""
        if self.is_open:
            goal = round(step + max(0, self.reached - step) * min(_LONGEST_WAY, 1 / rate))
            self.goal = max(goal, self.reached)
            self._stand(step, max((loss for other, loss in way.items() if other > step), default=None))
            self._losses.clear()

    def stayed(self, step: int, rate: float = 1.0) -> None:
        """Note a treatment without a rewind: learning again takes as long as it took to lose it."""
        if self.reference is not None:
            self.took = self.took or max(0, self.reached - self.reference.step)
            self.goal = step + round(self.took * min(_LONGEST_WAY, 1 / rate))
            self.has_stayed = True
            self._losses.clear()

    def resumed(self, step: int) -> None:
        """Note a resume from `step`, which may be before the last rewind's."""
        was_rewound = not self.has_stayed or step < self.reached
        if self.is_open and step < self.goal and was_rewound:
            self._stand(step, _UNKNOWN)  # the losses of the way from there

    def _stand(self, step: int, ceiling: float | None) -> None:
        self.came_from = step if self.came_from is None else min(step, self.came_from)
        self.stands_on, self.ceiling, self.has_stayed = step, ceiling, False

    def is_above(self, loss: float, sigmas: float, share: float) -> bool:
        """Whether a loss is above the reference, and above the losses of the way back while the run is on it."""
        if self.reference is None:
            return False
        rise = loss - max(self.reference.expected(self.goal), -inf if self.ceiling is None else self.ceiling)
        if self.reference.count < FEW:  # as much as no noise explains, since theirs was not measured
            share = max(share, _RISE_OVER_FEW)
        return rise > sigmas * self.reference.scatter and rise > share * self.reference.size

    def see(self, step: int, loss: float) -> Standing:
        """Add the loss of an accepted update. Returns BACK or OFF at a look that decides, else UNDECIDED."""
        self._losses.append(loss)
        if self.ceiling is not None and self.is_at_reference(step):
            self.ceiling = None
        after, window = step - self.goal, self.config.window
        is_look = after >= window and not (after - window) % (window // _LOOKS)
        return self._standing(step, window) if is_look else Standing.UNDECIDED

    def ends_back(self, step: int) -> bool:
        """Whether a run that ends at `step` is back, however few losses show it. Losses that still fall are not."""
        return self._standing(step, self._counted(step)) is Standing.BACK

    def is_at_reference(self, step: int) -> bool:
        """Whether the losses since the rewind are at the reference: only then states count as good."""
        if self.reference is None:
            return True
        return len(self._losses) >= FEW and self._standing(step, len(self._losses)) is Standing.BACK

    def evidence(self, step: int) -> Facts:
        assert self.reference is not None
        losses = list(self._losses)[-self._counted(step) :]
        mean, level = sum(losses) / max(1, len(losses)), self.reference.expected(step)
        return fact("off_level", count=len(losses), mean=mean, level=level, step=self.reference.step)

    def _counted(self, step: int) -> int:
        return min(len(self._losses), max(0, step - self.goal)) or len(self._losses)

    def _standing(self, step: int, count: int) -> Standing:
        assert self.reference is not None
        losses = list(self._losses)
        latest, config = losses[-count:] if count else [], self.config
        standing = self.reference.standing(step, latest, sigmas=config.sigmas, share=config.share)
        # All losses show whether a long way leads back; the latest few would not.
        return Standing.UNDECIDED if standing is Standing.OFF and falls(losses) else standing

    def persistent_state(self) -> dict[str, Any] | None:
        return super().persistent_state() if self.is_open else None

    def load_persistent_state(self, state: Mapping[str, Any] | None) -> None:
        if state is None:
            self.end()
        else:
            super().load_persistent_state(state)
