"""What a run minimises: any callable `(model, batch) -> loss`, or `-> (loss, {name: value})`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from resilient_train.errors import ConfigError

Metrics = Mapping[str, torch.Tensor | float]
Objective = Callable[[Any, Any], Any]

_KEY = "objective._target_"


class Measured:
    """Calls an objective and holds its answer to the contract: a scalar, with a graph behind it."""

    def __init__(self, objective: Objective, name: str) -> None:
        self.objective, self.name = objective, name

    def __call__(self, model: Any, batch: Any) -> tuple[torch.Tensor, Metrics]:
        answer = self.objective(model, batch)
        loss, metrics = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
        if not isinstance(loss, torch.Tensor):
            raise ConfigError(
                _KEY, self.name, f"returned a {type(loss).__name__} as the loss: a scalar tensor is wanted"
            )
        if loss.numel() != 1:
            shape = list(loss.shape)
            raise ConfigError(
                _KEY, self.name, f"returned a loss of shape {shape}: a scalar is wanted, such as its mean()"
            )
        if not isinstance(metrics, Mapping):
            raise ConfigError(
                _KEY, self.name, f"returned a {type(metrics).__name__} beside the loss: {{name: value}} is wanted"
            )
        return loss.reshape(()), metrics

    def for_training(self, model: Any, batch: Any) -> tuple[torch.Tensor, Metrics]:
        """Measure, and insist that the loss can be differentiated."""
        loss, metrics = self(model, batch)
        if not loss.requires_grad:
            why = "returned a loss without a graph: something between the weights and the loss detaches it"
            raise ConfigError(_KEY, self.name, f"{why} (.detach(), .item(), no_grad, argmax)")
        return loss, metrics
