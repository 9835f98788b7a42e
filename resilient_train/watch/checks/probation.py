"""Whether a run that got into trouble is back where it was."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf
from typing import Any

from resilient_train.watch.checks.memory import Remembers
from resilient_train.watch.config import ProbationConfig
from resilient_train.watch.reference import Reference, Standing, falls

_LOOKS = (0.25, 0.5)  # of the window, before its end
_LONGEST = 2.0  # times the way that it took before
_FEWEST = 8  # losses that say whether the way back is on the reference


class Probation(Remembers):
    """Holds a reference from the first damage on, until the loss has been back for a whole window.

    It counts from where the run stands again where it had been. The losses it has seen rewind with the run. The
    reference and the place do not: they are what the run is measured against, whatever it goes back to.
    """

    remembered = ("_losses",)

    def __init__(self, config: ProbationConfig) -> None:
        self.config = config
        self.reference: Reference | None = None
        self.goal = 0  # the step that the run had reached, and has to come to again; later, where it goes there slowly
        self._reached = 0  # the same without the time for a slow way
        self.came_from: int | None = None  # the lowest step it went back to since; None: it was not taken back
        self.stands_on: int | None = None  # the step it went back to last, a proven one
        self._ceiling: float | None = None  # the highest loss on the way from there, until it is back
        self._losses: deque[float] = deque(maxlen=config.window)

    @property
    def is_open(self) -> bool:
        return self.reference is not None

    def begin(self, reference: Reference | None, goal: int, since: int) -> None:
        """Measure against `reference` from now on, or on against an older one that is still to be trusted.

        What is newer than `since` is damaged. That speaks of the course that the run is on: an older reference of a
        course before a rewind holds, unless the two had not parted yet.
        """
        holds = self.reference is not None and (self.reference.step <= since or self._parted_before(since))
        if not holds:
            self.reference = reference
            self.came_from = self.stands_on = self._ceiling = None
        self.goal = self._reached = max(self._reached if holds else 0, goal)
        self._losses.clear()

    def _parted_before(self, since: int) -> bool:
        return self.came_from is not None and since >= self.came_from

    def rewound(self, step: int, way: Mapping[int, float], rate: float = 1.0) -> None:
        """The run has gone back: what it measures from here on counts. `way` holds the trusted losses by step.

        With `rate` times the learning rate the way takes as many times longer, within bounds.
        """
        if self.is_open:
            self.goal = round(step + max(0, self._reached - step) * min(_LONGEST, 1 / rate))
            self.goal = max(self.goal, self._reached)
            self.came_from = step if self.came_from is None else min(step, self.came_from)
            self.stands_on = step
            self._ceiling = max((loss for other, loss in way.items() if other > step), default=None)
            self._losses.clear()

    def resumed(self, step: int) -> None:
        """A process goes on from `step`, which may lie before where the last one went back to."""
        if self.is_open and step < self.goal:
            self.came_from = step if self.came_from is None else min(step, self.came_from)
            self.stands_on, self._ceiling = step, inf  # how high losses are from here on is not known

    def end(self) -> None:
        """The run is back, or somebody has changed on purpose where it should be."""
        self.reference, self.goal, self._reached = None, 0, 0
        self.came_from = self.stands_on = self._ceiling = None
        self._losses.clear()

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
        after = step - self.goal
        window = self.config.window
        if after <= 0:
            return Standing.UNDECIDED
        if after < window:
            if after not in [round(look * window) for look in _LOOKS]:
                return Standing.UNDECIDED
            early = self._standing(step, after)
            return early if early is Standing.OFF else Standing.UNDECIDED
        if after % round(_LOOKS[0] * window) and after != window:
            return Standing.UNDECIDED
        return self._standing(step, window)

    def final(self, step: int) -> Standing:
        """Where the run stands at its end, however few losses tell it; what only falls is not back."""
        after = min(len(self._losses), max(0, step - self.goal)) or len(self._losses)
        standing = self._standing(step, after)
        return Standing.BACK if standing is Standing.BACK else Standing.OFF

    def allows_proof(self, step: int) -> bool:
        """Whether the losses since the run went back are on the reference: else no state of it counts as good."""
        if self.reference is None:
            return True
        if len(self._losses) < _FEWEST:
            return False
        return self._standing(step, len(self._losses)) is Standing.BACK

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
        standing = self.reference.standing(
            step, losses[-count:] if count else [], sigmas=self.config.sigmas, share=self.config.share
        )
        # A way back that is long is judged by all of it: a few losses would not show that it leads there.
        return Standing.UNDECIDED if standing is Standing.OFF and falls(losses) else standing

    def memory(self) -> dict[str, Any] | None:
        """What does not rewind, as plain data; None where there is nothing."""
        if self.reference is None:
            return None
        one = {"reference": self.reference.as_plain(), "goal": self.goal, "came_from": self.came_from}
        one["reached"] = self._reached
        return {**one, "stands_on": self.stands_on, "ceiling": None if self._ceiling == inf else self._ceiling}

    def recall(self, memory: Mapping[str, Any] | None) -> None:
        """Measure on against what an earlier process was measured against."""
        if memory is None:
            self.end()
            return
        self.reference = Reference.from_plain(memory["reference"])
        self.goal, self._reached = int(memory["goal"]), int(memory["reached"])
        steps = (memory[name] for name in ("came_from", "stands_on"))
        self.came_from, self.stands_on = (None if step is None else int(step) for step in steps)
        self._ceiling = None if memory["ceiling"] is None else float(memory["ceiling"])
