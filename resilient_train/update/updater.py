"""One update: unscale, clip, set the rates, step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

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
        accelerator: Accelerator,
        optimizers: Sequence[AcceleratedOptimizer],
        schedules: Sequence[Schedule],
        clipping: ClipConfig,
    ) -> None:
        self.accelerator, self.clipping = accelerator, clipping
        self.optimizers, self.schedules = list(optimizers), list(schedules)
        self._weights = [weight for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"]]

    def apply(self, step: int) -> Applied:
        """Turn the gradients into update `step + 1` and drop them."""
        for optimizer in self.optimizers:
            self.accelerator.unscale_gradients(optimizer)
        grad_norm = clip(self._weights, self.clipping)
        settings: list[dict[str, Any]] = []
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            settings += (mine := schedule.settings(step))
            for group, setting in zip(optimizer.param_groups, mine, strict=True):
                group.update(setting)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        accepted = not any(optimizer.step_was_skipped for optimizer in self.optimizers)  # a scaler skips overflows
        return Applied(accepted, grad_norm, settings[0]["lr"])
