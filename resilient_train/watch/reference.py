"""Where a run stood, by its losses, and whether it is there again after trouble. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import inf, isfinite, sqrt
from statistics import fmean, median, stdev
from typing import Any

from resilient_train.watch.config import ProbationConfig

WINDOW = 48  # losses that a reference is made of
_LATEST = 8  # that show where a falling loss has come to
_CLEAR = 3.0  # standard errors from which a slope counts as one
_UNCERTAIN = 0.1  # of the size of the losses: their scatter, where too few are known to measure it
_FEW = 8  # losses: with fewer neither scatter, trend nor a way back can be judged
_LOOKS = (0.25, 0.5)  # of the window, before its end
_LONGEST = 2.0  # times the way that it took before


class Standing(StrEnum):
    """Where the losses are, compared with the reference."""

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
    size: float  # of such losses, for what is given in shares of it
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
        scatter = max(residual, _line(everything)[2]) if slope else stdev(everything)  # of all: the highest too
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
        is_back = fmean(values) <= self.bound(step, len(values), sigmas=sigmas, share=share)
        return Standing.BACK if is_back else Standing.OFF

    def excess(self, loss: float) -> float:
        """How far a loss lies above it, in sizes of such losses: 1 is twice as high as it was."""
        if not isfinite(loss):
            return inf
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
    slope, error, _ = _line(values)
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


class RewindCheck:
    """Keeps a reference from the first damage on, until the loss has been back at it for a whole window.

    It counts from where the run stands again where it had been. The losses it has seen rewind with the run. The
    reference and the place do not: they are what the run is measured against, whatever it goes back to.
    """

    def __init__(self, config: ProbationConfig) -> None:
        self.config = config
        self._losses: deque[float] = deque(maxlen=config.window)
        self.end()

    def end(self) -> None:
        """The run is back, or where it should be was changed on purpose."""
        self.reference: Reference | None = None
        self.goal = 0  # the step that the run had reached, and has to come to again; later, where it goes there slowly
        self._reached = 0  # the same without the time for a slow way
        self.came_from: int | None = None  # the lowest step it went back to since; None: it was not taken back
        self.stands_on: int | None = None  # the step it went back to last, a verified one
        self._ceiling: float | None = None  # the highest loss on the way from there, until it is back
        self._losses.clear()

    @property
    def is_open(self) -> bool:
        return self.reference is not None

    def reference_step(self) -> int | None:
        """The step of the state that the run is measured against, if it is."""
        return self.reference.step if self.reference is not None else None

    def begin(self, reference: Reference | None, goal: int, since: int) -> None:
        """Measure against `reference` from now on, or still against an older one that can be trusted.

        What is newer than `since` is damaged. That speaks of the course that the run is on: an older reference of a
        course before a rewind holds, unless the two had not parted yet.
        """
        parted_before = self.came_from is not None and since >= self.came_from
        holds = self.reference is not None and (self.reference.step <= since or parted_before)
        if not holds:
            self.reference = reference
            self.came_from = self.stands_on = self._ceiling = None
        self.goal = self._reached = max(self._reached if holds else 0, goal)
        self._losses.clear()

    def rewound(self, step: int, way: Mapping[int, float], rate: float = 1.0) -> None:
        """The run has gone back: what it measures from here on counts. `way` holds the trusted losses by step.

        With `rate` times the learning rate the way takes as many times longer, within bounds.
        """
        if self.is_open:
            self.goal = round(step + max(0, self._reached - step) * min(_LONGEST, 1 / rate))
            self.goal = max(self.goal, self._reached)
            self._stand(step, max((loss for other, loss in way.items() if other > step), default=None))
            self._losses.clear()

    def resumed(self, step: int) -> None:
        """A process resumes from `step`, which may lie before where the last one went back to."""
        if self.is_open and step < self.goal:
            self._stand(step, inf)  # how high losses are from here on is not known

    def _stand(self, step: int, ceiling: float | None) -> None:
        self.came_from = step if self.came_from is None else min(step, self.came_from)
        self.stands_on, self._ceiling = step, ceiling

    def is_above(self, loss: float, sigmas: float, share: float) -> bool:
        """Whether a loss is above what was usual where the run stood: nothing may be learned from it.

        On the way there, until it has been there again, above all that it was on that way.
        """
        if self.reference is None:
            return False
        over = loss - max(self.reference.expected(self.goal), -inf if self._ceiling is None else self._ceiling)
        return over > sigmas * self.reference.scatter and over > share * self.reference.size

    def see(self, step: int, loss: float) -> Standing:
        """Note the loss of an accepted update; say where the run stands, once there is something to say."""
        self._losses.append(loss)
        if self._ceiling is not None and self.allows_proof(step):
            self._ceiling = None
        after, window = step - self.goal, self.config.window
        if after >= window:
            is_look = after == window or not after % round(_LOOKS[0] * window)
            return self._standing(step, window) if is_look else Standing.UNDECIDED
        is_look = after > 0 and after in [round(look * window) for look in _LOOKS]
        return Standing.OFF if is_look and self._standing(step, after) is Standing.OFF else Standing.UNDECIDED

    def final(self, step: int) -> Standing:
        """Where the run stands at its end, however few losses show it; what only falls is not back."""
        after = min(len(self._losses), max(0, step - self.goal)) or len(self._losses)
        return Standing.BACK if self._standing(step, after) is Standing.BACK else Standing.OFF

    def allows_proof(self, step: int) -> bool:
        """Whether the losses since the run went back are on the reference: else no state of it counts as good."""
        if self.reference is None:
            return True
        return len(self._losses) >= _FEW and self._standing(step, len(self._losses)) is Standing.BACK

    def evidence(self, step: int) -> str:
        """For a person."""
        assert self.reference is not None
        losses = list(self._losses)[-max(1, step - self.goal) :]
        mean = sum(losses) / max(1, len(losses))
        return (
            f"the last losses ({len(losses)}) average {mean:.4g} where {self.reference.expected(step):.4g} was usual "
            f"at step {self.reference.step:,}"
        )

    def _standing(self, step: int, count: int) -> Standing:
        assert self.reference is not None
        losses = list(self._losses)
        latest, config = losses[-count:] if count else [], self.config
        standing = self.reference.standing(step, latest, sigmas=config.sigmas, share=config.share)
        # A way back that is long is judged by all of it: a few losses would not show that it leads there.
        return Standing.UNDECIDED if standing is Standing.OFF and falls(losses) else standing

    def persistent_state(self) -> dict[str, Any] | None:
        """What does not rewind, as plain data; None where there is nothing."""
        if self.reference is None:
            return None
        one = {"reference": self.reference.as_plain(), "goal": self.goal, "came_from": self.came_from}
        one["reached"] = self._reached
        return {**one, "stands_on": self.stands_on, "ceiling": None if self._ceiling == inf else self._ceiling}

    def load_persistent_state(self, state: Mapping[str, Any] | None) -> None:
        """Keep measuring against what an earlier process was measured against."""
        if state is None:
            self.end()
            return
        self.reference = Reference.from_plain(state["reference"])
        self.goal, self._reached = int(state["goal"]), int(state["reached"])
        steps = (state[name] for name in ("came_from", "stands_on"))
        self.came_from, self.stands_on = (None if step is None else int(step) for step in steps)
        self._ceiling = None if state["ceiling"] is None else float(state["ceiling"])

    def state_dict(self) -> dict[str, Any]:
        """What rewinds, as plain data."""
        return {"_losses": list(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._losses.clear()
        self._losses.extend(state["_losses"])
