"""The faults of one update: in its batch, its loss, its gradients, its learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from resilient_train.drills.fault import BatchFault, GradientFault, LossFault, TickFault, own_part
from resilient_train.drills.limits import require_factor, require_one_of, require_whole
from resilient_train.drills.numbers import changed, first_row_filled, holds_floats


@dataclass(frozen=True, kw_only=True)
class NanBatch(BatchFault):
    """The first row of the first micro-batch is not finite; the data set is fine."""

    name = "nan_batch"
    value: Literal["nan", "inf", "-inf"] = "nan"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("value", self.value, ("nan", "inf", "-inf"))

    def lacks(self, *things: Any) -> str | None:
        if holds_floats(things[0]):
            return None
        return "the batches hold no floating-point numbers: nan_batch needs some; use inf_loss or nan_grad"

    def spoil(self, batch: Any) -> Any:
        return changed(batch, first_row_filled(float(self.value)))


@dataclass(frozen=True, kw_only=True)
class InfLoss(LossFault):
    """The loss of the first micro-batch is infinite, and its gradients are no numbers."""

    name = "inf_loss"

    def spoil(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * math.inf


@dataclass(frozen=True, kw_only=True)
class LossSpike(LossFault):
    """The loss of one update, and with it the gradients, is many times what it should be."""

    name = "loss_spike"
    factor: float = 1e4

    whole_update = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_factor("factor", self.factor)

    def spoil(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.factor


@dataclass(frozen=True, kw_only=True)
class NanGrad(GradientFault):
    """One element of one gradient is NaN, though loss and batch are fine."""

    name = "nan_grad"

    def spoil(self, weights: Sequence[torch.Tensor]) -> None:
        gradients = (own_part(weight.grad) for weight in weights if weight.grad is not None)
        for gradient in gradients:
            if gradient.numel():
                gradient[(0,) * gradient.dim()] = math.nan
                return


@dataclass(frozen=True, kw_only=True)
class HotLr(TickFault):
    """The learning rate is far too high for a stretch of ticks."""

    name = "hot_lr"
    rank: int | Literal["all"] = "all"
    factor: float = 100.0
    updates: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        require_factor("factor", self.factor)
        require_whole("updates", self.updates, at_least=1)

    def began(self, tick: int) -> int | None:
        """Return the tick at which the stretch that `tick` lies in began, the latest if there are several."""
        first = max(1, tick - self.updates + 1)
        return next((start for start in range(tick, first - 1, -1) if self.begins(start)), None)
