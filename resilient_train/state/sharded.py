"""Tensors that are sharded over ranks: the part of each that this process holds, and where it lies in the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, NamedTuple, Protocol

import torch

Box = tuple[tuple[int, int], ...]  # of a tensor, along each of its axes: from, to


class Sharding(NamedTuple):
    """How a tensor is distributed over the ranks."""

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
        """Return the DTensor of which `local` is this rank's part."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A copy of what this rank holds of a tensor."""

    local: torch.Tensor
    sharding: Sharding

    @property
    def shape(self) -> torch.Size:
        return self.sharding.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype


class Unread(Protocol):
    """A tensor in a checkpoint that several ranks have written, each its own part; not read yet."""

    shape: torch.Size
    dtype: torch.dtype

    def read(self, box: Box) -> torch.Tensor:
        """Read a part of it."""


def is_sharded(tensor: Any) -> bool:
    """Say whether this rank holds a part of it only. Does not import torch.distributed.tensor."""
    return hasattr(tensor, "to_local")


def own_class(module: torch.nn.Module) -> type:
    """The class that a module was written as: `fully_shard` gives it another one, made from that."""
    made = {one for one in type(module).__mro__ if any(base.__name__ == "FSDPModule" for base in one.__mro__)}
    return next(one for one in type(module).__mro__ if one not in made)


def sharding_of(tensor: Any) -> Sharding:
    """How a Share, or a tensor that `is_sharded`, is distributed."""
    if isinstance(tensor, Share):
        return tensor.sharding
    return Sharding(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tuple(tensor.stride()))


def largest_share(tensor: torch.Tensor) -> int:
    """How many numbers of a tensor a rank holds at most: the same on all of them, also where the last has fewer."""
    if not is_sharded(tensor):
        return tensor.numel()
    sharding = sharding_of(tensor)
    sizes = list(sharding.shape)
    for ranks, placement in zip(sharding.mesh.shape, sharding.placements, strict=True):
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
    """All of a tensor, gathered from all ranks, each of which has to call this."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.detach().full_tensor()  # type: ignore[attr-defined,no-any-return]


def reshard(saved: torch.Tensor | Unread, like: Any) -> Any:
    """Shard a loaded tensor as one of this run is, over other ranks than it was or over none."""
    if like is None or not is_sharded(like):
        return saved if isinstance(saved, torch.Tensor) else saved.read(tuple((0, size) for size in saved.shape))
    sharding = sharding_of(like)
    box = sharding.box()
    if not isinstance(saved, torch.Tensor):
        return Share(saved.read(box), sharding)
    local = saved[_slices(box)].clone()
    if (home := getattr(saved, "home", None)) is not None:
        local.home = home  # type: ignore[attr-defined]
    return Share(local, sharding)


def assembled(box: Box, pieces: Sequence[tuple[Box, Callable[[Box], torch.Tensor]]], empty: torch.Tensor) -> None:
    """Fill `empty`, which is to hold `box` of the whole, from pieces that hold other boxes of it."""
    for there, read in pieces:
        if (shared := _overlap(box, there)) is not None:
            empty[_slices(_relative(shared, box))] = read(_relative(shared, there))


def covers(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Say whether boxes make up the whole, with nothing missing, nothing twice and nothing outside."""
    for box in boxes:
        if len(box) != len(shape) or not all(
            0 <= start <= end <= size for (start, end), size in zip(box, shape, strict=True)
        ):
            return False
    sizes = {box: math.prod(end - start for start, end in box) for box in boxes}
    full = sorted(box for box in boxes if sizes[box])
    if sum(sizes[box] for box in full) != math.prod(shape):
        return False
    if len({box[1:] for box in full}) <= 1:  # cut along the first axis, as a rule: there may be thousands of ranks
        return all(one[0][1] <= other[0][0] for one, other in pairwise(full))
    return all(_overlap(one, other) is None for one, other in combinations(full, 2))


def _overlap(one: Box, other: Box) -> Box | None:
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(start < end for start, end in shared) else None


def _relative(box: Box, origin: Box) -> Box:
    return tuple((start - at, end - at) for (start, end), (at, _) in zip(box, origin, strict=True))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in box)
