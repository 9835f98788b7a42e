"""A learning rate that rose, and a loss that is worse since."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean, median
from typing import Any

from resilient_train.watch.checks.memory import Remembers
from resilient_train.watch.config import RateConfig
from resilient_train.watch.reference import Reference, Standing, without_top

_ABSURD = 10.0  # times the usual rate: too much to be let pass unseen
_FEW = 8  # losses of which the mean without the highest says more than the median


class Rate(Remembers):
    """The rate is far above what it was, and the loss above where it was before: no need to wait until it jumps.

    A rate that rises is no trouble by itself, as in a warm-up. It makes the loss looked at more closely.
    """

    remembered = ("_paces", "_usual", "_since", "_losses", "_seen", "_base")

    def __init__(self, config: RateConfig) -> None:
        self.config = config
        self._paces: deque[float] = deque(maxlen=config.lately)  # rates, as multiples of the configured one
        self._usual = 0.0  # the highest of earlier ones
        self._reference: Reference | None = None  # from before the rate rose
        self._since = 0
        self._losses: deque[float] = deque(maxlen=2 * config.look)
        self._seen = 0  # losses since
        self._base = 1.0  # the highest rate before it rose

    def see(
        self, step: int, loss: float, pace: float, reference: Callable[[int], Reference | None]
    ) -> tuple[int, str] | None:
        """The step before the rate rose and the evidence, if the loss is worse since. `reference` makes that of a step.

        `pace` is the rate that the update was made with; its own loss was measured before.
        """
        if not self.config.every or not pace > 0:
            return None
        found = self._worse(step, loss) if self._reference is not None else None
        if len(self._paces) == self._paces.maxlen:
            self._usual = max(self._usual, self._paces[0])
        elif len(self._paces) < self.config.earlier:
            self._usual = max(self._usual, pace)
        before = self._paces[-1] if self._paces else pace
        self._paces.append(pace)
        is_high = pace >= self.config.times * self._usual and (pace > 1.0 or pace >= self.config.times * before)
        if self._reference is None and is_high and step > self.config.earlier:  # a warm-up climbs to 1, in small steps
            self._reference, self._since, self._base = reference(step), step - 1, max(self._usual, 1e-12)
            self._losses.clear()
            self._seen = 0
        return found

    def _worse(self, step: int, loss: float) -> tuple[int, str] | None:
        assert self._reference is not None
        self._losses.append(loss)
        self._seen += 1
        if self._seen >= self.config.window:  # it has gone well for so long
            self._usual = max([self._usual, *self._paces])
            self._reference = None
            return None
        if self._seen != self.config.first and self._seen % self.config.look:
            return None
        return self._judged(step)

    def unsettled(self, step: int) -> tuple[int, str] | None:
        """The same at the end of a run, where few losses or none were measured since the rate rose."""
        if self._reference is None or self._seen >= self.config.look:
            return None
        if self._losses:
            return self._judged(step)
        times = max(self._paces) / self._base
        told = f"the learning rate rose x{times:.3g} with the last update, and nothing shows what came of it"
        return (self._since, told) if times >= _ABSURD else None

    def _judged(self, step: int) -> tuple[int, str] | None:
        assert self._reference is not None
        losses = list(self._losses)
        losses = [median(losses)] * len(losses) if len(losses) < _FEW else losses
        standing = self._reference.standing(step, losses, sigmas=self.config.sigmas, share=self.config.share)
        if standing is not Standing.OFF:
            return None
        times = max(self._paces) / self._base
        evidence = f"the last losses ({len(losses)}) average {fmean(without_top(losses)):.4g} where "
        evidence += f"{self._reference.expected(step):.4g} was usual before the learning rate rose x{times:.3g}"
        self._reference = None
        return self._since, evidence

    def forget(self) -> None:
        self._reference = None
        self._losses.clear()

    def state_dict(self) -> dict[str, Any]:
        reference = None if self._reference is None else self._reference.as_plain()
        return {**super().state_dict(), "reference": reference}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        reference = state["reference"]
        self._reference = None if reference is None else Reference.from_plain(reference)
