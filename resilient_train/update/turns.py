"""Losses that are stepped in turn, as in a GAN: one update, in which optimizers step with losses of their own.

An optimizer has stepped when `update` returns, so that the next loss sees its new weights. The verdict comes when the
loop asks for the next batch. Until then a full mark has the weights and moments from before the turn: if any of its
losses is refused, all of it is undone.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from resilient_train.core.gate import Gate, Stepping
from resilient_train.errors import TrainError, named_type
from resilient_train.types import NO_LIMIT
from resilient_train.wording import log


class DirectStepCheck:
    """Notices optimizer steps outside of the guard: an error while the loop has a batch, else one warning."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._running: Literal["loop", "guard"] | None = None
        self.is_over = False  # the guard is closed: steps after it are on purpose; or one was warned of
        for optimizer in optimizers:
            optimizer.step = self._watched(optimizer, optimizer.step)  # type: ignore[method-assign]

    @contextmanager
    def running(self, who: Literal["loop", "guard"]) -> Iterator[None]:
        before, self._running = self._running, who
        try:
            yield
        finally:
            self._running = before

    def _watched(self, optimizer: Any, step: Any) -> Any:
        plain = getattr(step, "plain", step)  # without the wrapper of an earlier guard

        @functools.wraps(plain)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._running == "loop":
                raise TrainError(
                    "the loop stepped an optimizer itself, past the gate: remove optimizer.step(), "
                    "guard.step and guard.update do it"
                )
            if self._running is None and not self.is_over:
                self.is_over = True
                log.warning(
                    "optimizer.step() was called outside of guard.batches(): such updates are not protected, and a "
                    "rewind does not know of them; a trainer is guarded by resilient_train.hf.guard(trainer), or "
                    "callbacks=[resilient_train.lightning.Guarded()]"
                )
            optimizer._opt_called = True
            return plain(*args, **kwargs)

        watched.plain = plain  # type: ignore[attr-defined]
        # A scheduler of torch's that is made later would wrap a step of its class, to set that mark, and fails on this.
        watched._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return watched


_HOW = "for losses that are stepped in turn, as in a GAN, call guard.update(loss, optimizer=...) for each optimizer"
TWICE = f"guard.{{verb}} was called twice for one batch: {_HOW}"
MISSING = "a batch was not handed back: call guard.step(batch), or guard.update(loss)"
TWO_GUARDS = f"two guards are at work in turn, which would not rewind together: give one of them all networks; {_HOW}"


def require_gradient(loss: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    if all(weight.grad is None for weight in weights):
        raise TrainError(_why_no_gradient(loss, weights))


def _why_no_gradient(loss: torch.Tensor, weights: Sequence[torch.Tensor]) -> str:
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


class CopyGate:
    """The gate of losses in turn: any optimizers step, any number of times, and all of it is kept or undone."""

    def __init__(self, gates: Mapping[Optimizer, Gate]) -> None:
        """`gates` has one for each optimizer: a step that is refused leaves the next losses of the turn finite."""
        self._gates = gates
        self._steps = Counter[Optimizer]()  # of the newest update, with losses of their own
        self.loss = self.norm = torch.zeros(())  # the sums so far, of the norms as if they were one vector
        self.rates: list[dict[str, Any]] = []  # the settings of each group, in the step of its highest rate

    def known(self, optimizer: Any) -> Optimizer:
        """Return the optimizer that is meant, which may be in Accelerate's wrapper."""
        for one in self._gates:
            if one in (optimizer, getattr(optimizer, "optimizer", None)):
                return one
        what = f"the guard does not know this optimizer, {named_type(optimizer)}"
        raise TrainError(f"guard.update: {what}: give Guard a list of all optimizers")

    def begin(self) -> None:
        self._steps.clear()
        self.rates = []

    @property
    def has_stepped(self) -> bool:
        return bool(self._steps)

    @property
    def is_complete(self) -> bool:
        """Say whether every optimizer has stepped: a loop that is left before has left the turn."""
        return len(self._steps) == len(self._gates)

    @property
    def times(self) -> int:
        """How often the optimizer that stepped most often has stepped."""
        return max(self._steps.values(), default=1)

    def steps_of(self, optimizer: Optimizer) -> int:
        return self._steps[optimizer]

    def step(
        self,
        optimizer: Optimizer,
        steps: Stepping,
        loss: torch.Tensor,
        norm: torch.Tensor,
        settings: Sequence[Mapping[str, Any]],
        largest: float,
    ) -> None:
        """Let one optimizer make its step: the limit of the loss is for the sum, that of the norm is `largest`."""
        gate, measured = self._gates[optimizer], torch.stack([loss, norm])
        if self._steps:
            loss, norm = self.loss + loss, torch.hypot(self.norm, norm)
        self.loss, self.norm = loss, norm
        self._steps[optimizer] += 1
        pairs = zip([*self.rates, *settings[len(self.rates) :]], settings, strict=True)
        self.rates = [dict(max(pair, key=lambda one: float(one["lr"] or 0.0))) for pair in pairs]
        gate.limit(NO_LIMIT, largest)
        gate.step(measured, [steps])
