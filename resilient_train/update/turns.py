"""Losses that are stepped in turn, as in a GAN: one update, in which optimizers step with losses of their own.

An optimizer has stepped when `update` returns, so that the next loss sees its new weights. The verdict comes when the
loop asks for the next batch. Until then copies on the device have the weights and moments from before the turn: if any
of its losses is refused, all of it is undone.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from resilient_train.errors import TrainError, named_type
from resilient_train.state.copies import room
from resilient_train.state.run_state import optimizer_tree, restore_optimizer, weights_of
from resilient_train.state.tree import Tree, copy_into, local_part, put_together, taken_apart
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


def why_no_gradient(loss: torch.Tensor, weights: Sequence[torch.Tensor]) -> str:
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


class Turn:
    """The losses of the newest update, if they are stepped in turn: by any optimizers, any number of times."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self.current: Optimizer | None = None  # whose loss the loop has handed over; None if it is that of all
        self.has_stepped = False  # an optimizer has
        self.keeps_gradients = False  # a trainer steps, and drops them itself
        self.is_clipped = False  # gradients were clipped, to norms that are not known here
        self.before: Sequence[Mapping[str, Any]] = ()  # the settings of the groups before it
        self._groups: Sequence[dict[str, Any]] = ()  # of all optimizers
        self._steps = Counter[Optimizer]()  # with losses of their own
        self._loss = self._norm = torch.zeros(())  # so far
        self._rates: list[dict[str, Any]] = []  # the settings of each group, in the step of its highest rate
        self._saved: dict[Optimizer, tuple[Tree, list[torch.Tensor]]] = {}  # as they and their weights were before
        self._memory: dict[Optimizer, list[torch.Tensor]] = {}  # of the copies

    def begin(self) -> None:
        """Begin an update. What was saved stays until the verdict on the last one."""
        self.current, self.has_stepped, self._rates = None, False, []
        self._steps.clear()

    def take(self, optimizer: Any, accumulation: int, objective: object) -> None:
        """Take a loss for an optimizer, or for all of them if it is None."""
        if optimizer is None:
            if self._steps:
                raise TrainError(f"guard.update(loss) in the middle of a turn, without its optimizer: {_HOW}")
            return
        known = [one for one in self._optimizers if one is optimizer or one is getattr(optimizer, "optimizer", None)]
        if not known:
            what = f"the guard does not know this optimizer, {named_type(optimizer)}"
            raise TrainError(f"guard.update: {what}: give Guard a list of all optimizers")
        if accumulation > 1:
            raise TrainError("losses in turn cannot accumulate gradients: set gradient_accumulation_steps to 1")
        if objective is not None and not self.keeps_gradients:
            raise TrainError("losses in turn have no objective, which is one loss for all: leave out objective=")
        self.current = known[0]

    @property
    def is_complete(self) -> bool:
        """Say whether every optimizer has stepped: a loop that is left before has left the turn."""
        return len(self._steps) == len(self._optimizers)

    @property
    def is_again(self) -> bool:
        """Say whether the current optimizer has stepped in it before."""
        return self.current in self._steps

    @property
    def times(self) -> int:
        """How often the optimizer that stepped most often has stepped."""
        return max(self._steps.values(), default=1)

    # What the updater asks.

    @property
    def weights(self) -> list[torch.Tensor]:
        """Those of the current optimizer; empty if it is all."""
        return [] if self.current is None else weights_of(self.current)

    def add(self, loss: torch.Tensor, norm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses so far, and the norm of the gradients so far as if they were one vector."""
        if self.has_stepped:
            loss, norm = self._loss + loss, torch.hypot(self._norm, norm)
        self._loss, self._norm = loss, norm
        return loss, norm

    def fastest(self, settings: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return for each group the settings of the step of this turn in which its rate was highest."""
        pairs = zip([*self._rates, *settings[len(self._rates) :]], settings, strict=True)
        self._rates = [dict(max(pair, key=lambda one: float(one["lr"] or 0.0))) for pair in pairs]
        return self._rates

    def save(self, groups: Sequence[dict[str, Any]], before: Sequence[Mapping[str, Any]]) -> None:
        """Copy the current optimizer and its weights before its first step."""
        if not self.has_stepped:
            self.has_stepped, self._groups, self.before = True, groups, before
        assert self.current is not None
        self._steps[self.current] += 1
        if self.current in self._saved:
            return
        plain, sources = taken_apart({"weights": self.weights, "optimizer": optimizer_tree(self.current)})
        copies = room(sources, self._memory.get(self.current, []), torch.empty_like)
        copy_into(copies, sources)
        self._memory[self.current] = copies
        self._saved[self.current] = plain, copies

    # The verdict.

    def land(self) -> None:
        self._saved.clear()

    def undo(self) -> bool:
        """Restore the optimizers that have stepped in a turn which was not accepted; say whether there are any."""
        saved, self._saved = self._saved, {}
        for optimizer, (plain, tensors) in saved.items():
            parts = put_together(plain, tensors)
            weights = weights_of(optimizer)[: len(parts["weights"])]  # the loop may have added some
            copy_into(list(map(local_part, weights)), list(map(local_part, parts["weights"])))
            restore_optimizer(optimizer, parts["optimizer"])
        if saved:
            for group, settings in zip(self._groups, self.before, strict=True):
                group.update(settings)
        return bool(saved)
