"""One update: unscale, clip, set the rates, step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from resilient_train.update.clip import ClipConfig, clip
from resilient_train.update.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Applied:
    """What came of an update."""

    accepted: bool
    grad_norm: torch.Tensor  # on the device, from before clipping
    lr: float


class Updater:
    """The one place that changes weights."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedules: Sequence[Schedule],
        clipping: ClipConfig,
        *,
        unscale: Callable[[Optimizer], None] | None = None,
    ) -> None:
        """`unscale` divides the gradients of half-precision training by its loss scale."""
        self.optimizers, self.schedules = list(optimizers), list(schedules)
        self.clipping, self.unscale = clipping, unscale
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._weights = [weight for group in groups for weight in group["params"]]

    def apply(self, step: int) -> Applied:
        """Turn the gradients into update `step + 1` and drop them."""
        if self.unscale is not None:
            for optimizer in self.optimizers:
                self.unscale(optimizer)
        grad_norm = clip(self._weights, self.clipping)
        settings: list[dict[str, Any]] = []
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            settings += (mine := schedule.settings(step))
            for group, setting in zip(optimizer.param_groups, mine, strict=True):
                group.update(setting)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        # A gradient scaler skips what overflowed; Accelerate's wrapper around the optimizer knows of it.
        accepted = not any(getattr(optimizer, "step_was_skipped", False) for optimizer in self.optimizers)
        return Applied(accepted, grad_norm, settings[0]["lr"])
