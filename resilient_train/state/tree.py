"""Trees of tensors and plain values: copied, and hashed."""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from resilient_train.state.sharded import Sharding, Share, full_tensor, is_sharded, local_part, sharding_of

Tree = Any  # dict, list or tuple of trees; a leaf is a tensor, a numpy array or a plain value

_PLAIN = frozenset({type(None), bool, int, float, str})
_HOLE = object()  # where a tensor was


class _ShardingHole:
    """Where a tensor was of which this rank holds a share."""

    def __init__(self, spread: Sharding) -> None:
        self.spread = spread

    def __deepcopy__(self, memo: Any) -> _ShardingHole:
        return self


def copied(tree: Tree) -> Tree:
    """Return a copy that shares nothing with `tree`; all its tensors are copied in one go.

    Of a tensor that is spread over ranks it holds a Share.
    """
    return _copied(tree, torch.empty_like, Share)


def to_original_device(tree: Tree) -> Tree:
    """Return a copy whose tensors lie where the originals did: a snapshot may lie in the host's memory."""
    return _copied(
        tree,
        lambda source: torch.empty_like(source, device=original_device(source)),
        lambda local, spread: spread.joined(local),
    )


def _copied(
    tree: Tree, empty: Callable[[torch.Tensor], torch.Tensor], joined: Callable[[torch.Tensor, Sharding], Any]
) -> Tree:
    plain, sources = taken_apart(tree)
    targets = [empty(source) for source in sources]
    copy_into(targets, sources)
    return put_together(plain, targets, joined)


def taken_apart(tree: Tree) -> tuple[Tree, list[torch.Tensor]]:
    """Part a tree into a copy of its plain values and the list of its tensors, which are not copied.

    Of tensors that are spread over ranks the list has what this rank holds.
    """
    tensors: list[torch.Tensor] = []

    def visit(node: Tree) -> Tree:
        kind = type(node)
        if kind in _PLAIN:
            return node
        if isinstance(node, torch.Tensor):
            tensors.append(local_part(node))
            return _ShardingHole(sharding_of(node)) if is_sharded(node) else _HOLE
        if kind is Share:
            tensors.append(node.local)
            return _ShardingHole(node.spread)
        if isinstance(node, dict):
            return {key: visit(value) for key, value in node.items()}
        if kind is tuple and _is_long_and_plain(node):
            return node
        if kind is list or kind is tuple:
            return kind(visit(value) for value in node)
        return copy.deepcopy(node)

    return visit(tree), tensors


def put_together(
    plain: Tree, tensors: Iterable[torch.Tensor], joined: Callable[[torch.Tensor, Sharding], Any] = Share
) -> Tree:
    """Make one tree of what was taken apart, with `tensors` in the place of the ones it had."""
    following = iter(tensors)

    def visit(node: Tree) -> Tree:
        kind = type(node)
        if kind is dict:
            return {key: visit(value) for key, value in node.items()}
        if kind is list or (kind is tuple and not _is_long_and_plain(node)):
            return kind(visit(value) for value in node)
        if kind is _ShardingHole:
            return joined(next(following), node.spread)
        return next(following) if node is _HOLE else node

    return visit(plain)


def pinned(source: torch.Tensor) -> torch.Tensor:
    """Make room for a tensor of an accelerator in the host's memory, and note where it belongs."""
    room = torch.empty_like(source, device="cpu", pin_memory=True)
    room.home = source.device  # type: ignore[attr-defined]
    return room


def original_device(tensor: torch.Tensor) -> torch.device:
    """Where the original of a copy is."""
    return getattr(tensor, "home", tensor.device)


def nbytes(tree: Tree) -> int:
    """Count the bytes that the tensors of a tree hold."""
    return sum(tensor.nbytes for tensor in taken_apart(tree)[1])


@torch.no_grad()
def copy_into(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Overwrite `targets` with `sources`: one call for many tensors, at the price of a plain memory copy."""
    if targets:
        torch._foreach_copy_(targets, sources)


def with_dicts(tree: Any) -> Any:
    """Put a dict for each mapping that torch takes for one leaf, as it does any UserDict: transformers' batches are."""
    if not any(isinstance(leaf, Mapping) for leaf in tree_leaves(tree)):
        return tree
    return tree_map(lambda leaf: with_dicts(dict(leaf)) if isinstance(leaf, Mapping) else leaf, tree)


def leaves(tree: Any) -> list[Any]:
    """Flatten a batch, or a row, of any shape."""
    return tree_leaves(with_dicts(tree))


def sha256(tree: Tree) -> str:
    """Hash names, types, shapes and bytes of everything in the tree; equal digests mean equal to the last bit.

    What is spread over ranks is gathered, tensor by tensor: all of them have to ask.
    """
    digest = hashlib.sha256()
    for path, leaf in _leaves(tree):
        digest.update(f"{path}\0".encode())
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}\0".encode())
            flat = full_tensor(leaf).detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            if flat.stride() != (1,):  # a single element counts as contiguous whatever its stride
                flat = flat.clone(memory_format=torch.contiguous_format)
            digest.update(flat.view(torch.uint8).numpy().data)
        elif isinstance(leaf, np.ndarray):
            digest.update(f"{leaf.dtype}{leaf.shape}\0".encode())
            digest.update(np.ascontiguousarray(leaf).data)
        else:
            digest.update(_bytes(leaf) + b"\0")
    return digest.hexdigest()


def _bytes(leaf: Any) -> bytes:
    """A plain value as it is written; of other objects a pickle, because their text often shows an address."""
    if leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes) or _is_long_and_plain(leaf):
        return repr(leaf).encode()
    return pickle.dumps(leaf)


def _leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from _leaves(tree[key], f"{path}/{key}")
    elif isinstance(tree, list | tuple) and not _is_long_and_plain(tree):
        for number, value in enumerate(tree):
            yield from _leaves(value, f"{path}/{number}")
    else:
        yield path, tree


def _is_long_and_plain(node: Tree) -> bool:
    """Python's generator state is 625 whole numbers: one leaf."""
    return isinstance(node, list | tuple) and len(node) > 64 and {*map(type, node)} <= {int, bool}
