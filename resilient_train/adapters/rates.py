"""The schedules of the caller: torch's, Accelerate's, or a function of the step."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from accelerate import PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from resilient_train.errors import TrainError
from resilient_train.update.schedule import Curve, CurveSchedule, LoopSchedule, Schedule, ShadowSchedule


def schedules(given: Any, optimizers: list[Optimizer]) -> list[Schedule]:
    """Convert a schedule, or a list with one for each optimizer: None, a function `step -> factor`, or a scheduler."""
    several = list(given) if isinstance(given, list | tuple) else [given] * len(optimizers)
    if len(several) != len(optimizers):
        raise ValueError(f"schedule: {len(several)} schedules for {len(optimizers)} optimizers")
    return [_schedule(one, optimizer) for one, optimizer in zip(several, optimizers, strict=True)]


def _schedule(given: Any, optimizer: Optimizer) -> Schedule:
    if isinstance(given, AcceleratedScheduler):
        is_alone = given.split_batches or not given.step_with_optimizer
        return _Strided(_torchs(given.scheduler, optimizer), 1 if is_alone else int(PartialState().num_processes))
    if isinstance(given, LRScheduler | ReduceLROnPlateau):
        return _torchs(given, optimizer)
    if hasattr(given, "settings") and hasattr(given, "state_dict"):
        return given  # type: ignore[no-any-return]
    if given is None:
        return LoopSchedule([group["lr"] for group in optimizer.param_groups])
    curve: Curve = given
    try:
        first = curve(0)
    except TypeError:
        first = math.nan
    if not (isinstance(first, int | float) and math.isfinite(first)):
        expected = "expected a torch scheduler or a callable (step) -> factor of the configured rate"
        raise TypeError(f"schedule: {expected}, got {given!r:.80}")
    return CurveSchedule([group["lr"] for group in optimizer.param_groups], curve, 0)


def _torchs(given: Any, optimizer: Optimizer) -> ShadowSchedule:
    if isinstance(given, ReduceLROnPlateau):
        raise TypeError("schedule: ReduceLROnPlateau follows a metric, not the step, and is not supported")
    its_own = getattr(given, "optimizer", None)
    if (its_own.optimizer if isinstance(its_own, AcceleratedOptimizer) else its_own) is not optimizer:
        several = "give a list with a schedule for each optimizer, in their order, None for a constant rate"
        raise ValueError(f"schedule: this {type(given).__name__} was made for another optimizer; {several}")
    return _Watched.of(given, optimizer)


class _Watched(ShadowSchedule):
    """Notices if the loop still steps its scheduler."""

    _left_at: list[Any] | None = None  # counts of the scheduler when the guard had stepped it

    def advance(self, step: int) -> None:
        if self._left_at is not None and self._left_at != self._counts():
            why = "remove scheduler.step(), the guard does it when an update is accepted"
            raise TrainError(f"the loop stepped the scheduler itself: {why}")
        super().advance(step)
        self._left_at = self._counts()

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self._left_at = self._counts()

    def _counts(self) -> list[Any]:
        several = [self.scheduler, *getattr(self.scheduler, "_schedulers", [])]
        return [getattr(one, "last_epoch", None) for one in several]


class _Strided:
    """A schedule that takes several steps for one update, as Accelerate's schedulers do with several processes."""

    def __init__(self, inner: ShadowSchedule, stride: int) -> None:
        self.inner, self.stride = inner, stride
        self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict

    def settings(self, step: int) -> Sequence[dict[str, Any]]:
        return self.inner.settings(self._at(step))

    def advance(self, step: int) -> None:
        self.inner.advance(self._at(step))

    def _at(self, step: int) -> int:
        """Limit the step to what a one-cycle schedule was made for: it would raise."""
        return min(step * self.stride, getattr(self.inner.scheduler, "total_steps", sys.maxsize))
