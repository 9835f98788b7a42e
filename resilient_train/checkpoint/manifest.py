"""The manifest of a checkpoint: which state it holds, and the size and digest of each of its files."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from resilient_train.checkpoint.safetensors_files import are_complete, is_share
from resilient_train.checkpoint.tree_files import TENSORS, TREE
from resilient_train.files import Written, is_left_over, open_plain

MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"
VERIFIED, CANDIDATE, DEMOTED = "verified", "candidate", "demoted"

UNKNOWN_FORMAT = "is of format"  # how the message begins about a format that this version does not read

_FORMAT = 1
_KINDS = (VERIFIED, CANDIDATE, DEMOTED)
_KEYS = {"processes": "world", "samples_per_process": "each"}  # fields with another name in the file
_COUNTS = ("step", "tick", "position", "world", "samples", "each")
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("kind", "config", "made_by"), (str,)),
    **dict.fromkeys((*_COUNTS, "at"), (int,)),
    "mlflow": (str, type(None)),
    "remedies": (dict,),
    "groups": (list,),
    "files": (dict,),
}
_FILES = {WEIGHTS, TENSORS, TREE}
_MOST_BYTES, _MOST_TREE = 2**26, 2**30  # of a manifest, and of tree.json
_MOST_HEADER = 10**8  # of a safetensors file: the limit of the library
_MOST = 10**18  # of any count
_AT_ONCE = 8  # files


class Damaged(ValueError):
    """A checkpoint is not what was written. The message is one line."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The state that a checkpoint holds, the run it belongs to, and its files."""

    kind: str  # verified; candidate: not verified yet; demoted: an incident began before it
    step: int
    tick: int
    position: int
    processes: int
    samples: int  # of an update, over all processes and micro-batches
    samples_per_process: int  # of an update, as configured; samples / processes, unless the number of processes changed
    config: str  # digest
    made_by: str
    at: int  # milliseconds since 1970
    mlflow: str | None  # the id of the run in MLflow
    remedies: dict[str, Any]  # knobs, skipped samples, armor, rows in quarantine, open incidents
    groups: list[Any]  # the configured settings of each optimizer's parameter groups
    files: dict[str, Written]

    def text(self) -> str:
        """Return the content of the file; its last key is a digest of all before it."""
        body = {"format": _FORMAT, **{_KEYS.get(name, name): value for name, value in asdict(self).items()}}
        body["files"] = {name: {"bytes": one.size, "sha256": one.sha256} for name, one in self.files.items()}
        return json.dumps({**body, "sha256": _digest(body)}, indent=1) + "\n"


def read(checkpoint: Path) -> Manifest:
    """Read only the manifest of a checkpoint. Raises Damaged."""
    try:
        is_directory = stat.S_ISDIR(checkpoint.lstat().st_mode)
    except OSError as error:
        raise Damaged(f"cannot be read: {error.strerror}") from error
    if not is_directory:
        raise Damaged("is a link or a file, not a directory")
    try:
        with _opened(checkpoint / MANIFEST) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise Damaged(f"{MANIFEST} is more than {_MOST_BYTES:,} bytes long, too long for a manifest")
        manifest = _checked(json.loads(content.decode("utf-8")))
        is_as_written = manifest.text().encode() == content
    except Damaged:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is not JSON") from error
    if not is_as_written:  # the same values in another form, such as 1E9 for 1e9
        raise Damaged(f"{MANIFEST} is not what was written")
    return manifest


def _checked(node: Any) -> Manifest:
    if not isinstance(node, dict) or type(node.get("format")) is not int:
        raise Damaged(f"{MANIFEST} is not a manifest")
    if node["format"] != _FORMAT:
        raise Damaged(f"{UNKNOWN_FORMAT} {node['format']!s:.20}, where this version reads {_FORMAT}")
    if node.pop("sha256", None) != _digest(node):
        raise Damaged(f"{MANIFEST} is not what was written")
    del node["format"]
    if node.keys() != _TYPES.keys() or any(type(node[key]) not in types for key, types in _TYPES.items()):
        raise Damaged(f"{MANIFEST} has unknown keys or wrong types")
    if node["kind"] not in _KINDS or any(not 0 <= node[key] < _MOST for key in _COUNTS):
        raise Damaged(f"{MANIFEST} has invalid values")
    files: dict[str, Written] = {}
    for name, one in node.pop("files").items():
        if not isinstance(one, dict) or type(one.get("bytes")) is not int or not isinstance(one.get("sha256"), str):
            raise Damaged(f"{MANIFEST} has no size and sha256 of {name[:60]!r}")
        files[name] = Written(one["bytes"], one["sha256"])
    shares = {name for name in files if is_share(name)}
    if files.keys() - shares != (_FILES - {WEIGHTS} if shares else _FILES) or not are_complete(shares):
        listed = ", ".join(map(repr, sorted(files)))[:100] or "nothing"
        raise Damaged(f"{MANIFEST} lists {listed}, not the files of a checkpoint")
    return Manifest(**{name: node.pop(key) for name, key in _KEYS.items()}, **node, files=files)


def verify(checkpoint: Path, *, with_digests: bool = True) -> Manifest:
    """Compare the files of a checkpoint with its manifest; without digests, only their sizes. Raises Damaged."""
    manifest = read(checkpoint)
    try:
        names = {one.name for one in checkpoint.iterdir() if not is_left_over(one.name)}
    except OSError as error:
        raise Damaged(f"cannot be read: {error.strerror}") from error
    if unexpected := sorted(names - manifest.files.keys() - {MANIFEST}):
        raise Damaged(f"contains {unexpected[0][:60]!r}, which is not a file of a checkpoint")
    for name, written in manifest.files.items():
        with _opened(checkpoint / name) as file:
            size = os.fstat(file.fileno()).st_size
            if name == TREE and size > _MOST_TREE:
                raise Damaged(f"{name} is {size:,} bytes long, too long for a state")
            if size != written.size:
                raise Damaged(f"{name} is {size:,} bytes long, and {written.size:,} were written")
            if name != TREE and (filled := _size_by_header(name, file)) != size:  # a huge file would take long to read
                raise Damaged(f"{name} is {size:,} bytes long, and its tensors {filled:,}")
    if with_digests:
        with ThreadPoolExecutor(_AT_ONCE) as pool:  # hashing releases Python's lock
            digests = pool.map(_sha256, [checkpoint / name for name in manifest.files])
            for (name, written), digest in zip(manifest.files.items(), digests, strict=True):
                if digest != written.sha256:
                    raise Damaged(f"{name} is not what was written")
    return manifest


def _opened(file: Path) -> BufferedReader:
    """Open a regular file; links are not followed."""
    try:
        return open_plain(file, follow=False)
    except OSError as error:
        raise Damaged(f"{file.name} cannot be read: {error.strerror}") from error


def _size_by_header(name: str, file: BufferedReader) -> int:
    """The size that a safetensors file must have for the tensors in its header."""
    try:
        length = int.from_bytes(file.read(8), "little")
        tensors = json.loads(file.read(min(length, _MOST_HEADER)))
        ends = [one["data_offsets"][1] for key, one in tensors.items() if key != "__metadata__"]
        return int(8 + length + max(ends, default=0))
    except (OSError, ValueError, RecursionError, AttributeError, LookupError, TypeError, OverflowError) as error:
        raise Damaged(f"{name} does not say which tensors it contains") from error


def _sha256(file: Path) -> str:
    try:
        with _opened(file) as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise Damaged(f"{file.name} cannot be read: {error.strerror}") from error


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
