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
from resilient_train.extensions.diagnosis.replay import Replay
from resilient_train.extensions.diagnosis.verdict import Observations
from resilient_train.ground.types import Diagnosis
from resilient_train.ground.wording import blamed, say
from resilient_train.parts.modes import Attributes
from resilient_train.parts.run import Measured, nonfinite


@dataclass
class Layer:
    """What one layer put out, and the gradient that arrived there."""

    name: str  # its path in the model
    kind: str  # its class
    output: Mapping[str, Any]  # shape, type and range
    gradient: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        there = f"; gradient {_range(self.gradient)}" if self.gradient is not None else ""
        return f"{self.name or 'the model'} ({self.kind}): {_described(self.output)}{there}"


@dataclass(frozen=True)
class Examined:
    """What one forward and backward of a batch showed. `print` it, or take it apart."""

    loss: float
    grad_norm: float
    batch: tuple[Mapping[str, Any], ...]  # the ranges of its tensors
    layers: tuple[Layer, ...]  # in the order of the forward
    weights: Mapping[str, float]  # the norm of each weight's gradient
    diagnosis: Diagnosis | None  # of what is not finite: operation, line and advice, as far as they are known
    remarks: tuple[str, ...]

    @property
    def is_healthy(self) -> bool:
        return isfinite(self.loss) and isfinite(self.grad_norm)

    def __str__(self) -> str:
        lines = [f"loss {self.loss:.6g}, gradient norm {self.grad_norm:.4g}"]
        lines += [f"batch: {_described(one)}" for one in self.batch]
        lines += map(str, self.layers)
        if self.diagnosis is not None:
            where = f" ({say(blamed(self.diagnosis)[:1])})" if self.diagnosis.culprit is not None else ""
            lines += [f"cause {self.diagnosis.cause}{where}", f"advice: {say(self.diagnosis.advice)}"]
        elif self.is_healthy and not self.remarks:
            lines.append("nothing here is out of order")
        return "\n".join([*lines, *self.remarks])


def examine(model: nn.Module, objective: Callable[[Any, Any], Any], batch: Any) -> Examined:
    """Run forward and backward of one batch under the microscope; model, gradients and random numbers are restored.

    `objective` is called as `(model, batch)` and returns the loss, or the loss and metrics. It runs three times.
    Its precision is that of the model: give what `accelerator.prepare` returned.
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
    layers: list[Layer] = []
    with _listening(getattr(model, "_orig_mod", model), layers):
        first = replay.of([batch], 0)
    origin = replay.under_microscope([batch], 0).origin
    bad_fields = rows.nonfinite_fields(batch)
    diagnosis = None
    if not (isfinite(first.loss) and isfinite(first.norm)):
        seen = Observations(reproduced=True, batch_is_bad=bool(bad_fields), size=first.norm, error=first.raised)
        seen = origin.noted(seen) if origin is not None else seen
        diagnosis = verdict.of_error(seen) if first.raised else verdict.of_nonfinite(seen)
    return Examined(
        first.loss,
        first.norm,
        batch=tuple(map(range_of, floating(leaves(batch)))),
        layers=tuple(layers),
        weights=first.by_layer,
        diagnosis=diagnosis,
        remarks=(
            *(f"the batch: {say([one])}" for one in bad_fields),
            *(say([one]) for one in nonfinite(first.by_layer)),
        ),
    )


@contextmanager
def _listening(model: nn.Module, layers: list[Layer]) -> Iterator[None]:
    """Note what every layer of the model puts out, and the gradients that arrive there."""
    hooks: list[Any] = []

    def saw(name: str, module: nn.Module, inputs: Any, result: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # a checkpoint computes it again, in backward
            return
        for one in floating(result):
            layers.append(layer := Layer(name, type(module).__name__, range_of(one)))
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


def _described(found: Mapping[str, Any]) -> str:
    return f"{found['shape']} {found['dtype']}, {_range(found)}"


def _range(found: Mapping[str, Any]) -> str:
    ends = " to ".join(f"{found[end]:.4g}" for end in ("min", "max") if end in found)
    return ", ".join([ends] * bool(ends) + [f"{found['nonfinite']:,} not finite"] * bool(found["nonfinite"]))
