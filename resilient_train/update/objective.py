"""What a run minimises: any callable `(model, batch) -> loss`, or `-> (loss, {name: value})`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from resilient_train.errors import ConfigError

Metrics = Mapping[str, torch.Tensor | float]
Objective = Callable[[Any, Any], Any]


class Measured:
    """Calls an objective and holds its answer to the contract: a scalar, with a graph behind it."""

    def __init__(self, objective: Objective, name: str, key: str = "objective._target_") -> None:
        """`key` is what the place is called where the objective was given: it begins every complaint."""
        self.objective, self.name, self.key = objective, name, key

    def __call__(self, model: Any, batch: Any) -> tuple[torch.Tensor, Metrics]:
        answer = self.objective(model, batch)
        loss, metrics = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
        if not isinstance(loss, torch.Tensor):
            raise ConfigError(
                self.key, self.name, f"returned a {type(loss).__name__} as the loss: a scalar tensor is wanted"
            )
        if loss.numel() != 1:
            shape = list(loss.shape)
            raise ConfigError(
                self.key, self.name, f"returned a loss of shape {shape}: a scalar is wanted, such as its mean()"
            )
        if not isinstance(metrics, Mapping):
            what = type(metrics).__name__
            raise ConfigError(self.key, self.name, f"returned a {what} beside the loss: {{name: value}} is wanted")
        return loss.reshape(()), {str(name): self._scalar(str(name), value) for name, value in metrics.items()}

    def _scalar(self, name: str, value: Any) -> torch.Tensor | float:
        """Metrics are kept until somebody looks: without their graphs, which would keep whole forwards alive."""
        if name == "loss":
            raise ConfigError(
                self.key, self.name, "returned a metric named loss: that name is taken by the loss itself"
            )
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return value.detach().reshape(())
        if isinstance(value, int | float):
            return value
        shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
        what = f"a {type(value).__name__}{shape}"
        raise ConfigError(
            self.key, self.name, f"returned {what} as the metric {name}: a number or a scalar tensor is wanted"
        )

    def for_training(self, model: Any, batch: Any) -> tuple[torch.Tensor, Metrics]:
        """Measure, and insist that the loss can be differentiated."""
        loss, metrics = self(model, batch)
        if not loss.requires_grad:
            why = "returned a loss without a graph: something between the weights and the loss detaches it"
            raise ConfigError(self.key, self.name, f"{why} (.detach(), .item(), no_grad, argmax)")
        return loss, metrics
