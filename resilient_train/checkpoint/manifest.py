"""The manifest of a checkpoint: what it is of, and what its files have to hold."""

from __future__ import annotations

import hashlib
import json
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from resilient_train.checkpoint.safetensors_files import are_complete, is_share
from resilient_train.checkpoint.tree_files import TENSORS, TREE
from resilient_train.files import Written, is_left_over, open_plain

MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"
VERIFIED, CANDIDATE, DEMOTED = "verified", "candidate", "demoted"

UNKNOWN_FORMAT = "is of format"  # how the message begins about one that this version does not read

_FORMAT = 1
_KINDS = (VERIFIED, CANDIDATE, DEMOTED)
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
_MOST_BYTES, _MOST_TREE = 2**26, 2**30  # of a manifest, and of what is in no tensor
_MOST_HEADER = 10**8  # of a safetensors file: its own limit
_MOST = 10**18  # of any count
_AT_ONCE = 8  # files


class Damaged(ValueError):
    """A checkpoint is not what was written. The message is one line."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds, and of which run."""

    kind: str  # verified; candidate: not verified yet; demoted: an incident began before it
    step: int
    tick: int
    position: int
    world: int
    samples: int  # of an update, over all processes and micro-batches
    each: int  # that one process is configured to bring to it; with other processes than at first it brings others
    config: str  # digest
    made_by: str
    at: int  # milliseconds since 1970
    mlflow: str | None  # the run's name there
    remedies: dict[str, Any]  # knobs, skipped samples, armor, rows in quarantine, open incidents
    groups: list[Any]  # what each optimizer's parameter groups were configured to
    files: dict[str, Written]

    def text(self) -> str:
        """Return the file: its last key is a digest of all before it."""
        body = {"format": _FORMAT, **asdict(self)}
        body["files"] = {name: {"bytes": one.size, "sha256": one.sha256} for name, one in self.files.items()}
        return json.dumps({**body, "sha256": _digest(body)}, indent=1) + "\n"


def read(checkpoint: Path) -> Manifest:
    """Read the manifest of a checkpoint, and nothing else of it. Raises Damaged."""
    try:
        mode = checkpoint.lstat().st_mode
    except OSError as error:
        raise Damaged(f"cannot be read: {error.strerror}") from error
    if not stat.S_ISDIR(mode):
        raise Damaged("is no directory, but a link or a file")
    file = checkpoint / MANIFEST
    size = _plain_size(file)
    if size > _MOST_BYTES:
        raise Damaged(f"{MANIFEST} is {size:,} bytes long, too long for a manifest")
    try:
        content = _opened(file)
        manifest = _checked(json.loads(content.decode("utf-8")))
        is_as_written = manifest.text().encode() == content
    except Damaged:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is no JSON") from error
    if not is_as_written:  # it says the same in other letters: 1E9 for 1e9
        raise Damaged(f"{MANIFEST} is not what was written")
    return manifest


def _checked(node: Any) -> Manifest:
    if not isinstance(node, dict) or type(node.get("format")) is not int:
        raise Damaged(f"{MANIFEST} is no manifest")
    if node["format"] != _FORMAT:
        raise Damaged(f"{UNKNOWN_FORMAT} {node['format']!s:.20}, where this version reads {_FORMAT}")
    if node.pop("sha256", None) != _digest(node):
        raise Damaged(f"{MANIFEST} is not what was written")
    del node["format"]
    if node.keys() != _TYPES.keys() or any(type(node[key]) not in types for key, types in _TYPES.items()):
        raise Damaged(f"{MANIFEST} has keys or values that no manifest has")
    if node["kind"] not in _KINDS or any(not 0 <= node[key] < _MOST for key in _COUNTS):
        raise Damaged(f"{MANIFEST} has values that no manifest has")
    files: dict[str, Written] = {}
    for name, entry in node.pop("files").items():
        match entry:
            case {"bytes": int(size), "sha256": str(digest)} if (
                len(entry) == 2 and type(size) is int and 0 <= size < _MOST
            ):
                files[name] = Written(size, digest)
            case _:
                raise Damaged(f"{MANIFEST} has no size and sha256 of {name[:60]!r}")
    shares = {name for name in files if is_share(name)}
    if files.keys() - shares != (_FILES - {WEIGHTS} if shares else _FILES) or not are_complete(shares):
        raise Damaged(
            f"{MANIFEST} lists {', '.join(map(repr, sorted(files)))[:100] or 'nothing'}, not a checkpoint's files"
        )
    return Manifest(**node, files=files)


def verify(checkpoint: Path, *, is_read: bool = True) -> Manifest:
    """Read all of a checkpoint and compare it with its manifest; or only look at its files. Raises Damaged."""
    manifest = read(checkpoint)
    try:
        names = {one.name for one in checkpoint.iterdir() if not is_left_over(one.name)}
    except OSError as error:
        raise Damaged(f"cannot be read: {error.strerror}") from error
    if unexpected := sorted(names - manifest.files.keys() - {MANIFEST}):
        raise Damaged(f"holds {unexpected[0][:60]!r}, which belongs to no checkpoint")
    for name, written in manifest.files.items():
        size = _plain_size(checkpoint / name)
        if name == TREE and size > _MOST_TREE:
            raise Damaged(f"{name} is {size:,} bytes long, too long for a state")
        if size != written.size:
            raise Damaged(f"{name} is {size:,} bytes long, and {written.size:,} were written")
        if name != TREE:
            _require_described(checkpoint / name, size)
    if is_read:
        with ThreadPoolExecutor(_AT_ONCE) as pool:  # hashing lets go of Python's lock
            digests = pool.map(lambda name: _sha256(checkpoint / name), manifest.files)
            for (name, written), digest in zip(manifest.files.items(), digests, strict=True):
                if digest != written.sha256:
                    raise Damaged(f"{name} is not what was written")
    return manifest


def _plain_size(file: Path) -> int:
    """The size of a regular file: links and devices are not followed."""
    try:
        facts = file.lstat()
    except OSError as error:
        raise Damaged(f"{file.name} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(facts.st_mode):
        raise Damaged(f"{file.name} is no regular file")
    return facts.st_size


def _require_described(file: Path, size: int) -> None:
    """Raise Damaged unless the tensors in a file's header fill it: a file that is too large takes long to read."""
    try:
        length = int.from_bytes(_opened(file, 8), "little")
        tensors = json.loads(_opened(file, 8 + min(length, _MOST_HEADER))[8:])
        ends = [one["data_offsets"][1] for name, one in tensors.items() if name != "__metadata__"]
        filled = 8 + length + max(ends, default=0)
    except (OSError, ValueError, RecursionError, AttributeError, LookupError, TypeError) as error:
        raise Damaged(f"{file.name} does not say which tensors it holds") from error
    if filled != size:
        raise Damaged(f"{file.name} is {size:,} bytes long, and its tensors {filled:,}")


def _opened(file: Path, most: int = _MOST_BYTES + 1) -> bytes:
    with open_plain(file, follow=False) as opened:
        return opened.read(most)


def _sha256(file: Path) -> str:
    try:
        with open_plain(file, follow=False) as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise Damaged(f"{file.name} cannot be read: {error.strerror}") from error


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
