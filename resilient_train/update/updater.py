"""One update: unscale, clip, set the rates, step."""

from __future__ import annotations

from collections.abc import Sequence
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
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """`scaler` is the loss scale of half-precision training."""
        self.optimizers, self.schedules = list(optimizers), list(schedules)
        self.clipping, self.scaler = clipping, scaler
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._weights = [weight for group in groups for weight in group["params"]]

    def apply(self, step: int) -> Applied:
        """Turn the gradients into update `step + 1` and drop them. All optimizers step, or none does."""
        overflowed = self._unscale()
        grad_norm = clip(self._weights, self.clipping)
        settings: list[dict[str, Any]] = []
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            settings += (mine := schedule.settings(step))
            for group, setting in zip(optimizer.param_groups, mine, strict=True):
                group.update(setting)
        for optimizer in self.optimizers:
            if not overflowed:
                optimizer.step()
            optimizer.zero_grad()
        if self.scaler is not None:
            self.scaler.update()
        return Applied(not overflowed, grad_norm, settings[0]["lr"])

    def _unscale(self) -> bool:
        """Divide the gradients by the loss scale; say whether one of them had overflowed.

        The scaler would step each optimizer by itself, and forget after the first that the others are unscaled
        already. So its flag is read here, once for all of them: the host read that it costs anyway.
        """
        if self.scaler is None:
            return False
        flags = []
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
            flags += self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        return bool(torch.stack([flag.to(flags[0].device) for flag in flags]).max().item())
