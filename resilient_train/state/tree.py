"""Trees of tensors and plain values: copied, and hashed."""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

Tree = Any  # dict, list or tuple of trees; a leaf is a tensor, a numpy array or a plain value


def copied(tree: Tree) -> Tree:
    """Return a copy that shares nothing with `tree`; all its tensors are copied in one go."""
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []

    def visit(node: Tree) -> Tree:
        if isinstance(node, torch.Tensor):
            source = node.detach()
            sources.append(source)
            targets.append(torch.empty_like(source))
            return targets[-1]
        if isinstance(node, dict):
            return {key: visit(value) for key, value in node.items()}
        if type(node) is tuple and _is_long_and_plain(node):
            return node
        if type(node) in (list, tuple):
            return type(node)(visit(value) for value in node)
        return copy.deepcopy(node)

    tree = visit(tree)
    copy_into(targets, sources)
    return tree


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
            flat = leaf.detach().cpu().contiguous().reshape(-1)
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
