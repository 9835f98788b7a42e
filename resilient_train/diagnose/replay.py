"""Replays one update as it was: the same weights and random numbers, with given batches. Training does not notice."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from resilient_train.diagnose.frames import Layers
from resilient_train.diagnose.microscope import Microscope, Origin
from resilient_train.errors import in_one_line
from resilient_train.state import randomness
from resilient_train.state.copies import Attributes, Backups
from resilient_train.state.randomness import Seeds
from resilient_train.state.tree import is_sharded, local_part


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay measured on this rank alone."""

    loss: float
    norm: float  # in doubles, so that it is finite wherever the gradient is
    by_layer: dict[str, float]  # the norm of each weight's gradient
    origin: Origin | None = None  # under the microscope: the operation that broke first
    raised: str = ""  # the exception that ended it, in one line; then loss and norm are NaN


@dataclass
class Replay:
    """Runs forward and backward of given batches at the current weights.

    No rank waits for another, as the model is taken out of DistributedDataParallel. Where it `is_sharded` over the
    ranks, all of them replay at the same time, and gradients are those of all their batches.
    """

    model: nn.Module  # as training calls it, without the wrappers of other processes
    measure: Callable[[nn.Module, Any], Tensor]  # returns the loss of a batch
    backward: Callable[[Tensor], None]
    backups: Backups
    drop_gradients: Callable[[], None]
    trained: Sequence[Tensor]  # the weights whose gradients the gate looks at
    over_ranks: Callable[[list[Tensor]], Tensor]  # the norm of sharded gradients, which every rank calls
    seeds: Seeds
    device: torch.device

    def __post_init__(self) -> None:
        self._bare: nn.Module = getattr(self.model, "_orig_mod", self.model)
        self.attributes: Attributes = ()  # of the model's modules, to replay with
        self.is_sharded = any(map(is_sharded, self._bare.parameters()))
        # A forward may update frozen weights (a teacher). Only those that have changed are backed up: all are many.
        frozen = [weight for weight in self._bare.parameters() if not weight.requires_grad]
        self._versions = [(weight, weight._version) for weight in frozen]

    def of(
        self, batches: Sequence[Any], start: int, microscope: Microscope | None = None, layers: Layers | None = None
    ) -> Replayed:
        """Replay the update at position `start` of the stream, with these batches in place of its own."""
        before, gradients = self.backups.take(), [(weight, weight.grad) for weight in self._bare.parameters()]
        moving = [(weight, weight.detach().clone()) for weight, version in self._versions if weight._version != version]
        for weight, _ in gradients:
            weight.grad = None
        attributes = self.backups.attributes()
        self.backups.set_attributes(self.attributes)
        self.backups.set_scale(1.0)  # what is not finite then is no overflow that a lower scale prevents
        may_be_compiled = hasattr(self.model, "_orig_mod") or "torch._dynamo" in sys.modules
        # The microscope cannot look into a fused kernel.
        in_eager = torch.compiler.set_stance("force_eager") if may_be_compiled else nullcontext()
        with randomness.preserved(self.device), in_eager:
            try:
                with layers or nullcontext():
                    return self._replayed([_copied(batch) for batch in batches], start, microscope)
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:
                return Replayed(math.nan, math.nan, {}, raised=in_one_line(error))
            finally:
                self.backups.put_back(before)
                self.backups.let_go(before)
                self.backups.set_attributes(attributes)
                self.drop_gradients()
                for weight, gradient in gradients:
                    weight.grad = gradient
                with torch.no_grad():
                    for weight, value in moving:
                        weight.copy_(value)

    def under_microscope(self, batches: Sequence[Any], start: int) -> Replayed:
        """Replay under the microscope, and again to look at the inputs of the call whose backward is to blame."""
        first = Microscope(self._bare)
        measured = self.of(batches, start, first)
        call = first.backward.call if first.backward is not None else None
        second = Microscope(self._bare, look_at=call)
        self.of(batches, start, second)  # every rank replays as often
        # Where the loss is not finite no gradient can be, and backward says nothing about the cause.
        origin = first.backward if math.isfinite(measured.loss) else first.of_error or first.of_loss
        if origin is not None:
            origin = replace(origin, inputs=origin.inputs or second.inputs)
        return replace(measured, origin=origin)

    def _replayed(self, batches: Sequence[Any], start: int, microscope: Microscope | None) -> Replayed:
        self.seeds.for_update(start)
        losses = []
        with microscope or nullcontext():
            for batch in batches:
                if microscope is not None:
                    microscope.knows(batch)
                loss = self.measure(self.model, batch)
                if microscope is not None and microscope.of_loss is None:
                    microscope.judge(loss)
                self.backward(loss)
                losses.append(loss.detach().float().reshape(()))
        ids = set(map(id, self.trained))
        grads = {}
        for name, weight in self._bare.named_parameters():
            if id(weight) in ids and (grad := weight.grad) is not None:
                grads[name] = grad.coalesce().values() if grad.is_sparse else grad
        by_layer = {name: float(torch.linalg.vector_norm(local_part(grad).double())) for name, grad in grads.items()}
        total = math.sqrt(sum(norm**2 for norm in by_layer.values()))
        if self.is_sharded and grads:
            total = float(self.over_ranks([*grads.values()]))
        return Replayed(float(torch.stack(losses).mean()), total, by_layer)


def _copied(batch: Any) -> Any:
    """The same tensors in other containers: an objective may remove entries."""
    if isinstance(batch, torch.Tensor):
        return batch
    if type(batch) in (dict, list, tuple):
        return tree_map(lambda leaf: leaf, batch)
    return copy.copy(batch)
