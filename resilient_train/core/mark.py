"""Marks: all that an update may change before it is accepted, as it was when the update began.

A mark is light (buffers, loss scale, what is kept), and full for optimizers that step before the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from resilient_train.core.copies import Stateful, restore_item, room
from resilient_train.core.state import optimizer_tree, restore_optimizer, weights_of
from resilient_train.core.tree import Tree, copy_into, local_part, put_together, taken_apart


@dataclass(eq=False)
class Mark:
    """One moment of a run; `Marks` takes it and puts it back."""

    modules: Sequence[nn.Module] = ()
    # The buffers that each of them had, by name; then all tensors of these, and those of the loss scale.
    tables: Sequence[tuple[nn.Module, dict[str, torch.Tensor | None]]] = ()
    live: Sequence[torch.Tensor] = ()
    copies: list[torch.Tensor] = field(default_factory=list)  # of these, then of the tensors of what is kept
    kept: Mapping[str, Tree] = field(default_factory=dict)  # what is kept, by name, as it was
    steps: dict[Optimizer, tuple[Tree, list[torch.Tensor]]] = field(default_factory=dict)  # and their weights
    spare: list[Any] = field(default_factory=list)  # to which the copies go when it is no longer used

    def __del__(self) -> None:
        self.spare.append((self.live, self.copies))


class Marks:
    """Takes marks, and puts them back: with a gate that decides on the device, all that undoes an update."""

    def __init__(
        self,
        model: nn.Module,
        scaler: torch.amp.GradScaler | None = None,
        kept: Mapping[str, Stateful] = MappingProxyType({}),
        undone: Callable[[Mark], None] = lambda mark: None,
    ) -> None:
        """`undone` is called after everything was put back."""
        self._scaler, self._kept, self._undone = scaler, kept, undone
        self._model = model
        self.list_modules()
        self._spare: list[tuple[Sequence[torch.Tensor], list[torch.Tensor]]] = []

    def list_modules(self) -> None:
        """List those of the model as it is now: `named_buffers` would walk the tree in every update."""
        self._modules = list(self._model.modules())

    def take(self) -> Mark:
        tables = [(module, module._buffers.copy()) for module in self._modules if module._buffers]
        live = [one for _, table in tables for one in table.values() if one is not None] + self.scale()
        if not (tables or live or self._kept):
            return Mark(self._modules)
        plain, kept = taken_apart({name: item.state_dict() for name, item in self._kept.items()})
        old_live, copies = self._spare.pop() if self._spare else ([], [])
        # Usually they are the same: there is no need to compare all else of each tensor.
        is_same = not kept and len(old_live) == len(live) and all(map(is_, old_live, live))
        if not is_same or [one.shape for one in copies] != [one.shape for one in live]:
            copies = room(live + kept, copies)
        copy_into(copies, live + kept)
        return Mark(self._modules, tables, live, copies, put_together(plain, copies[len(live) :]), spare=self._spare)

    def fill(self, mark: Mark, optimizer: Optimizer) -> None:
        """Copy an optimizer and its weights, which step before the verdict; once for a mark."""
        if optimizer in mark.steps:
            return
        plain, sources = taken_apart({"weights": weights_of(optimizer), "optimizer": optimizer_tree(optimizer)})
        mark.steps[optimizer] = plain, [one.detach().clone() for one in sources]

    def undo_steps(self, mark: Mark) -> bool:
        """Put back the optimizers that have stepped, and their weights; say whether there are any."""
        steps, mark.steps = mark.steps, {}
        for optimizer, (plain, tensors) in steps.items():
            parts = put_together(plain, tensors)
            weights = weights_of(optimizer)[: len(parts["weights"])]  # the loop may have added some
            copy_into(list(map(local_part, weights)), list(map(local_part, parts["weights"])))
            restore_optimizer(optimizer, parts["optimizer"])
        return bool(steps)

    def undo(self, mark: Mark, *, keeps_scale: bool = False) -> None:
        """Put everything back. With `keeps_scale` the loss scale stays, as after an overflow."""
        self.undo_steps(mark)
        for name, saved in mark.kept.items():
            restore_item(self._kept[name], saved)
        self.put_back(mark, {*map(id, self.scale())} if keeps_scale else set())
        self._undone(mark)

    def put_back(self, mark: Mark, stays: Collection[int] = ()) -> None:
        """Restore names, tensors and contents of the buffers and the loss scale, but for the tensors that stay."""
        before = dict(mark.tables)
        for module in mark.modules:
            module._buffers.clear()
            module._buffers.update(before.get(module, {}))
        pairs = [pair for pair in zip(mark.live, mark.copies, strict=False) if id(pair[0]) not in stays]
        for one, saved in pairs:
            if one.shape != saved.shape:  # it was resized in place
                one.resize_(saved.shape)
        copy_into([one for one, _ in pairs], [saved for _, saved in pairs])

    def scale(self) -> list[torch.Tensor]:
        """The tensors of the loss scale, which RunState has made."""
        scaler: Any = self._scaler
        return [] if scaler is None else [scaler._scale, scaler._growth_tracker]

    @contextmanager
    def buffers_of(self, mark: Mark) -> Iterator[Mapping[str, Tree]]:
        """Have the buffers of a mark; yields what it kept. Versions stay, as a loss of a turn may need them later."""
        now = self.take()
        with torch.autograd._unsafe_preserve_version_counter(tuple(now.live)):  # type: ignore[attr-defined]
            self.put_back(mark)
            try:
                yield mark.kept
            finally:
                self.put_back(now)
