"""Where a run stood, as its losses tell it, and whether it stands there again. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import isfinite, sqrt
from statistics import fmean, median, stdev
from typing import Any

WINDOW = 48  # losses that a reference is made of
_LATEST = 8  # that tell where a falling loss has come to
_CLEAR = 3.0  # standard errors from which a slope counts as one
_UNCERTAIN = 0.1  # of the size of the losses: their scatter, where too few are known to measure it
_FEW = 8


class Standing(StrEnum):
    """Where the losses are, beside the reference."""

    BACK = "back"
    OFF = "off"
    UNDECIDED = "undecided"  # no losses yet, or they are above it and fall


@dataclass(frozen=True, slots=True)
class Reference:
    """The losses up to a step that is trusted: their level there, their scatter, and their trend if they rose."""

    step: int
    level: float
    scatter: float  # standard deviation of one loss around the level
    slope: float  # per step; 0 where the losses did not rise: what fell has to be no worse than it was
    size: float  # of such losses, for what is said in shares of it
    count: int  # losses that it is made of

    @classmethod
    def of(cls, losses: Mapping[int, float], until: int, size: float = 0.0) -> Reference | None:
        """Make it of the losses by step up to `until`; None where there are none."""
        steps = sorted(step for step in losses if step <= until)[-WINDOW:]
        everything = [losses[step] for step in steps]
        values = without_top(everything)
        if not values:
            return None
        latest = [losses[step] for step in steps[-_LATEST:]]
        size = max(size, abs(median(latest)))
        if len(values) < _FEW:
            return cls(steps[-1], median(latest), _UNCERTAIN * size, 0.0, size, len(values))
        slope, error, residual = _line(values)
        slope = slope if abs(slope) > _CLEAR * error else 0.0
        level = fmean(values)
        if slope < 0:  # the line is straight and losses are not: never below what the last ones were
            level = max(level + slope * (len(values) - 1) / 2, fmean(without_top(latest)))
        elif slope > 0:
            level += slope * (len(values) - 1) / 2
        scatter = (
            max(residual, _line(everything)[2]) if slope else stdev(everything)
        )  # of all: the highest are no fault
        return cls(steps[-1], level, scatter, max(0.0, slope), size, len(values))

    def expected(self, step: int) -> float:
        """The loss at a later step of a run that is where it was, or where its trend leads."""
        return self.level + self.slope * max(0, step - self.step)

    def bound(self, step: int, count: int, *, sigmas: float, share: float) -> float:
        """What the mean of `count` losses up to a step may come to at most, noise included."""
        noise = self.scatter * sqrt(1 / self.count + 1 / count)
        return self.expected(step) + max(sigmas * noise, share * self.size)

    def standing(self, step: int, losses: Sequence[float], *, sigmas: float, share: float) -> Standing:
        """Compare the losses of the last steps up to `step` with it."""
        if not losses:
            return Standing.UNDECIDED
        values = without_top(losses)
        if fmean(values) <= self.bound(step, len(values), sigmas=sigmas, share=share):
            return Standing.BACK
        return Standing.OFF

    def off(self, loss: float) -> float:
        """How far a loss lies above it, in sizes of such losses: 1 is twice as high as it was."""
        if not isfinite(loss):
            return float("inf")
        return max(0.0, (loss - self.level) / self.size) if self.size else 0.0

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Reference:
        """Make it again of what `as_plain` returned."""
        whole = {name: int(plain[name]) for name in ("step", "count")}
        numbers = {name: float(plain[name]) for name in ("level", "scatter", "slope", "size")}
        is_one = whole["count"] > 0 and numbers["scatter"] >= 0 and numbers["size"] >= 0
        if not (is_one and all(map(isfinite, numbers.values()))):
            raise ValueError(f"a reference cannot be {dict(plain)}")
        return cls(**whole, **numbers)  # type: ignore[arg-type]

    def as_plain(self) -> dict[str, Any]:
        """Plain data, for a file."""
        return asdict(self)


def falls(losses: Sequence[float]) -> bool:
    """Whether losses come down, beyond noise."""
    values = without_top(losses)
    if len(values) < _FEW:
        return False
    slope, error, _ = _line(list(values))
    return slope < -_CLEAR * error


def without_top(losses: Sequence[float]) -> list[float]:
    """All but the highest tenth, in their order: single outliers are where losses are wild."""
    if len(losses) < _FEW:
        return list(losses)
    ranked = sorted(range(len(losses)), key=losses.__getitem__)
    return [losses[place] for place in sorted(ranked[: len(losses) - max(1, len(losses) // 10)])]


def _line(values: Sequence[float]) -> tuple[float, float, float]:
    """Slope of a straight line through values, its standard error, and the deviation from the line."""
    count, middle = len(values), (len(values) - 1) / 2
    mean = fmean(values)
    square = sum((place - middle) ** 2 for place in range(count))
    slope = sum((place - middle) * (value - mean) for place, value in enumerate(values)) / square
    rest = sum((value - mean - slope * (place - middle)) ** 2 for place, value in enumerate(values))
    residual = sqrt(max(0.0, rest) / max(1, count - 2))
    return slope, residual / sqrt(square), residual
