"""Trees of tensors and plain values as two files: names, numbers and text, nothing that executes on loading.

`tensors.safetensors` holds the tensors and arrays, by number. `tree.json` holds the rest: null,
booleans, numbers (also NaN and Infinity), text and lists as themselves, and all else as an object with one of these:

    {"dict": [["lr", 0.1], [0, ...]]}   {"tuple": [...]}
    {"tensor": "0"}   {"tensor": "1", "order": [0, 2, 3, 1], "device": "cuda"}   {"tensor": "2", "numpy": "array"}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from resilient_train.core.tree import (
    Sharding,
    Share,
    Tree,
    is_sharded,
    original_device,
    put_together,
    sharding_of,
    taken_apart,
    with_home,
)
from resilient_train.data.trees import as_bytes, box_of
from resilient_train.ground.files import write_file

TENSORS, TREE = "tensors.safetensors", "tree.json"
NAMES = {  # of dtypes in safetensors, which holds no others
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.bool: "BOOL",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
}
_PIECE = 2**22  # bytes that are hashed and written at a time, without Python's lock


def chunks(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file, the widest types first; the library would hold the whole file in memory."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        data = as_bytes(tensors[name]).numpy().data
        for start in range(0, len(data), _PIECE):
            yield data[start : start + _PIECE]


Place = tuple[str | int, ...]  # the keys that lead to a node

_PLAIN = (type(None), bool, int, float, str)

_CPU = torch.device("cpu")


def load_tree(directory: Path, device: torch.device = _CPU) -> Tree:
    """Read what a SerializedTree wrote; ValueError says what is damaged. Those of an accelerator belong on `device`."""
    try:
        reading = _Reading(load_file(directory / TENSORS), device)
        tree = reading.node(json.loads((directory / TREE).read_text(encoding="utf-8")))
    except MemoryError:  # says nothing about the files
        raise
    except Exception as error:  # whatever damage leads to
        raise ValueError(f"{directory} is damaged: {' '.join(str(error).split())}") from error
    return tree


class SerializedTree:
    """A tree in the form in which it is written. TypeError names the path of a value that cannot be saved."""

    def __init__(self, tree: Tree) -> None:
        """Convert to JSON; tensors are not copied from their devices before `write`."""
        self._tensors: dict[str, torch.Tensor] = {}
        self._text = json.dumps(self._node(tree, ()))

    def write(self, directory: Path) -> dict[str, dict[str, Any]]:
        return {
            TENSORS: write_file(directory / TENSORS, chunks(self._tensors)),
            TREE: write_file(directory / TREE, [self._text.encode(), b"\n"]),
        }

    def _node(self, node: Tree, path: Place) -> Any:
        if type(node) in _PLAIN:
            return node
        if type(node) in (list, tuple):
            values = [self._node(value, (*path, number)) for number, value in enumerate(node)]
            return values if type(node) is list else {"tuple": values}
        if isinstance(node, dict):  # an OrderedDict, such as the state_dict of a module, is read back as a dict
            if odd := [key for key in node if type(key) not in (str, int)]:
                raise _unfit(path, f"has the key {odd[0]!r:.60}")
            return {"dict": [[key, self._node(value, (*path, key))] for key, value in node.items()]}
        if type(node) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return self._tensor(node, path)
        if type(node) is np.ndarray or isinstance(node, np.generic):
            try:
                tensor = torch.from_numpy(np.array(node))
            except TypeError as error:
                raise _unfit(path, f"is a numpy array of {node.dtype}") from error
            return self._tensor(tensor, path) | {"numpy": "array" if type(node) is np.ndarray else "scalar"}
        raise _unfit(path, f"is a {type(node).__module__}.{type(node).__qualname__}")

    def _tensor(self, tensor: torch.Tensor, path: Place) -> dict[str, Any]:
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in NAMES:
            raise _unfit(path, f"is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}")
        described: dict[str, Any] = {"tensor": str(len(self._tensors))}
        self._tensors[described["tensor"]] = tensor
        if (device := original_device(tensor).type) != "cpu":
            described["device"] = device
        if not tensor.is_contiguous():  # as in channels_last: the last bit of a sum may depend on the order of the axes
            order = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride()[axis])
            if tensor.permute(order).is_contiguous():
                described["order"] = order
        return described


class _Reading:
    """Turns JSON back into a tree; each tensor can be named only once."""

    def __init__(self, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
        self.tensors, self.device = tensors, device

    def node(self, node: Any) -> Tree:
        match node:
            case list():
                return [self.node(value) for value in node]
            case {"dict": list(items)}:
                return {key: self.node(value) for key, value in items}
            case {"tuple": list(values)}:
                return tuple(self.node(value) for value in values)
            case {"tensor": name, "numpy": kind}:
                array = self._tensor(name, node).numpy()
                return array if kind == "array" else array[()]
            case {"tensor": name}:
                return with_home(self._tensor(name, node), self.device if "device" in node else None)
            case dict():
                raise ValueError(f"it has an object it should not have, {node!r:.60}")
        return node

    def _tensor(self, name: str, node: dict[str, Any]) -> torch.Tensor:
        saved = self.tensors.pop(name)
        if (order := node.get("order")) is None:
            return saved
        inverse = [order.index(place) for place in range(saved.dim())]
        return saved.permute(order).contiguous().permute(inverse)


def _unfit(path: Place, what: str) -> TypeError:
    place = "".join(f"[{key!r}]" for key in path) or "the tree itself"
    return TypeError(f"{place} {what}: only tensors, numpy arrays, numbers, text and trees of them can be saved")


def reshard(saved: Tree, like: Any) -> Tree:
    """Shard the tensors of a loaded tree like those of this run at the same places with the same shape; all of a tree
    like the tensor that `like` has there.
    """
    if isinstance(saved, torch.Tensor):
        if not is_sharded(like) or like.shape != saved.shape:
            return saved
        sharding = sharding_of(like)
        local = saved[tuple(slice(*span) for span in box_of(sharding))].clone()
        return Share(with_home(local, getattr(saved, "home", None)), sharding)
    there = dict(enumerate(like)) if isinstance(like, list | tuple) else like

    def resharded(key: Any, value: Tree) -> Tree:
        return reshard(value, there.get(key) if isinstance(there, Mapping) else there)

    if isinstance(saved, dict):
        return {key: resharded(key, value) for key, value in saved.items()}
    if type(saved) in (list, tuple):
        return type(saved)(resharded(number, value) for number, value in enumerate(saved))
    return saved


def gathered(tree: Tree, *, keep: bool) -> Tree:
    """Return a tree with full tensors, on the host, for sharded ones; None there unless `keep`. All ranks call this."""

    def full(local: torch.Tensor, sharding: Sharding) -> torch.Tensor | None:
        home = original_device(local)
        tensor = sharding.joined(local.to(home)).full_tensor()
        return with_home(tensor.cpu(), home if home.type != "cpu" else None) if keep else None

    return put_together(*taken_apart(tree), full)
