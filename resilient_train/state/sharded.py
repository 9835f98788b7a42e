"""Tensors that are sharded over ranks: the part that this process holds, and its place in the full tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import torch

Box = tuple[tuple[int, int], ...]  # a part of a tensor: (start, stop) along each axis


class Sharding(NamedTuple):
    """How a tensor is distributed over the ranks."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def box(self) -> Box:
        """The part of the full tensor that this rank holds."""
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
    """A copy of this rank's part of a tensor."""

    local: torch.Tensor
    sharding: Sharding

    @property
    def shape(self) -> torch.Size:
        return self.sharding.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype


@dataclass(frozen=True, slots=True)
class UnreadTensor:
    """A tensor in files that each hold a part of it: only the parts that are needed are read, when they are needed."""

    shape: torch.Size
    dtype: torch.dtype
    home: torch.device | None  # where the original was, if not in the host's memory
    pieces: list[tuple[Box, Callable[[Box], torch.Tensor]]]  # each with a function that reads a box within the piece

    def read(self, box: Box) -> torch.Tensor:
        """Read a part of the full tensor."""
        tensor = torch.empty([stop - start for start, stop in box], dtype=self.dtype)
        for there, read in self.pieces:
            if (common := _overlap(box, there)) is not None:
                tensor[_slices(_relative(common, box))] = read(_relative(common, there))
        return with_home(tensor, self.home)


def with_home(copy: torch.Tensor, home: torch.device | None) -> torch.Tensor:
    """Note on a copy in the host's memory on which device its original is; None: nothing to note."""
    if home is not None:
        copy.home = home  # type: ignore[attr-defined]
    return copy


def original_device(tensor: torch.Tensor) -> torch.device:
    """The device of the original, if `tensor` is a copy of one; else its own."""
    return getattr(tensor, "home", tensor.device)


def is_sharded(tensor: Any) -> bool:
    """Say whether this rank holds only a part of a tensor. Does not import torch.distributed.tensor."""
    return hasattr(tensor, "to_local")


def own_class(module: torch.nn.Module) -> type:
    """The class of a module before `fully_shard` gave it a class derived from that one."""
    made = {one for one in type(module).__mro__ if any(base.__name__ == "FSDPModule" for base in one.__mro__)}
    return next(one for one in type(module).__mro__ if one not in made)


def sharding_of(tensor: Any) -> Sharding:
    """How a Share, or a tensor that `is_sharded`, is distributed."""
    if isinstance(tensor, Share):
        return tensor.sharding
    return Sharding(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tuple(tensor.stride()))


def largest_share(tensor: torch.Tensor) -> int:
    """The most elements of a tensor that any rank holds: the same number on all ranks."""
    if not is_sharded(tensor):
        return tensor.numel()
    sharding = sharding_of(tensor)
    sizes = list(sharding.shape)
    for ranks, placement in zip(sharding.mesh.shape, sharding.placements, strict=True):
        if placement.is_shard():
            sizes[placement.dim] = -(-sizes[placement.dim] // ranks)
    return math.prod(sizes)


def local_part(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor, in the tensor's own memory."""
    if isinstance(tensor, Share):
        return tensor.local
    if not is_sharded(tensor):
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():
        return tensor.detach().to_local()  # type: ignore[no-any-return]


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor from all ranks, each of which has to call this."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.detach().full_tensor()  # type: ignore[attr-defined,no-any-return]


def reshard(saved: torch.Tensor | UnreadTensor, like: Any) -> Any:
    """Shard a loaded tensor like `like`, a tensor of this run; where that is not sharded, return the full tensor."""
    sharding = sharding_of(like) if is_sharded(like) else None
    box = tuple((0, size) for size in saved.shape) if sharding is None else sharding.box()
    if isinstance(saved, UnreadTensor):
        local = saved.read(box)
    elif sharding is None:
        return saved
    else:
        local = with_home(saved[_slices(box)].clone(), getattr(saved, "home", None))
    return local if sharding is None else Share(local, sharding)


def covers(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Say whether boxes make up the full tensor, with nothing missing, nothing twice and nothing outside."""
    for box in boxes:
        if len(box) != len(shape) or not all(
            0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)
        ):
            return False
    sizes = {box: math.prod(stop - start for start, stop in box) for box in boxes}
    full = sorted(box for box in boxes if sizes[box])
    if sum(sizes[box] for box in full) != math.prod(shape):
        return False
    if len({box[1:] for box in full}) <= 1:  # cut along the first axis, as usual: there may be thousands of ranks
        return all(one[0][1] <= other[0][0] for one, other in pairwise(full))
    return all(_overlap(one, other) is None for one, other in combinations(full, 2))


def _overlap(one: Box, other: Box) -> Box | None:
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _relative(box: Box, origin: Box) -> Box:
    return tuple((start - at, stop - at) for (start, stop), (at, _) in zip(box, origin, strict=True))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in box)
