"""Files that are either the old one or the new one, whatever happens in between."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TEMPORARY = ".resilient-tmp"


def commit(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside `path`, sync, rename, sync the directory."""
    temporary = path.with_name(f".{path.name}{_TEMPORARY}")
    temporary.touch()
    mode = temporary.stat().st_mode
    write(temporary)
    temporary.chmod(mode)  # safetensors would leave a file that only its owner can read
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def is_left_over(name: str) -> bool:
    """Say whether a file is what a kill in the middle of a commit leaves behind."""
    return name.startswith(".") and name.endswith(_TEMPORARY)


def commit_text(path: Path, text: str) -> None:
    """Commit a text file."""
    commit(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> Any:
    """Return what a JSON file holds; None if there is no such file or it holds something else."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
