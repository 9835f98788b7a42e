"""What is usual for the loss, and three ways of leaving it: a jump, a climb block by block, a slow rise."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from math import sqrt
from typing import Any, ClassVar

from resilient_train.watch.config import CreepConfig, JumpConfig, SlowConfig

_USUAL_EVERY = 8
_FIRST = 8  # losses that give the level at which the run began
_BEGINNING = 2  # windows
_OF_THE_WAY = 0.02  # a loss near zero is judged by this share of the way it has come
_FAR = 2.0  # times as many spreads, and times the size of the losses: a young run changes fast
_YOUNG = 12  # losses that show what is far above all of them, as long as there are not many more
_MOST = 8.0  # spreads that one block counts for at most: an alarm takes two blocks or more
_USUAL = 1.0  # spreads within which a block is like those before it


class PlainState:
    """Returns what it has seen as plain data, and takes it back; the two share nothing that could change."""

    saved: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        values = ((name, getattr(self, name)) for name in self.saved)
        return {name: list(value) if isinstance(value, deque | list) else value for name, value in values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.saved:
            mine = getattr(self, name)
            if isinstance(mine, deque | list):
                mine.clear()
                mine.extend(state[name])
            else:
                setattr(self, name, state[name])


class Level(PlainState):
    """Where the accepted losses usually lie: their median, their spread upwards, and what is large for them.

    The spread is the largest of four, since losses are skewed: median + k·MAD alone flags dozens of healthy ones in
    a thousand. Computed every few losses only, because it moves slowly and every step pays for it.
    """

    saved = (
        "losses", "ready", "median", "spread", "scale", "low", "high", "first", "best", "_seen", "_fresh",
    )  # fmt: skip

    def __init__(self, config: JumpConfig) -> None:
        self.every = config.every or _USUAL_EVERY
        self.warmup = config.warmup
        self.losses: deque[float] = deque(maxlen=config.window)
        self.ready = False
        self.median = self.spread = self.scale = 0.0
        self.low = self.high = 0.0  # nine of ten lie between
        self.first = 0.0
        self.best: float | None = None
        self._seen = self._fresh = 0

    @property
    def usual(self) -> str:
        """For a person."""
        known = list(self.losses)
        low, high = (self.low, self.high) if self.ready or not known else (min(known), max(known))
        return f"{low:.4g} to {high:.4g} was usual"

    def learn(self, loss: float) -> bool:
        """Take one more; whether the level was computed again."""
        self.losses.append(loss)
        self._seen += 1
        if self._seen <= _FIRST:
            self.first += (loss - self.first) / self._seen
        self._fresh += 1
        if self._fresh < self.every:
            return False
        self._refresh()
        return True

    def forget(self) -> None:
        """Start again. The way from the first loss still shows what is small."""
        self.losses.clear()
        self.best = None
        self.ready = False
        self._refresh()

    def _drop_descent(self) -> None:
        """Forget the descent that a run begins with: it says nothing about how far losses stray once it is over.

        Only then: later on, a level that falls and rises again may be in the nature of the data.
        """
        while len(self.losses) >= self.warmup:
            losses = list(self.losses)
            older, newer = sorted(losses[: len(losses) // 2]), sorted(losses[len(losses) // 2 :])
            middle = newer[len(newer) // 2]
            if older[len(older) // 2] - middle <= 1.4826 * deviation(newer, middle):
                return
            self.losses = deque(losses[len(losses) // 2 :], maxlen=self.losses.maxlen)

    def _refresh(self) -> None:
        self._fresh = 0
        self.ready = self.ready or len(self.losses) >= self.warmup
        if self._seen < _BEGINNING * (self.losses.maxlen or 0):
            self._drop_descent()
        ranked = sorted(self.losses)
        count = len(ranked)
        if not count:
            return
        self.median = median = ranked[count // 2]
        self.low, self.high = ranked[count // 20], ranked[int(0.95 * (count - 1))]
        self.best = median if self.best is None else min(self.best, median)
        self.scale = max(abs(median), _OF_THE_WAY * (self.first - self.best))
        self.spread = max(
            1.4826 * deviation(ranked, median),
            (self.high - median) / 1.645,
            (ranked[-1] - median) / 3,
            1e-3 * abs(median),
        )


def deviation(ranked: Sequence[float], center: float) -> float:
    """The median distance of ranked values from `center`, by bisection: sorting the distances costs ten times more.

    The nearest half of the values is a stretch around the center: find how many of them lie below.
    """
    middle = bisect_left(ranked, center)
    half = (len(ranked) + 1) // 2
    least, most = max(0, half - (len(ranked) - middle)), min(half, middle)
    while least < most:
        below = (least + most) // 2
        if center - ranked[middle - 1 - below] < ranked[middle + half - below - 1] - center:
            least = below + 1
        else:
            most = below
    from_below = center - ranked[middle - least] if least else 0.0
    from_above = ranked[middle + half - least - 1] - center if half > least else 0.0
    return max(from_below, from_above)


class Jump(PlainState):
    """The loss left its usual range and stays out of it.

    Losses outside do not enter the range, or it would follow the damage. A young run has no range yet: there only
    what lies far above every loss so far is outside.
    """

    saved = ("_flags", "_trusted", "_usual_at", "_quiet")

    def __init__(self, config: JumpConfig, level: Level) -> None:
        self.config, self.level = config, level
        self._flags: deque[bool] = deque(maxlen=config.flagged_of)
        self._trusted: deque[int] = deque(maxlen=config.flagged_of)  # the newest good state as each flag was raised
        self._usual_at = 0
        self._quiet = 0

    def is_outside(self, loss: float) -> bool:
        level = self.level
        if not self.config.every or len(level.losses) < _YOUNG:
            return False
        if not level.ready:
            recent = list(level.losses)[-_YOUNG:]
            over, usual = loss - max(recent), sorted(recent)[_YOUNG // 2]
            spread, size = deviation(sorted(recent), usual), max(abs(usual), level.scale)
            return over > _FAR * self.config.sigmas * spread and over > _FAR * size
        over = loss - level.median
        return over > self.config.sigmas * level.spread and over > self.config.share * level.scale

    def see(self, step: int, loss: float, outside: bool) -> int | None:
        """The newest step still to be trusted, when the loss has jumped.

        That is the state which produced the last loss below the median, before the first one outside: damage may
        grow for a while before it shows.
        """
        if self._quiet:
            self._quiet -= 1
        if not outside and (loss <= self.level.median or len(self.level.losses) < _YOUNG):
            self._usual_at = step
        if not outside and not self._flags:
            return None
        self._flags.append(outside)
        self._trusted.append(max(0, self._usual_at - 1))
        recent = list(self._flags)
        if not outside:
            if True not in recent:
                self.forget()
            return None
        if self._quiet or sum(recent) < self.config.flagged:
            return None
        self._quiet = 2 * self.config.flagged_of  # what was done about it gets time before the next alarm
        return self._trusted[recent.index(True)]

    def forget(self) -> None:
        self._flags.clear()
        self._trusted.clear()
        self._quiet = 0


def _mean_without_top(losses: Collection[float]) -> tuple[list[float], float]:
    """All but the highest tenth, so that single outliers move nothing, and their mean."""
    kept = sorted(losses)[: len(losses) - len(losses) // 10]
    return kept, sum(kept) / len(kept)


class Creep(PlainState):
    """The loss climbs from block to block, though no single step is a jump."""

    saved = ("_block", "_means", "_sum", "_since")

    def __init__(self, config: CreepConfig, level: Level) -> None:
        self.config, self.level = config, level
        self._block: list[float] = []
        self._means: deque[float] = deque(maxlen=config.blocks + config.lag)
        self._sum = 0.0
        self._since = 0

    def see(self, step: int, loss: float) -> int | None:
        """The newest step before the climb, if there is one."""
        if not self.config.every:
            return None
        self._block.append(loss)
        if len(self._block) < self.config.every:
            return None
        mean = _mean_without_top(self._block)[1]
        self._block.clear()
        if len(self._means) == self._means.maxlen:
            self._add(step, mean)
        self._means.append(mean)
        return max(0, self._since) if self._sum > self.config.alarm else None

    def _add(self, step: int, mean: float) -> None:
        usual = sorted(list(self._means)[: self.config.blocks])
        middle = usual[len(usual) // 2]
        spread = max(
            1.4826 * deviation(usual, middle),
            (usual[-1] - middle) / 2,  # skewed losses have skewed blocks
            self.config.share * self.level.scale,
        )
        z = max(-_MOST, min(_MOST, (mean - middle) / spread)) if spread else 0.0  # a loss of 0 throughout
        if z <= _USUAL:
            self._since = step - 2 * self.config.every  # the climb may have begun within this block
        self._sum = max(0.0, self._sum + z - self.config.slack)

    def forget(self) -> None:
        self._block.clear()
        self._means.clear()
        self._sum = 0.0


class Slow(PlainState):
    """The loss has risen from its best by more than noise explains, however slowly."""

    saved = ("_losses", "_fresh", "_best", "_over", "_since")

    def __init__(self, config: SlowConfig, level: Level) -> None:
        self.config, self.level = config, level
        self._losses: deque[float] = deque(maxlen=config.window)
        self._best: float | None = None
        self._fresh = self._over = self._since = 0

    def see(self, step: int, loss: float) -> int | None:
        """The newest step before the rise, if there is one."""
        if not self.config.every:
            return None
        self._losses.append(loss)
        self._fresh += 1
        if self._fresh < self.config.every or len(self._losses) < self.config.window:
            return None
        self._fresh = 0
        kept, mean = _mean_without_top(self._losses)
        noise = sqrt(sum((one - mean) ** 2 for one in kept) / len(kept))
        if self._best is None or mean < self._best:
            self._best = mean
        bound = max(self.config.share * self.level.scale, self.config.sigmas * noise / sqrt(self.config.every))
        over = mean - self._best
        if over <= bound / 4:
            self._since = step - self.config.every
        self._over = self._over + 1 if over > bound else 0
        return max(0, self._since) if self._over >= self.config.times else None

    def forget(self) -> None:
        self._losses.clear()
        self._fresh = self._over = 0
        self._best = None
