"""The safetensors files of a checkpoint: written in pieces, as one file or as one share for each rank.

checkpoints/step-00000400/share-00001-of-00004.safetensors

holds what rank 1 of 4 has of each sharded tensor, under its name in the tree; the file's header says which part of the
full tensor that is. Any number of ranks can read such a checkpoint, and each reads only what it needs.

Torch's distributed checkpoint writes such files as well, but plans them by collectives, which a thread next to training
cannot join, holds a share in memory once more, and does not notice a share that is missing.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open

from resilient_train import files
from resilient_train.errors import in_one_line
from resilient_train.files import Written, commit_text, read_json, write_file
from resilient_train.state.sharded import Box, assembled, covers, local_part, sharding_of

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PIECE = 2**22  # bytes: so much is hashed and written at a time, without Python's lock
_SHARE = re.compile(r"share-(\d{5,})-of-(\d{5,})\.safetensors")
_BOXES = "boxes"  # the key in a share's header that says which part of each full tensor it holds
_LOOK_S = 0.02
_PATIENCE_S = 60.0  # rank 0 waits this long for the others, or twice as long as its own share took


def chunks(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] = MappingProxyType({})
) -> Iterator[bytes | memoryview]:
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
        flat = tensors[name].detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        if flat.stride() != (1,):  # a single element counts as contiguous whatever its stride
            flat = flat.clone(memory_format=torch.contiguous_format)
        data = flat.view(torch.uint8).numpy().data.cast("B") if flat.numel() else b""
        for start in range(0, len(data), _PIECE):
            yield data[start : start + _PIECE]


@dataclass(frozen=True, slots=True)
class SharedWrite:
    """A checkpoint that all ranks write, in a directory that all their hosts see."""

    rank: int
    world: int
    label: str  # the same on all of them, and of no other checkpoint of this run
    cancelled: threading.Event = field(default_factory=threading.Event)  # stop waiting for the others


def share_name(rank: int, world: int) -> str:
    return f"share-{rank:05}-of-{world:05}.safetensors"


def is_share(name: str) -> bool:
    return _SHARE.fullmatch(name) is not None


def are_complete(names: Iterable[str]) -> bool:
    """Say whether these are the shares of all ranks of a group, or none."""
    found = sorted(names)
    return found == [share_name(rank, len(found)) for rank in range(len(found))]


def write_share(directory: Path, shared: SharedWrite, plan: Callable[[], Mapping[str, Any]]) -> None:
    """Write this rank's share, then a note for rank 0 that it is on disk, or of what went wrong."""
    path, note = directory / share_name(shared.rank, shared.world), directory / _note(shared.rank)
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while not directory.is_dir():
            _pause(shared, deadline, f"{directory}: rank 0 has not begun")
        mine = {name: one for name, one in plan().items() if _is_mine(one)}
        boxes = json.dumps({name: sharding_of(one).box() for name, one in mine.items()})
        tensors = {name: local_part(one) for name, one in mine.items()}
        written = write_file(path, chunks(tensors, {_BOXES: boxes}))
        commit_text(note, json.dumps({"bytes": written.size, "sha256": written.sha256}))
    except Exception as error:
        with suppress(OSError):
            files.disk.unlink(path)  # first: on a full disk it is the room that the note needs
        number, why = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
        with suppress(OSError):
            if directory.is_dir():
                commit_text(note, json.dumps({"errno": number, "trouble": why or in_one_line(error)}))
        raise


def collect_shares(directory: Path, shared: SharedWrite, seconds: float) -> dict[str, Written]:
    """Wait until every rank has written its share, which took this one `seconds`; OSError where one could not."""
    found: dict[str, Written] = {}
    deadline = time.monotonic() + max(_PATIENCE_S, 2 * seconds)
    for rank in range(shared.world):
        while (note := read_json(directory / _note(rank))) is None:
            why = "its disk is full, or the run directory is not the same one on all hosts"
            _pause(shared, deadline, f"rank {rank} has written nothing to {directory}: {why}")
        match note:
            case {"bytes": int(size), "sha256": str(digest)}:
                found[share_name(rank, shared.world)] = Written(size, digest)
            case {"errno": int() | None as number, "trouble": str(trouble)}:
                raise OSError(number or 0, f"rank {rank} could not write its share: {trouble}")
            case _:
                raise OSError(0, f"rank {rank} could not write its share")
    for rank in range(shared.world):
        files.disk.unlink(directory / _note(rank))
    return found


@dataclass(frozen=True, slots=True)
class UnreadTensor:
    """A tensor of which several files hold a part each: read when, and as far as, it is needed."""

    shape: torch.Size
    dtype: torch.dtype
    home: torch.device | None  # where the original was, if not in the host's memory
    pieces: list[tuple[Box, Callable[[Box], torch.Tensor]]]

    def read(self, box: Box) -> torch.Tensor:
        """Read a part of the full tensor."""
        tensor = torch.empty([end - start for start, end in box], dtype=self.dtype)
        assembled(box, self.pieces, tensor)
        if self.home is not None:
            tensor.home = self.home  # type: ignore[attr-defined]
        return tensor


class Shares:
    """The share files of a checkpoint, and what of each tensor is in which."""

    def __init__(self, checkpoint: Path) -> None:
        """Read their headers. Raises ValueError, OSError or SafetensorError where they are no such files."""
        self._found: dict[str, list[tuple[Box, str, Callable[[Box], torch.Tensor]]]] = {}
        for path in sorted(path for path in checkpoint.iterdir() if is_share(path.name)):
            file: Any = safe_open(path, framework="pt")
            boxes = json.loads((file.metadata() or {}).get(_BOXES, "null"))
            if not isinstance(boxes, dict) or not all(map(_is_box, boxes.values())):
                raise ValueError(f"{path.name} does not say which parts it holds")
            for name, spans in boxes.items():
                part, box = file.get_slice(name), tuple((start, end) for start, end in spans)
                if list(part.get_shape()) != [end - start for start, end in box]:
                    raise ValueError(f"{name:.120} in {path.name} has another shape than the file's header says")
                self._found.setdefault(name, []).append((box, part.get_dtype(), _reader(file, name)))

    def take(self, name: str, shape: list[int], dtype: torch.dtype, home: torch.device | None) -> UnreadTensor:
        """The tensor of a name, once; ValueError where its parts do not make it up."""
        parts = self._found.pop(name, [])
        if any(kind != NAMES[dtype] for _, kind, _ in parts):
            raise ValueError(f"{name:.120} has another dtype in the ranks' shares")
        if not covers(shape, [box for box, _, _ in parts]):
            raise ValueError(f"the parts of {name:.120} do not add up to the full tensor")
        return UnreadTensor(torch.Size(shape), dtype, home, [(box, read) for box, _, read in parts])

    @property
    def left(self) -> list[str]:
        """The names that were not taken."""
        return sorted(self._found)


def _is_box(node: Any) -> bool:
    return isinstance(node, list) and all(
        isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span) for span in node
    )


def _reader(file: Any, name: str) -> Callable[[Box], torch.Tensor]:
    return lambda box: file.get_slice(name)[tuple(slice(*span) for span in box)] if box else file.get_tensor(name)


def _is_mine(one: Any) -> bool:
    """Say whether this rank is to write a share: it is not empty, and of equal ones it has the first."""
    sharding = sharding_of(one)
    pairs = zip(sharding.mesh.get_coordinate() or (), sharding.placements, strict=True)
    return local_part(one).numel() > 0 and not any(at for at, placement in pairs if placement.is_replicate())


def _pause(shared: SharedWrite, deadline: float, why: str) -> None:
    if time.monotonic() > deadline or shared.cancelled.wait(_LOOK_S):
        raise OSError(0, why)


def _note(rank: int) -> str:
    return f"share-{rank:05}.json"
