"""Copies of tensors: into a snapshot, of frozen weights for all snapshots; of buffers and what is kept, as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from resilient_train.core.tree import Tree, copy_into, fits, to_original_device, with_home

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
    """Copies the state into a snapshot, with CUDA into pinned host memory. Large tensors that only an optimizer
    changes are copied on a second stream in the next forward, all others first.
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
    """Knows the newest copy of each frozen weight: as long as the weight stays as it was, all snapshots share that."""

    def __init__(self) -> None:
        self._now: dict[str, tuple[Any, ...]] = {}  # shape and digest by name, at the last look
        self._copies: dict[str, tuple[tuple[Any, ...], torch.Tensor]] = {}  # and of what was copied

    def unchanged(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the copies of those weights that are as they were.

        The contents decide: the usual `target.data.mul_(0.99)` does not increase a version. Reading the digests waits
        for the device, once for each snapshot, if there are frozen weights.
        """
        frozen = {name: one for name, one in weights.items() if not one.requires_grad and _has_digest(one)}
        digests = [_digest(one.detach()) for one in frozen.values()]
        read = torch.stack([one.to(digests[0].device) for one in digests]).tolist() if digests else []
        pairs = zip(frozen.items(), read, strict=True)
        self._now = {name: (weight.shape, weight.dtype, digest) for (name, weight), digest in pairs}
        return {name: copy for name, (then, copy) in self._copies.items() if self._now.get(name) == then}

    def copied(self, copies: Mapping[str, torch.Tensor]) -> None:
        """Note the copies of what the weights were at the last look."""
        self._copies = {name: (now, copies[name]) for name, now in self._now.items()}


def _has_digest(weight: torch.Tensor) -> bool:
    """Whether its bits can be read as integers of eight bytes; one of another kind is copied each time."""
    is_plain = type(weight.detach()) is torch.Tensor and weight.layout is torch.strided and weight.is_contiguous()
    return is_plain and not weight.nbytes % 8 and not weight.storage_offset() * weight.element_size() % 8


def _digest(weight: torch.Tensor) -> torch.Tensor:
    return weight.reshape(-1).view(torch.int64).sum()


class Stateful(Protocol):
    """Anything with a state that can be saved and restored: a schedule, a cursor, an object of the user's."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


def restore_item(item: Stateful, saved: Tree) -> None:
    """Restore a state that was copied or read: the item gets a copy of its own, in the classes of its present state."""
    item.load_state_dict(_in_classes_of(item.state_dict(), to_original_device(saved)))
    if isinstance(item, LRScheduler):  # it knows the rates that it has set, and leaves them as they are now
        for group, rate in zip(item.optimizer.param_groups, item.get_last_lr(), strict=False):
            group["lr"] = rate


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
