"""Replays one update as it was: the same weights and random numbers, with given batches. Training does not notice."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from resilient_train.core import randomness
from resilient_train.core.mark import Marks
from resilient_train.core.randomness import Seeds
from resilient_train.core.tree import is_sharded
from resilient_train.data.trees import rebuilt
from resilient_train.extensions.diagnosis.microscope import Microscope
from resilient_train.extensions.diagnosis.verdict import Origin
from resilient_train.ground.errors import in_one_line
from resilient_train.ground.types import Facts, fact
from resilient_train.parts.code_lines import CALLERS
from resilient_train.parts.modes import Attributes, Saved

CALLERS.add(__file__)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay measured on this rank alone."""

    loss: float
    norm: float  # in doubles, so that it is finite wherever the gradient is
    origin: Origin | None = None  # under the microscope: the operation that broke first
    raised: str = ""  # the exception that ended it, in one line; then loss and norm are NaN
    failure: Facts = ()  # why nothing could be measured; then the loss is NaN


@dataclass
class Replay:
    """Runs forward and backward of given batches at the current weights.

    No rank waits, as DistributedDataParallel is left out. If `is_sharded`, all replay together; gradients are of all.
    """

    model: nn.Module  # as training calls it, without the wrappers of other processes
    measure: Callable[[nn.Module, Any], Tensor]  # returns the loss of a batch
    backward: Callable[[Tensor], None]
    marks: Marks
    attributes: Attributes
    seeds: Seeds
    device: torch.device
    drop_gradients: Callable[[], None]
    trained: Sequence[Tensor]  # the weights whose gradients the gate looks at
    over_ranks: Callable[[list[Tensor]], Tensor] | None = None  # the norm of sharded gradients, which every rank calls
    # Says of file, line and operation whether what it breaks is repaired.
    is_patched: Callable[[str, int, str], bool] = lambda file, line, op: False

    def __post_init__(self) -> None:
        self._bare: nn.Module = getattr(self.model, "_orig_mod", self.model)
        self.is_sharded = any(map(is_sharded, self._bare.parameters()))
        # A forward may update frozen weights (a teacher). Only those that have changed are backed up: all are many.
        frozen = [weight for weight in self._bare.parameters() if not weight.requires_grad]
        self._versions = [(weight, weight._version) for weight in frozen]

    def of(self, batches: Sequence[Any], start: int, attributes: Saved = (), *, watched: bool = False) -> Replayed:
        """Replay the update at position `start` with these batches, beginning with `attributes` of the modules; and
        find what broke, if `watched`.
        """
        microscope = Microscope(self._bare, self.is_patched) if watched else None
        gradients = [(weight, weight.grad) for weight in self._bare.parameters()]
        moving = [(weight, weight.detach().clone()) for weight, version in self._versions if weight._version != version]
        for weight, _ in gradients:
            weight.grad = None
        may_be_compiled = hasattr(self.model, "_orig_mod") or "torch._dynamo" in sys.modules
        # The microscope cannot look into a fused kernel.
        in_eager = torch.compiler.set_stance("force_eager") if may_be_compiled else nullcontext()
        # Unscaled: what is not finite then is no overflow that a lower scale prevents.
        with unscaled(self.marks), self.attributes.preserved(attributes), randomness.preserved(self.device), in_eager:
            try:
                with microscope or nullcontext():
                    loss = self._loss([_copied(batch) for batch in batches], start, microscope)
                measured = Replayed(loss, self._norm())
            except (torch.OutOfMemoryError, MemoryError) as error:
                return Replayed(math.nan, 0.0, failure=fact("text", text=in_one_line(error)))
            except Exception as error:
                measured = Replayed(math.nan, math.nan, raised=in_one_line(error))
            finally:
                self.drop_gradients()
                for weight, gradient in gradients:
                    weight.grad = gradient
                with torch.no_grad():
                    for weight, value in moving:
                        weight.copy_(value)
        return replace(measured, origin=microscope.origin) if microscope is not None else measured

    def _loss(self, batches: Sequence[Any], start: int, microscope: Microscope | None) -> float:
        """The loss, after forward and backward."""
        self.seeds.for_update(start)
        losses = []
        for batch in batches:
            if microscope is not None:
                microscope.knows(batch)
            loss = self.measure(self.model, batch)
            if microscope is not None:
                microscope.judge(loss)
            self.backward(loss)
            losses.append(loss.detach().float().reshape(()))
        return float(torch.stack(losses).mean())

    def _norm(self) -> float:
        trained = set(map(id, self.trained))
        known = [weight.grad for weight in self._bare.parameters() if id(weight) in trained and weight.grad is not None]
        grads = [grad.coalesce().values() if grad.is_sparse else grad for grad in known]
        if self.is_sharded and grads and self.over_ranks is not None:
            return float(self.over_ranks(grads))
        return math.hypot(*(float(torch.linalg.vector_norm(grad.double())) for grad in grads))


def _copied(batch: Any) -> Any:
    """The same tensors in other containers: an objective may remove entries."""
    return rebuilt(batch, lambda leaf: leaf if isinstance(leaf, Tensor) else copy.copy(leaf))


@contextmanager
def unscaled(marks: Marks) -> Iterator[None]:
    """Begin with an unscaled loss; at the end everything is as it was before."""
    before = marks.take()
    for one in marks.scale()[:1]:
        one.fill_(1.0)
    try:
        yield
    finally:
        marks.undo(before)
