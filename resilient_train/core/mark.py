"""Marks: all that an update may change before it is accepted, as it was when the update began.

A mark is light: the buffers, the loss scale, what is kept, the settings of parameter groups. It becomes a full one for
the optimizers that step before the verdict: their weights and moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from resilient_train.core.copies import Attributes, Backup, Backups, room
from resilient_train.core.state import optimizer_tree, restore_optimizer, weights_of
from resilient_train.core.tree import Tree, copy_into, local_part, put_together, taken_apart


@dataclass(eq=False)
class Mark:
    """One moment of a run; `Marks` takes it and puts it back."""

    backup: Backup
    settings: Sequence[tuple[dict[str, Any], dict[str, Any]]]  # each parameter group, and what it held
    attributes: Attributes = ()  # of the model's modules
    copies: dict[Optimizer, tuple[Tree, list[torch.Tensor]]] = field(default_factory=dict)  # with the weights


class Marks:
    def __init__(self, backups: Backups, optimizers: Sequence[Optimizer]) -> None:
        self._backups, self._optimizers = backups, optimizers
        self._memory: dict[Optimizer, list[torch.Tensor]] = {}  # of the copies of full marks

    def take(self) -> Mark:
        settings = [(group, dict(group)) for one in self._optimizers for group in one.param_groups]
        return Mark(self._backups.take(), settings)

    def fill(self, mark: Mark, optimizer: Optimizer) -> None:
        """Copy an optimizer and its weights, which step before the verdict; once for a mark."""
        if optimizer in mark.copies:
            return
        plain, sources = taken_apart({"weights": weights_of(optimizer), "optimizer": optimizer_tree(optimizer)})
        copies = room(sources, self._memory.get(optimizer, []), torch.empty_like)
        copy_into(copies, sources)
        self._memory[optimizer] = copies
        mark.copies[optimizer] = plain, copies

    def undo_steps(self, mark: Mark) -> bool:
        """Put back the optimizers that have stepped, and their weights; say whether there are any."""
        copies, mark.copies = mark.copies, {}
        for optimizer, (plain, tensors) in copies.items():
            parts = put_together(plain, tensors)
            weights = weights_of(optimizer)[: len(parts["weights"])]  # the loop may have added some
            copy_into(list(map(local_part, weights)), list(map(local_part, parts["weights"])))
            restore_optimizer(optimizer, parts["optimizer"])
        return bool(copies)

    def undo(self, mark: Mark, *, keeps_scale: bool = False) -> None:
        """Put everything back. With `keeps_scale` the loss scale stays, as after an overflow."""
        self.undo_steps(mark)
        for group, settings in mark.settings:
            for name in group.keys() - settings.keys():
                del group[name]
            group.update(settings)
        self._backups.put_back(mark.backup, with_scale=not keeps_scale)

    def release(self, mark: Mark) -> None:
        """Let the next mark have the memory of this one."""
        self._backups.let_go(mark.backup)

    def note_attributes(self, mark: Mark) -> None:
        """Note the attributes of the modules that forwards change."""
        mark.attributes = self._backups.attributes()

    def restore_attributes(self, mark: Mark, *, only_lost: bool = False) -> None:
        """Restore those of them; with `only_lost` those that are not finite any more, for which the host waits."""
        self._backups.set_attributes(mark.attributes, only_lost=only_lost)

    def is_kept(self, mark: Mark) -> bool:
        """Say whether it holds buffers, or what the user keeps: a forward or the loop may have changed these."""
        return bool(mark.backup.tables or mark.backup.kept)

    @contextmanager
    def buffers_of(self, mark: Mark) -> Iterator[Mapping[str, Tree]]:
        """Have the buffers of a mark for a moment; yields what it kept.

        Their versions stay, as a later loss of a turn may need them in its backward.
        """
        now = self._backups.take()
        with torch.autograd._unsafe_preserve_version_counter(tuple(now.live)):  # type: ignore[attr-defined]
            self._backups.put_back(mark.backup, with_kept=False)
            try:
                yield mark.backup.kept
            finally:
                self._backups.put_back(now, with_kept=False)
        self._backups.let_go(now)

    @contextmanager
    def finite_buffers(self) -> Iterator[None]:
        """Let the buffers outlive the block if they are finite, for which the host waits for the device."""
        now = self._backups.take()
        yield
        if all(bool(buffer.isfinite().all()) for buffer in now.copies):
            self._backups.put_back(now)
        self._backups.let_go(now)
