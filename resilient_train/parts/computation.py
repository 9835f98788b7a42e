"""Forward and backward of a batch with an objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import nn

from resilient_train.core.protocols import Computed
from resilient_train.core.vitals import Metrics, mean
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.types import Facts, fact
from resilient_train.parts.modes import AnomalyMode, Attributes, BufferWatch

Objective = Callable[[Any, Any], Any]


class Measured:
    """Calls an objective and checks what it returns: the loss must be a scalar tensor."""

    def __init__(self, objective: Objective, name: str, key: str = "objective._target_") -> None:
        """`key` is the setting that gave the objective: error messages begin with it."""
        self.objective, self.name, self.key = objective, name, key
        self.buffers: BufferWatch | None = None  # of the model that it is called with
        self.changes: list[Callable[[torch.Tensor], torch.Tensor]] = []  # of the loss in training, as in a drill

    def __call__(self, model: Any, batch: Any) -> tuple[torch.Tensor, Metrics]:
        answer = self.objective(model, batch)
        loss, given = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
        if not isinstance(loss, torch.Tensor):
            raise self._error(f"returned a {type(loss).__name__} as the loss: expected a scalar tensor")
        if loss.numel() != 1:
            raise self._error(f"returned a loss of shape {list(loss.shape)}: expected a scalar, such as its mean()")
        if not isinstance(given, Mapping):
            raise self._error(f"returned a {type(given).__name__} next to the loss: expected {{name: value}}")
        loss = loss.reshape(()) if self.buffers is None else self.buffers.spoil(loss.reshape(()))
        metrics: dict[str, torch.Tensor | float] = {}
        for key, value in given.items():
            if (name := str(key)) == "loss":
                raise self._error("returned a metric named loss: the loss itself has that name")
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                # Detached: it is kept until it is reported, and its graph would keep the whole forward alive.
                metrics[name] = value.detach().reshape(())
            elif isinstance(value, int | float):
                metrics[name] = value
            else:
                what = type(value).__name__ + (f" of shape {list(value.shape)}" if hasattr(value, "shape") else "")
                raise self._error(f"returned a {what} as the metric {name}: expected a number or a scalar tensor")
        return loss, metrics

    def for_training(self, model: Any, batch: Any) -> tuple[torch.Tensor, Metrics]:
        loss, metrics = self(model, batch)
        if not loss.requires_grad:
            why = "something between the weights and the loss detaches it (.detach(), .item(), no_grad, argmax)"
            if not any(one.requires_grad for one in model.parameters()):
                why = "all weights of the model are frozen (requires_grad=False)"
            raise self._error(f"returned a loss without a graph: {why}")
        for change in self.changes:
            loss = change(loss)
        return loss, metrics

    def _error(self, why: str) -> ConfigError:
        return ConfigError(self.key, self.name, why)


@dataclass(frozen=True)
class Computation:
    """How the run makes an update: what the training loop does with a batch, without the loop."""

    model: nn.Module  # as the training calls it
    bare: nn.Module  # without the wrappers of other processes
    objective: Measured | None  # None: the loop hands over its losses
    anomaly_mode: AnomalyMode
    attributes: Attributes  # of its modules

    def compute(self, batch: Any) -> Computed:
        assert self.objective is not None
        self.attributes.forward_begins()
        loss, metrics = self.objective.for_training(self.model, batch)
        self.anomaly_mode.backward(loss)
        return loss, metrics

    def why_no_gradient(self, loss: torch.Tensor, weights: Sequence[torch.Tensor]) -> str:
        if not any(one.requires_grad for one in weights):
            return "no weight has a gradient: all that the optimizer trains are frozen (requires_grad=False)"
        graph, left = set[Any](), [loss.grad_fn]
        while left:
            if (node := left.pop()) is not None and node not in graph:
                graph.add(node)
                left += [one for one, _ in node.next_functions]
        used = {id(getattr(node, "variable", None)) for node in graph}
        if graph and not used & set(map(id, weights)):
            return "no weight has a gradient: the loss was not computed with the guarded model, or is detached from it"
        return "no weight has a gradient: call loss.backward(), or accelerator.backward(loss), before"


def mean_metrics(reported: Sequence[Mapping[str, torch.Tensor | float]]) -> Mapping[str, torch.Tensor | float]:
    """Average the metrics of micro-batches, each over those that reported it."""
    if len(reported) < 2:
        return reported[0] if reported else {}
    names = sorted({name for one in reported for name in one})
    return {name: mean([one[name] for one in reported if name in one]) for name in names}


def nonfinite(norms: Mapping[str, float]) -> Facts:
    """Say which weights, in order, have gradients that are not finite. Backward meets layers in reverse: if all up
    to one are affected, it began there.
    """
    names = [name for name, norm in norms.items() if not isfinite(norm)]
    if not names:
        return ()
    if 1 < len(names) == len(norms):
        return fact("no_gradient_finite")
    is_up_to_one = len(names) > 1 and names == [*norms][: len(names)]
    began = (names[-1].rpartition(".")[0] or names[-1]) if is_up_to_one else ""
    return fact("gradients_not_finite", names=names, bad=len(names), count=len(norms), began=began)
