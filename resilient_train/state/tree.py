"""Trees of tensors and plain values: copied, and hashed."""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

Tree = Any  # dict, list or tuple of trees; a leaf is a tensor, a numpy array or a plain value


def copied(tree: Tree) -> Tree:
    """Return a copy that shares nothing with `tree`; all its tensors are copied in one go."""
    copies, targets, sources = laid_out(tree, room=None, empty=torch.empty_like)
    copy_into(targets, sources)
    return copies


def laid_out(
    tree: Tree, *, room: Tree, empty: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Tree, list[torch.Tensor], list[torch.Tensor]]:
    """Lay out a copy of `tree` whose tensors are still to be filled: return it, its tensors, and what goes into them.

    Tensors of `room`, an older copy that nobody needs any more, are used again where they fit.
    """
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []

    def visit(node: Tree, old: Tree) -> Tree:
        if isinstance(node, torch.Tensor):
            source = node.detach()
            is_room = isinstance(old, torch.Tensor) and (old.shape, old.dtype) == (source.shape, source.dtype)
            targets.append(old if is_room else empty(source))
            sources.append(source)
            return targets[-1]
        if isinstance(node, dict):
            older = old if isinstance(old, dict) else {}
            return {key: visit(value, older.get(key)) for key, value in node.items()}
        if type(node) is tuple and _is_long_and_plain(node):
            return node
        if type(node) in (list, tuple):
            places = old if isinstance(old, list | tuple) and len(old) == len(node) else [None] * len(node)
            return type(node)(visit(value, one) for value, one in zip(node, places, strict=True))
        return node if isinstance(node, bool | int | float | str | None) else copy.deepcopy(node)

    return visit(tree, room), targets, sources


def pinned(source: torch.Tensor) -> torch.Tensor:
    """Make room for a tensor of an accelerator in the host's memory, and note where it belongs."""
    room = torch.empty_like(source, device="cpu", pin_memory=True)
    room.home = source.device  # type: ignore[attr-defined]
    return room


def home(tensor: torch.Tensor) -> torch.device:
    """Where the original of a copy is."""
    return getattr(tensor, "home", tensor.device)


def nbytes(tree: Tree) -> int:
    """Count the bytes that the tensors of a tree hold."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in _leaves(tree) if isinstance(leaf, torch.Tensor))


@torch.no_grad()
def copy_into(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Overwrite `targets` with `sources`: one call for many tensors, at the price of a plain memory copy."""
    if targets:
        torch._foreach_copy_(targets, sources)


def sha256(tree: Tree) -> str:
    """Hash names, types, shapes and bytes of everything in the tree; equal digests mean equal to the last bit."""
    digest = hashlib.sha256()
    for path, leaf in _leaves(tree):
        digest.update(f"{path}\0".encode())
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}\0".encode())
            flat = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
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
    return isinstance(node, list | tuple) and len(node) > 64 and all(isinstance(value, int) for value in node)
