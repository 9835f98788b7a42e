"""Running statistics of normalization layers: no training loss shows their damage."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from resilient_train.extensions.checks.config import NormsConfig
from resilient_train.extensions.scans.weights import Found, Scan
from resilient_train.ground.types import Signal, fact


class NormStatistics(Scan):
    """Compares running statistics of normalization layers with the batches that they average; no training loss shows
    their damage, as only evaluation uses them. The hooks are on the model for one update, while armed.
    """

    saved = ("clean_step", "usual")

    def __init__(self, config: NormsConfig, model: nn.Module, device: torch.device) -> None:
        self.factor, self.device = config.factor, device
        named = [(name, one) for name, one in model.named_modules() if isinstance(one, _BatchNorm)]
        self.modules = [(name, one) for name, one in named if one.track_running_stats]
        is_compiled = any(type(module).__name__ == "OptimizedModule" for module in model.modules())
        super().__init__(config.every if self.modules and not is_compiled else 0)  # hooks would undo a compilation
        self.is_armed = False
        self._handles: list[RemovableHandle] = []
        self._seen: dict[str, Tensor] = {}
        self.usual: dict[str, float] = {}  # by layer: how far it was from its batches at most, while healthy
        self._out: set[str] = set()  # layers out of range at the last look; a second look excludes an odd batch

    def arm(self) -> None:
        self._disarm()
        self.is_armed = True
        self._seen.clear()
        for name, module in self.modules:
            hook = module.register_forward_pre_hook(partial(self._compare, name), with_kwargs=True)
            self._handles.append(hook)

    def _disarm(self) -> None:
        self.is_armed = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @torch.no_grad()
    def _compare(self, name: str, module: Any, args: Any, named: Any) -> None:
        batch = next((one for one in (*args, *named.values()) if isinstance(one, Tensor)), None)
        mean, var = module.running_mean, module.running_var
        if batch is None or mean is None or var is None or not module.training or name in self._seen:
            return
        if batch.dim() < 2 or batch.shape[1] != mean.numel():
            return
        dims = [dim for dim in range(batch.dim()) if dim != 1]
        batch_var, batch_mean = torch.var_mean(batch.float(), dims, unbiased=False)
        size = torch.maximum(batch_var.mean(), var.mean()) + module.eps  # a batch may be blank
        of_mean = (mean - batch_mean).square().max() / size
        of_var = var.max() / (batch_var.max() + module.eps)
        # A batch with NaN shows nothing here, and NaN in the statistics is found by the scan of the weights.
        self._seen[name] = torch.nan_to_num(torch.maximum(of_mean, of_var), nan=0.0)

    def values(self) -> Tensor:
        """One value for each layer; 0 for a layer that was not called."""
        self._disarm()
        nothing = torch.zeros((), device=self.device)
        return torch.stack([self._seen.pop(name, nothing).float() for name, _ in self.modules])

    def judge(self, step: int, values: Mapping[str, float]) -> Found | None:
        for name, value in values.items():
            usual, was_out = self.usual.get(name), name in self._out
            if usual is None or value <= self.factor * max(1.0, usual):
                self._out.discard(name)
                self.usual[name] = max(value, usual or 0.0)
                continue
            self._out.add(name)
            if was_out:
                return Found(Signal.WEIGHTS_JUMP, fact("statistics_out", name=name, value=value, usual=usual))
        if not self._out:
            self.clean_step = step
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._disarm()
        self._out.clear()
        super().load_state_dict(state)
