"""What the layers of a model put out, and the gradients that arrive there.

For examining them one by one, and for saying between which two a value broke where no operation can be named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from resilient_train.diagnose.values import floating, kinds_of, statistics


@dataclass(frozen=True, slots=True)
class Output:
    """One output of one layer, or the gradient that arrived there."""

    layer: str  # its path in the model
    kind: str  # its class
    is_finite: bool
    range: Mapping[str, Any]  # as of the inputs of an operation; empty if it was not asked for

    def __str__(self) -> str:
        return f"`{self.layer}` ({self.kind})" if self.layer else f"the model ({self.kind})"


class Layers:
    """Enter it around forward and backward: it listens to every layer of the model."""

    def __init__(self, model: nn.Module, *, ranges: bool = False) -> None:
        """With `ranges` outputs are measured, and not only tested for being finite."""
        self.outputs: list[Output] = []  # in the order in which they were computed
        self.gradients: list[Output] = []
        self._model, self._ranges, self._hooks = model, ranges, list[Any]()

    def __enter__(self) -> Layers:
        for name, module in self._model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._hooks.append(module.register_forward_hook(partial(self._saw, name)))
        return self

    def __exit__(self, *exc: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _saw(self, name: str, module: nn.Module, inputs: Any, result: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # a checkpoint computes it again, in backward
            return
        with torch._C.DisableTorchFunction():
            for one in floating(result):
                self.outputs.append(self._measured(name, module, one))
                if one.requires_grad:

                    def arrived(gradient: Tensor) -> None:
                        with torch._C.DisableTorchFunction():
                            self.gradients.append(self._measured(name, module, gradient))

                    self._hooks.append(one.register_hook(arrived))  # type: ignore[no-untyped-call]

    def _measured(self, name: str, module: nn.Module, value: Tensor) -> Output:
        found = statistics([value])[0] if self._ranges else {}
        return Output(name, type(module).__name__, not kinds_of(value), found)

    def bracket(self, *, is_loss_finite: bool) -> str:
        """Say between which two layers it broke; empty if no layer was called, or all gradients there are finite."""
        seen, where = (self.gradients, "The gradient at") if is_loss_finite else (self.outputs, "The output of")
        place = next((number for number, one in enumerate(seen) if not one.is_finite), None)
        if not seen or (place is None and is_loss_finite):
            return ""
        if place is None:
            return "The output of every layer is finite: it breaks after the model, in the objective."
        if place == 0 and is_loss_finite:
            return f"The gradient is not finite where it enters the model, at {seen[0]}: it breaks in the objective."
        if place == 0:
            return f"It is not finite from the first layer on, {seen[0]}: look at its weights and at what it is given."
        return f"{where} {seen[place - 1]} is the last that is finite, and {where.lower()} {seen[place]} the first not."
