"""Was a rise of the loss on purpose? An experiment shows it: undo it once, and look for it at a tenth of the rate."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, ClassVar, NamedTuple

from resilient_train.core.checks import Check
from resilient_train.core.config import LimitConfig
from resilient_train.core.loss import Alarm
from resilient_train.types import Vitals

PROBE_RATE = 0.1  # of the rate, around the step of a rise that was undone
_BEFORE, _AFTER = 2, 12  # steps around a jump that are made at that rate
LEARNED = 0.25  # of a rise
_LONGEST = 200  # steps of a climb
_ALIKE = 0.25  # of the higher of two rises, by which they may differ
_NEAR, _NEAR_SHARE = 2, 0.25  # steps, and share of the way from the rewind, by which their steps may differ


class Rise(NamedTuple):
    """A loss that left its level."""

    step: int  # the first update with it
    start: int  # of its samples
    height: float  # above the level
    grows: bool  # gradient norms grow with it


class Probe(NamedTuple):
    """A rise that a rewind has undone, and the steps in which the rate is a tenth.

    A rise that comes again there, as high, with other samples, was made by none of weights, rate and samples. So it is,
    with any samples, if it comes at once at the weights of a verified state.
    """

    rise: Rise
    rewound_to: int
    first: int
    last: int
    came_again: bool = False  # there, but not as high

    @classmethod
    def of(cls, rise: Rise, noticed: int, rewound_to: int, *, is_jump: bool, came_again: bool = False) -> Probe:
        """Of a climb most of the way from the rewind is made at the lower rate."""
        first = rise.step - _BEFORE if is_jump else max(rewound_to, noticed - _LONGEST)
        return cls(rise, rewound_to, first, (rise.step if is_jump else noticed) + _AFTER, came_again)

    def covers(self, step: int) -> bool:
        return self.first <= step <= self.last

    def is_at(self, step: int) -> bool:
        return self.is_near(step) or step == self.rewound_to + 1

    def is_near(self, step: int) -> bool:
        near = max(_NEAR, round(_NEAR_SHARE * (self.rise.step - self.rewound_to)))
        return abs(step - self.rise.step) <= near

    def confirms(self, again: Rise, step: int, *, was_low: bool) -> bool:
        """Say whether it is the same rise; `was_low`: the loss was, at the state which the run was rewound to."""
        is_alike = abs(again.height - self.rise.height) <= _ALIKE * max(again.height, self.rise.height)
        if again.grows or not (is_alike or self.came_again):
            return False
        if again.step == self.rewound_to + 1:
            return was_low and is_alike
        return self.is_near(again.step) and self.covers(step) and again.start != self.rise.start

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Probe:
        return cls(Rise(*plain[0]), *plain[1:])


class Experiment(Check):
    """The probe of a rise that may be on purpose: around it the rate is a tenth, and no limit hides what comes."""

    persistent = ("probe",)
    records: ClassVar = {"probe": Probe.from_plain}

    def __init__(self, config: LimitConfig) -> None:
        self._lasts = config.regime_of  # steps after it
        self.probe: Probe | None = None

    def see(self, step: int, which: int, vitals: Vitals) -> Alarm | None:
        if self.probe is not None and vitals.step > self.probe.last + self._lasts:
            self.probe = None
        return None

    def lifts_limits(self, step: int) -> bool:
        return self.probe is not None and self.probe.is_at(step)

    def rate_factor(self, step: int) -> float:
        return PROBE_RATE if self.probe is not None and self.probe.covers(step) else 1.0

    def forget(self, limit: float = inf) -> None:
        self.probe = None
