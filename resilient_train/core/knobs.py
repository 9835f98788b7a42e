"""Knobs: factors of the configured rate and clip. Rewinds do not undo them; a healthy run relaxes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

MIN_LR = MIN_CLIP = 1e-6

_RELAX_FACTOR = 2**0.5  # of lr and clip in one step of relaxing: two steps undo a halving
_LONG_PATIENCE = 8  # at least, where the configured rate never worked, or failed at once
_MAX_PATIENCE = 64


@dataclass(slots=True)
class Numbers:
    """Numbers that are written down, and read again."""

    own: ClassVar = ""  # a field that is none of them

    def state_dict(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != self.own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, first in type(self)().state_dict().items():
            setattr(self, name, type(first)(state[name]))  # a remedy may have set a float to 1


@dataclass(slots=True)
class Knobs(Numbers):
    """Turned by remedies, used by every update, relaxed step by step after enough healthy ones."""

    own: ClassVar = "relax_after"
    relax_after: int = 100  # healthy updates between two steps of relaxing
    lr: float = 1.0  # what the rate is multiplied by, after re-warming
    clip: float = 1.0  # factor of the configured limits
    ceiling: float = 0.0  # of the rate, as a multiple of the configured one, whatever the schedule says; 0: none
    ceiling_met: bool = False  # the schedule went beyond it since it was set
    leapt_to: float = 0.0  # the multiple that the schedule rose to in one step; 0: it did not
    warmed: int = 0  # steps done of the present re-warming, ...
    warms_for: int = 0  # ... and all of its steps
    healthy: int = 0  # steps since the last trouble or relaxing
    patience: int = 1  # a step of relaxing takes so many times `relax_after`
    relaxing: bool = False  # it has relaxed since the last trouble

    @property
    def rate(self) -> float:
        """What the scheduled rate is multiplied by, re-warming included."""
        return max(MIN_LR, self.lr * ((self.warmed + 1) / self.warms_for if self.warms_for else 1.0))

    @property
    def turned(self) -> tuple[float, ...]:
        """All that shapes an update."""
        return self.rate, self.clip, self.ceiling, self.leapt_to

    def turn_lr(self, factor: float, rewarm: int = 0, *, lasting: bool = False) -> None:
        """Multiply the rate; `rewarm`: climb from zero; `lasting`: relax it last."""
        self.patience = _MAX_PATIENCE if lasting else self.patience
        self.lr = _bounded(self.lr * factor, MIN_LR)
        if rewarm:
            self.warmed, self.warms_for = 0, rewarm

    def limit_lr(self, ceiling: float, leapt_to: float = 0.0) -> None:
        """Keep the rate below `ceiling` times the configured one, which falls as the schedule does from `leapt_to`."""
        self.ceiling = _bounded(min(self.ceiling or math.inf, ceiling), MIN_LR, math.inf)
        self.leapt_to = leapt_to
        self.patience = max(self.patience, _LONG_PATIENCE)

    def turn_clip(self, factor: float) -> None:
        """Multiply the limits of the clip."""
        self.clip = _bounded(self.clip * factor, MIN_CLIP)

    def advance(self, *, was_limited: bool = False, may_relax: bool = True) -> None:
        """Count a healthy update; relax after enough. `was_limited`: by the ceiling. `may_relax`: the loss is back."""
        self.ceiling_met |= was_limited
        if self.warms_for:
            self.warmed += 1
            if self.warmed >= self.warms_for:
                self.warmed = self.warms_for = 0
        elif may_relax:
            self.healthy += 1
            if self.healthy >= self.relax_after * self.patience:
                self._relax()

    def trouble(self) -> None:
        """Note an incident that took more than a skip; while relaxing, the next wait is twice as long."""
        if self.relaxing:
            self.patience = min(2 * self.patience, _MAX_PATIENCE)
        self.healthy, self.relaxing = 0, False

    def _relax(self) -> None:
        self.healthy = 0
        if self.ceiling:
            self.ceiling = self.ceiling * _RELAX_FACTOR if self.ceiling_met else 0.0
            self.leapt_to = self.leapt_to if self.ceiling_met else 0.0
            self.ceiling_met = False
        if self.lr == self.clip == 1.0 and not self.ceiling:
            self.patience, self.relaxing = 1, False  # relaxed long ago, and still healthy
            return
        self.turn_clip(_RELAX_FACTOR)
        self.lr, self.relaxing = _bounded(self.lr * _RELAX_FACTOR, MIN_LR), True


def _bounded(value: float, lowest: float, highest: float = 1.0) -> float:
    """Keep a factor inside its bounds, and make one that is 1 except for rounding exactly 1."""
    return 1.0 if abs(value - 1.0) < 1e-9 else min(max(value, lowest), highest)
