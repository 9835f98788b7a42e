"""Limits above which an update is refused, and what many refusals mean: a new regime, or a collapsing loss scale."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from statistics import median_high

from resilient_train.core.loss import Every, Level, PlainState
from resilient_train.ground.reader import limited
from resilient_train.ground.types import NO_LIMIT

_OUTLIER = 100  # times the median of the first norms: left out when the first limit is made from them
_EARLY_LIMIT = 1e3  # times the median of a few norms or losses, before there are enough for the limit
_FIRST_LIMIT = 1e7  # times the median of fewer norms than that
_FEW = 4  # norms


@dataclass
class LimitConfig(Every):
    window: int = limited(at_least=8)
    warmup: int = limited(at_least=2)
    grad_factor: float = limited(above=1)
    early_factor: float = limited(above=1)
    loss_factor: float = limited(above=1)
    regime: int = limited(at_least=2)
    regime_of: int = limited(at_least=2)


def as_float32(value: float) -> float:
    """Round to float32, in which the device compares; at most its largest value."""
    if not value < NO_LIMIT:
        return NO_LIMIT
    return float(struct.unpack("f", struct.pack("f", value))[0])


class GradLimit(PlainState):
    """The limit for gradient norms: far above the largest of the recent ones. Between two refreshes it only rises.

    A norm of the first updates is accepted later, too, unless it is farther away still: a network that has memorized
    its rows has next to no gradient, until a hard row comes.
    """

    saved = ("limit", "_norms", "_early", "_fresh")

    def __init__(self, config: LimitConfig) -> None:
        self.config = config
        self.limit = NO_LIMIT
        self._norms: deque[float] = deque(maxlen=config.window)
        self._early: float | None = None  # the 90th percentile of the first norms
        self._fresh = 0  # norms since the last refresh

    @property
    def largest(self) -> float:
        return max(self._norms, default=0.0)

    @property
    def is_warm(self) -> bool:
        return len(self._norms) >= self.config.warmup and self.largest > 0

    def learn(self, norm: float) -> None:
        if not self.config.every:
            return
        self._norms.append(norm)
        self._fresh += 1
        is_new = len(self._norms) < self.config.warmup
        if is_new or self._fresh >= self.config.every or norm * self.config.grad_factor > self.limit:
            self._refresh()

    def _refresh(self) -> None:
        self._fresh = 0
        median = median_high(self._norms) if self._norms else 0.0
        if not self.is_warm:
            # Of the median, not of the largest: in a run that explodes from the start every norm is the largest so far.
            times = _EARLY_LIMIT if len(self._norms) >= _FEW else _FIRST_LIMIT
            self.limit = as_float32(times * median) if median > 0 else NO_LIMIT
            return
        if self._early is None:
            # The first updates landed without a limit: one absurd norm would raise it for a whole window.
            kept = [norm for norm in self._norms if norm <= _OUTLIER * median or not median > 0]
            self._norms.clear()
            self._norms.extend(kept)
            self._early = sorted(kept)[int(0.9 * (len(kept) - 1))]
        largest = self.largest
        early = min(self._early, self.config.early_factor * largest)
        self.limit = as_float32(max(self.config.grad_factor * largest, early))

    def make_room(self, norms: list[float]) -> None:
        self._norms.extend(norms)
        self._refresh()

    def forget(self) -> None:
        self._norms.clear()
        self._early = None
        self._refresh()


def loss_limit(config: LimitConfig, level: Level) -> float:
    """Return the limit for losses, a thousand times farther out than usual: only such a loss points at bad rows."""
    if not config.every:
        return NO_LIMIT
    if level.ready:
        return as_float32(level.median + config.loss_factor * max(level.spread, level.scale))
    largest = max(map(abs, level.losses), default=0.0) if len(level.losses) >= _FEW - 1 else 0.0
    return as_float32(_EARLY_LIMIT * largest) if largest > 0 else NO_LIMIT


class Refusals(PlainState):
    """Refused updates of the last steps. Several different ones are a new regime: rewinding would fight it forever."""

    persistent = ("_recent",)

    def __init__(self, config: LimitConfig) -> None:
        self.config = config
        self._recent: list[tuple[int, int, float]] = []  # what identifies an update, its step, its gradient norm
        self.latest: int | None = None  # what identifies the newest one

    def add(self, step: int, which: int, norm: float) -> list[float] | None:
        """Add a refused update; one that is retried counts once. Returns all norms if they make a new regime."""
        self.latest = which
        lately = [one for one in self._recent if abs(step - one[1]) <= self.config.regime_of and one[0] != which]
        self._recent = [*lately, (which, step, norm)]
        norms = [one[2] for one in self._recent]
        return norms if len(norms) >= self.config.regime else None

    def forget(self) -> None:
        self._recent = []

    @property
    def since(self) -> int:
        return max(0, min((one[1] for one in self._recent), default=1) - 1)
