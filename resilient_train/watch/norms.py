"""The running statistics of normalization layers, compared now and then with the batches they are made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from resilient_train.types import Signal
from resilient_train.watch.config import NormsConfig
from resilient_train.watch.weights import Found


class NormStatistics:
    """How far the running statistics are above their batches, by forward hooks that are there only while armed.

    Training does not use them, so no loss shows it: evaluation does.
    """

    def __init__(self, config: NormsConfig, model: nn.Module, device: torch.device) -> None:
        self.factor, self.device = config.factor, device
        named = [(name, one) for name, one in model.named_modules() if isinstance(one, _BatchNorm)]
        self.modules = [(name, one) for name, one in named if one.track_running_stats]
        is_compiled = any(type(module).__name__ == "OptimizedModule" for module in model.modules())
        self.every = config.every if self.modules and not is_compiled else 0  # hooks would undo a compilation
        self.clean_step = 0  # the newest step whose running statistics were those of its batches
        self.is_armed = False
        self._handles: list[RemovableHandle] = []
        self._seen: dict[str, Tensor] = {}
        self._usual: dict[str, float] = {}  # the farthest that each was from its batches, in healthy times
        self._out: set[str] = set()  # those that were out of range at the last look: one batch may be odd

    def arm(self) -> None:
        self._disarm()
        self.is_armed = True
        self._seen.clear()
        for name, module in self.modules:
            self._handles.append(module.register_forward_pre_hook(self._hook(name), with_kwargs=True))

    def _disarm(self) -> None:
        self.is_armed = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, name: str) -> Any:
        @torch.no_grad()
        def look(module: Any, args: Any, named: Any) -> None:
            batch = next((one for one in (*args, *named.values()) if isinstance(one, Tensor)), None)
            mean, var = module.running_mean, module.running_var
            if batch is None or mean is None or var is None or not module.training or name in self._seen:
                return
            if batch.dim() < 2 or batch.shape[1] != mean.numel():
                return
            dims = [dim for dim in range(batch.dim()) if dim != 1]
            its_var, its_mean = torch.var_mean(batch.float(), dims, unbiased=False)
            size = torch.maximum(its_var.mean(), var.mean()) + module.eps  # a batch may be blank
            apart = torch.maximum((mean - its_mean).square().max() / size, var.max() / (its_var.max() + module.eps))
            # A batch that is not finite shows nothing, and statistics that are not are another scan's.
            self._seen[name] = torch.nan_to_num(apart, nan=0.0)

        return look

    def values(self) -> Tensor:
        """One value a layer, zero for one that was not called."""
        self._disarm()
        nothing = torch.zeros((), device=self.device)
        return torch.stack([self._seen.pop(name, nothing).float() for name, _ in self.modules])

    def judge(self, step: int, values: Sequence[float]) -> Found | None:
        """`factor` is how far they may be from a batch, and beyond what was usual."""
        found = None
        for (name, _), value in zip(self.modules, values, strict=True):
            usual, was_out = self._usual.get(name), name in self._out
            is_out = usual is not None and not value <= self.factor * max(1.0, usual)
            (self._out.add if is_out else self._out.discard)(name)
            if is_out and was_out:
                evidence = f"the running statistics of `{name}` are {value:.3g} times out of the range of its batches"
                found = Found(Signal.WEIGHTS_JUMP, name, f"{evidence}; {usual:.3g} was usual")
                break
            if not is_out:
                self._usual[name] = max(value, usual or 0.0)
        if found is None and not self._out:
            self.clean_step = step
        return found

    def state(self) -> list[Any]:
        """What rewinds, as plain data."""
        return [self.clean_step, dict(self._usual)]

    def load(self, state: Sequence[Any]) -> None:
        self._disarm()
        self._out.clear()
        self.clean_step, self._usual = int(state[0]), dict(state[1])
