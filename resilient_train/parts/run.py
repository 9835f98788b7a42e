"""A run that is put together: what extensions get, and add to; and how it computes an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from resilient_train.core.controls import Controls
from resilient_train.core.mark import Marks
from resilient_train.core.protocols import Computed
from resilient_train.core.randomness import Seeds
from resilient_train.core.recovery import Recovery
from resilient_train.core.vitals import Metrics, mean
from resilient_train.data.history import BestLevel
from resilient_train.data.samples import Slicing
from resilient_train.durable.incident_log import IncidentLog
from resilient_train.durable.keeper import CheckpointKeeper
from resilient_train.durable.resume import RunParts
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.types import Facts, fact
from resilient_train.parts.modes import Attributes, BufferWatch, without_nan_check

Objective = Callable[[Any, Any], Any]


class Measured:
    """Calls an objective and checks what it returns: the loss must be a scalar tensor."""

    def __init__(
        self,
        objective: Objective,
        name: str,
        key: str = "objective._target_",
        *,
        clip: Callable[[], None] = lambda: None,
        is_goal: bool = True,
    ) -> None:
        """`key` is the setting that gave the objective: error messages begin with it. `clip` the gradients of an update
        where a trainer does; `is_goal`: its loss is what training lowers.
        """
        self.objective, self.name, self.key = objective, name, key
        self.clip, self.is_goal = clip, is_goal
        self.buffers: BufferWatch | None = None  # of the model that it is called with
        self.changes: list[Callable[[torch.Tensor], torch.Tensor]] = []  # of the loss in training, as in a drill

    def __call__(self, model: Any, batch: Any) -> tuple[torch.Tensor, Metrics]:
        answer = self.objective(model, batch)
        loss, given = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
        if not isinstance(loss, torch.Tensor):
            raise self._error(f"returned a {type(loss).__name__} as the loss: expected a scalar tensor")
        if loss.numel() != 1:
            raise self._error(f"returned a loss of shape {list(loss.shape)}: expected a scalar, such as its mean()")
        if not isinstance(given, Mapping) or "loss" in given:
            raise self._error(f"returned {given!r:.60} next to the loss: expected {{name: value}}, no name being loss")
        loss = loss.reshape(()) if self.buffers is None else self.buffers.spoil(loss.reshape(()))
        metrics: dict[str, torch.Tensor | float] = {}
        for key, value in given.items():
            name = str(key)
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                # Detached: it is kept until it is reported, and its graph would keep the whole forward alive.
                metrics[name] = value.detach().reshape(())
            elif isinstance(value, int | float):
                metrics[name] = value
            else:
                what = f"a {type(value).__name__} as the metric {name}"
                raise self._error(f"returned {what}: expected a number or a tensor of one element")
        return loss, metrics

    def for_training(self, model: Any, batch: Any) -> tuple[torch.Tensor, Metrics]:
        loss, metrics = self(model, batch)
        if not loss.requires_grad:
            why = "its weights are frozen, or something detaches it from them (.detach(), .item(), no_grad, argmax)"
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
    run_backward: Callable[[torch.Tensor], None]
    attributes: Attributes  # of its modules

    def compute(self, batch: Any) -> Computed:
        assert self.objective is not None
        self.attributes.forward_begins()
        loss, metrics = self.objective.for_training(self.model, batch)
        self.backward(loss)
        return loss, metrics

    def backward(self, loss: torch.Tensor) -> None:
        with without_nan_check():  # the objective may have turned it on again
            self.run_backward(loss)


def mean_metrics(reported: Sequence[Mapping[str, torch.Tensor | float]]) -> Mapping[str, torch.Tensor | float]:
    """Average the metrics of micro-batches, each over those that reported it."""
    names = sorted({name for one in reported for name in one})
    return {name: mean([one[name] for one in reported if name in one]) for name in names}


@dataclass(kw_only=True)
class Run(RunParts):
    settings: Any  # of all checks by their names
    best: BestLevel
    sinks: list[Any] = field(default_factory=list)  # an `extensions.Sink` each
    is_patched: Callable[[str, int, str], bool] = lambda file, line, op: False  # whether what breaks there is repaired
    handled_lines: set[tuple[str, int, str]] = field(default_factory=set)  # of operations: patched, or cannot be
    backend: Computation
    buffers: BufferWatch
    marks: Marks
    seeds: Seeds
    incident_log: IncidentLog
    planned: Callable[[], int | None]  # the steps that the run plans, if that is known
    stop: Callable[[], bool]  # whether it was asked to stop
    settle: Callable[[], bool]  # waits for the verdict on the newest update
    keeper: CheckpointKeeper = field(init=False)
    # From when all extensions are built.
    controls: Controls = field(init=False)
    recovery: Recovery = field(init=False)

    def slice_as(self, slicing: Slicing) -> bool:
        """Slice updates into other micro-batches from now on; False if these samples cannot be."""
        if not self.samples.slice_as(slicing):
            return False
        self.world.accelerator.gradient_accumulation_steps = self.samples.slicing.accumulation
        return True


def lost_eps(optimizers: Iterable[Optimizer]) -> Facts | None:
    """Name an epsilon that is 0 in the type of the weights, so that an update may divide by zero."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if not isinstance(eps, int | float):
                continue
            for dtype in {weight.dtype for weight in group["params"] if weight.is_floating_point()}:
                if torch.tensor(eps, dtype=dtype).item() == 0:
                    name = str(dtype).removeprefix("torch.")
                    return fact("eps_lost", eps=eps, optimizer=type(optimizer).__name__, dtype=name)
    return None
