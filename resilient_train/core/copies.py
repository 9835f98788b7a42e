"""Copies of tensors: into a snapshot, of frozen weights for all snapshots; of buffers and what is kept, as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from operator import is_
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from resilient_train.core.tree import Tree, copy_into, fits, put_together, taken_apart, to_original_device, with_home

_BIG = 2**16  # bytes: smaller tensors are not worth copying on another stream


def room(
    sources: list[torch.Tensor], old: list[torch.Tensor], empty: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Return memory for copies of `sources`: tensors of `old`, which are no longer used, where they fit."""
    return [
        one if one is not None and fits(one, source) else empty(source)
        for source, one in zip_longest(sources, old[: len(sources)])
    ]


class Copier:
    """Copies the state of a run into a snapshot, with CUDA into pinned host memory.

    Large tensors that only an optimizer changes are copied on a second stream in the next forward, all others first.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None  # recorded after the latest copy
        self._sources: list[torch.Tensor] = []  # being copied on that stream: keeps their memory from being reused

    def empty(self, source: torch.Tensor) -> torch.Tensor:
        if self._stream is None or not source.is_cuda:
            return torch.empty_like(source)
        return with_home(torch.empty_like(source, device="cpu", pin_memory=True), source.device)

    def fill(self, targets: list[torch.Tensor], sources: list[torch.Tensor], trained: int) -> None:
        """Copy; only optimizers change the first `trained` of the sources."""
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
        """Make the device finish copying before the weights change; the host does not wait."""
        if self._sources:
            assert self._copied is not None
            torch.cuda.current_stream().wait_event(self._copied)
            self._sources = []

    def wait(self) -> None:
        """Wait on the host until copies can be read."""
        if self._copied is not None:
            self._copied.synchronize()
        self.before_change()

    def give_up(self) -> None:
        """Wait for nothing any more: the device is lost."""
        self._copied, self._sources = None, []


class Frozen:
    """Finds the frozen weights that have not changed, and keeps one copy of each for all snapshots.

    One that the loop changes, such as a teacher's, is copied for every snapshot from then on, like a trained one.
    """

    def __init__(self) -> None:
        self.shared: dict[str, tuple[torch.Tensor, int, int]] = {}  # the weights by name, with version and digest
        self._copies: dict[str, torch.Tensor] = {}  # of those that a snapshot needed
        self._moving: set[str] = set()

    def moving(self, weights: Mapping[str, torch.Tensor]) -> set[str]:
        """Return the names of the frozen weights that change; all others are as at the last snapshot.

        The contents decide: the usual `target.data.mul_(0.99)` does not increase a version. Reading the digests waits
        for the device, once for each snapshot, if there are frozen weights that do not change.
        """
        frozen = {name: weight for name, weight in weights.items() if not weight.requires_grad}
        for name, weight in frozen.items():  # sparse tensors, and classes that hide where their bits are: no digest
            if weight.layout is not torch.strided or type(weight.detach()) is not torch.Tensor:
                self._moving.add(name)
        still = [name for name in frozen if name not in self._moving]
        digests = [_digest(frozen[name].detach()) for name in still]
        read = torch.stack([one.to(digests[0].device) for one in digests]).tolist() if digests else []
        now = {name: (frozen[name], frozen[name]._version, digest) for name, digest in zip(still, read, strict=True)}
        for name, (weight, *state) in now.items():
            known, *before = self.shared.get(name, now[name])
            if known is not weight or state != before:
                self._moving.add(name)
        self.shared = {name: one for name, one in now.items() if name not in self._moving}
        self._copies = {name: one for name, one in self._copies.items() if name in self.shared}
        return frozen.keys() & self._moving

    def copies(
        self, empty: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Return the shared copies by name, then the copies that are still to be filled, and their sources."""
        sources = {name: weight for name, (weight, *_) in self.shared.items() if name not in self._copies}
        new = {name: empty(weight) for name, weight in sources.items()}
        self._copies |= new
        return self._copies.copy(), list(new.values()), list(sources.values())

    def restored(self) -> None:
        """Note that the weights were restored from a snapshot: they have new versions and the same contents."""
        self.shared = {name: (one, one._version, digest) for name, (one, _, digest) in self.shared.items()}


def _digest(weight: torch.Tensor) -> torch.Tensor:
    """Sum the bits of a tensor as integers of eight bytes, ten times faster than of four, and the bytes left over."""
    order = sorted(range(weight.dim()), key=weight.stride, reverse=True)
    octets = weight.permute(order).reshape(-1).view(torch.uint8)  # no copy of a dense tensor, whatever its order
    if octets.storage_offset() % 8:
        octets = octets.clone()
    whole = octets.numel() // 8 * 8
    return octets[:whole].view(torch.int64).sum() + octets[whole:].sum(dtype=torch.int64)


class Stateful(Protocol):
    """Anything with a state that can be saved and restored: a schedule, a cursor, an object of the user's."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


def restore_item(item: Stateful, saved: Tree) -> None:
    """Restore a state that was copied or read: the item gets a copy of its own, in the classes of its present state."""
    item.load_state_dict(_in_classes_of(item.state_dict(), to_original_device(saved)))


def restore_changed(item: Stateful, saved: Tree) -> None:
    """Restore an item unless it still is what was copied. Waits for the device."""
    (now, tensors), (before, copies) = taken_apart(item.state_dict()), taken_apart(saved)
    try:
        is_same = bool(now == before) and all(map(torch.equal, tensors, copies))
    except (RuntimeError, ValueError):  # other types or devices; arrays
        is_same = False
    if not is_same:
        restore_item(item, saved)


def _in_classes_of(like: Any, tree: Tree) -> Any:
    """Return a tree, whose containers are plain ones, in those that `like` has there: an OrderedDict, a Counter."""
    if isinstance(tree, dict) and isinstance(like, dict):
        made = copy.copy(like)  # with what the class adds, such as the versions of modules, or a default
        made.clear()
        for key, value in tree.items():
            made[key] = _in_classes_of(like.get(key), value)
        return made
    if type(tree) in (list, tuple) and isinstance(like, list | tuple):
        return type(tree)(_in_classes_of(*pair) for pair in zip([*like, *[None] * len(tree)], tree, strict=False))
    return tree


class Metrics:
    """Metrics of torchmetrics, or a module that has some: their `state_dict` leaves out what they have counted."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._metrics = {path: one for path, one in module.named_modules() if hasattr(one, "_update_count")}

    def state_dict(self) -> dict[str, Any]:
        counted = {
            path: {name: getattr(one, name) for name in (*one._defaults, "_update_count", "_computed")}
            for path, one in self._metrics.items()
        }
        return {"module": self._module.state_dict(), "counted": counted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._module.load_state_dict(state["module"])
        for path, values in state["counted"].items():
            vars(self._metrics[path]).update(values)


@dataclass(frozen=True, slots=True)
class Backup:
    """The buffers at one moment: the tensors that each module had, by name, with their shapes and contents."""

    tables: list[tuple[nn.Module, dict[str, torch.Tensor | None]]]
    live: list[torch.Tensor]  # all tensors of the tables, and those of the loss scale
    shapes: list[torch.Size]
    copies: list[torch.Tensor]
    kept: dict[str, Tree]  # what is kept, by name, as it was
    of_kept: list[torch.Tensor]  # the tensors of that, which are copies


Attributes = Sequence[tuple[dict[str, Any], str, Any]]  # of modules: where, name, value

_NOTHING = Backup([], [], [], [], {}, [])
_ABSENT = object()
_LOOKS = 5  # calls of `attributes` in which those that change are looked for


class Backups:
    """Copies what a refused update must not change: the buffers, the loss scale, and what the user keeps.

    A model may also count its forwards, or carry a hidden state along, in plain attributes. `attributes` returns those
    that change in the first updates, numbers and tensors without a graph: a replay begins with them.
    """

    def __init__(
        self,
        model: nn.Module,
        scaler: torch.amp.GradScaler | None = None,
        kept: Mapping[str, Stateful] = MappingProxyType({}),
    ) -> None:
        self.kept = kept
        self._modules = list(model.modules())  # listed once: `named_buffers` would walk the tree in every update
        self._scaler = scaler
        self._spare: list[Backup] = []
        self._changing: dict[tuple[int, str], dict[str, Any]] = {}  # attributes, by id of the dictionary and name
        self._first: dict[tuple[int, str], Any] = {}
        self._looks = 0

    def take(self) -> Backup:
        tables = [(module, module._buffers.copy()) for module in self._modules if module._buffers]
        if not tables and self._scaler is None and not self.kept:
            return _NOTHING
        live = [one for _, table in tables for one in table.values() if one is not None] + self._scale()
        shapes = [one.shape for one in live]
        old = self._spare.pop() if self._spare else _NOTHING
        is_same = old.shapes == shapes and all(map(is_, old.live, live))  # usually: no need to compare each tensor
        copies = old.copies if is_same else room(live, old.copies, torch.empty_like)
        copy_into(copies, live)
        plain, kept = taken_apart({name: item.state_dict() for name, item in self.kept.items()})
        of_kept = room(kept, old.of_kept, torch.empty_like)
        copy_into(of_kept, kept)
        return Backup(tables, live, shapes, copies, put_together(plain, of_kept), of_kept)

    def attributes(self) -> Attributes:
        """Return the attributes that change with the updates, as they are; tensors are not copied."""
        if self._looks < _LOOKS:
            self._looks += 1
            self._look()
        now = [(own, name, own.get(name, _ABSENT)) for (_, name), own in self._changing.items()]
        return [one for one in now if one[2] is _ABSENT or _is_state(one[2])]

    def set_attributes(self, attributes: Attributes, *, only_lost: bool = False) -> None:
        """Set what `attributes` returned; `only_lost`: those that are not finite any more. Then the host waits."""
        for own, name, value in attributes:
            now = own.get(name)
            if only_lost and (value is _ABSENT or not _is_state(now) or torch.as_tensor(now).isfinite().all()):
                continue
            if value is _ABSENT:
                own.pop(name, None)
            else:
                own[name] = value

    def _look(self) -> None:
        tables = [vars(module) for module in self._modules]
        now = {(id(own), name): (own, one) for own in tables for name, one in own.items() if _is_state(one)}
        if self._looks == 1:
            self._first = {place: one for place, (_, one) in now.items()}
            return
        for place, (own, one) in now.items():
            if self._first.get(place, _ABSENT) is not one:
                self._changing[place] = own
        if self._looks == _LOOKS:
            self._first.clear()

    def put_back(self, backup: Backup, *, with_scale: bool = True, with_kept: bool = True) -> None:
        """Restore names, tensors and contents. Without `with_scale` the loss scale stays, as after an overflow."""
        for name, saved in backup.kept.items() if with_kept else ():
            restore_changed(self.kept[name], saved)
        kept = set() if with_scale else set(map(id, self._scale()))
        resized = {
            id(one): saved.clone()
            for one, shape, saved in zip(backup.live, backup.shapes, backup.copies, strict=True)
            if one.shape != shape
        }
        before = dict(backup.tables)
        for module in self._modules:
            table = module._buffers
            then = before.get(module, {})
            if table or then:
                table.clear()
                table.update({name: resized.get(id(one), one) for name, one in then.items()})
        in_place = [place for place, one in enumerate(backup.live) if id(one) not in resized.keys() | kept]
        copy_into([backup.live[place] for place in in_place], [backup.copies[place] for place in in_place])

    def let_go(self, backup: Backup) -> None:
        """Reuse the memory of a backup for the next one."""
        if backup.copies or backup.of_kept:
            self._spare.append(backup)

    @contextmanager
    def preserved(self, attributes: Attributes) -> Iterator[None]:
        """Begin with these attributes and an unscaled loss; at the end everything is as it was before."""
        before, own = self.take(), self.attributes()
        self.set_attributes(attributes)
        for one in self._scale()[:1]:
            one.fill_(1.0)
        try:
            yield
        finally:
            self.put_back(before)
            self.let_go(before)
            self.set_attributes(own)

    def _scale(self) -> list[torch.Tensor]:
        """The tensors of the loss scale, which RunState has made."""
        scaler: Any = self._scaler
        return [] if scaler is None else [scaler._scale, scaler._growth_tracker]


def _is_state(value: Any) -> bool:
    """Say whether an attribute of a module may be a part of its state. A tensor with a graph would keep that alive."""
    return type(value) in (int, float) or (isinstance(value, torch.Tensor) and not value.requires_grad)


class BufferWatch:
    """Makes the loss NaN as soon as a watched buffer is not finite. It watches those that a rewind had to restore."""

    def __init__(self, model: nn.Module) -> None:
        self._owned = [module._buffers for module in model.modules() if module._buffers]
        self._watched: set[tuple[int, str]] = set()  # the number of the module, and the name

    @contextmanager
    def across_rewind(self) -> Iterator[None]:
        """Watch the buffers that are not finite before a rewind and are after it. Waits for the device."""
        broken = {place for place, buffer in self._named() if not buffer.isfinite().all()}
        yield
        self._watched |= {place for place, buffer in self._named() if place in broken and buffer.isfinite().all()}

    def spoil(self, loss: Tensor) -> Tensor:
        """Return the loss as it is, or NaN if a watched buffer is not finite now; the microscope sees why."""
        for number, name in self._watched:
            if (buffer := self._owned[number].get(name)) is not None:
                loss = loss + (0 * buffer.detach()).sum().abs().to(loss)
        return loss

    def _named(self) -> Iterator[tuple[tuple[int, str], Tensor]]:
        """The buffers of a type that can be not finite; those of one byte cannot be computed with."""
        for number, own in enumerate(self._owned):
            for name, buffer in own.items():
                if buffer is None or buffer.layout is not torch.strided or buffer.element_size() == 1:
                    continue
                if buffer.is_floating_point() or buffer.is_complex():
                    yield (number, name), buffer
