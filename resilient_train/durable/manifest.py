"""What a run directory says of its checkpoints: their manifests. Without torch, whose import takes seconds."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from resilient_train.durable.endings import CHECKPOINTS, DEMOTED_END
from resilient_train.durable.journal import seal, unseal

MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"
VERIFIED, CANDIDATE, DEMOTED = "verified", "candidate", "demoted"

_FORMAT = 7
_NAME = re.compile(r"step-(\d{8,18})(-\d+)?(\.demoted)?")


class Damaged(ValueError):
    """A checkpoint is not what was written. The message is one line."""


@dataclass(frozen=True, slots=True)
class Manifest:
    kind: str  # verified; candidate: not verified yet
    step: int
    tick: int
    samples: int  # of an update, over all processes and micro-batches
    each: int  # samples of a process, as configured; samples / world, unless the number of processes changed
    effects: dict[str, Any]  # of remedies: knobs, skipped samples, patched lines, rows in quarantine
    groups: list[Any]  # the configured settings of each optimizer's parameter groups
    files: dict[str, dict[str, Any]]  # size and digest of each


def read(checkpoint: Path) -> Manifest:
    """Read only the manifest of a checkpoint. Raises Damaged."""
    with _cannot_be_read(MANIFEST):
        node = unseal((checkpoint / MANIFEST).read_bytes().removesuffix(b"\n"))
    if node is None or node.pop("format", None) != _FORMAT:
        raise Damaged(f"{MANIFEST} is damaged, or of another version")
    try:
        return Manifest(**node)
    except TypeError as error:
        raise Damaged(f"{MANIFEST} is not a manifest") from error


def sealed(manifest: Manifest) -> bytes:
    """Return the file of a manifest."""
    return seal(json.dumps({"format": _FORMAT, **asdict(manifest)}))


def verify(checkpoint: Path) -> Manifest:
    """Compare the files of a checkpoint with its manifest. Raises Damaged."""
    manifest = read(checkpoint)
    for name, written in manifest.files.items():
        with _cannot_be_read(name), open(checkpoint / name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != written["sha256"]:
                raise Damaged(f"{name} is not what was written")
    return manifest


@contextlib.contextmanager
def _cannot_be_read(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from error


NO_MANIFEST = Manifest("", 0, 0, 0, 0, {}, [], {})


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint on disk. Its other files than the manifest may be damaged all the same."""

    path: Path
    manifest: Manifest
    damage: str = ""  # why the manifest cannot be read

    @classmethod
    def of(cls, path: Path) -> Entry:
        try:
            return cls(path, read(path))
        except Damaged as why:
            return cls(path, NO_MANIFEST, str(why))

    @property
    def kind(self) -> str:
        is_demoted = self.path.suffix == DEMOTED_END and not self.damage
        return DEMOTED if is_demoted else self.manifest.kind

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def is_usable(self) -> bool:
        return self.kind in (VERIFIED, CANDIDATE)


def entries_of(run_dir: Path) -> list[Entry]:
    """List all checkpoints of a run, the latest first by the tick, which never goes back; only manifests are read.

    One whose manifest is damaged comes first, to be reported.
    """
    found = [Entry.of(path) for path in run_dir.glob(f"{CHECKPOINTS}/*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda one: (one.damage != "", one.manifest.tick, one.step, one.path.name), reverse=True)
