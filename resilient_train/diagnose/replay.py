"""Replay one step as it was: same weights, same random numbers, batches as given. It leaves nothing behind."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from resilient_train.diagnose.microscope import Microscope, Seen
from resilient_train.state import randomness
from resilient_train.state.copies import Backups
from resilient_train.state.randomness import Purpose, mix, seed_all
from resilient_train.state.sharded import is_sharded, local_part

Measure = Callable[[nn.Module, Any], Tensor]  # (model, batch) -> loss


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay measured on this rank alone."""

    loss: float
    norm: float  # in doubles, so that it is finite wherever the gradient is
    by_layer: dict[str, float]  # the norm of each weight's gradient


class Replay:
    """Makes forward and backward of given batches at the weights as they are.

    No rank waits for another in it, as the model is taken out of DistributedDataParallel; unless it `is_sharded` over
    them: then all make a replay at the same time, and gradients are those of all their batches.
    """

    def __init__(
        self,
        model: nn.Module,
        measure: Measure,
        backward: Callable[[Tensor], None],
        backups: Backups,
        forget: Callable[[], None],
        *,
        trained: Iterable[Tensor],
        scale: Callable[[], float],
        over_ranks: Callable[[list[Tensor]], Tensor],
        seed: int,
        rank: int,
        device: torch.device,
    ) -> None:
        """`model` as training calls it, without the wrappers of other processes; `forget` drops gradients.

        `trained` are the weights whose gradients the gate looks at, `scale` is what they are multiplied by.
        `over_ranks` is the norm of sharded gradients; every rank calls it.
        """
        self.model, self._measure, self._backward = model, measure, backward
        self._backups, self._forget, self._over_ranks = backups, forget, over_ranks
        self._seed, self._rank, self._device = seed, rank, device
        self._bare: nn.Module = getattr(model, "_orig_mod", model)
        self.armored: set[tuple[str, int, str]] = set()  # patched operations, by file, line and name
        self.is_sharded = any(map(is_sharded, self._bare.parameters()))
        self._trained, self._scale = {id(weight) for weight in trained}, scale
        # Frozen weights may be teachers that a forward moves. Those that have moved so far are few; all would be many.
        frozen = [weight for weight in self._bare.parameters() if not weight.requires_grad]
        self._versions = [(weight, weight._version) for weight in frozen]

    def of(self, batches: Sequence[Any], start: int, microscope: Microscope | None = None) -> Replayed:
        """Replay the update at position `start` of the stream, with these batches in place of its own."""
        before, gradients = self._backups.take(), [(weight, weight.grad) for weight in self._bare.parameters()]
        moving = [(weight, weight.detach().clone()) for weight, version in self._versions if weight._version != version]
        for weight, _ in gradients:
            weight.grad = None
        with randomness.preserved(self._device), _in_eager(self.model):
            try:
                return self._replayed([_copied(batch) for batch in batches], start, microscope)
            finally:
                self._backups.put_back(before)
                self._backups.let_go(before)
                self._forget()
                for weight, gradient in gradients:
                    weight.grad = gradient
                with torch.no_grad():
                    for weight, value in moving:
                        weight.copy_(value)

    def seen(self, batches: Sequence[Any], start: int) -> tuple[Seen, Replayed]:
        """Replay under the microscope, and again to look at the call whose backward is to blame."""
        microscope = Microscope(self._bare, armored=self.armored)
        measured = self.of(batches, start, microscope)
        seen = microscope.seen
        look_at = seen.backward.call if seen.backward else None
        second = Microscope(self._bare, look_at=look_at, armored=self.armored)
        self.of(batches, start, second)  # every rank replays as often
        seen.inputs = second.seen.inputs
        return seen, measured

    def _replayed(self, batches: Sequence[Any], start: int, microscope: Microscope | None) -> Replayed:
        seed_all(mix(Purpose.UPDATE, self._seed, start, self._rank), self._device)
        losses = []
        with microscope or nullcontext():
            for batch in batches:
                loss = self._measure(self.model, batch)
                if microscope is not None and microscope.seen.of_loss is None:
                    microscope.judge(loss)
                self._backward(loss)
                losses.append(loss.detach().float().reshape(()))
        trained = [(name, one) for name, one in self._bare.named_parameters() if id(one) in self._trained]
        named = [(name, one.grad) for name, one in trained if one.grad is not None]
        grads = [grad.coalesce().values() if grad.is_sparse else grad for _, grad in named]
        parts = [local_part(grad) for grad in grads]
        norms = [torch.linalg.vector_norm(one.double() if one.numel() else one.new_zeros(1)) for one in parts]
        scale = self._scale()
        by_layer = {name: float(norm) / scale for (name, _), norm in zip(named, norms, strict=True)}
        total = math.sqrt(sum(norm**2 for norm in by_layer.values())) if by_layer else 0.0
        if self.is_sharded and grads:
            total = float(self._over_ranks(grads)) / scale
        return Replayed(float(torch.stack(losses).mean()), total, by_layer)


def _copied(batch: Any) -> Any:
    """The same tensors in other containers: an objective may take them out."""
    if isinstance(batch, torch.Tensor):
        return batch
    if type(batch) in (dict, list, tuple):
        return tree_map(lambda leaf: leaf, batch)
    return copy.copy(batch)


@contextmanager
def _in_eager(model: nn.Module) -> Iterator[None]:
    """Let what is compiled run as it was written: a microscope sees nothing of a fused kernel."""
    if hasattr(model, "_orig_mod") or "torch._dynamo" in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield
