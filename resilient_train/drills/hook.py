"""Lets a drill act on a run, where an update begins, is computed and is sent to the gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from resilient_train.core.protocols import Hook
from resilient_train.core.ring import Ring
from resilient_train.core.state import RunState
from resilient_train.core.transaction import Transaction
from resilient_train.drills import Drill, UpdatePlace


class DrillHook(Hook):
    def __init__(self, drill: Drill, state: RunState, ring: Ring, rank: int, settle: Callable[[], bool]) -> None:
        """`settle` waits for the verdict on the last update."""
        self._drill, self._state, self._ring, self._rank, self._settle = drill, state, ring, rank, settle
        self._place = UpdatePlace(0, 0, rank)  # of the newest update

    def before_update(self) -> None:
        if self._drill.strikes_at(self._state.clock.tick + 1):
            self._settle()  # a fault strikes once: what the last update holds could drop the next one

    @contextmanager
    def around_compute(self, update: Transaction) -> Iterator[None]:
        self._place = UpdatePlace(update.tick, update.step, self._rank)
        if len(update.inputs) == 1:
            if self._drill.strikes_at(update.tick):
                self._ring.copier.before_change()  # a device may still be copying what it spoils
            self._drill.between_updates(self._place, self._state.model, self._state.optimizers)
        update.inputs[-1] = self._drill.on_batch(self._place, update.inputs[-1])
        yield

    def on_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return self._drill.on_loss(self._place, loss) if self._is_computing else loss

    def on_gradients(self, weights: Sequence[torch.Tensor]) -> None:
        if self._is_computing:
            self._drill.on_gradients(self._place, weights)

    def rate_factor(self) -> float:
        return self._drill.rate_factor(self._place)

    @property
    def _is_computing(self) -> bool:
        """Whether the newest update is being computed. Later its faults do not strike replays and trials."""
        return self._place.tick == self._state.clock.tick + 1
