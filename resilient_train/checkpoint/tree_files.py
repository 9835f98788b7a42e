"""Trees of tensors and plain values as two files: names, numbers and text, nothing that executes on loading.

`tensors.safetensors` holds the tensors and arrays, named by their paths in the tree. `tree.json` holds the rest: null,
booleans, integers, finite floats, text and lists as themselves, and all else as an object with one of these keys:

    {"dict": {"lr": 0.1}}   {"items": [[0, ...], ["a", ...]]}   {"tuple": [...]}   {"float": "nan"}   {"bytes": "AAE="}
    {"tensor": "weights/head.bias", "dtype": "float32", "shape": [10]}   {"array": "random", ...}
    {"spread": "weights/head.weight", "dtype": "float32", "shape": [10, 64]}   a tensor in the ranks' shares
"""

from __future__ import annotations

import base64
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from resilient_train.checkpoint.safetensors_files import NAMES, Part, chunks, parts_in_shares
from resilient_train.files import Written, write_file
from resilient_train.state.sharded import (
    Share,
    UnreadTensor,
    covers,
    is_sharded,
    local_part,
    original_device,
    with_home,
)
from resilient_train.state.tree import as_bytes

TENSORS, TREE = "tensors.safetensors", "tree.json"

Tree = Any  # dict, list or tuple of trees; a leaf is a tensor, a numpy array or scalar, or a plain value
Place = tuple[str | int, ...]  # the keys that lead to a node

_PLAIN = (type(None), bool, int, str)

# Other dtypes (complex, float8 and future ones) are written as their bytes.
_COMMON = NAMES.keys() - {torch.float8_e4m3fn, torch.float8_e5m2}
_NAMES = {one: str(one).removeprefix("torch.") for one in vars(torch).values() if isinstance(one, torch.dtype)}
_DTYPES = {name: one for one, name in _NAMES.items() if re.match("bool|u?int|b?float|complex", name)}  # none quantized
_ARRAY_DTYPE = re.compile(r"[<>|][biufcSU][1-9]\d{0,8}")  # no objects, no structures

_CPU = torch.device("cpu")


def load_tree(directory: Path, device: torch.device = _CPU) -> Tree:
    """Read what a SerializedTree wrote; ValueError says in one line what is damaged.

    Tensors are read into the host's memory; for those that were on an accelerator, `device` is noted as their home.
    Sharded ones become UnreadTensors. Tensors that shared memory no longer do.
    """
    try:
        tensors, shares = load_file(directory / TENSORS), parts_in_shares(directory)
        text = (directory / TREE).read_text(encoding="utf-8")
        tree = _Reading(tensors, shares, device).node(json.loads(text, object_pairs_hook=_without_repeated_keys))
        if unused := sorted([*tensors, *shares]):
            raise ValueError(f"{TREE} has no place for {unused[0]:.120}")
    except (FileNotFoundError, SafetensorError, ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{directory} is damaged: {' '.join(str(error).split())}") from error
    return tree


class SerializedTree:
    """A tree in the form in which it is written. TypeError names the path of a value that cannot be saved."""

    def __init__(self, tree: Tree) -> None:
        """Convert to JSON; tensors are not copied from their devices before `write`."""
        self._tensors: dict[str, torch.Tensor] = {}
        self.sharded: dict[str, Any] = {}  # by names that are the same on all ranks
        self._text = json.dumps(self._node(tree, ()), allow_nan=False)

    def write(self, directory: Path) -> dict[str, Written]:
        """Write all but the sharded tensors to files in an existing directory, and sync them."""
        tensors = {name: one if one.dtype in _COMMON else as_bytes(one) for name, one in self._tensors.items()}
        return {
            TENSORS: write_file(directory / TENSORS, chunks(tensors)),
            TREE: write_file(directory / TREE, [self._text.encode(), b"\n"]),
        }

    def _node(self, node: Tree, path: Place) -> Any:
        if type(node) in _PLAIN:
            return node
        if type(node) is float:
            return node if math.isfinite(node) else {"float": repr(node)}
        if type(node) is bytes:
            return {"bytes": base64.b64encode(node).decode("ascii")}
        if type(node) in (list, tuple):
            values = [self._node(value, (*path, number)) for number, value in enumerate(node)]
            return values if type(node) is list else {"tuple": values}
        if isinstance(node, dict):  # an OrderedDict, such as the state_dict of a module, is read back as a dict
            if odd := [key for key in node if type(key) not in (str, int)]:
                raise _unfit(path, f"has the key {odd[0]!r:.60}")
            items = {key: self._node(value, (*path, key)) for key, value in node.items()}
            return {"dict": items} if all(type(key) is str for key in items) else {"items": list(items.items())}
        if type(node) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, Share) or is_sharded(node):
            return self._tensor(node, path)
        if type(node) is np.ndarray or isinstance(node, np.generic):
            return self._array(node, path)
        raise _unfit(path, f"is a {type(node).__module__}.{type(node).__qualname__}")

    def _tensor(self, tensor: Any, path: Place) -> dict[str, Any]:
        name, local = self._name(path), local_part(tensor)
        is_spread = local is not tensor
        is_known = tensor.dtype in (_COMMON if is_spread else _DTYPES.values())
        if local.layout is not torch.strided or local.is_meta or not is_known:
            what = f"is a {local.layout} tensor of {tensor.dtype} on {local.device}"
            raise _unfit(path, f"{what} that is sharded" if is_spread else what)
        key, tensors = ("spread", self.sharded) if is_spread else ("tensor", self._tensors)
        described = {key: name, "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
        if not is_spread and (order := _order(tensor)):
            described["order"] = order
        if (device := original_device(local).type) != "cpu":
            described["device"] = device
        tensors[name] = tensor
        return described

    def _array(self, array: np.ndarray[Any, Any] | np.generic, path: Place) -> dict[str, Any]:
        name, dtype = self._name(path), array.dtype.str
        if not _ARRAY_DTYPE.fullmatch(dtype):
            raise _unfit(path, f"is a numpy array of {array.dtype}")
        kind = "array" if isinstance(array, np.ndarray) else "scalar"
        self._tensors[name] = torch.from_numpy(np.array(array, order="C").reshape(-1).view(np.uint8))
        return {kind: name, "dtype": dtype, "shape": list(array.shape)}

    def _name(self, path: Place) -> str:
        """Return the path as a unique name: 1 and "1", or a key with a slash, would give the same one."""
        name = "/".join(map(str, path)).encode("utf-8", "replace").decode() or "tensor"
        unique, number = name, 2
        while unique in self._tensors or unique in self.sharded or unique == "__metadata__":  # safetensors' own key
            unique, number = f"{name}#{number}", number + 1
        return unique


class _Reading:
    """Turns JSON back into a tree; each tensor can be named only once."""

    def __init__(self, tensors: dict[str, torch.Tensor], shares: dict[str, list[Part]], device: torch.device) -> None:
        self.tensors, self.shares, self.device = tensors, shares, device

    def node(self, node: Any) -> Tree:
        match node:
            case list():
                return [self.node(value) for value in node]
            case float() if not math.isfinite(node):
                raise ValueError(f"it has a bare {node}")
            case {"dict": dict(values)} if len(node) == 1:
                return {key: self.node(value) for key, value in values.items()}
            case {"items": list(items)} if len(node) == 1:
                for item in items:
                    if not isinstance(item, list) or len(item) != 2 or type(item[0]) not in (str, int):
                        raise ValueError(f"it has an item it should not have, {item!r:.60}")
                return _without_repeated_keys([(key, self.node(value)) for key, value in items])
            case {"tuple": list(values)} if len(node) == 1:
                return tuple(self.node(value) for value in values)
            case {"float": "nan" | "inf" | "-inf" as word} if len(node) == 1:
                return float(word)
            case {"bytes": str(text)} if len(node) == 1:
                return base64.b64decode(text, validate=True)
            case {"tensor": str(name), "dtype": str(dtype), "shape": list(shape), **rest} if rest.keys() <= {
                "order",
                "device",
            }:
                return with_home(self._tensor(name, dtype, shape, rest.get("order")), self._home(name, rest))
            case {"spread": str(name), "dtype": str(dtype), "shape": list(shape), **rest} if rest.keys() <= {"device"}:
                return self._spread(name, dtype, shape, self._home(name, rest))
            case {"array": str(name), "dtype": str(dtype), "shape": list(shape)} if len(node) == 3:
                return self._array(name, dtype, shape)
            case {"scalar": str(name), "dtype": str(dtype), "shape": []} if len(node) == 3:
                return self._array(name, dtype, [])[()]
            case dict():
                raise ValueError(f"it has an object it should not have, {node!r:.60}")
        return node

    def _home(self, name: str, rest: dict[Any, Any]) -> torch.device | None:
        if rest.get("device") not in (None, self.device.type):
            raise ValueError(f"{name} was on another kind of device, {rest['device']!r:.60}")
        return self.device if "device" in rest else None

    def _tensor(self, name: str, dtype_name: str, shape: list[Any], order: Any) -> torch.Tensor:
        dtype = _DTYPES.get(dtype_name)
        if dtype is None:
            raise ValueError(f"{name} has a dtype that is unknown here, {dtype_name:.60}")
        saved, count = self._take(name), _count(shape)
        if dtype not in _COMMON and saved.dtype is torch.uint8 and saved.nbytes == count * dtype.itemsize:
            saved = saved.clone().view(dtype).reshape(shape)  # cloned, as its bytes may begin anywhere in the file
        if saved.dtype is not dtype or list(saved.shape) != shape:
            raise ValueError(f"{name} is {saved.dtype}{list(saved.shape)}, not {dtype_name}{shape!r:.60}")
        if order is None:
            return saved
        if not isinstance(order, list) or sorted(map(repr, order)) != sorted(map(repr, range(saved.dim()))):
            raise ValueError(f"{name} cannot have the order {order!r:.60}")
        inverse = [order.index(place) for place in range(saved.dim())]
        return saved.permute(order).contiguous().permute(inverse)

    def _spread(self, name: str, dtype_name: str, shape: list[Any], home: torch.device | None) -> UnreadTensor:
        _count(shape)
        dtype, parts = _DTYPES.get(dtype_name), self.shares.pop(name, [])
        if dtype not in _COMMON or any(kind != NAMES[dtype] for _, kind, _ in parts):
            raise ValueError(f"{name:.120} has another dtype in the ranks' shares than {dtype_name:.60}")
        if not covers(shape, [box for box, _, _ in parts]):
            raise ValueError(f"the parts of {name:.120} do not add up to the full tensor")
        return UnreadTensor(torch.Size(shape), dtype, home, [(box, read) for box, _, read in parts])

    def _array(self, name: str, dtype: str, shape: list[Any]) -> np.ndarray[Any, Any]:
        if not _ARRAY_DTYPE.fullmatch(dtype):
            raise ValueError(f"{name} has a dtype that is not allowed, {dtype:.60}")
        saved, kind = self._take(name), np.dtype(dtype)
        if saved.dtype is not torch.uint8 or saved.numel() != _count(shape) * kind.itemsize:
            raise ValueError(f"{name} is not {dtype}{shape!r:.60}")
        array: np.ndarray[Any, Any] = saved.reshape(-1).numpy().view(kind).reshape(shape).copy()
        return array

    def _take(self, name: str) -> torch.Tensor:
        if name not in self.tensors:
            raise ValueError(f"it names {name:.120}, which is not there")
        return self.tensors.pop(name)


def _order(tensor: torch.Tensor) -> list[int] | None:
    """Return the order of the axes in memory if it is not the usual one, as in channels_last.

    It is restored, because the last bit of a sum may depend on it.
    """
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
    return order if tensor.permute(order).is_contiguous() else None


def _count(shape: list[Any]) -> int:
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"it has the shape {shape!r:.60}")
    return math.prod(shape)


def _without_repeated_keys(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    read = dict(pairs)
    if len(read) != len(pairs):
        raise ValueError("it has a key twice")
    return read


def _unfit(path: Place, what: str) -> TypeError:
    place = "".join(f"[{key!r}]" for key in path) or "the tree itself"
    return TypeError(f"{place} {what}: only tensors, numpy arrays, numbers, text, bytes and trees of them can be saved")
