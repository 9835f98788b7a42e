"""One batch under the microscope, outside of any run: what every layer puts out, and the operation that breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from resilient_train.core.mark import Marks
from resilient_train.core.randomness import Seeds
from resilient_train.core.tree import leaves
from resilient_train.data.trees import rebuilt
from resilient_train.extensions.diagnosis import rows, verdict
from resilient_train.extensions.diagnosis.microscope import floating, range_of
from resilient_train.extensions.diagnosis.search import Replay
from resilient_train.extensions.diagnosis.verdict import Observations
from resilient_train.ground.types import Diagnosis
from resilient_train.ground.wording import say
from resilient_train.parts.modes import Attributes
from resilient_train.parts.run import Measured


@dataclass
class Layer:
    """What one layer put out, and the gradient that arrived there."""

    name: str  # its path in the model and its class
    output: Mapping[str, Any]  # shape, type and range
    gradient: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        there = f"; gradient {_range(self.gradient)}" if self.gradient is not None else ""
        return f"{self.name}: {self.output['shape']} {self.output['dtype']}, {_range(self.output)}{there}"


@dataclass(frozen=True)
class Examined:
    """What one forward and backward of a batch showed. `print` it, or take it apart."""

    loss: float
    grad_norm: float
    layers: tuple[Layer, ...]  # the tensors of the batch, then the layers in the order of the forward
    diagnosis: Diagnosis | None  # of what is not finite: operation, line and advice, as far as they are known

    @property
    def is_healthy(self) -> bool:
        return isfinite(self.loss) and isfinite(self.grad_norm)

    def __str__(self) -> str:
        lines = [f"loss {self.loss:.6g}, gradient norm {self.grad_norm:.4g}", *map(str, self.layers)]
        if self.diagnosis is not None:
            lines += [f"cause {self.diagnosis.cause}", f"advice: {say(self.diagnosis.advice)}"]
        return "\n".join(lines)


def examine(model: nn.Module, objective: Callable[[Any, Any], Any], batch: Any) -> Examined:
    """Run forward and backward of one batch under the microscope; model, gradients and random numbers are restored.

    `objective` is called as `(model, batch)` and returns the loss, or the loss and metrics. Its precision is that of
    the model: give what `accelerator.prepare` returned.
    """
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    batch = rebuilt(batch, lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)
    measured = Measured(objective, getattr(objective, "__name__", ""), key="objective")
    replay = Replay(
        model,
        measure=lambda network, given: measured.for_training(network, given)[0],
        backward=Tensor.backward,
        marks=Marks(model),
        attributes=Attributes(model),
        seeds=Seeds(0, 0, device),
        device=device,
        drop_gradients=model.zero_grad,
        trained=[weight for weight in model.parameters() if weight.requires_grad],
    )
    layers = [Layer("batch", range_of(one)) for one in floating(leaves(batch))]
    with _listening(getattr(model, "_orig_mod", model), layers):
        found = replay.of([batch], 0, watched=True)
    diagnosis = None
    if not (isfinite(found.loss) and isfinite(found.norm)):
        bad = rows.nonfinite_fields(batch)
        seen = Observations(
            True, origin=found.origin, batch_is_bad=bool(bad), error=found.raised, failure=bad or found.failure
        )
        diagnosis = verdict.of_error(seen) if found.raised else verdict.of_nonfinite(seen)
    return Examined(found.loss, found.norm, tuple(layers), diagnosis)


@contextmanager
def _listening(model: nn.Module, layers: list[Layer]) -> Iterator[None]:
    """Note what every layer of the model puts out, and the gradients that arrive there."""
    hooks: list[Any] = []

    def saw(name: str, module: nn.Module, inputs: Any, result: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # a checkpoint computes it again, in backward
            return
        with torch._C.DisableTorchFunction():  # what this does is no operation of the model
            for one in floating(result):
                layers.append(layer := Layer(f"{name or 'the model'} ({type(module).__name__})", range_of(one)))
                if one.requires_grad:
                    hooks.append(one.register_hook(partial(arrived, layer)))  # type: ignore[no-untyped-call]

    def arrived(layer: Layer, gradient: Tensor) -> None:
        layer.gradient = range_of(gradient)

    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            hooks.append(module.register_forward_hook(partial(saw, name)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _range(found: Mapping[str, Any]) -> str:
    ends = " to ".join(f"{found[end]:.4g}" for end in ("min", "max") if end in found)
    return ", ".join([ends] * bool(ends) + [f"{found['nonfinite']:,} not finite"] * bool(found["nonfinite"]))
