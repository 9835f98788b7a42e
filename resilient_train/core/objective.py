"""What a run minimises: any callable `(model, batch) -> loss`, or `-> (loss, {name: value})`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from resilient_train.core.copies import BufferWatch
from resilient_train.errors import ConfigError

Metrics = Mapping[str, torch.Tensor | float]
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


def scalar(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"type {type(loss).__name__}"
        raise TypeError(f"guard.update takes the loss as a scalar tensor, not one of {what}")
    made: torch.Tensor = loss.detach()
    return made if made.dtype is torch.float32 and made.dim() == 0 else made.float().reshape(())
