"""Tensors that are spread over ranks: the share of each that this process holds, and where it lies in the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

Box = tuple[tuple[int, int], ...]  # of a tensor, along each of its axes: from, to


class Sharding(NamedTuple):
    """How a tensor is dealt out over the ranks."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def box(self) -> Box:
        """What of the whole this rank holds."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        sizes, offsets = compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)
        return tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))

    def joined(self, local: torch.Tensor) -> torch.Tensor:
        """Make this rank's share a part of the whole again."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A copy of what this rank holds of a tensor."""

    local: torch.Tensor
    spread: Sharding

    @property
    def shape(self) -> torch.Size:
        return self.spread.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype


class Whole(Protocol):
    """A tensor that is not here yet: of a checkpoint that each of several ranks has written its share of."""

    shape: torch.Size
    dtype: torch.dtype

    def read(self, box: Box) -> torch.Tensor:
        """Read a part of it."""


def is_sharded(tensor: Any) -> bool:
    """Say whether this rank holds a share of it only. Asked without loading what makes such tensors."""
    return hasattr(tensor, "to_local")


def own_class(module: torch.nn.Module) -> type:
    """The class that a module was written as: `fully_shard` gives it another one, made from that."""
    made = {one for one in type(module).__mro__ if any(base.__name__ == "FSDPModule" for base in one.__mro__)}
    return next(one for one in type(module).__mro__ if one not in made)


def sharding_of(tensor: Any) -> Sharding:
    """How a tensor that `is_sharded` is dealt out."""
    return Sharding(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tuple(tensor.stride()))


def largest_share(tensor: torch.Tensor) -> int:
    """How many numbers of a tensor a rank holds at most: the same on all of them, also where the last has fewer."""
    if not is_sharded(tensor):
        return tensor.numel()
    spread = sharding_of(tensor)
    sizes = list(spread.shape)
    for ranks, placement in zip(spread.mesh.shape, spread.placements, strict=True):
        if placement.is_shard():
            sizes[placement.dim] = -(-sizes[placement.dim] // ranks)
    return math.prod(sizes)


def local_part(tensor: Any) -> torch.Tensor:
    """The numbers that this rank holds itself, in the tensor's own memory."""
    if isinstance(tensor, Share):
        return tensor.local
    if not is_sharded(tensor):
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():
        return tensor.detach().to_local()  # type: ignore[no-any-return]


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, gathered from all ranks, each of which has to ask."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.detach().full_tensor()  # type: ignore[attr-defined,no-any-return]


def reshard(saved: torch.Tensor | Whole, like: Any) -> Any:
    """Give a tensor from outside the form of one of this run, be that spread over other ranks or over none."""
    if like is None or not is_sharded(like):
        return saved if isinstance(saved, torch.Tensor) else saved.read(_everything(saved.shape))
    spread = sharding_of(like)
    box = spread.box()
    if not isinstance(saved, torch.Tensor):
        return Share(saved.read(box), spread)
    local = saved[tuple(slice(*span) for span in box)].clone()
    if (home := getattr(saved, "home", None)) is not None:
        local.home = home  # type: ignore[attr-defined]
    return Share(local, spread)


def assembled(box: Box, pieces: Sequence[tuple[Box, Callable[[Box], torch.Tensor]]], empty: torch.Tensor) -> None:
    """Fill `empty`, which is to hold `box` of the whole, from pieces that hold other boxes of it."""
    for there, read in pieces:
        shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, there, strict=True))
        if all(start < end for start, end in shared):
            empty[_within(shared, box)] = read(tuple(_moved(shared, there)))


def covers(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Say whether boxes make up the whole, with nothing missing, nothing twice and nothing outside."""
    for box in boxes:
        if len(box) != len(shape) or not all(
            0 <= start <= end <= size for (start, end), size in zip(box, shape, strict=True)
        ):
            return False
    full = sorted(box for box in boxes if _count(box))
    if sum(map(_count, full)) != _count(_everything(shape)):
        return False
    if len({tuple(box[1:]) for box in full}) <= 1:  # cut along the first axis, as a rule: thousands of ranks may be
        return all(one[0][1] <= other[0][0] for one, other in pairwise(full)) or len(full) < 2
    return all(not _overlap(one, other) for at, one in enumerate(full) for other in full[:at])


def _everything(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def _count(box: Box) -> int:
    return math.prod(end - start for start, end in box)


def _overlap(one: Box, other: Box) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))


def _moved(box: Box, origin: Box) -> list[tuple[int, int]]:
    return [(start - at, end - at) for (start, end), (at, _) in zip(box, origin, strict=True)]


def _within(box: Box, origin: Box) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in _moved(box, origin))
