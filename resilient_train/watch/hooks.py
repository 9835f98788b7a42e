"""What goes into a model and what its modules put out, looked at now and then."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from resilient_train.watch.scans import measure


def _largest(tree: Any, device: torch.device) -> Tensor | None:
    """The largest absolute value of all tensors of numbers in a tree."""
    tensors = measure.tensors_in(tree)
    return measure.Gauge(tensors, device).largest().max() if tensors else None


class Activations:
    """The largest output of every module, by forward hooks that are there only while they are armed."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.modules = [(name, module) for name, module in model.named_modules() if not any(module.children())]
        self.can_arm = not any(type(module).__name__ == "OptimizedModule" for module in model.modules())
        self._handles: list[RemovableHandle] = []
        self._seen: dict[str, Tensor] = {}

    def arm(self) -> None:
        self.disarm()
        self._seen.clear()
        for name, module in self.modules:
            self._handles.append(module.register_forward_hook(self._hook(name)))

    def disarm(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, name: str) -> Any:
        @torch.no_grad()
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if (seen := _largest(output, self.device)) is not None:
                before = self._seen.get(name)
                self._seen[name] = seen if before is None else torch.maximum(before, seen)

        return look

    def values(self) -> Tensor:
        """One value a module, zero for one that was not called: ranks may take different ways through a model."""
        self.disarm()
        nothing = torch.zeros((), device=self.device)
        seen = [self._seen.pop(name, nothing) for name, _ in self.modules]
        return torch.stack(seen) if seen else torch.zeros(0, device=self.device)

    def judge(self, step: int, values: Sequence[float]) -> str | None:
        bad = [name for (name, _), value in zip(self.modules, values, strict=True) if not isfinite(value)]
        if not bad:
            return None
        more = f" and {len(bad) - 1} more modules" if len(bad) > 1 else ""
        return f"step {step}: the output of {bad[0] or 'the model'}{more} is not finite"


class BatchRange:
    """The largest value of the batches, beside the largest one before."""

    def __init__(self, factor: float, device: torch.device) -> None:
        self.factor, self.device = factor, device
        self.largest: float | None = None
        self._seen: Tensor | None = None

    @torch.no_grad()
    def see(self, batch: Any) -> None:
        if (seen := _largest(batch, self.device)) is not None:
            self._seen = seen if self._seen is None else torch.maximum(self._seen, seen)

    def values(self) -> Tensor:
        seen, self._seen = self._seen, None
        return torch.zeros(1, device=self.device) if seen is None else seen.reshape(1)

    def judge(self, step: int, values: Sequence[float]) -> str | None:
        (value,) = values
        before = self.largest
        if not isfinite(value):
            return f"step {step}: a batch holds a value that is not finite"
        self.largest = value if before is None else max(before, value)
        if before and value > self.factor * before:
            return f"step {step}: a batch holds a value of {value:.4g} where {before:.4g} was the largest before"
        return None
