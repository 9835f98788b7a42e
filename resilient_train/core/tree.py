"""Trees of tensors and plain values: rebuilt, copied, and hashed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

Tree = Any  # dict, list or tuple of trees; a leaf is a tensor, a numpy array or scalar, or a plain value

_PLAIN = frozenset({type(None), bool, int, float, str})


class Sharding(NamedTuple):
    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def joined(self, local: torch.Tensor) -> Any:
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


def with_home(copy: torch.Tensor, home: torch.device | None) -> torch.Tensor:
    """Note on a copy in the host's memory on which device its original is; None: nothing to note."""
    if home is not None:
        copy.home = home  # type: ignore[attr-defined]
    return copy


def original_device(tensor: torch.Tensor) -> torch.device:
    return getattr(tensor, "home", tensor.device)


def is_sharded(tensor: Any) -> bool:
    """Say whether this rank holds only a part of a tensor. Does not import torch.distributed.tensor."""
    return hasattr(tensor, "to_local")


def sharding_of(tensor: Any) -> Sharding:
    if isinstance(tensor, Share):
        return tensor.sharding
    return Sharding(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tuple(tensor.stride()))


def local_part(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor, in the tensor's own memory."""
    if isinstance(tensor, Share):
        return tensor.local
    if not is_sharded(tensor):
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():
        return tensor.detach().to_local()  # type: ignore[no-any-return]


class _Hole(NamedTuple):
    """Takes the place of a tensor, and knows how that was sharded."""

    sharding: Sharding | None


def with_dicts(tree: Any) -> Any:
    """Replace each mapping that pytree takes for a leaf, such as a UserDict, by a dict: batches of transformers are."""
    return tree_map(lambda leaf: with_dicts(dict(leaf)) if isinstance(leaf, Mapping) else leaf, tree)


def leaves(tree: Any) -> list[Any]:
    """Flatten a batch, or a row, of any shape that pytree knows: registered dataclasses, too."""
    parts = list(tree.values()) if type(tree) is dict else tree if type(tree) in (list, tuple) else [tree]
    if all(type(one) is torch.Tensor for one in parts):  # usually: pytree takes ten times as long
        return list(parts)
    found = tree_leaves(tree)
    return tree_leaves(with_dicts(tree)) if any(isinstance(leaf, Mapping) for leaf in found) else found


def to_original_device(tree: Tree) -> Tree:
    """Return a copy whose tensors are on the devices of the originals: a snapshot may be in the host's memory."""
    plain, sources = taken_apart(tree)
    targets = [torch.empty_like(source, device=original_device(source)) for source in sources]
    copy_into(targets, sources)
    return put_together(plain, targets, lambda local, sharding: sharding.joined(local))


def taken_apart(tree: Tree) -> tuple[Tree, list[torch.Tensor]]:
    """Split a tree into a copy of its plain values and its tensors, not copied; of sharded ones, local parts."""
    tensors: list[torch.Tensor] = []

    def visit(node: Tree) -> Tree:  # by hand: pytree takes seven times as long, and this is done for every snapshot
        kind = type(node)
        if kind in _PLAIN or (kind is tuple and is_long_and_plain(node)):
            return node
        if isinstance(node, torch.Tensor) or kind is Share:
            tensors.append(local_part(node))
            return _Hole(sharding_of(node) if kind is Share or is_sharded(node) else None)
        if isinstance(node, dict):
            return {key: visit(value) for key, value in node.items()}
        if kind is list or kind is tuple:
            return kind(visit(value) for value in node)
        return copy.deepcopy(node)

    return visit(tree), tensors


def put_together(
    plain: Tree, tensors: Iterable[torch.Tensor], joined: Callable[[torch.Tensor, Sharding], Any] = Share
) -> Tree:
    """Undo `taken_apart`, with other tensors: `joined` makes one that was sharded from this rank's part."""
    following = iter(tensors)

    def visit(node: Tree) -> Tree:
        kind = type(node)
        if kind is _Hole:
            tensor = next(following)
            return tensor if node.sharding is None else joined(tensor, node.sharding)
        if kind is dict:
            return {key: visit(value) for key, value in node.items()}
        if (kind is list or kind is tuple) and not is_long_and_plain(node):
            return kind(visit(value) for value in node)
        return node

    return visit(plain)


def fits(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (copy.shape, copy.dtype, original_device(copy)) == (tensor.shape, tensor.dtype, tensor.device)


@torch.no_grad()
def copy_into(targets: list[torch.Tensor], sources: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Overwrite `targets` with `sources`: one call for many tensors, which costs no more than a plain memory copy."""
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def is_long_and_plain(node: Tree) -> bool:
    """Python's generator state is 625 integers: one leaf."""
    return isinstance(node, list | tuple) and len(node) > 64 and {*map(type, node)} <= {int, bool}
