"""What a run trains with, as factors of what was configured. Knobs outlive rewinds, and relax while it is healthy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LOWEST_LR = 1e-6
LOWEST_CLIP = 1e-6
HIGHEST_EPS = 1e8
LONGEST_PATIENCE = 64  # times `relax_after`

_LOOSEN = 2**0.5  # lr and clip are multiplied by it in one step of relaxing: two steps undo a halving
_CLIMB = 2 ** (1 / 8)  # lr is multiplied by it in one step of regaining: eight of them double it
_WRONG = 8  # times `relax_after`, at least, where what was configured never worked, or broke at once
_SINK = 10**0.5  # eps is divided by it: two steps undo a tenfold


@dataclass(frozen=True, slots=True)
class KnobValues:
    """What the next update uses."""

    lr: float = 1.0  # factor of the scheduled rate, re-warming included
    clip: float = 1.0  # factor of the configured limits
    eps: float = 1.0  # factor of the configured epsilon
    ceiling: float = math.inf  # of the rate, as a multiple of the configured one, whatever the schedule says
    leapt_to: float = 0.0  # the multiple that the schedule leapt to; 0: it did not
    higher_precision: bool = False  # without autocast


class Knobs:
    """Turned by remedies, read by every update, advanced by every healthy one."""

    def __init__(self, relax_after: int = 100) -> None:
        """`relax_after`: healthy updates between two steps of relaxing."""
        assert relax_after >= 1
        self.relax_after = relax_after
        self._lr = self._clip = self._eps = 1.0
        self._ceiling, self._was_met = math.inf, False  # and whether the schedule went beyond it since it was raised
        self._leapt_to = 0.0
        self._regain = 0.0  # what lr climbs back to
        self._precise = 0  # steps left in higher precision
        self._warmed, self._rewarm = 0, 0  # steps of the present re-warming, of so many
        self._healthy = 0  # steps since the last trouble or relaxing
        self._patience = 1  # how many times `relax_after` it takes now
        self._relaxing = False  # it has relaxed since the last trouble
        self._settle()

    @property
    def lr(self) -> float:
        """What the rate is multiplied by, once it is warm."""
        return self._lr

    @property
    def values(self) -> KnobValues:
        """What the next update uses: computed when something changes, so that reading costs nothing."""
        return self._values

    def turn_lr(self, factor: float, rewarm: int = 0, regain: float = 0.0) -> None:
        """Multiply the rate; with `rewarm`, let it climb there from zero over so many steps.

        With `regain` it is soon back at this share of what it was: a search for the highest rate that works.
        """
        self._regain = self._lr * regain
        if regain:
            self._patience = max(self._patience, _WRONG)
        self._lr = _bounded(self._lr * factor, LOWEST_LR, 1.0)
        if rewarm:
            self._warmed, self._rewarm = 0, rewarm
        self._settle()

    def limit_lr(self, ceiling: float, leapt_to: float = 0.0) -> None:
        """Keep the rate below `ceiling` times the configured one, until the schedule comes down by itself.

        `leapt_to` is what it rose to at once: as the schedule falls from there, so does the limit.
        """
        self._ceiling, self._leapt_to = max(LOWEST_LR, min(self._ceiling, ceiling)), leapt_to
        self._patience = max(self._patience, _WRONG)
        self._settle()

    def turn_clip(self, factor: float) -> None:
        """Multiply the limits of the clip."""
        self._clip = _bounded(self._clip * factor, LOWEST_CLIP, 1.0)
        self._settle()

    def turn_eps(self, factor: float) -> None:
        """Multiply epsilon."""
        self._eps = _bounded(self._eps * factor, 1.0, HIGHEST_EPS)
        self._settle()

    def turn_precision(self, steps: int) -> None:
        """Stay in higher precision for at least so many steps."""
        self._precise = max(self._precise, steps)
        self._settle()

    def advance(self, *, was_limited: bool = False, may_relax: bool = True) -> None:
        """Note an accepted and healthy update, and relax when there have been enough of them.

        `was_limited`: the schedule asked for more than the limit of the rate. `may_relax`: the loss is where it was
        before the trouble; until then nothing is relaxed.
        """
        if self._at_rest:
            return
        self._was_met |= was_limited
        if self._precise:
            self._precise -= 1
        if self._rewarm:
            self._warmed += 1
            if self._warmed >= self._rewarm:
                self._warmed, self._rewarm = 0, 0
        else:
            self._healthy += may_relax
            if self._lr < self._regain and may_relax:
                self._lr = _bounded(min(self._lr * _CLIMB, self._regain), LOWEST_LR, 1.0)
            if self._healthy >= self.relax_after * self._patience:
                self._relax()
        self._settle()

    def trouble(self) -> None:
        """Note an incident that took more than skipping an update.

        One that comes while relaxing shows that this was too early: the next time waits twice as long.
        """
        if self._relaxing:
            self._patience = min(2 * self._patience, LONGEST_PATIENCE)
        self._healthy, self._relaxing = 0, False
        self._settle()

    def _relax(self) -> None:
        self._healthy = 0
        if self._ceiling < math.inf:
            self._ceiling = self._ceiling * _LOOSEN if self._was_met else math.inf
            self._leapt_to = self._leapt_to if self._was_met else 0.0
            self._was_met = False
        if self._lr == self._clip == self._eps == 1.0 and self._ceiling == math.inf:
            # Relaxed long ago, and still healthy.
            self._patience, self._relaxing = 1, False
            return
        self._lr = _bounded(self._lr * _LOOSEN, LOWEST_LR, 1.0)
        self._clip = _bounded(self._clip * _LOOSEN, LOWEST_CLIP, 1.0)
        self._eps = _bounded(self._eps / _SINK, 1.0, HIGHEST_EPS)
        self._relaxing = True

    def _settle(self) -> None:
        warmth = (self._warmed + 1) / self._rewarm if self._rewarm else 1.0
        rate = max(LOWEST_LR, self._lr * warmth)
        limit = self._ceiling, self._leapt_to
        self._values = KnobValues(rate, self._clip, self._eps, *limit, self._precise > 0)
        turned = self._values != KnobValues() or self._rewarm > 0
        self._at_rest = not turned and self._patience == 1 and not self._relaxing

    def __str__(self) -> str:
        """What differs from the configuration: "lr x0.5, clip x0.5"."""
        warming = f" (re-warming, {self._warmed} of {self._rewarm})" if self._rewarm else ""
        warming += f" (climbing to x{self._regain:.3g})" if self._lr < self._regain else ""
        said = [f"lr x{self._lr:.3g}{warming}"] if self._lr != 1.0 or warming else []
        said += [f"lr at most x{self._ceiling:.3g} of the configured one"] if self._ceiling < math.inf else []
        said += [f"clip x{self._clip:.3g}"] if self._clip != 1.0 else []
        said += [f"eps x{self._eps:.3g}"] if self._eps != 1.0 else []
        said += [f"higher precision for {self._precise} steps"] if self._precise else []
        return ", ".join(said) or "as configured"

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "lr": self._lr,
            "clip": self._clip,
            "eps": self._eps,
            "regain": self._regain,
            "ceiling": self._ceiling if self._ceiling < math.inf else None,
            "ceiling_met": self._was_met,
            "leapt_to": self._leapt_to,
            "higher_precision": self._precise,
            "rewarm": [self._warmed, self._rewarm],
            "healthy": self._healthy,
            "patience": self._patience,
            "relaxing": self._relaxing,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; values beyond the bounds are clipped to them.

        Raises ValueError where a factor is below 0 or not finite.
        """
        for name in ("lr", "clip", "eps", "regain", "ceiling", "leapt_to"):
            if not 0 <= float(state.get(name) or 0.0) < math.inf:
                raise ValueError(f"the knob {name} is {state[name]!s:.20}, not a number from 0 up")
        self._lr = _bounded(float(state["lr"]), LOWEST_LR, 1.0)
        self._clip = _bounded(float(state["clip"]), LOWEST_CLIP, 1.0)
        self._eps = _bounded(float(state["eps"]), 1.0, HIGHEST_EPS)
        self._regain = min(max(0.0, float(state.get("regain", 0.0))), 1.0)
        ceiling = state.get("ceiling")
        self._ceiling = math.inf if ceiling is None else max(LOWEST_LR, float(ceiling))
        self._was_met = bool(state.get("ceiling_met", False))
        self._leapt_to = max(0.0, float(state.get("leapt_to", 0.0)))
        self._precise = max(0, int(state["higher_precision"]))
        warmed, rewarm = state["rewarm"]
        self._warmed, self._rewarm = (int(warmed), int(rewarm)) if 0 <= warmed < rewarm else (0, 0)
        self._healthy = max(0, int(state["healthy"]))
        self._patience = min(max(1, int(state["patience"])), LONGEST_PATIENCE)
        self._relaxing = bool(state["relaxing"])
        self._settle()


def _bounded(value: float, lowest: float, highest: float) -> float:
    """Keep a factor inside its bounds, and make one that is 1 except for rounding exactly 1."""
    return 1.0 if abs(value - 1.0) < 1e-9 else min(max(value, lowest), highest)
