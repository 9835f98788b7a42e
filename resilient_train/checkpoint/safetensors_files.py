"""The safetensors files of a checkpoint: written in pieces, as one file or as one share for each rank.

checkpoints/step-00000400/share-00001-of-00004.safetensors

holds what rank 1 of 4 has of each sharded tensor, under its name in the tree; the file's header says which part of the
full tensor that is. Any number of ranks can read such a checkpoint, and each reads only what it needs.
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
from resilient_train.state.sharded import Box, Share, assembled, covers, local_part, sharding_of

_PIECE = 2**22  # bytes: so much is hashed and written at a time, without Python's lock

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


def chunks(
    tensors: Mapping[str, torch.Tensor], told: Mapping[str, str] = MappingProxyType({})
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file: the length of its header, the header, and the tensors, the widest types first.

    `told` is for people: words beside the names.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **told}}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        data = _bytes(tensors[name])
        for start in range(0, len(data), _PIECE):
            yield data[start : start + _PIECE]


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if flat.stride() != (1,):  # a single element counts as contiguous whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().data.cast("B") if flat.numel() else memoryview(b"")


_NAME = re.compile(r"share-(\d{5,})-of-(\d{5,})\.safetensors")
_BOXES = "boxes"  # in the header of a file, beside its names
_LOOK_S = 0.02
_PATIENCE_S = 60.0  # rank 0 waits so long for the others, or twice as long as its own share took
_DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True, slots=True)
class Together:
    """The ranks that write one checkpoint, in a directory that all their hosts see."""

    rank: int
    world: int
    label: str  # the same on all of them, and of no other checkpoint of this run
    given_up: threading.Event = field(default_factory=threading.Event)  # nobody is waited for any more


def name_of(rank: int, world: int) -> str:
    """What the file of a rank is called."""
    return f"share-{rank:05}-of-{world:05}.safetensors"


def is_share(name: str) -> bool:
    """Say whether a file is one that a rank has written."""
    return _NAME.fullmatch(name) is not None


def are_complete(names: Iterable[str]) -> bool:
    """Say whether these are the files of all ranks of a group, or none."""
    found = sorted(names)
    return found == [name_of(rank, len(found)) for rank in range(len(found))]


def write(beside: Path, together: Together, planned: Callable[[], Mapping[str, Any]]) -> None:
    """Write this rank's share, and a note for rank 0 when it lasts; also of trouble, so that it is not waited for."""
    name = beside / name_of(together.rank, together.world)
    try:
        until = time.monotonic() + _PATIENCE_S
        while not beside.is_dir():
            _look_again(together, until, f"{beside}: rank 0 has not begun")
        mine = {name: one for name, one in planned().items() if _is_mine(one)}
        boxes = {name: _spread(one).box() for name, one in mine.items()}
        tensors = {name: local_part(one) for name, one in mine.items()}
        written = write_file(name, chunks(tensors, {_BOXES: json.dumps(boxes)}))
        commit_text(beside / _note(together.rank), json.dumps({"bytes": written.size, "sha256": written.sha256}))
    except Exception as error:
        with suppress(OSError):
            files.disk.unlink(name)  # first: it is the room that the note needs on a disk that is full
        number, said = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
        trouble = {"errno": number, "trouble": said or in_one_line(error)}
        with suppress(OSError):
            if beside.is_dir():
                commit_text(beside / _note(together.rank), json.dumps(trouble))
        raise


def gathered(beside: Path, together: Together, seconds: float) -> dict[str, Written]:
    """Wait until every rank has written its share, which took this one `seconds`; OSError where one could not."""
    found: dict[str, Written] = {}
    until = time.monotonic() + max(_PATIENCE_S, 2 * seconds)
    for rank in range(together.world):
        while (note := read_json(beside / _note(rank))) is None:
            why = "its disk is full, or the run directory is not the same one on all hosts"
            _look_again(together, until, f"rank {rank} has written nothing to {beside}: {why}")
        match note:
            case {"bytes": int(size), "sha256": str(digest)}:
                found[name_of(rank, together.world)] = Written(size, digest)
            case {"errno": int() | None as number, "trouble": str(trouble)}:
                raise OSError(number or 0, f"rank {rank} could not write its share: {trouble}")
            case _:
                raise OSError(0, f"rank {rank} could not write its share")
    for rank in range(together.world):
        files.disk.unlink(beside / _note(rank))
    return found


class Scattered:
    """A tensor of which several files hold a part each: read when, and as far as, it is needed."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, home: torch.device | None) -> None:
        self.shape, self.dtype, self.home = shape, dtype, home
        self.pieces: list[tuple[Box, Any]] = []

    def read(self, box: Box) -> torch.Tensor:
        """Read a part of the whole."""
        tensor = torch.empty([end - start for start, end in box], dtype=self.dtype)
        assembled(box, self.pieces, tensor)
        if self.home is not None:
            tensor.home = self.home  # type: ignore[attr-defined]
        return tensor


class Shares:
    """The share files of a checkpoint, and what of each tensor is in which."""

    def __init__(self, checkpoint: Path) -> None:
        """Read their headers. Raises ValueError, OSError or SafetensorError where they are no such files."""
        self._found: dict[str, list[tuple[Box, str, Any]]] = {}
        for path in sorted(path for path in checkpoint.iterdir() if is_share(path.name)):
            file: Any = safe_open(path, framework="pt")
            for name, box in _boxes(json.loads(_header(file).get(_BOXES, "null")), path.name):
                part = file.get_slice(name)
                if list(part.get_shape()) != [end - start for start, end in box]:
                    raise ValueError(f"{name:.120} in {path.name} is not of the shape that is said of it")
                self._found.setdefault(name, []).append((box, part.get_dtype(), _reader(file, name)))

    def take(self, name: str, shape: list[int], dtype: torch.dtype, home: torch.device | None) -> Scattered:
        """The tensor of a name, once; ValueError where its parts do not make it up."""
        pieces = self._found.pop(name, [])
        if any(_DTYPES.get(kind) is not dtype for _, kind, _ in pieces):
            raise ValueError(f"{name:.120} is of another type in the files of the ranks")
        if not covers(shape, [box for box, _, _ in pieces]):
            raise ValueError(f"the parts of {name:.120} do not make up a whole")
        scattered = Scattered(torch.Size(shape), dtype, home)
        scattered.pieces = [(box, read) for box, _, read in pieces]
        return scattered

    @property
    def left(self) -> list[str]:
        """Names that nobody has asked for."""
        return sorted(self._found)


def _header(file: Any) -> dict[str, str]:
    return file.metadata() or {}


def _boxes(node: Any, name: str) -> Iterator[tuple[str, Box]]:
    if not isinstance(node, dict):
        raise ValueError(f"{name} does not say what its parts are of")
    for key, spans in node.items():
        match spans:
            case list() if all(
                isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span) for span in spans
            ):
                yield key, tuple((start, end) for start, end in spans)
            case _:
                raise ValueError(f"{name} does not say what its parts are of")


def _reader(file: Any, name: str) -> Any:
    def read(box: Box) -> torch.Tensor:
        if not box:
            return file.get_tensor(name)  # type: ignore[no-any-return]
        return file.get_slice(name)[tuple(slice(*span) for span in box)]  # type: ignore[no-any-return]

    return read


def _is_mine(one: Any) -> bool:
    """Say whether this rank is to write a share: it is not empty, and of equal ones it has the first."""
    spread = _spread(one)
    coordinate = spread.mesh.get_coordinate() or ()
    pairs = zip(coordinate, spread.placements, strict=True)
    return local_part(one).numel() > 0 and not any(at for at, placement in pairs if placement.is_replicate())


def _spread(one: Any) -> Any:
    return one.spread if isinstance(one, Share) else sharding_of(one)


def _look_again(together: Together, until: float, why: str) -> None:
    if time.monotonic() > until or together.given_up.wait(_LOOK_S):
        raise OSError(0, why)


def _note(rank: int) -> str:
    return f"share-{rank:05}.json"
