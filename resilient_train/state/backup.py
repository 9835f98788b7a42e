"""What a forward changes whether or not its update lands: buffers, such as BatchNorm's running statistics."""

from __future__ import annotations

import torch
from torch import nn

from resilient_train.state.tree import copy_into


class Backups:
    """Copies of the buffers from before an update, and of the loss scale, which a refused update must not move."""

    def __init__(self, model: nn.Module, scaler: torch.amp.GradScaler | None = None) -> None:
        self._modules = list(model.modules())  # to ask for all buffers by name would walk the tree every update
        self._scaler = scaler
        self._spare: list[list[torch.Tensor]] = []

    def take(self) -> list[torch.Tensor]:
        """Copy them: one call for all, and none where a model has no buffers."""
        live = self._live()
        if not live:
            return []
        kept = self._spare.pop() if self._spare else []
        if len(kept) != len(live):
            kept = [torch.empty_like(one) for one in live]
        copy_into(kept, live)
        return kept

    def put_back(self, kept: list[torch.Tensor]) -> None:
        """Undo what was done since they were taken."""
        copy_into(self._live()[: len(kept)], kept)

    def let_go(self, kept: list[torch.Tensor]) -> None:
        """Hand the memory back for the next one."""
        if kept:
            self._spare.append(kept)

    def _live(self) -> list[torch.Tensor]:
        # Looked up anew every time: a module may make or replace buffers, and the scaler makes its scale late.
        scale = [self._scaler._scale, self._scaler._growth_tracker] if self._scaler is not None else []
        buffers = [
            one for module in self._modules if module._buffers for one in module._buffers.values() if one is not None
        ]
        return [*buffers, *(one for one in scale if one is not None)]
