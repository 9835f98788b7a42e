"""Knobs: factors of the configured rate, clip and epsilon. Rewinds do not undo them; a healthy run relaxes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MIN_LR = MIN_CLIP = 1e-6
MAX_EPS = 1e8

_RELAX_FACTOR = 2**0.5  # of lr and clip in one step of relaxing: two steps undo a halving
_RELAX_EPS_FACTOR = 10**0.5  # eps is divided by it: two steps undo a tenfold
_REGAIN_FACTOR = 2 ** (1 / 8)  # of lr in one step of the climb to `regain`: eight steps double it
_LONG_PATIENCE = 8  # at least, where the configured rate never worked, or failed at once
_MAX_PATIENCE = 64
_DECAY = 50  # healthy updates until a limit of updates is 0.7 of what it was
_LEAST_SHARE = 0.1  # of it: no less, or it would slow down healthy training late in a long run


@dataclass(frozen=True, slots=True)
class KnobValues:
    """What the next update uses."""

    lr: float = 1.0  # factor of the scheduled rate, re-warming included
    clip: float = 1.0  # factor of the configured limits
    eps: float = 1.0  # factor of the configured epsilon
    ceiling: float = math.inf  # of the rate, as a multiple of the configured one, whatever the schedule says
    leapt_to: float = 0.0  # the multiple that the schedule rose to in one step; 0: it did not
    higher_precision: bool = False  # without autocast
    share: float = 0.0  # of the norm of the weights, by which SGD may change them; 0: no limit


class Knobs:
    """Turned by remedies, used by every update, relaxed step by step after enough healthy ones."""

    def __init__(self, relax_after: int = 100) -> None:
        """`relax_after`: healthy updates between two steps of relaxing."""
        assert relax_after >= 1
        self.relax_after = relax_after
        self.lr = 1.0  # what the rate is multiplied by, after re-warming
        self._clip = self._eps = 1.0
        self._regain = 0.0  # what lr climbs back to
        self._ceiling, self._ceiling_met = math.inf, False  # and whether the schedule went beyond it since it was set
        self._leapt_to = 0.0
        self._share, self._limited = 0.0, 0  # the share at first, and healthy updates since
        self._precise_steps = 0  # steps left in higher precision
        self._warmed, self._rewarm = 0, 0  # steps done of the present re-warming, and all of its steps
        self._healthy = 0  # steps since the last trouble or relaxing
        self._patience = 1  # a step of relaxing takes so many times `relax_after`
        self._relaxing = False  # it has relaxed since the last trouble

    @property
    def values(self) -> KnobValues:
        """What the next update uses."""
        warmth = (self._warmed + 1) / self._rewarm if self._rewarm else 1.0
        rate, is_precise = max(MIN_LR, self.lr * warmth), self._precise_steps > 0
        return KnobValues(rate, self._clip, self._eps, self._ceiling, self._leapt_to, is_precise, self._decayed_share())

    def turn_lr(self, factor: float, rewarm: int = 0, regain: float = 0.0, *, lasting: bool = False) -> None:
        """Multiply the rate; with `rewarm`, climb there from zero over so many steps.

        With `regain` it soon climbs back to this share of the previous rate: a search for the highest one that works.
        A `lasting` cut is relaxed as late as possible.
        """
        self._regain = self.lr * regain
        self._patience = _MAX_PATIENCE if lasting else self._patience
        if regain:
            self._patience = max(self._patience, _LONG_PATIENCE)
        self.lr = _bounded(self.lr * factor, MIN_LR, 1.0)
        if rewarm:
            self._warmed, self._rewarm = 0, rewarm

    def limit_lr(self, ceiling: float, leapt_to: float = 0.0) -> None:
        """Keep the rate below `ceiling` times the configured one, until the schedule comes down by itself.

        `leapt_to` is what the schedule rose to in one step: as it falls from there, so does the limit.
        """
        self._ceiling, self._leapt_to = max(MIN_LR, min(self._ceiling, ceiling)), leapt_to
        self._patience = max(self._patience, _LONG_PATIENCE)

    def limit_update(self, share: float) -> None:
        """Let SGD change the weights by no more than this share of their norm, and by less from here, down to a tenth.

        Where every update is as long as it may be, no loss comes to rest before they become shorter.
        """
        self._share, self._limited = share, 0

    def _decayed_share(self) -> float:
        return self._share * max(_LEAST_SHARE, math.sqrt(_DECAY / (_DECAY + self._limited)))

    def turn_clip(self, factor: float) -> None:
        """Multiply the limits of the clip."""
        self._clip = _bounded(self._clip * factor, MIN_CLIP, 1.0)

    def turn_eps(self, factor: float) -> None:
        """Multiply epsilon."""
        self._eps = _bounded(self._eps * factor, 1.0, MAX_EPS)

    def turn_precision(self, steps: int) -> None:
        """Stay in higher precision for at least so many steps."""
        self._precise_steps = max(self._precise_steps, steps)

    def advance(self, *, was_limited: bool = False, may_relax: bool = True) -> None:
        """Count an accepted and healthy update, and relax after enough of them.

        `was_limited`: the schedule asked for more than the ceiling. `may_relax`: the loss is back at the level before
        the trouble; until then nothing is relaxed.
        """
        if self._patience == 1 and not self._relaxing and not self._rewarm and self.values == KnobValues():
            return  # nothing is turned
        self._ceiling_met |= was_limited
        self._precise_steps = max(0, self._precise_steps - 1)
        self._limited += self._share > 0
        if self._rewarm:
            self._warmed += 1
            if self._warmed >= self._rewarm:
                self._warmed, self._rewarm = 0, 0
        elif may_relax:
            self._healthy += 1
            if self.lr < self._regain:
                self.lr = _bounded(min(self.lr * _REGAIN_FACTOR, self._regain), MIN_LR, 1.0)
            if self._healthy >= self.relax_after * self._patience:
                self._relax()

    def trouble(self) -> None:
        """Note an incident that took more than skipping an update.

        One that comes while relaxing shows that this was too early: the next time waits twice as long.
        """
        if self._relaxing:
            self._patience = min(2 * self._patience, _MAX_PATIENCE)
        self._healthy, self._relaxing = 0, False

    def _relax(self) -> None:
        self._healthy = 0
        if self._ceiling < math.inf:
            self._ceiling = self._ceiling * _RELAX_FACTOR if self._ceiling_met else math.inf
            self._leapt_to = self._leapt_to if self._ceiling_met else 0.0
            self._ceiling_met = False
        if self.lr == self._clip == self._eps == 1.0 and self._ceiling == math.inf:
            self._patience, self._relaxing = 1, False  # relaxed long ago, and still healthy
            return
        self.lr = _bounded(self.lr * _RELAX_FACTOR, MIN_LR, 1.0)
        self._clip = _bounded(self._clip * _RELAX_FACTOR, MIN_CLIP, 1.0)
        self._eps = _bounded(self._eps / _RELAX_EPS_FACTOR, 1.0, MAX_EPS)
        self._relaxing = True

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "lr": self.lr,
            "clip": self._clip,
            "eps": self._eps,
            "regain": self._regain,
            "ceiling": self._ceiling if self._ceiling < math.inf else None,
            "ceiling_met": self._ceiling_met,
            "leapt_to": self._leapt_to,
            "share": self._share,
            "limited": self._limited,
            "higher_precision": self._precise_steps,
            "rewarm": [self._warmed, self._rewarm],
            "healthy": self._healthy,
            "patience": self._patience,
            "relaxing": self._relaxing,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; values beyond the bounds are clipped to them.

        Raises ValueError where a factor is below 0 or not finite.
        """
        for name in ("lr", "clip", "eps", "regain", "ceiling", "leapt_to", "share"):
            if not 0 <= float(state.get(name) or 0.0) < math.inf:
                raise ValueError(f"the knob {name} is {state[name]!s:.20}, not a number from 0 up")
        self.lr = _bounded(float(state["lr"]), MIN_LR, 1.0)
        self._clip = _bounded(float(state["clip"]), MIN_CLIP, 1.0)
        self._eps = _bounded(float(state["eps"]), 1.0, MAX_EPS)
        self._regain = min(float(state.get("regain", 0.0)), 1.0)
        ceiling = state.get("ceiling")
        self._ceiling = math.inf if ceiling is None else max(MIN_LR, float(ceiling))
        self._ceiling_met = bool(state.get("ceiling_met", False))
        self._leapt_to = float(state.get("leapt_to", 0.0))
        self._share = min(float(state.get("share", 0.0)), 1.0)
        self._limited = max(0, int(state.get("limited", 0)))
        self._precise_steps = max(0, int(state["higher_precision"]))
        warmed, rewarm = state["rewarm"]
        self._warmed, self._rewarm = (int(warmed), int(rewarm)) if 0 <= warmed < rewarm else (0, 0)
        self._healthy = max(0, int(state["healthy"]))
        self._patience = min(max(1, int(state["patience"])), _MAX_PATIENCE)
        self._relaxing = bool(state["relaxing"])


def _bounded(value: float, lowest: float, highest: float) -> float:
    """Keep a factor inside its bounds, and make one that is 1 except for rounding exactly 1."""
    return 1.0 if abs(value - 1.0) < 1e-9 else min(max(value, lowest), highest)
