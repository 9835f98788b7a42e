"""Trees of tensors and plain values as two files: names, numbers and text, nothing that executes on loading.

`tensors.safetensors` holds the tensors and arrays, named by their paths in the tree. `tree.json` holds the rest: null,
booleans, integers, finite floats, text and lists as themselves, and all else as an object with one of these keys:

    {"dict": {"lr": 0.1}}   {"items": [[0, ...], ["a", ...]]}   {"tuple": [...]}   {"float": "nan"}   {"bytes": "AAE="}
    {"complex": [0, 1]}   {"size": [10, 64]}
    {"tensor": "weights/head.bias", "dtype": "float32", "shape": [10]}   {"array": "random", ...}
    {"spread": "weights/head.weight", "dtype": "float32", "shape": [10, 64]}   a tensor in the ranks' shares
"""

from __future__ import annotations

import base64
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from resilient_train import files
from resilient_train.errors import in_one_line
from resilient_train.files import Written, commit_text, read_json, write_file
from resilient_train.state.tree import (
    Box,
    Share,
    UnreadTensor,
    as_bytes,
    covers,
    is_sharded,
    local_part,
    original_device,
    sharding_of,
    with_home,
)

TENSORS, TREE = "tensors.safetensors", "tree.json"
NAMES = {  # of dtypes in safetensors
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
}
_PIECE = 2**22  # bytes that are hashed and written at a time, without Python's lock
_SHARE = re.compile(r"share-(\d{5,})-of-(\d{5,})\.safetensors")
_BOXES = "boxes"  # the key in a share's header with the part of the full tensor that each of its tensors is
_LOOK_S = 0.02
_PATIENCE_S = 60.0  # rank 0 waits this long for the others, or twice as long as its own share took


def chunks(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] = {}) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file: the length of its header, the header, and the tensors, the widest types first.

    The library itself would hold the whole file in memory before writing it.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
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


@dataclass(frozen=True, slots=True)
class SharedWrite:
    """A checkpoint that all ranks write together, in a directory that all their hosts see."""

    rank: int
    world: int
    label: str  # the same on all ranks, and different for each checkpoint of a run
    cancelled: threading.Event  # stop waiting for the others


def share_name(rank: int, world: int) -> str:
    return f"share-{rank:05}-of-{world:05}.safetensors"


def is_share(name: str) -> bool:
    return _SHARE.fullmatch(name) is not None


def are_complete(names: Iterable[str]) -> bool:
    """Say whether these are the shares of all ranks of a group, or none."""
    found = sorted(names)
    return found == [share_name(rank, len(found)) for rank in range(len(found))]


def write_share(directory: Path, shared: SharedWrite, tensors: Callable[[], Mapping[str, Any]]) -> None:
    """Write this rank's share of sharded tensors, then a note for rank 0 that says that, or why it failed."""
    path, note = directory / share_name(shared.rank, shared.world), directory / f"share-{shared.rank:05}.json"
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while not directory.is_dir():
            _pause(shared, deadline, f"{directory}: rank 0 has not begun")
        boxes, parts = {}, {}
        for name, one in tensors().items():
            sharding, local = sharding_of(one), local_part(one)
            places = zip(sharding.mesh.get_coordinate() or (), sharding.placements, strict=True)
            # Of equal replicas the rank that holds the first writes it.
            if local.numel() and not any(at for at, placement in places if placement.is_replicate()):
                boxes[name], parts[name] = sharding.box(), local
        written = write_file(path, chunks(parts, {_BOXES: json.dumps(boxes)}))
        commit_text(note, json.dumps({"bytes": written.size, "sha256": written.sha256}))
    except Exception as error:
        number, why = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
        with suppress(OSError):
            files.disk.unlink(path)  # first: on a full disk, this makes room for the note
        with suppress(OSError):
            commit_text(note, json.dumps({"errno": number, "trouble": why or in_one_line(error)}))
        raise


def collect_shares(directory: Path, shared: SharedWrite, seconds: float) -> dict[str, Written]:
    """Wait until all ranks have written their shares; OSError if one could not. Rank 0 took `seconds` for its own."""
    found: dict[str, Written] = {}
    notes = [directory / f"share-{rank:05}.json" for rank in range(shared.world)]
    deadline = time.monotonic() + max(_PATIENCE_S, 2 * seconds)
    for rank, path in enumerate(notes):
        while (note := read_json(path)) is None:
            why = "its disk is full, or the run directory is not the same one on all hosts"
            _pause(shared, deadline, f"rank {rank} has written nothing to {directory}: {why}")
        if "sha256" not in note:
            raise OSError(note["errno"] or 0, f"rank {rank} could not write its share: {note['trouble']}")
        found[share_name(rank, shared.world)] = Written(note["bytes"], note["sha256"])
    for path in notes:
        files.disk.unlink(path)
    return found


def _pause(shared: SharedWrite, deadline: float, why: str) -> None:
    is_over = not threading.main_thread().is_alive()  # the program ends: other ranks may be gone
    if is_over or time.monotonic() > deadline or shared.cancelled.wait(_LOOK_S):
        raise OSError(0, why)


Part = tuple[Box, Callable[[Box], torch.Tensor]]  # its place, and what reads some of it


def parts_in_shares(checkpoint: Path) -> dict[str, list[Part]]:
    """Read the headers of all shares. Returns the parts of each tensor by its name."""
    found: dict[str, list[Part]] = {}
    for path in sorted(path for path in checkpoint.iterdir() if is_share(path.name)):
        file: Any = safe_open(path, framework="pt")
        for name, spans in json.loads((file.metadata() or {})[_BOXES]).items():
            box = tuple((start, stop) for start, stop in spans)
            found.setdefault(name, []).append((box, partial(_read, file, name)))
    return found


def _read(file: Any, name: str, box: Box) -> torch.Tensor:
    if not box:  # a tensor of a single element has no axis to slice
        return file.get_tensor(name)  # type: ignore[no-any-return]
    return file.get_slice(name)[tuple(slice(*span) for span in box)]  # type: ignore[no-any-return]


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
        tree = _Reading(tensors, shares, device).node(json.loads((directory / TREE).read_text(encoding="utf-8")))
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
        if type(node) is complex:
            return {"complex": [self._node(part, path) for part in (node.real, node.imag)]}
        if type(node) is torch.Size:
            return {"size": [*node]}
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
        is_part = local is not tensor
        is_known = tensor.dtype in (_COMMON if is_part else _DTYPES.values())
        if local.layout is not torch.strided or local.is_meta or not is_known:
            raise _unfit(path, f"is a {local.layout} tensor of {tensor.dtype} on {local.device}")
        described = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
        if (device := original_device(local).type) != "cpu":
            described["device"] = device
        if is_part:
            self.sharded[name] = tensor
            return {"spread": name, **described}
        self._tensors[name] = tensor
        if not tensor.is_contiguous():  # as in channels_last: the last bit of a sum may depend on the order of the axes
            order = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))
            if tensor.permute(order).is_contiguous():
                described["order"] = order
        return {"tensor": name, **described}

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
            case {"dict": dict(values)}:
                return {key: self.node(value) for key, value in values.items()}
            case {"items": list(items)}:
                return {key: self.node(value) for key, value in items}
            case {"tuple": list(values)}:
                return tuple(self.node(value) for value in values)
            case {"complex": [real, imaginary]}:
                return complex(self.node(real), self.node(imaginary))
            case {"size": list(sizes)}:
                return torch.Size(sizes)
            case {"float": word}:
                return float(word)
            case {"bytes": text}:
                return base64.b64decode(text)
            case {"tensor": name}:
                return with_home(self._tensor(name, node), self._home(node))
            case {"spread": name}:
                return self._spread(name, node)
            case {"array": name}:
                return self._array(name, node)
            case {"scalar": name}:
                return self._array(name, node)[()]
            case dict():
                raise ValueError(f"it has an object it should not have, {node!r:.60}")
        return node

    def _home(self, node: dict[str, Any]) -> torch.device | None:
        if (kind := node.get("device")) not in (None, self.device.type):
            raise ValueError(f"a tensor was on another kind of device, {kind!r:.60}")
        return self.device if kind else None

    def _tensor(self, name: str, node: dict[str, Any]) -> torch.Tensor:
        dtype, shape, saved = _DTYPES[node["dtype"]], node["shape"], self.tensors.pop(name)
        if dtype not in _COMMON:
            saved = saved.clone().view(dtype).reshape(shape)  # cloned, as its bytes may begin anywhere in the file
        if saved.dtype is not dtype or list(saved.shape) != shape:
            raise ValueError(f"{name} is {saved.dtype}{list(saved.shape)}, not {dtype}{shape!r:.60}")
        if (order := node.get("order")) is None:
            return saved
        inverse = [order.index(place) for place in range(saved.dim())]
        return saved.permute(order).contiguous().permute(inverse)

    def _spread(self, name: str, node: dict[str, Any]) -> UnreadTensor:
        parts = self.shares.pop(name)
        if not covers(node["shape"], [box for box, _ in parts]):
            raise ValueError(f"the parts of {name:.120} do not add up to the full tensor")
        return UnreadTensor(torch.Size(node["shape"]), _DTYPES[node["dtype"]], self._home(node), parts)

    def _array(self, name: str, node: dict[str, Any]) -> np.ndarray[Any, Any]:
        if not _ARRAY_DTYPE.fullmatch(node["dtype"]):  # an object of Python's would be a pointer from the file
            raise ValueError(f"{name} has a dtype that is not allowed, {node['dtype']:.60}")
        saved = self.tensors.pop(name)
        array: np.ndarray[Any, Any] = saved.reshape(-1).numpy().view(node["dtype"]).reshape(node["shape"]).copy()
        return array


def _unfit(path: Place, what: str) -> TypeError:
    place = "".join(f"[{key!r}]" for key in path) or "the tree itself"
    return TypeError(f"{place} {what}: only tensors, numpy arrays, numbers, text, bytes and trees of them can be saved")
