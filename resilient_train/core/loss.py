"""The usual range of the loss, and two ways of leaving it: a jump, and a climb from block to block."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, is_dataclass
from math import log
from statistics import fmean, median_high, median_low
from sys import float_info
from typing import Any, ClassVar, NamedTuple

from resilient_train.ground.reader import limited
from resilient_train.ground.types import Facts, fact

_MAD_TO_SIGMA = 1.4826  # standard deviation / median absolute deviation, of normal noise
_Q95_SIGMAS = 1.645  # the 95th percentile of normal noise, in standard deviations
_MAX_SIGMAS = 3  # about the largest of 256 values of normal noise, in standard deviations
_LEAST_SPREAD = 1e-3  # share of the median: no loss is less noisy than this
_REFRESH_EVERY = 8  # accepted losses, if the configuration turns the jump check off
_FIRST_LOSSES = 8  # losses whose mean is the level at which the run began
_DESCENT_WINDOWS = 2  # windows of losses in which the descent of a new run may be forgotten
_SHARE_OF_DESCENT = 0.02  # a loss near 0 is judged by this share of its descent since the beginning
_YOUNG_LOSSES = 12  # losses that show what is far above them all, before the range is known
_YOUNG_MARGIN = 2.0  # times the usual thresholds, before the range is known: a young run changes fast
FEW = 8  # losses; fewer show no scatter, no trend, no outliers, and no return
_IN_TAIL = 3  # values at least that show how heavy a tail is
_LOWEST = -float_info.max  # no loss is below it
_HEAVIEST = 5.0  # slope of a tail
_RARE = 100  # one in so many losses is as large


@dataclass
class Every:
    """What each check has; `conf/checks/default.yaml` has the default of each setting, its unit and its meaning."""

    every: int = limited(at_least=0)  # 0 turns the check off


@dataclass
class JumpConfig(Every):
    window: int = limited(at_least=16)
    warmup: int = limited(at_least=8)
    sigmas: float = limited(above=0)
    share: float = limited(above=0)
    flagged: int = limited(at_least=1)
    flagged_of: int = limited(at_least=1)


class Alarm(NamedTuple):
    since: int  # the newest step that can still be trusted
    evidence: Facts


class PlainState:
    """Base of the checks: `saved` attributes rewind with the run, `persistent` ones do not. Containers are copied, what
    they hold is not: it is never changed in place. A set only grows, by a rewind as well.
    """

    saved: ClassVar[tuple[str, ...]] = ()
    persistent: ClassVar[tuple[str, ...]] = ()
    records: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}  # how attributes are made from plain data

    def state_dict(self) -> dict[str, Any]:
        return plain(self, self.saved)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load(self, self.saved, state)

    def persistent_state(self) -> dict[str, Any] | None:
        return plain(self, self.persistent)

    def load_persistent_state(self, state: Mapping[str, Any]) -> None:
        load(self, self.persistent, state)


def plain(owner: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: _plain(getattr(owner, name)) for name in names}


def load(owner: Any, names: Iterable[str], state: Mapping[str, Any]) -> None:
    for name in names:
        mine, value = getattr(owner, name), state[name]
        if isinstance(mine, deque):
            mine.clear()
            mine.extend(value)
        elif isinstance(mine, set):
            mine.update(value)
        elif name in owner.records and value is not None:
            setattr(owner, name, owner.records[name](value))
        else:
            setattr(owner, name, copy(value))


def _plain(value: Any) -> Any:
    if isinstance(value, set):
        return sorted(value)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, tuple):
        return [_plain(one) for one in value]  # a record may hold another
    return list(value) if isinstance(value, deque) else copy(value)


class Level(PlainState):
    """The range of the accepted losses: their median, their spread upwards, and the scale for thresholds in shares.

    The spread is the largest of four estimates, since losses are skewed: median + k·MAD alone flags dozens of healthy
    losses in a thousand. It is computed every few losses only, because it changes slowly and costs time in every step.
    """

    saved = ("losses", "ready", "median", "spread", "scale", "first", "best", "rare", "_outliers", "_seen", "_fresh")

    def __init__(self, config: JumpConfig) -> None:
        self.every = config.every or _REFRESH_EVERY
        self.warmup = config.warmup
        self.losses: deque[float] = deque(maxlen=config.window)
        self._outliers: deque[Any] = deque(maxlen=config.window)  # after how many losses each came, and what it was
        self.ready = False  # enough losses were seen to know the range
        self.median = self.spread = self.scale = 0.0
        self.rare = _LOWEST  # what one loss in a hundred exceeds
        self.first = 0.0  # the mean of the first losses of the run
        self.best: float | None = None  # the lowest median so far
        self._seen = self._fresh = 0  # losses in all, and since the last refresh

    @property
    def usual_range(self) -> dict[str, float]:
        ranked = sorted(self.losses) or [0.0]
        tail = len(ranked) // 20 if self.ready else 0
        return {"low": ranked[tail], "high": ranked[-1 - tail]}

    def learn(self, loss: float) -> None:
        self.losses.append(loss)
        self._seen += 1
        if self._seen <= _FIRST_LOSSES:
            self.first += (loss - self.first) / self._seen
        self._fresh += 1
        if self._fresh >= self.every:
            self._refresh()

    def forget(self) -> None:
        """Start from scratch, but keep the first loss: how far the loss fell since then shows what is small."""
        self.losses.clear()
        self._outliers.clear()
        self.best = None
        self.ready = False
        self._refresh()

    def add_outliers(self, losses: Sequence[float]) -> None:
        """Take losses outside the range that were few, and landed: they show how heavy its tail is."""
        self._outliers.extend([self._seen, loss] for loss in losses)

    def exceeded(self) -> float:
        first = self._seen - (self.losses.maxlen or 0)
        return exceeded(sorted([*self.losses, *(loss for seen, loss in self._outliers if seen > first)]))

    def _drop_descent(self) -> None:
        """Forget the first half of the losses while the second half is clearly lower.

        A descent does not show how losses stray later. Only in a new run: later, levels may fall and rise by nature.
        """
        while len(self.losses) >= self.warmup:
            losses = list(self.losses)
            half = len(losses) // 2
            newer = losses[half:]
            middle = median_high(newer)
            if median_high(losses[:half]) - middle <= _MAD_TO_SIGMA * deviation(newer, middle):
                return
            self.losses = deque(losses[half:], maxlen=self.losses.maxlen)

    def _refresh(self) -> None:
        self._fresh = 0
        self.ready = self.ready or len(self.losses) >= self.warmup
        if self._seen < _DESCENT_WINDOWS * (self.losses.maxlen or 0):
            self._drop_descent()
        ranked = sorted(self.losses)
        count = len(ranked)
        if not count:
            return
        self.median = median = ranked[count // 2]
        self.rare = self.exceeded()
        self.best = median if self.best is None else min(self.best, median)
        self.scale = max(abs(median), _SHARE_OF_DESCENT * (self.first - self.best))
        self.spread = max(
            _MAD_TO_SIGMA * deviation(ranked, median),
            (ranked[int(0.95 * (count - 1))] - median) / _Q95_SIGMAS,
            (ranked[-1] - median) / _MAX_SIGMAS,
            _LEAST_SPREAD * abs(median),
        )


def exceeded(ranked: Sequence[float]) -> float:
    """Return what one in a hundred values exceeds (Hill's estimate): a spread says little over orders of magnitude."""
    top, median = max(_IN_TAIL, len(ranked) // 10), ranked[len(ranked) // 2] if ranked else 0.0
    if len(ranked) <= 2 * top or not ranked[-top - 1] > median:
        return _LOWEST
    threshold = ranked[-top - 1] - median
    slope = min(_HEAVIEST, fmean([log((value - median) / threshold) for value in ranked[-top:]]))
    return float(median + threshold * (_RARE * top / len(ranked)) ** slope)


def deviation(values: Sequence[float], center: float) -> float:
    return median_low([abs(value - center) for value in values])


class Jump(PlainState):
    """The loss left its usual range and stays outside.

    Losses outside the range do not enter it, or it would follow the damage; a few now and then only show how heavy its
    tail is. A young run has no range yet: there a loss is outside if it is far above all losses so far.
    """

    saved = ("_flags", "_trusted", "_outside", "_usual_at", "_quiet")

    def __init__(self, config: JumpConfig, level: Level) -> None:
        self.config, self.level = config, level
        self._flags: deque[bool] = deque(maxlen=config.flagged_of)  # which of the latest losses were outside
        self._trusted: deque[int] = deque(maxlen=config.flagged_of)  # the newest trusted step at each flag
        self._outside: deque[float] = deque(maxlen=config.flagged_of)  # those of the flags that landed
        self._usual_at = 0  # the newest step whose loss was usual
        self._quiet = 0  # losses without another alarm, while a treatment takes effect

    def is_outside(self, loss: float) -> bool:
        level, config = self.level, self.config
        if not config.every or len(level.losses) < _YOUNG_LOSSES:
            return False
        if level.ready:
            rise = loss - level.median
            return rise > config.sigmas * level.spread and rise > config.share * level.scale and loss > level.rare
        ranked = sorted(list(level.losses)[-_YOUNG_LOSSES:])
        rise, median = loss - ranked[-1], ranked[_YOUNG_LOSSES // 2]
        spread, size = deviation(ranked, median), max(abs(median), level.scale)
        is_far = rise > _YOUNG_MARGIN * config.sigmas * spread and rise > _YOUNG_MARGIN * config.share * size
        return is_far and loss > level.exceeded()

    def see(self, step: int, loss: float, outside: bool, *, landed: bool = True) -> Alarm | None:
        """Judge the loss. Damage may grow before one is outside: what made the last low loss is trusted."""
        if self._quiet:
            self._quiet -= 1
        if not outside and (loss <= self.level.median or len(self.level.losses) < _YOUNG_LOSSES):
            self._usual_at = step
        if not outside and not self._flags:
            return None
        self._flags.append(outside)
        self._trusted.append(max(0, self._usual_at - 1))
        if not outside:
            if not any(self._flags):
                if len(self._outside) < self.config.flagged:
                    self.level.add_outliers(self._outside)
                self.forget()
            return None
        if landed:
            self._outside.append(loss)
        if self._quiet or sum(self._flags) < self.config.flagged:
            return None
        self._quiet = 2 * self.config.flagged_of
        since = self._trusted[self._flags.index(True)]
        return Alarm(since, fact("loss_outside", loss=loss, **self.level.usual_range, stays=True))

    def forget(self) -> None:
        self._flags.clear()
        self._trusted.clear()
        self._outside.clear()
        self._quiet = 0


def without_top(losses: Sequence[float]) -> list[float]:
    """Return the losses in their order except for the highest tenth, in which wild losses have their outliers."""
    if len(losses) < FEW:
        return list(losses)
    ranked = sorted(range(len(losses)), key=losses.__getitem__)
    return [losses[place] for place in sorted(ranked[: len(losses) - max(1, len(losses) // 10)])]
