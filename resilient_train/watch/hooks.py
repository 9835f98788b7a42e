"""What goes into a model and what its modules put out, looked at now and then."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from resilient_train.types import Signal
from resilient_train.watch.scans import measure
from resilient_train.watch.scans.found import Found


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


class NormStatistics:
    """How far the running statistics of normalization layers are above the batches that they are made from.

    Training does not use them, so that no loss tells of it: evaluation does.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        named = [(name, one) for name, one in model.named_modules() if isinstance(one, _BatchNorm)]
        self.modules = [(name, one) for name, one in named if one.track_running_stats]
        is_compiled = any(type(module).__name__ == "OptimizedModule" for module in model.modules())
        self.can_arm = bool(self.modules) and not is_compiled
        self._handles: list[RemovableHandle] = []
        self._seen: dict[str, Tensor] = {}
        self.usual: dict[str, float] = {}  # the farthest that each was from its batches, in healthy times
        self._out: set[str] = set()  # those that were out of range at the last look: one batch may be odd

    def forget(self) -> None:
        """The run went back."""
        self.disarm()
        self._out.clear()

    def arm(self) -> None:
        self.disarm()
        self._seen.clear()
        for name, module in self.modules:
            self._handles.append(module.register_forward_pre_hook(self._hook(name), with_kwargs=True))

    def disarm(self) -> None:
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
            # A batch that is not finite tells nothing, and statistics that are not are another scan's.
            self._seen[name] = torch.nan_to_num(apart, nan=0.0)

        return look

    def values(self) -> Tensor:
        """One value a layer, zero for one that was not called."""
        self.disarm()
        nothing = torch.zeros((), device=self.device)
        seen = [self._seen.pop(name, nothing).float() for name, _ in self.modules]
        return torch.stack(seen) if seen else torch.zeros(0, device=self.device)

    @property
    def is_suspect(self) -> bool:
        """Whether the next look has to tell."""
        return bool(self._out)

    def judge(self, values: Sequence[float], factor: float) -> Found | None:
        """`factor`: how far they may be from a batch, and beyond what was usual."""
        for (name, _), value in zip(self.modules, values, strict=True):
            usual, was_out = self.usual.get(name), name in self._out
            is_out = usual is not None and not value <= factor * max(1.0, usual)
            (self._out.add if is_out else self._out.discard)(name)
            if is_out and not was_out:
                continue
            if is_out:
                evidence = f"the running statistics of `{name}` are {value:.3g} times out of the range of its batches"
                return Found(Signal.WEIGHTS_JUMP, name, f"{evidence}; {usual:.3g} was usual")
            self.usual[name] = max(value, usual or 0.0)
        return None


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
