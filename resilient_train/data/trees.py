"""Trees of tensors and plain values: rebuilt with other leaves, in a fixed order, and hashed."""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from resilient_train.core.state import RunState
from resilient_train.core.tree import Sharding, Tree, is_long_and_plain, is_sharded, taken_apart


def nbytes(tree: Tree) -> int:
    return sum(tensor.nbytes for tensor in taken_apart(tree)[1])


def box_of(sharding: Sharding) -> tuple[tuple[int, int], ...]:
    """Return the part of a full tensor that this rank holds: from where to where along each axis."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(sharding.shape, sharding.mesh, sharding.placements)
    return tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))


def weights_sha256(state: RunState) -> str:
    """Hash the trainable weights: tied ones once, each under its first name and in its own dtype. All ranks call it."""
    return sha256({name: weight for name, weight in state.model.named_parameters() if weight.requires_grad})


def state_sha256(state: RunState) -> str:
    return sha256(state.live())


def rebuilt(tree: Any, change: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """Return a tree in new containers of its classes, each leaf as `change` returns it: ten times as fast as pytree."""
    if isinstance(tree, MutableMapping | list):
        twin: Any = copy.copy(tree)
        for key, value in list(tree.items() if isinstance(tree, MutableMapping) else enumerate(tree)):
            if (new := rebuilt(value, change)) is not value:
                twin[key] = new
        return twin
    if isinstance(tree, tuple):
        values = [rebuilt(value, change) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    return change(tree)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in the host's memory as a flat tensor of bytes; copied only where necessary."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if flat.stride() != (1,):  # a single element counts as contiguous whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def sha256(tree: Tree) -> str:
    """Hash names, types, shapes and bytes of everything in a tree. All ranks call this for sharded tensors."""
    digest = hashlib.sha256()
    for path, leaf in sorted_leaves(tree):
        digest.update(f"{path}\0".encode())
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}\0".encode())
            tensor = leaf.detach().full_tensor() if is_sharded(leaf) else leaf  # type: ignore[attr-defined]
            digest.update(as_bytes(tensor).numpy().data)
        elif isinstance(leaf, np.ndarray):
            digest.update(f"{leaf.dtype}{leaf.shape}\0".encode())
            digest.update(np.ascontiguousarray(leaf).data)
        elif leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes) or is_long_and_plain(leaf):
            digest.update(repr(leaf).encode() + b"\0")
        else:  # a pickle, because the text of other objects often shows an address
            digest.update(pickle.dumps(leaf) + b"\0")
    return digest.hexdigest()


def sorted_leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of a tree after its path, in an order that does not depend on that of the keys."""
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from sorted_leaves(tree[key], f"{path}/{key}")
    elif isinstance(tree, list | tuple) and not is_long_and_plain(tree):
        for number, value in enumerate(tree):
            yield from sorted_leaves(value, f"{path}/{number}")
    else:
        yield path, tree
