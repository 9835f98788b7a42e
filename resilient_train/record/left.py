"""What a run has left on disk to go on from, as the JSON beside the tensors tells it: nothing is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from resilient_train.files import read_json
from resilient_train.record.directory import CHECKPOINTS

_NAME = re.compile(r"step-\d{8,18}(\.\d+)?")
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state, or weights alone, that lie in a place of their own."""

    step: int
    path: Path  # absolute
    kind: str  # verified; candidate: its proof is not finished; best: of the least evaluation loss, proven
    tick: int = 0
    metrics: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    remedies: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)  # that were in force

    @property
    def is_verified(self) -> bool:
        """Say whether the updates after it were healthy, too."""
        return self.kind == "verified"


def checkpoints_of(run_dir: Path) -> list[Checkpoint]:
    """Return what a resume may take, the latest first; sums are left to the one who loads it."""
    try:
        names = [path for path in (run_dir / CHECKPOINTS).iterdir() if _NAME.fullmatch(path.name)]
    except OSError:
        return []
    found = [one for path in names if (one := _checkpoint(path.absolute())) is not None]
    return sorted(found, key=lambda one: (one.tick, one.step, one.path.name), reverse=True)


def last_good_of(run_dir: Path) -> Checkpoint | None:
    """Return the newest that is verified, by its manifest."""
    return next((one for one in checkpoints_of(run_dir) if one.is_verified), None)


def best_of(run_dir: Path) -> Checkpoint | None:
    """Return the weights with the least evaluation loss, if any were written."""
    path = run_dir.absolute() / "best"
    said = read_json(path / "best.json")
    step = said.get("step") if isinstance(said, dict) else None
    if type(step) is not int or step < 0 or not (path / "weights.safetensors").is_file():
        return None
    metrics = {str(name): float(value) for name, value in said.items() if name != "step" and _is_number(value)}
    return Checkpoint(step, path, "best", metrics=metrics)


def _checkpoint(path: Path) -> Checkpoint | None:
    """What a manifest says; None where it is demoted, damaged, or its files are not there as it says."""
    said = None if path.is_symlink() else read_json(path / "manifest.json")
    match said:
        case {
            "kind": "verified" | "candidate" as kind,
            "step": int(step),
            "tick": int(tick),
            "files": dict(files),
            "remedies": dict(remedies),
        } if min(step, tick) >= 0 and files and all(_is_there(path / name, one) for name, one in files.items()):
            return Checkpoint(step, path, kind, tick, remedies=remedies)
    return None


def _is_there(file: Path, written: Any) -> bool:
    try:
        return isinstance(written, dict) and file.lstat().st_size == written.get("bytes")
    except (OSError, ValueError):
        return False


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
