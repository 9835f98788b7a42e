"""Copies of what changes: filling a snapshot, sharing what never changes, and buffers from before an update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from operator import is_

import torch
from torch import nn

from resilient_train.state.tree import copy_into, fits, pinned

_BIG = 2**16  # bytes: less is not worth a stream of its own


def room(
    sources: list[torch.Tensor], old: list[torch.Tensor], empty: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Memory for copies of `sources`: tensors of `old`, which are not used any more, where they fit."""
    return [
        one if one is not None and fits(one, source) else empty(source)
        for source, one in zip_longest(sources, old[: len(sources)])
    ]


class Copier:
    """Copies from where a run is to where its snapshots are.

    On an accelerator that is pinned host memory. What only an optimizer changes, and is big, is copied on a stream of
    its own during the next forward; the rest, which a forward or the loop may change at any moment, first and on the
    stream that everything else runs on.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None  # recorded after the newest copy
        self._sources: list[torch.Tensor] = []  # being read on that stream: their memory must not go to others

    def empty(self, source: torch.Tensor) -> torch.Tensor:
        """Memory for a copy of one tensor."""
        return pinned(source) if self._stream is not None and source.is_cuda else torch.empty_like(source)

    def fill(self, targets: list[torch.Tensor], sources: list[torch.Tensor], trained: int) -> None:
        """Copy; the first `trained` of the sources are changed by optimizers only."""
        if self._stream is None:
            copy_into(targets, sources)
            return
        self.before_change()
        later = [place for place in range(trained) if sources[place].is_cuda and sources[place].nbytes >= _BIG]
        at_once = sorted(set(range(len(sources))) - set(later))
        copy_into([targets[place] for place in at_once], [sources[place] for place in at_once], non_blocking=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        self._sources = [sources[place].detach() for place in later]  # a weight may be given other memory
        with torch.cuda.stream(self._stream):
            copy_into([targets[place] for place in later], self._sources, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def before_change(self) -> None:
        """Let the device finish copying before the weights change; the host does not wait."""
        if self._sources:
            assert self._copied is not None
            torch.cuda.current_stream().wait_event(self._copied)
            self._sources = []

    def wait(self) -> None:
        """Wait on the host until copies can be read."""
        if self._copied is not None:
            self._copied.synchronize()
        self.before_change()


@dataclass
class _Shared:
    weight: torch.Tensor
    version: int
    digest: int
    copy: torch.Tensor | None = None  # None until a snapshot needs it


class Frozen:
    """Knows which frozen weights are still what they were, and holds the copies of those.

    Frozen does not mean constant: teachers and target networks are updated by the loop. A weight that was once seen
    to change is copied for every snapshot from then on, like a trained one.
    """

    def __init__(self) -> None:
        self.shared: dict[str, _Shared] = {}  # by the names of the weights
        self._moving: set[str] = set()

    def moving(self, weights: Mapping[str, torch.Tensor]) -> set[str]:
        """Name the frozen ones among `weights` that change; what is left is the same as at the last snapshot.

        The contents decide, not only the version: the usual `target.data.mul_(0.99)` counts none. Reading the
        digests waits for the device, once a snapshot and only where weights are frozen and were never seen to change.
        """
        frozen = {name: weight for name, weight in weights.items() if not weight.requires_grad}
        self.shared = {name: one for name, one in self.shared.items() if name in frozen}
        self._moving |= {name for name, weight in frozen.items() if not _is_plain(weight)}
        still = [name for name in frozen if name not in self._moving]
        for name, digest in zip(still, _digests([frozen[name] for name in still]), strict=True):
            weight, known = frozen[name], self.shared.get(name)
            if known is None:
                self.shared[name] = _Shared(weight, weight._version, digest)
            elif known.weight is not weight or (known.version, known.digest) != (weight._version, digest):
                del self.shared[name]
                self._moving.add(name)
        return frozen.keys() & self._moving

    def copies(
        self, empty: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Return the shared copies by name, and of those still to be filled a list, and one of what goes into them."""
        new = [one for one in self.shared.values() if one.copy is None]
        targets = [empty(one.weight) for one in new]
        for one, target in zip(new, targets, strict=True):
            one.copy = target
        copies = {name: one.copy for name, one in self.shared.items() if one.copy is not None}
        return copies, targets, [one.weight for one in new]

    def restored(self) -> None:
        """Take note that a snapshot was written over the weights: new versions, the same contents."""
        for one in self.shared.values():
            one.version = one.weight._version


def _digests(weights: list[torch.Tensor]) -> list[int]:
    """Sums of the bits of each, taken where they lie and read in one go."""
    if not weights:
        return []
    digests = [_digest(weight.detach()) for weight in weights]
    return [int(one) for one in torch.stack([one.to(digests[0].device) for one in digests]).tolist()]


def _is_plain(weight: torch.Tensor) -> bool:
    """Say whether a digest can be taken: not of sparse tensors, nor of classes that hide where their bits are."""
    return weight.layout is torch.strided and type(weight.detach()) is torch.Tensor


def _digest(weight: torch.Tensor) -> torch.Tensor:
    """Add up a tensor as whole numbers of eight bytes, ten times faster than as ones of four, and what is left over."""
    order = sorted(range(weight.dim()), key=weight.stride, reverse=True)
    octets = weight.permute(order).reshape(-1).view(torch.uint8)  # no copy of a dense tensor, whatever its order
    if octets.storage_offset() % 8:
        octets = octets.clone()
    whole = octets.numel() // 8 * 8
    return octets[:whole].view(torch.int64).sum() + octets[whole:].sum(dtype=torch.int64)


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
        return room(live, old.copies, torch.empty_like)

    def _scale(self) -> list[torch.Tensor]:
        """Of the loss scale: nothing before its first use."""
        scaler = self._scaler
        if scaler is None or scaler._scale is None or scaler._growth_tracker is None:
            return []
        return [scaler._scale, scaler._growth_tracker]
