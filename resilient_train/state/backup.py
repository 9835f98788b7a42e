"""What a forward changes whether or not its update lands: buffers, such as BatchNorm's running statistics."""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_

import torch
from torch import nn

from resilient_train.state.tree import copy_into

Table = dict[str, torch.Tensor | None]  # a module's buffers by name


@dataclass(frozen=True, slots=True)
class Backup:
    """The buffers of one moment: which tensors each module had under which names, their shapes, and their contents."""

    tables: list[tuple[nn.Module, Table]]
    live: list[torch.Tensor]  # all tensors of the tables, and those of the loss scale
    shapes: list[torch.Size]
    copies: list[torch.Tensor]


_NOTHING = Backup([], [], [], [])


class Backups:
    """Copies of the buffers from before an update, and of the loss scale, which a refused update must not move."""

    def __init__(self, model: nn.Module, scaler: torch.amp.GradScaler | None = None) -> None:
        self._modules = list(model.modules())  # to ask for all buffers by name would walk the tree every update
        self._scaler = scaler
        self._spare: list[Backup] = []

    def take(self) -> Backup:
        """Copy them: one call for all, and none where a model has no buffers."""
        tables = [(module, module._buffers.copy()) for module in self._modules if module._buffers]
        if not tables and self._scaler is None:
            return _NOTHING
        live = [one for _, table in tables for one in table.values() if one is not None] + self._scale()
        shapes = [one.shape for one in live]
        copies = self._room(live, shapes)
        copy_into(copies, live)
        return Backup(tables, live, shapes, copies)

    def put_back(self, kept: Backup) -> None:
        """Undo what was done since it was taken: names that came are gone, tensors that were replaced are back."""
        resized = {
            id(one): copy.clone()
            for one, shape, copy in zip(kept.live, kept.shapes, kept.copies, strict=True)
            if one.shape != shape
        }
        before = dict(kept.tables)
        for module in self._modules:
            table = module._buffers
            then = before.get(module, {})
            if table or then:
                table.clear()
                table.update({name: resized.get(id(one), one) for name, one in then.items()})
        in_place = [place for place, one in enumerate(kept.live) if id(one) not in resized]
        copy_into([kept.live[place] for place in in_place], [kept.copies[place] for place in in_place])
        if self._scaler is not None and (scale := self._scale()) and not any(one is scale[0] for one in kept.live):
            scale[0].fill_(self._scaler._init_scale)  # made since, at its first use
            scale[1].fill_(self._scaler._init_growth_tracker)

    def let_go(self, kept: Backup) -> None:
        """Hand the memory back for the next one."""
        if kept.copies:
            self._spare.append(kept)

    def _room(self, live: list[torch.Tensor], shapes: list[torch.Size]) -> list[torch.Tensor]:
        """Memory for copies: as a rule that of an earlier backup of the very same tensors."""
        old = self._spare.pop() if self._spare else _NOTHING
        if old.shapes == shapes and all(map(is_, old.live, live)):
            return old.copies
        room: list[torch.Tensor] = []
        for place, one in enumerate(live):
            fits = place < len(old.copies) and _alike(old.copies[place], one)
            room.append(old.copies[place] if fits else torch.empty_like(one))
        return room

    def _scale(self) -> list[torch.Tensor]:
        """Of the loss scale: nothing before its first use."""
        scaler = self._scaler
        if scaler is None or scaler._scale is None or scaler._growth_tracker is None:
            return []
        return [scaler._scale, scaler._growth_tracker]


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
