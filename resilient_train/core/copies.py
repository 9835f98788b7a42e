"""Copies of tensors: into a snapshot; of buffers and what is kept, as it was."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from resilient_train.core.tree import Tree, copy_into, fits, to_original_device, with_home

_BIG = 2**16  # bytes: smaller tensors are not worth copying on another stream


def room(sources: list[torch.Tensor], old: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return memory for copies of `sources`: tensors of `old`, which are no longer used, where they fit."""
    return [
        one if one is not None and fits(one, source) else torch.empty_like(source)
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

    def copied(self, sources: list[torch.Tensor], trained: int) -> list[torch.Tensor]:
        """Return copies; only optimizers change the first `trained` of the sources."""
        targets = [self._empty(one) for one in sources]
        if self._stream is None:
            copy_into(targets, sources)
            return targets
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
        return targets

    def _empty(self, source: torch.Tensor) -> torch.Tensor:
        if self._stream is None or not source.is_cuda:
            return torch.empty_like(source)
        pinned = torch.empty_like(source, device="cpu", pin_memory=True)  # torch keeps pinned memory, to use it again
        return with_home(pinned, source.device)

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


def digests_of_frozen(weights: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Sum up the bits of each frozen weight: the usual `target.data.mul_(0.99)` does not increase a version. Waits for
    the device, if there are any. Sparse tensors have none, nor have classes that hide where their bits are.
    """
    frozen = {name: one.detach() for name, one in weights.items() if not one.requires_grad}
    plain = {name: one for name, one in frozen.items() if type(one) is torch.Tensor and one.layout is torch.strided}
    sums = [_digest(one) for one in plain.values()]
    return dict(zip(plain, torch.stack([one.to(sums[0].device) for one in sums]).tolist() if sums else [], strict=True))


def _digest(weight: torch.Tensor) -> torch.Tensor:
    """Sum a tensor as integers of eight bytes, ten times faster than of four, and the bytes left over."""
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
