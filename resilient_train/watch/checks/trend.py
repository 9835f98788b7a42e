"""Slow changes of the loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from math import sqrt

from resilient_train.watch.checks.level import Level, deviation
from resilient_train.watch.checks.memory import Remembers
from resilient_train.watch.config import CreepConfig, SlowConfig, StallConfig

_MOST = 8.0  # spreads that one block counts for at most: two blocks are needed at least
_USUAL = 1.0  # spreads within which a block is like those before it


def lower(losses: Collection[float]) -> list[float]:
    """All but the highest tenth: single outliers cannot move what is made of them."""
    return sorted(losses)[: len(losses) - len(losses) // 10]


class Creep(Remembers):
    """The loss climbs from block to block, though no single step is a jump."""

    remembered = ("_block", "_means", "_sum", "_since")

    def __init__(self, config: CreepConfig, level: Level) -> None:
        self.config, self.level = config, level
        self._block: list[float] = []
        self._means: deque[float] = deque(maxlen=config.blocks + config.lag)
        self._sum = 0.0
        self._since = 0

    def see(self, step: int, loss: float) -> int | None:
        """The newest step before the climb, when it is one."""
        if not self.config.every:
            return None
        self._block.append(loss)
        if len(self._block) < self.config.every:
            return None
        kept = lower(self._block)
        mean = sum(kept) / len(kept)
        self._block.clear()
        if len(self._means) == self._means.maxlen:
            self._add(step, mean)
        self._means.append(mean)
        if self._sum <= self.config.alarm:
            return None
        return max(0, self._since)

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


class Slow(Remembers):
    """The loss has risen from its best by more than noise explains, however slowly."""

    remembered = ("_losses", "_fresh", "_best", "_over", "_since")

    def __init__(self, config: SlowConfig, level: Level) -> None:
        self.config, self.level = config, level
        self._losses: deque[float] = deque(maxlen=config.window)
        self._fresh = 0
        self._best: float | None = None
        self._over = 0
        self._since = 0

    def see(self, step: int, loss: float) -> int | None:
        """The newest step before the rise, when it is one."""
        if not self.config.every:
            return None
        self._losses.append(loss)
        self._fresh += 1
        if self._fresh < self.config.every or len(self._losses) < self.config.window:
            return None
        self._fresh = 0
        kept = lower(self._losses)
        mean = sum(kept) / len(kept)
        noise = sqrt(sum((one - mean) ** 2 for one in kept) / len(kept))
        if self._best is None or mean < self._best:
            self._best = mean
        bound = max(self.config.share * self.level.scale, self.config.sigmas * noise / sqrt(self.config.every))
        over = mean - self._best
        if over <= bound / 4:
            self._since = step - self.config.every
        self._over = self._over + 1 if over > bound else 0
        if self._over < self.config.times:
            return None
        return max(0, self._since)

    def forget(self) -> None:
        self._losses.clear()
        self._fresh = self._over = 0
        self._best = None


class Stall(Remembers):
    """The loss has not improved for long: told, never treated."""

    remembered = ("_sum", "_count", "_best", "_improved")

    def __init__(self, config: StallConfig, level: Level) -> None:
        self.config, self.level = config, level
        self._block = max(1, config.every // 20)
        self._sum = 0.0
        self._count = 0
        self._best: float | None = None
        self._improved = 0

    def see(self, step: int, loss: float) -> str | None:
        if not self.config.every:
            return None
        self._sum += loss
        self._count += 1
        if self._count < self._block:
            return None
        mean = self._sum / self._count
        self._sum, self._count = 0.0, 0
        if self._best is None or mean < self._best - self.config.share * self.level.scale:
            self._best, self._improved = mean, step
        if step - self._improved < self.config.every:
            return None
        since, self._improved = self._improved, step
        return f"no better than {self._best:.4g} since step {since}: learning has stalled"

    def forget(self) -> None:
        self._sum, self._count, self._best = 0.0, 0, None
