"""What is refused: updates above a limit, several of them in a row, and half precision whose loss scale collapses."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence

from resilient_train.types import Vitals
from resilient_train.watch.config import LimitConfig, ScaleConfig
from resilient_train.watch.loss import Level, PlainState

NO_LIMIT = 3.4028234663852886e38  # the largest float32
_ABSURD = 100  # times the usual norm
_UNSEEN, _FEW = 1e3, 4  # times the median of at least so many norms, before there are enough of them
_UNHEARD_OF = 1e7  # of fewer norms


def as_float32(value: float) -> float:
    """The nearest float32 that is finite: the device compares in that precision."""
    if not value < NO_LIMIT:
        return NO_LIMIT
    return float(struct.unpack("f", struct.pack("f", value))[0])


class GradLimit(PlainState):
    """A gradient norm far above the largest of the recent ones must not land.

    A norm that was ordinary in the first updates may still land, unless it is further away still: a network that has
    nearly learned its rows by heart has next to no gradient, until a hard row comes. From one refresh to the next the
    limit can only rise.
    """

    saved = ("limit", "_norms", "_early", "_fresh")

    def __init__(self, config: LimitConfig) -> None:
        self.config = config
        self.limit = NO_LIMIT
        self._norms: deque[float] = deque(maxlen=config.window)
        self._early: float | None = None
        self._fresh = 0
        self._bound = NO_LIMIT  # while there are too few norms; known from updates before a rewind

    @property
    def largest(self) -> float:
        """Of the recent ones."""
        return max(self._norms, default=0.0)

    @property
    def is_warm(self) -> bool:
        """Enough of them were seen."""
        return len(self._norms) >= self.config.warmup and self.largest > 0

    @property
    def _median(self) -> float:
        return sorted(self._norms)[len(self._norms) // 2] if self._norms else 0.0

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
        if not self.is_warm:
            # Little is known yet, but what is a thousand times the usual would spoil the moments for good. Not of the
            # largest: in a run that explodes from the start every norm is the largest so far.
            times, usual = _UNSEEN if len(self._norms) >= _FEW else _UNHEARD_OF, self._median
            self.limit = min(self._bound, as_float32(times * usual) if usual > 0 else NO_LIMIT)
            return
        if self._early is None:
            # Before there was a limit anything landed: one absurd norm would raise it for as long as it is remembered.
            usual = self._median
            kept = [norm for norm in self._norms if norm <= _ABSURD * usual or not usual > 0]
            self._norms.clear()
            self._norms.extend(kept)
            self._early = sorted(self._norms)[int(0.9 * (len(self._norms) - 1))]
        largest = self.largest
        early = min(self._early, self.config.early_factor * largest)
        self.limit = as_float32(max(self.config.grad_factor * largest, early))

    def bound(self, largest: float) -> None:
        """Set the limit for the time until there are enough norms again."""
        if self.config.every and largest > 0:
            self._bound = as_float32(self.config.grad_factor * largest)
            self._refresh()

    def make_room(self, norms: list[float]) -> None:
        """Count refused norms as usual from now on."""
        self._bound = NO_LIMIT
        self._norms.extend(norms)
        self._refresh()

    def forget(self) -> None:
        self._norms.clear()
        self._bound = NO_LIMIT
        self._refresh()


class LossLimit(PlainState):
    """An absurd loss must not land.

    Single outliers of the loss did no harm in any recipe that was measured, so this is for values that point at
    bad rows, a thousand times further out than anything usual.
    """

    saved = ("limit", "_gave_way")

    def __init__(self, config: LimitConfig, level: Level) -> None:
        self.config, self.level = config, level
        self.limit = NO_LIMIT
        self._gave_way = False  # no limit, until the level is another one

    def refresh(self) -> None:
        level = self.level
        if not self.config.every or self._gave_way:
            self.limit = NO_LIMIT
        elif not level.ready:  # little is known yet: as of norms
            largest = max(map(abs, level.losses), default=0.0) if len(level.losses) >= _FEW - 1 else 0.0
            self.limit = as_float32(_UNSEEN * largest) if largest > 0 else NO_LIMIT
        else:
            self.limit = as_float32(level.median + self.config.loss_factor * max(level.spread, level.scale))

    def lift(self) -> None:
        self._gave_way = True
        self.refresh()

    def forget(self) -> None:
        self._gave_way = False
        self.refresh()


class Refusals:
    """Several different updates refused within a few steps are no outliers: a new regime has begun.

    Remembered across rewinds: else a rewind at each refusal would fight a new regime for ever.
    """

    def __init__(self, config: LimitConfig) -> None:
        self.enough, self.within = config.regime, config.regime_of
        self._recent: dict[int, tuple[int, float]] = {}  # which update -> its step and gradient norm
        self.latest: int | None = None

    def add(self, step: int, which: int, norm: float) -> list[float] | None:
        """Note one; the norms of all when they make a new regime. The same update tried again counts once."""
        self.latest = which
        self._recent = {key: one for key, one in self._recent.items() if abs(step - one[0]) <= self.within}
        self._recent[which] = (step, norm)
        return [one[1] for one in self._recent.values()] if len(self._recent) >= self.enough else None

    @property
    def since(self) -> int:
        """The step before the first of the recent ones."""
        return max(0, min((step for step, _ in self._recent.values()), default=1) - 1)

    def state_dict(self) -> list[list[float]]:
        """What is remembered, as plain data."""
        return [[which, step, norm] for which, (step, norm) in self._recent.items()]

    def load_state_dict(self, state: Sequence[Sequence[float]]) -> None:
        """Remember what an earlier process did."""
        self._recent = {int(which): (int(step), float(norm)) for which, step, norm in state}


class ScaleCollapse(PlainState):
    """The loss scale falls without end: no update lands any more, or only with a scale that is of no use.

    A scaler halves its scale at each overflow and begins at 2**16: ten in a row are an ordinary start, twenty mean
    that no scale is small enough.
    """

    saved = ("_in_a_row", "_told")

    def __init__(self, config: ScaleConfig) -> None:
        self.config = config
        self._in_a_row = 0
        self._told = False  # a scale that is too small was reported; the name is that in checkpoints

    def overflowed(self, vitals: Vitals) -> str | None:
        """Count an overflow; the evidence, once it is a collapse."""
        if not self.config.every:
            return None
        self._in_a_row += 1
        scale = vitals.loss_scale
        if self._in_a_row >= self.config.in_a_row:
            count, self._in_a_row = self._in_a_row, 0  # reported again after as many more
            return f"{count} updates overflowed one after the other; the loss scale is {scale}"
        if scale is not None and scale < self.config.lowest and not self._told:
            self._told = True
            return f"the loss scale fell to {scale:.3g}"
        return None

    def landed(self, scale: float) -> None:
        self._in_a_row = 0
        if scale >= self.config.lowest:
            self._told = False
