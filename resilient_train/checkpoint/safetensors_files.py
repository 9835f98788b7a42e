"""Writes safetensors files in small pieces; the ranks of a sharded run write one file each, a share.

checkpoints/step-00000400/share-00001-of-00004.safetensors

holds the parts of sharded tensors that rank 1 of 4 has, by their names in the tree; the header says which part of the
full tensor each of them is. Any number of ranks can read such a checkpoint, and each reads only what it needs.

Torch's distributed checkpoints are safetensors files, too. But they are planned by collectives, which a thread next to
training cannot join, need the memory of a share once more, and do not notice when a share is missing.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from resilient_train import files
from resilient_train.errors import in_one_line
from resilient_train.files import Written, commit_text, read_json, write_file
from resilient_train.state.sharded import Box, local_part, sharding_of
from resilient_train.state.tree import as_bytes

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
    path, note = directory / share_name(shared.rank, shared.world), directory / _note(shared.rank)
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while not directory.is_dir():
            _pause(shared, deadline, f"{directory}: rank 0 has not begun")
        mine = {name: one for name, one in tensors().items() if _is_written_here(one)}
        boxes = json.dumps({name: sharding_of(one).box() for name, one in mine.items()})
        parts = {name: local_part(one) for name, one in mine.items()}
        written = write_file(path, chunks(parts, {_BOXES: boxes}))
        commit_text(note, json.dumps({"bytes": written.size, "sha256": written.sha256}))
    except Exception as error:
        with suppress(OSError):
            files.disk.unlink(path)  # first: on a full disk, this makes room for the note
        number, why = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
        with suppress(OSError):
            if directory.is_dir():
                commit_text(note, json.dumps({"errno": number, "trouble": why or in_one_line(error)}))
        raise


def collect_shares(directory: Path, shared: SharedWrite, seconds: float) -> dict[str, Written]:
    """Wait until all ranks have written their shares; OSError if one could not. Rank 0 took `seconds` for its own."""
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


Part = tuple[Box, str, Callable[[Box], torch.Tensor]]  # its place, its dtype in the file, and what reads some of it


def parts_in_shares(checkpoint: Path) -> dict[str, list[Part]]:
    """Read the headers of all shares; ValueError, OSError or SafetensorError where they are not the headers of shares.

    Returns the parts of each tensor by its name.
    """
    found: dict[str, list[Part]] = {}
    for path in sorted(path for path in checkpoint.iterdir() if is_share(path.name)):
        file: Any = safe_open(path, framework="pt")
        boxes = json.loads((file.metadata() or {}).get(_BOXES, "null"))
        if not isinstance(boxes, dict) or not all(map(_is_box, boxes.values())):
            raise ValueError(f"{path.name} does not say which parts it holds")
        for name, spans in boxes.items():
            part, box = file.get_slice(name), tuple((start, stop) for start, stop in spans)
            if list(part.get_shape()) != [stop - start for start, stop in box]:
                raise ValueError(f"{name:.120} in {path.name} has another shape than the file's header says")
            found.setdefault(name, []).append((box, part.get_dtype(), partial(_read, file, name)))
    return found


def _is_box(node: Any) -> bool:
    return isinstance(node, list) and all(
        isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span) for span in node
    )


def _read(file: Any, name: str, box: Box) -> torch.Tensor:
    if not box:  # a tensor of a single element has no axis to slice
        return file.get_tensor(name)  # type: ignore[no-any-return]
    return file.get_slice(name)[tuple(slice(*span) for span in box)]  # type: ignore[no-any-return]


def _is_written_here(one: Any) -> bool:
    """Say whether this rank writes its part: it is not empty, and of equal replicas this rank holds the first."""
    sharding = sharding_of(one)
    pairs = zip(sharding.mesh.get_coordinate() or (), sharding.placements, strict=True)
    return local_part(one).numel() > 0 and not any(at for at, placement in pairs if placement.is_replicate())


def _pause(shared: SharedWrite, deadline: float, why: str) -> None:
    if time.monotonic() > deadline or shared.cancelled.wait(_LOOK_S):
        raise OSError(0, why)


def _note(rank: int) -> str:
    return f"share-{rank:05}.json"
